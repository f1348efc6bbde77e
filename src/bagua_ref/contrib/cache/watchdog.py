"""Watchdog process between a rank and its server, which ends the server when the rank ends for any
reason (S8.4).

It runs as a script, with the standard library only: ``python -I -S watchdog.py RANK_PID PROGRAM
ARGUMENT...``, with the server's configuration on stdin. It polls its parent's id: a parent-death
signal would depend on the thread that forked, and a pipe stays open while children of the rank hold
it. The server's last output goes to stdout; then the pipe closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_TICK = 0.1
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the server until it or the rank ends, then wait for the rank."""
    rank, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    me = os.getpid()

    def die_with_watchdog() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:
            os._exit(1)

    configuration = sys.stdin.buffer.read()
    server = subprocess.Popen(  # noqa: S603 # the command is that of server.py, without a shell
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        preexec_fn=die_with_watchdog,
    )
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        # it ended before it read the configuration; its output follows
        with contextlib.suppress(BrokenPipeError):
            server.stdin.write(configuration)
            server.stdin.close()
        said = b""
        while os.getppid() == rank:
            if select.select([server.stdout], [], [], _TICK)[0]:
                heard = os.read(server.stdout.fileno(), 4096)
                if not heard:
                    break
                said = (said + heard)[-4000:]
    finally:
        server.kill()
        server.wait()
    # the rank reads the output only while the server starts
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), said)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    # An ended child stays a zombie until its parent waits for it; the rank may be busy with
    # training.
    while os.getppid() == rank:
        time.sleep(_TICK)


if __name__ == "__main__":
    main()

"""Runs of pytest in forks of a process that has imported what takes long to import: ``python warm_pytest.py`` serves them."""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

IMPORTED = ("pytest", "hypothesis", "numpy", "torch", "torch._dynamo", "torch.distributed.checkpoint")
"""Nothing of the package: each run imports its own copy."""


class WarmPytest:
    """Runs pytest as `tests.meta.mutate.run_pytest` does, one run at a time, but without the seconds of imports; a context."""

    def __enter__(self) -> WarmPytest:
        self._folder = tempfile.TemporaryDirectory()  # takes what runs leave that are killed
        environment = {**os.environ, "TMPDIR": self._folder.name}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen([sys.executable, __file__], env=environment, text=True, **pipes)
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.communicate()
        self._folder.cleanup()

    def run(self, copy: Path, arguments: list[str], limit: float) -> tuple[int | None, str]:
        """Run pytest in ``copy``; return its exit code, None at the time limit, and its output."""
        pipes: tuple[IO[str], IO[str]] = self._server.stdin, self._server.stdout  # type: ignore[assignment]
        with tempfile.NamedTemporaryFile() as output:
            json.dump({"copy": str(copy), "arguments": arguments, "limit": limit, "output": output.name}, pipes[0])
            print(file=pipes[0], flush=True)
            code = json.loads(pipes[1].readline())
            return code, output.read().decode(errors="replace")


def serve() -> None:
    """Answer each line of standard input, a run, with its exit code."""
    for name in IMPORTED:
        importlib.import_module(name)
    with suppress(ImportError):  # what compiles the kernels, if it is installed
        importlib.import_module("cupy")
    assert "bagua_ref" not in sys.modules
    gc.freeze()  # no run traverses what it shares with this process
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(**order)
        ends = select.poll()
        ends.register(descriptor := os.pidfd_open(pid), select.POLLIN)
        in_time = ends.poll(1000 * order["limit"])
        os.close(descriptor)
        if not in_time:
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status) if in_time else None), flush=True)


def _run(copy: str, output: str, arguments: list[str], **_: Any) -> None:
    """Become a run of pytest."""
    code = 1
    try:
        os.setsid()
        for descriptor, opened in enumerate((os.open(os.devnull, os.O_RDONLY), *[os.open(output, os.O_WRONLY | os.O_APPEND)] * 2)):
            os.dup2(opened, descriptor)
        os.chdir(copy)
        sys.path[:1] = [copy, f"{copy}/src"]
        os.environ["PYTHONPATH"] = f"{copy}/src"
        sys.argv = ["pytest"]
        _start_fork_server()
        pytest: Any = importlib.import_module("pytest")
        code = pytest.main(["-v", "-rfE", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments])
        sys.stdout.flush()
    finally:
        os._exit(code)


def _start_fork_server() -> None:
    """Fork the server that forks the ranks of tests, as a new interpreter would import torch again."""

    def start(path: bytes, command: Sequence[str], pipes: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        low, high = sorted(pipes)
        for first, last in ((3, low), (low + 1, high), (high + 1, 65536)):  # one of them would keep it from ending with the run
            os.closerange(first, last)
        if pipes[0] in select.select(pipes, [], [])[0]:  # the first process is asked for; otherwise the run has ended
            exec(command[-1])
        os._exit(0)

    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.set_forkserver_preload(["bagua_ref.conformance"])
    spawn, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, start
    multiprocessing.forkserver.ensure_running()
    multiprocessing.util.spawnv_passfds = spawn


if __name__ == "__main__":
    serve()

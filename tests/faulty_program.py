"""A program for ``verify --command`` that breaks the protocol in the way chosen; it needs no torch,
so that it starts at once.

python faulty_program.py FAULT; it answers the first request after hello as if it had been asked to
add ones to four ones.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time

RIGHT = b'{"tensors":[{"name":"x","dtype":"float32","shape":[4]}]}\n' + struct.pack(
    "<4f", 2, 2, 2, 2
)
WRONG = {
    "garbage": b"hello world\n",
    "error": b'{"error":"no cheese","tensors":[]}\n',
    "shape": RIGHT.replace(b"[4]", b"[1,4]"),
    "dtype": RIGHT.replace(b"float32", b"int32"),
    "huge": b'{"tensors":[{"name":"x","dtype":"float64","shape":[1000000000000]}]}\n',
    "nothing": b'{"tensors":[]}\n',
}


def say(answer: bytes) -> None:
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()


def main(fault: str) -> None:
    first = json.loads(sys.stdin.buffer.readline())["call"]
    if fault == "crashes" and first != "hello":
        os.kill(os.getpid(), signal.SIGSEGV)
    assert first == "hello"
    hello = {
        "protocol": 2 if fault == "version" else 1,
        "name": fault,
        "kernels": ["add"],
        "tensors": [],
    }
    say(json.dumps(hello).encode() + b"\n")
    if not sys.stdin.buffer.readline():
        return
    if fault == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hangs":
        time.sleep(3600)
    if fault == "dies":
        print("out of cheese", file=sys.stderr, flush=True)
        sys.exit(3)
    if fault == "short":
        print("too short", file=sys.stderr, flush=True)
        say(RIGHT[:-1])
        sys.exit(0)
    say(WRONG[fault])
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main(sys.argv[1])

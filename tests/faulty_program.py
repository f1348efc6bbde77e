"""A program for ``verify --command`` that breaks the protocol in the way chosen; it needs no torch,
so that it starts at once.

python faulty_program.py FAULT; it answers the request after hello as if it had been asked to add
ones to four ones.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

X = {"dtype": "float32", "shape": [4], "data": "AAAAQAAAAEAAAABAAAAAQA=="}
RIGHT = {"id": 2, "tensors": {"x": X}}
WRONG = {
    "garbage": "hello world",
    "list": "[1]",
    "error": {"id": 2, "error": "no cheese"},
    "other": {**RIGHT, "id": 1},
    "shape": {"id": 2, "tensors": {"x": {**X, "shape": [1, 4]}}},
    "dtype": {"id": 2, "tensors": {"x": {**X, "dtype": "int32"}}},
    "bytes": {"id": 2, "tensors": {"x": {**X, "shape": [5]}}},
    "sizes": {"id": 2, "tensors": {"x": {**X, "shape": [-2, -2]}}},
    "base64": {"id": 2, "tensors": {"x": {**X, "data": "!"}}},
    "nothing": {"id": 2},
}


def say(answer: object, end: str = "\n") -> None:
    print(answer if isinstance(answer, str) else json.dumps(answer), end=end, flush=True)


def main(fault: str) -> None:
    hello = json.loads(sys.stdin.readline())
    if fault == "crashes" and hello["call"] != "hello":
        os.kill(os.getpid(), signal.SIGSEGV)
    assert hello["call"] == "hello"
    say({"id": hello["id"], "protocol": 2, "name": fault, "kernels": ["add"]})
    if not sys.stdin.readline():
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
        say(json.dumps(RIGHT)[:20], end="")
        sys.exit(0)
    say(WRONG[fault])
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])

"""Line tracer for `mutate.py`: records which test executes which line of the package, in child
processes too.

With this folder on PYTHONPATH, every Python process imports this file when it starts. The process
that runs pytest also loads it
as a plugin (``-p sitecustomize``): after each test it collects what all processes have written.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE, HITS = os.environ.get("TRACED_PACKAGE", ""), Path(os.environ.get("TRACED_HITS", ""))
seen: set[tuple[str, int]] = set()
seconds: dict[str, float] = {}
"""Of each test that passed."""
tests_of: dict[str, dict[int, list[str]]] = {}
"""File under the package -> line -> the tests that execute it."""


def on_call(frame: FrameType, event: str, argument: Any) -> Any:
    return on_line if frame.f_code.co_filename.startswith(PACKAGE) else None


def on_line(frame: FrameType, event: str, argument: Any) -> Any:
    place = frame.f_code.co_filename, frame.f_lineno
    if event == "line" and place not in seen:
        seen.add(place)
        # at once: workers end without clean-up
        file = os.open(HITS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{place[0]}:{place[1]}\n".encode())
        os.close(file)
    return on_line


def pytest_runtest_protocol() -> None:
    sys.settrace(on_call)  # doctest, or an interrupt, may have ended it
    seen.clear()
    HITS.write_bytes(b"")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" and report.passed:
        seconds[report.nodeid] = round(report.duration, 3)
    if report.when == "teardown" and report.nodeid in seconds:
        for hit in sorted(set(HITS.read_text().split())):
            file, line = hit.removeprefix(PACKAGE).rsplit(":", 1)
            tests_of.setdefault(file, {}).setdefault(int(line), []).append(report.nodeid)


def pytest_sessionfinish() -> None:
    Path(os.environ["TRACED_RESULT"]).write_text(
        json.dumps({"seconds": seconds, "tests_of": tests_of})
    )


if PACKAGE:  # not when doctest looks into this file
    sys.settrace(on_call)
    threading.settrace(on_call)

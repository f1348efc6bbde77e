"""The server of multiprocessing that forks processes, as a fork of this process, which has imported
all that they need.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import select
import sys
import weakref
from collections.abc import Sequence


def fork_server() -> None:
    """Start the server, which a new interpreter would be otherwise; it does nothing until a process
    is asked for.
    """
    spawn = multiprocessing.util.spawnv_passfds

    def fork(_path: bytes, command: Sequence[str], passed: Sequence[int]) -> int:
        if server := os.fork():
            return server
        multiprocessing.util.spawnv_passfds = spawn
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not a test's file
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {
            0,
            1,
            2,
            nothing,
            *passed,
        }:
            # not closed: libraries' handlers may write there, and the number would be reused
            os.dup2(nothing, descriptor)
        for finalizer in list(weakref.finalize._registry):
            finalizer.detach()  # folders of this process, which scripts would remove when they end
        try:
            # a process is asked for; otherwise the run has ended
            if passed[0] in select.select(passed, [], [])[0]:
                exec(command[-1], {})
        finally:
            os._exit(0)

    multiprocessing.resource_tracker.ensure_running()  # starts an interpreter of its own
    multiprocessing.util.spawnv_passfds = fork
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = spawn

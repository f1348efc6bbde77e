"""Processes that run a program under one schedule after another, so that a crash costs one run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch._dynamo  # noqa: F401 # used by optimizers and DDP; importing it takes seconds, once here or in each worker

from bagua_ref.simulation.observation import Observation, Order, observe
from bagua_ref.simulation.programs import Program

__all__ = ["Workers"]


class Workers:
    """Worker processes that observe runs of one program, each in an empty working folder of its own.

    Args:
        program: to run.
        nodes: the number of ranks on each node.
        count: the most processes at a time.
        hash_seed: PYTHONHASHSEED of new interpreters; None: forks of this process.
    """

    def __init__(self, program: Program, nodes: Sequence[int], count: int, hash_seed: int | None = None) -> None:
        self._program, self._nodes, self._count, self._hash_seed = program, tuple(nodes), count, hash_seed
        self._idle: list[tuple[Any, Connection]] = []
        self._busy: dict[Connection, tuple[Any, Order]] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        for process, connection in [*self._idle, *((process, link) for link, (process, _) in self._busy.items())]:
            connection.close()
            process.kill()
            process.join()
        self._idle, self._busy = [], {}

    @property
    def running(self) -> int:
        """The number of orders under way."""
        return len(self._busy)

    def is_free(self) -> bool:
        """Return whether `start` may be called."""
        return self.running < self._count

    def start(self, order: Order) -> None:
        """Let a worker carry out an order."""
        process, connection = self._idle.pop() if self._idle else self._new_worker()
        connection.send(order)
        self._busy[connection] = process, order

    def results(self, timeout: float | None = None) -> list[tuple[Order, Observation]]:
        """Wait for at least one result, at most ``timeout`` seconds; return those that are there."""
        found = []
        for connection in wait(list(self._busy), timeout):
            assert isinstance(connection, Connection)
            process, order = self._busy.pop(connection)
            try:
                seen = connection.recv()
                self._idle.append((process, connection))
            except (EOFError, ConnectionResetError):
                process.join()
                seen = _crash(order, process.exitcode)
            found.append((order, seen))
        return found

    def run(self, order: Order, timeout: float | None = None) -> Observation | None:
        """Carry out one order while no other is under way; return None after ``timeout`` seconds."""
        self.start(order)
        found = self.results(timeout)
        return found[0][1] if found else None

    def _new_worker(self) -> tuple[Any, Connection]:
        ours, theirs = multiprocessing.Pipe()
        context: Any = multiprocessing.get_context("fork" if self._hash_seed is None else "spawn")
        before = os.environ.get("PYTHONHASHSEED")
        try:
            if self._hash_seed is not None:
                os.environ["PYTHONHASHSEED"] = str(self._hash_seed)
            inherited = [ours, *self._busy, *(link for _, link in self._idle)] if self._hash_seed is None else []
            process = context.Process(target=_serve, args=(theirs, inherited, self._program, self._nodes), daemon=False)
            process.start()
        finally:
            if self._hash_seed is not None:
                os.environ.pop("PYTHONHASHSEED")
                os.environ |= {} if before is None else {"PYTHONHASHSEED": before}
        theirs.close()
        return process, ours


def _serve(connection: Connection, inherited: Sequence[Connection], program: Program, nodes: Sequence[int]) -> None:
    """Carry out orders until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    for end in inherited:  # so that the parent's ends are the last ones, and its death ends its workers
        end.close()
    shown, program = sys.stdout, program.absolute()
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the parent has ended
        while True:
            order: Order = connection.recv()
            with tempfile.TemporaryDirectory(prefix="bagua-ref-sim-") as folder:
                os.chdir(folder)
                seen = observe(program, nodes, order, shown)
                os.chdir("/")
            connection.send(seen)


def _crash(order: Order, code: int | None) -> Observation:
    name = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return Observation(order.schedule, kind="crash", message=f"the process of the run ended with {name}")

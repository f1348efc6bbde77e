"""Processes that run a program under one schedule after another, so that a crash costs one run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch._dynamo  # noqa: F401 # used by optimizers and DDP; importing it takes seconds, once here or in each worker

from bagua_ref.simulation.observation import Observation, Order, observe
from bagua_ref.simulation.programs import Program

__all__ = ["Workers"]


class Workers:
    """Worker processes that observe runs of one program, each run in an empty working folder of its own.

    Args:
        program: to run.
        nodes: the number of ranks on each node.
        count: the most runs at a time.
        end: when to end, by `time.monotonic`.
    """

    def __init__(self, program: Program, nodes: Sequence[int], count: int, end: float) -> None:
        self.end = end
        self._program, self._nodes, self._count = program, tuple(nodes), count
        self._processes: list[Any] = []
        self._idle: dict[int | None, list[tuple[Any, Connection]]] = defaultdict(list)
        self._folder = tempfile.TemporaryDirectory(prefix="bagua-ref-sim-", ignore_cleanup_errors=True)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def carry_out(self, orders: Iterator[Order | None]) -> Iterator[Observation]:
        """Carry out orders, several at a time; yield their records, in the order of ending.

        Args:
            orders: gives None if the next order depends on those under way.

        Raises:
            TimeoutError: the time is up.
        """
        running: dict[Any, tuple[Any, Connection, Order]] = {}
        while True:
            while len(running) < self._count and (order := next(orders, None)) is not None:
                idle = self._idle[order.hash_seed]
                process, connection = idle.pop() if idle else self._new_worker(order.hash_seed)
                connection.send(order)
                running[connection] = process, connection, order
            if not running:
                return
            ended = wait(list(running), max(0.0, self.end - time.monotonic()))
            if not ended:
                raise TimeoutError
            for process, connection, order in map(running.pop, ended):
                try:
                    seen = connection.recv()
                    self._idle[order.hash_seed].append((process, connection))
                except (EOFError, ConnectionResetError):
                    process.join()
                    code = process.exitcode
                    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                    seen = Observation(order, kind="crash", message=f"the process of the run ended with {how}")
                yield seen

    def _new_worker(self, hash_seed: int | None) -> tuple[Any, Connection]:
        """Return a fork of this process, or a new interpreter with a hash seed."""
        ours, theirs = multiprocessing.Pipe()
        context: Any = multiprocessing.get_context("fork" if hash_seed is None else "spawn")
        process = context.Process(target=_serve, args=(theirs, self._folder.name, self._program, self._nodes))
        with mock.patch.dict(os.environ, {} if hash_seed is None else {"PYTHONHASHSEED": str(hash_seed)}):
            process.start()
        theirs.close()
        self._processes.append(process)
        return process, ours


def _serve(connection: Connection, folder: str, program: Program, nodes: Sequence[int]) -> None:
    """Carry out orders until the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    parent: Any = multiprocessing.parent_process()
    program = program.absolute()
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while connection in wait([connection, parent.sentinel]):
            order: Order = connection.recv()
            with tempfile.TemporaryDirectory(dir=folder) as own:
                os.chdir(own)
                seen = observe(program, nodes, order)
                os.chdir("/")
            connection.send(seen)

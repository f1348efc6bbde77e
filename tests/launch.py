"""Worker processes with a gloo world, and scripts in separate processes.

The parent holds the store through which workers find each other, as torch's elastic launcher does,
so no port is ever guessed. Workers are forked from a server process that has imported torch; each
ends with barrier, destroy, flush, ``os._exit``.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import bagua_ref

# torch looks up the name of each end of a store's connections; a name server that drops the request
# would take five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
_processes = multiprocessing.get_context("forkserver")
# Whatever is missing here, every worker of a test that uses it imports itself: torch._dynamo, which
# the first step of an optimizer does, takes as long as torch, and Hypothesis longer than the two
# ranks of a small test.
_preloaded = [
    "pytest",
    "hypothesis.strategies",
    "redis",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "bagua_ref.cli.command",
    "bagua_ref.contrib",
    "bagua_ref.conformance.lab.lab",
    "bagua_ref.conformance.targets.reference_target",
    "bagua_ref.record",
]


def preload(*modules: str) -> None:
    """Let the server that forks all workers, which the first of them starts, import ``modules``,
    too.
    """
    _preloaded.extend(modules)
    _processes.set_forkserver_preload(_preloaded)


preload()


@dataclass
class Outcome:
    """The end of a worker: its result, or the exception and its traceback as text; neither if it
    died.
    """

    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exitcode: int | None = None
    """None: killed at the time limit."""


def launch(function: Callable[..., Any], nranks: int, *args: Any, **options: Any) -> list[Any]:
    """Return the results of ``function(*args)`` in ``nranks`` processes, in rank order; `outcomes`
    has the options.

    Raises:
        AssertionError: a worker raised, died or exceeded the time limit; the message has each
            failed rank's traceback.
    """
    ended = outcomes(function, nranks, *args, **options)
    if any(o.exitcode != 0 for o in ended):
        failures = [
            f"rank {r}: exit code {o.exitcode}\n{o.traceback}"
            for r, o in enumerate(ended)
            if o.exitcode != 0
        ]
        raise AssertionError(
            f"{function.__name__} failed in {len(failures)} of {nranks} workers\n"
            + "\n".join(failures)
        )
    return [o.result for o in ended]


def on_every_process(
    nranks: int = 0, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on every rank of a world of processes; `outcomes` has the options, which the
    test's parameters may be, too.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            of_world = {name: given[name] for name in ("nranks", "over_gloo") if name in given}
            ranks = of_world.pop("nranks", nranks)
            launch(
                _run_test, ranks, test.__module__, test.__name__, given, **{**options, **of_world}
            )

        return run

    return decorate


def _run_test(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**given)


def outcomes(
    function: Callable[..., Any],
    nranks: int,
    *args: Any,
    nodes: Sequence[int] | None = None,
    init: bool = True,
    collective_timeout: float = 60.0,
    limit: float = 120.0,
    over_gloo: bool = False,
) -> list[Outcome]:
    """Run ``function(*args)`` in ``nranks`` processes and return how each ended.

    Args:
        function: importable by the workers.
        nranks: number of workers.
        args: picklable.
        nodes: ranks per node, in rank order; None: all on one.
        init: whether to call ``init_process_group()`` first.
        collective_timeout: its timeout.
        limit: seconds after which workers are killed.
        over_gloo: whether ranks of one node use gloo, rather than memory that they share, unless it
            is turned off for all tests.
    """
    nodes = tuple(nodes or (nranks,))
    assert sum(nodes) == nranks
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [(node, local, size) for node, size in enumerate(nodes) for local in range(size)]
    workers, pipes = [], []
    for rank, (node, local, size) in enumerate(places):
        environment = {
            "RANK": rank,
            "WORLD_SIZE": nranks,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": node,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        if over_gloo:
            environment["BAGUA_REF_SHARED_MEMORY"] = 0
        here, there = _processes.Pipe(duplex=False)
        work = (there, environment, function, args, init, collective_timeout)
        workers.append(
            _processes.Process(target=_work, args=work, name=f"rank {rank}", daemon=True)
        )
        pipes.append(here)
        workers[-1].start()
        there.close()
    try:
        return _collect(workers, pipes, limit)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _collect(workers: list[Any], pipes: list[Connection], limit: float) -> list[Outcome]:
    ended = [Outcome() for _ in workers]
    deadline = time.monotonic() + limit
    waiting = set(range(len(workers)))
    while waiting:
        # A child of a worker that died may hold its pipe.
        ends: dict[Any, int] = {
            end: rank for rank in waiting for end in (pipes[rank], workers[rank].sentinel)
        }
        if not (ready := wait(list(ends), timeout=max(0.0, deadline - time.monotonic()))):
            break
        for rank in {ends[end] for end in ready}:
            waiting.remove(rank)
            try:
                if not pipes[rank].poll():
                    raise EOFError
                ended[rank] = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:  # it died
                ended[rank].traceback = "the process ended without a result\n"
    for outcome, worker in zip(ended, workers, strict=True):
        worker.join(timeout=max(0.0, deadline - time.monotonic()))
        outcome.exitcode = worker.exitcode
    return ended


def _work(
    pipe: Connection,
    environment: dict[str, Any],
    function: Callable[..., Any],
    args: Any,
    init: bool,
    collective_timeout: float,
) -> None:
    # otherwise the first collection traverses, and so copies, all that is shared with the server
    gc.freeze()
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    outcome = Outcome()
    try:
        if init:
            bagua_ref.init_process_group(timeout=collective_timeout)
        outcome.result = function(*args)
        if bagua_ref.is_initialized():
            bagua_ref.barrier()
            bagua_ref.destroy_process_group()
    except BaseException as error:
        outcome.error, outcome.traceback = error, traceback.format_exc()
    try:
        message = pickle.dumps(outcome)
    except Exception:  # an exception that cannot be pickled: send its text
        outcome.result = outcome.error = None
        outcome.traceback += traceback.format_exc()
        message = pickle.dumps(outcome)
    pipe.send_bytes(message)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if outcome.traceback else 0)


def run_script(
    script: str, environment: dict[str, str] | None = None, limit: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """Return the exit code and output of ``script``, as from ``python -c`` but in a fork that has
    already imported torch.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = _processes.Process(
            target=_run_script, args=(script, folder, os.getcwd(), environment or dict(os.environ))
        )
        process.start()
        process.join(limit)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(script, limit)
        printed, complaints = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(script, process.exitcode, printed, complaints)


def _run_script(script: str, folder: str, cwd: str, environment: dict[str, str]) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(
            os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor
        )
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(script, "<string>", "exec"), main.__dict__)
    finally:
        # Interpreters run these at exit; processes of multiprocessing do not.
        atexit._run_exitfuncs()


def fork_program(words: Sequence[str], stdin: int, **_: Any) -> Any:
    """Start a Python script as `subprocess.Popen` does, but in a fork that has already imported
    torch; its standard input is also its output.
    """
    connection = socket.socket(fileno=os.dup(stdin))
    process = _processes.Process(target=_run_program, args=(words[1:], connection), daemon=True)
    process.start()
    connection.close()
    return SimpleNamespace(
        kill=process.kill, wait=lambda limit=None: process.join(limit) or process.exitcode
    )


def start_by_fork(monkeypatch: Any) -> None:
    """Let programs under test be started by `fork_program`."""
    forks = SimpleNamespace(Popen=fork_program, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("bagua_ref.conformance.targets.process_link.subprocess", forks)


def _run_program(words: Sequence[str], connection: socket.socket) -> None:
    os.setsid()
    for descriptor in (0, 1):
        os.dup2(connection.fileno(), descriptor)
    connection.close()
    sys.stdout = open(1, "w")  # noqa: SIM115 # as long as the process lives
    sys.stdin = open(0)  # noqa: SIM115 # as long as the process lives
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")

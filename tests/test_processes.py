"""Tests of watching the processes of other ranks, with programs in their place."""

from __future__ import annotations

import math
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from bagua_ref.communicators import missing, processes
from bagua_ref.communicators.missing import Peers
from bagua_ref.communicators.processes import Processes, this_process


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as started:
        yield started
        started.kill()


def watched(program: subprocess.Popen[bytes], **changed: Any) -> Processes:
    """Rank 0 is this process, rank 1 the program."""
    own = this_process()
    assert own[0], "this system hides what is needed"
    theirs = {
        "where": own[0],
        "pid": program.pid,
        "started": processes._start_time(program.pid),
    } | changed
    return Processes([own, list(theirs.values())], 0)


def test_the_end_of_a_process_is_noticed_at_once_even_if_its_parent_has_not(
    program: subprocess.Popen[bytes],
) -> None:
    found = watched(program)
    assert found.are_watched([1])
    assert found.ended([1]) == set()
    threading.Timer(0.2, program.kill).start()
    assert found.ended([0, 1], 20) == {1}  # this process is never among them
    assert found.ended([1]) == {1}
    found.close()


@pytest.mark.parametrize("started", [1, None], ids=["another's number", "ended before"])
def test_a_process_may_have_ended_before(
    program: subprocess.Popen[bytes], started: int | None
) -> None:
    known = processes._start_time(program.pid) if started is None else started
    if started is None:
        program.kill()
        program.wait()
    found = Processes([this_process(), [this_process()[0], program.pid, known]], 0)
    assert found.ended([1]) == {1}
    found.close()


def test_processes_elsewhere_are_not_watched(program: subprocess.Popen[bytes]) -> None:
    for where in ("another machine", ""):
        found = watched(program, where=where)
        assert not found.are_watched([1])
        found.close()


def test_waiting_can_be_ended(program: subprocess.Popen[bytes]) -> None:
    found = watched(program)
    threading.Timer(0.1, found.wake).start()
    begin = time.monotonic()
    assert found.ended([1], math.inf) == set()
    assert time.monotonic() - begin < 10
    found.close()


@pytest.mark.parametrize("interrupted", [True, False], ids=["killed", "left"])
def test_waits_for_a_rank_whose_process_has_ended_are_interrupted_unless_it_has_left(
    program: subprocess.Popen[bytes],
    interrupted: bool,
    monkeypatch: pytest.MonkeyPatch,
    no_thread_is_left: None,
) -> None:
    store, reasons, others = dist.HashStore(), list[str](), list[str]()
    if not interrupted:
        store.set("left/1", "")
    found, looks = watched(program), list[float]()
    look = found.ended
    monkeypatch.setattr(
        found, "ended", lambda ranks, seconds: looks.append(seconds) or look(ranks, seconds)
    )
    waits = Peers(store, 0, 3, found)
    with waits.waiting("in allreduce", "all/7", (0, 1), reasons.append):
        program.kill()
        until = time.monotonic() + (20 if interrupted else 1)
        while not reasons and time.monotonic() < until:
            time.sleep(0.01)
    with waits.waiting("in recv", "all/exchange", (0, 2), others.append):
        time.sleep(3 * missing._GRACE)
    waits.leave()
    assert set(reasons) == ({"the process of rank 1 has ended"} if interrupted else set())
    assert not others
    assert len(looks) < 200  # it sleeps in between


def test_a_process_that_ends_a_while_after_its_sockets_is_known_to_have_ended(
    program: subprocess.Popen[bytes], no_thread_is_left: None
) -> None:
    """As on a busy machine."""
    peers = Peers(dist.HashStore(), 0, 2, watched(program))
    threading.Timer(3 * missing._EXIT_DELAY, program.kill).start()
    closed = RuntimeError("closed by peer")
    error = peers.failure("allreduce", "a", (0, 1), "a/1", closed, 20.0, (1,))
    assert str(error).endswith("failed; the process of rank 1 has ended")
    peers.leave()

"""Ranks that publish what they wait for, in one process (two ranks, one store)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from bagua_ref.communicators import waiting
from bagua_ref.communicators.waiting import Waiting

Enter = Callable[..., "Wait"]


class Wait:
    """A wait of one rank in a thread of its own, until it is interrupted or ended."""

    def __init__(self, waits: Waiting, place: str, is_background: bool, members: tuple[int, ...] = (0, 1)) -> None:
        self.reasons: list[str] = []
        self._end = threading.Event()
        self._inside = threading.Event()
        self._arguments = (waits, place, members, is_background)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._inside.wait(10)

    def _run(self) -> None:
        waits, place, members, is_background = self._arguments
        with waits.waiting(f"in {place}", place, members, self._interrupt, is_background):
            self._inside.set()
            self._end.wait(10)

    def _interrupt(self, reason: str) -> None:
        self.reasons.append(reason)
        self._end.set()

    def end(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def ranks(store: dist.Store, monkeypatch: pytest.MonkeyPatch, no_thread_is_left: None) -> Iterator[list[Waiting]]:
    monkeypatch.setattr(waiting, "_PATIENCE", 0.2)
    monkeypatch.setattr(waiting, "_GLANCE", 0.05)
    made = [Waiting(store, rank, 2) for rank in range(2)]
    yield made
    for waits in made:
        waits.close()


@pytest.fixture
def enter(ranks: list[Waiting]) -> Iterator[Enter]:
    entered = []

    def one(rank: int, place: str, is_background: bool = False) -> Wait:
        entered.append(Wait(ranks[rank], place, is_background))
        return entered[-1]

    yield one
    for wait in entered:
        wait.end()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_that_wait_in_different_collectives_are_all_interrupted_with_the_same_words(enter: Enter) -> None:
    waits = [enter(0, "gradients/3"), enter(1, "barrier/7")]
    until(lambda: all(wait.reasons for wait in waits))
    assert {wait.reasons[0] for wait in waits} == {
        "the ranks wait for each other and none can go on: rank 0 waits in gradients/3; rank 1 waits in barrier/7"
    }


def test_a_collective_that_all_have_reached_may_take_its_time(enter: Enter) -> None:
    waits = [enter(0, "gradients/3"), enter(1, "gradients/3")]
    time.sleep(0.8)
    assert not any(wait.reasons for wait in waits)


def test_a_rank_that_does_not_wait_may_still_come(enter: Enter) -> None:
    wait = enter(0, "gradients/3")
    time.sleep(0.8)
    assert not wait.reasons


def test_a_rank_that_has_left_never_comes(enter: Enter, ranks: list[Waiting]) -> None:
    enter(1, "earlier/1").end()
    until(lambda: ranks[1]._store is not None)
    ranks[1].close()
    wait = enter(0, "gradients/3")
    until(lambda: wait.reasons)
    assert wait.reasons[0].endswith("rank 0 waits in gradients/3; rank 1 has left")


def test_a_wait_that_ends_is_taken_back_at_once(enter: Enter, store: dist.Store) -> None:
    wait = enter(0, "gradients/3")
    until(lambda: store.check(["waits/0"]))
    assert json.loads(store.get("waits/0")) == [["in gradients/3", "gradients/3", [0, 1]]]
    wait.end()
    assert json.loads(store.get("waits/0")) == []


def test_a_rank_whose_background_thread_computes_does_not_count_as_waiting(enter: Enter) -> None:
    ours = enter(0, "")  # the training thread waits for its background thread
    theirs = enter(1, "barrier/7")
    time.sleep(0.8)
    assert not ours.reasons + theirs.reasons
    enter(0, "gradients/3", is_background=True)
    until(lambda: ours.reasons and theirs.reasons)


@pytest.mark.parametrize("waited_before", [True, False])
def test_a_rank_whose_training_goes_on_beside_a_background_collective_does_not_count_as_waiting(
    enter: Enter, ranks: list[Waiting], waited_before: bool
) -> None:
    if waited_before:
        with ranks[0].waiting("in earlier", "earlier/1", (0, 1), print):
            pass
    background, theirs = enter(0, "average/2", is_background=True), enter(1, "barrier/7")
    time.sleep(0.8)
    assert not background.reasons + theirs.reasons

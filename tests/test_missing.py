"""Ranks that publish what they wait for, in one process (two ranks, one store)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from bagua_ref.communicators import missing
from bagua_ref.communicators.missing import Peers
from bagua_ref.communicators.processes import Processes
from bagua_ref.errors import CommunicationTimeoutError

pytestmark = pytest.mark.slow

Enter = Callable[..., "Wait"]


class Wait:
    """A wait of one rank in a thread of its own, until it is interrupted or ended."""

    def __init__(
        self, waits: Peers, place: str, is_background: bool, members: tuple[int, ...] = (0, 1)
    ) -> None:
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
def ranks(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, no_thread_is_left: None
) -> Iterator[list[Peers]]:
    monkeypatch.setattr(missing, "_PATIENCE", 0.2)
    monkeypatch.setattr(missing, "_INTERVAL", 0.05)
    made = [Peers(store, rank, 2, Processes([], 0)) for rank in range(2)]
    yield made
    for waits in made:
        if not waits._stop.is_set():
            waits.leave()


@pytest.fixture
def enter(ranks: list[Peers]) -> Iterator[Enter]:
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


def test_a_rank_that_is_told_late_hears_of_the_first_deadlock(
    enter: Enter, ranks: list[Peers], store: dist.Store
) -> None:
    ours, late = enter(0, "save/1"), enter(1, "gradients/3")
    until(lambda: json.loads(store.get("waits/1"))[:1] == [True])
    with ranks[1]._lock:  # its watch is behind
        until(lambda: ours.reasons)
        ours.end()
        next_one = enter(0, "barrier/1")
        time.sleep(1)
        assert not next_one.reasons  # rank 1 may still come
    until(lambda: late.reasons)
    assert "rank 0 waits in save/1" in late.reasons[0]


def test_a_wait_is_not_refused_for_what_an_earlier_one_met(enter: Enter) -> None:
    waits = [enter(0, "save/1"), enter(1, "gradients/3")]
    until(lambda: all(wait.reasons for wait in waits))
    for wait in waits:
        wait.end()
    again = enter(0, "save/1")
    time.sleep(1)
    assert not again.reasons


@pytest.mark.parametrize("others", [1, 0])
def test_a_collective_may_take_its_time_and_a_rank_that_does_not_wait_may_still_come(
    others: int, enter: Enter
) -> None:
    waits = [enter(rank, "gradients/3") for rank in range(1 + others)]
    time.sleep(0.5)
    assert not any(wait.reasons for wait in waits)


def test_a_wait_in_a_group_that_a_rank_has_given_up_ends_once_it_is_long(
    enter: Enter, ranks: list[Peers]
) -> None:
    begin = time.monotonic()
    given_up, other = enter(0, "a/1"), enter(0, "b/1")
    ranks[1].give_up("a", "enough")
    until(lambda: given_up.reasons)
    assert time.monotonic() - begin > missing._PATIENCE / 4
    assert given_up.reasons[0] == "rank 1 gave up: enough"
    assert not other.reasons


def test_a_wait_that_ends_is_taken_back_at_once(enter: Enter, store: dist.Store) -> None:
    wait = enter(0, "gradients/3")
    until(lambda: store.check(["waits/0"]))
    until(lambda: json.loads(store.get("waits/0"))[:1] == [True])
    _, (published,), _, _ = json.loads(store.get("waits/0"))
    assert published[:3] == ["in gradients/3", "gradients/3", [0, 1]]
    wait.end()
    assert json.loads(store.get("waits/0")) == []


def test_a_store_that_does_not_answer_keeps_no_wait_from_ending(
    monkeypatch: pytest.MonkeyPatch, no_thread_is_left: None
) -> None:
    monkeypatch.setattr(missing, "_PATIENCE", 0.1)
    monkeypatch.setattr(missing, "_INTERVAL", 0.05)
    monkeypatch.setattr(missing, "_LIMIT", 0.1)
    asked, answer = threading.Event(), threading.Event()

    class Hangs(dist.HashStore):
        def clone(self) -> dist.Store:
            return self

        def check(self, keys: list[str]) -> bool:
            asked.set()
            answer.wait(60)
            return False

    waits = Peers(Hangs(), 0, 2, Processes([], 0))
    with waits.waiting("in barrier", "barrier/7", (0, 1), print):
        assert asked.wait(10)
    waits.leave(ValueError("no data"))
    answer.set()
    assert waits._threads
    waits._threads[0].join(10)


def test_who_is_missing_from_a_collective_is_known_with_what_it_waits_for(
    ranks: list[Peers], enter: Enter
) -> None:
    def missed(rank: int, place: str) -> str:
        # Without the last operation, which may be one of an earlier test in this process.
        return ranks[rank].who_is_missing(place, (0, 1), 0.2).partition("; last reported")[0]

    assert missed(0, "gradients/3") == "rank 1 did not come"
    elsewhere = enter(1, "barrier/7")
    until(lambda: "," in missed(0, "gradients/3"))
    assert missed(0, "gradients/3") == "rank 1 did not come, waiting in barrier/7"
    assert missed(0, "barrier/7") == ""
    elsewhere.end()
    until(lambda: missed(0, "barrier/8"))
    assert missed(0, "barrier/8") == "rank 1 did not come"


def test_a_rank_that_has_passed_a_collective_is_not_missing_from_it(
    ranks: list[Peers], enter: Enter
) -> None:
    """As the source of a broadcast may, while others still wait."""
    enter(1, "gradients/3").end()
    enter(1, "barrier/7")
    until(lambda: not ranks[0].who_is_missing("gradients/3", (0, 1), 0.2))
    said = "rank 1 did not come, waiting in barrier/7"
    assert ranks[0].who_is_missing("gradients/4", (0, 1), 0.2) == said
    assert ranks[0].who_is_missing("gradients/agreement 2", (0, 1), 0.2) == said


def test_a_wait_that_has_just_timed_out_is_still_known(
    ranks: list[Peers], store: dist.Store
) -> None:
    with (
        pytest.raises(RuntimeError),
        ranks[1].waiting("in gradients/3", "gradients/3", (0, 1), print, timeout=0.1),
    ):
        raise RuntimeError
    until(lambda: store.check(["waits/1"]))
    time.sleep(0.2)
    assert ranks[0].who_is_missing("gradients/3", (0, 1), 0.2) == ""


def why(peers: Peers, hung_up: tuple[int, ...] = ()) -> str:
    closed = RuntimeError("closed by peer")
    return str(peers.failure("allreduce", "a", (0, 1), "a/1", closed, 20.0, hung_up))


def test_a_rank_that_does_not_come_to_connect_is_named(ranks: list[Peers]) -> None:
    begin = time.monotonic()
    with pytest.raises(
        CommunicationTimeoutError,
        match=r"^connect on rank 0 in group 'a' of ranks 0-1: timed out after 0\.5 s; rank 1 did not",
    ):
        ranks[0].meet("a", (0, 1), 0.5, pytest.fail)
    assert time.monotonic() - begin < 10


def test_the_exception_that_ends_a_rank_is_told(ranks: list[Peers]) -> None:
    assert why(ranks[0]) == (
        "allreduce on rank 0 in group 'a' of ranks 0-1 failed; this rank failed, or another one has"
        " died or left (closed by peer)"
    )
    assert why(ranks[0], (1,)).endswith("failed; rank 1 has died or left")
    ranks[1].leave(ValueError("no data"))
    assert why(ranks[0], (1,)).endswith("failed; rank 1 ended with ValueError: no data")


def test_a_connection_that_closes_because_none_could_go_on_is_known_for_that(
    enter: Enter, ranks: list[Peers]
) -> None:
    ours, theirs = enter(0, "gradients/3"), enter(1, "barrier/7")
    until(lambda: theirs.reasons)
    ours.end()  # before this rank's own watch has seen the verdict, or after it
    assert why(ranks[0]).endswith(theirs.reasons[0])


def test_a_wait_that_ends_while_it_is_being_published_is_taken_back(
    enter: Enter, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked, ending = Peers._is_blocked, []

    def blocked_and_ends(waits: Peers) -> bool:
        found = blocked(waits)
        if found and not ending:
            monkeypatch.setattr(missing, "_INTERVAL", 60)
            thread = threading.Thread(target=wait.end)
            thread.start()
            ending.append(thread)
            time.sleep(0.2)
        return found

    monkeypatch.setattr(Peers, "_is_blocked", blocked_and_ends)
    wait = enter(0, "gradients/3")
    until(lambda: ending)
    ending[0].join()
    time.sleep(0.2)
    assert json.loads(store.get("waits/0")) == []


def test_a_rank_whose_background_thread_computes_does_not_count_as_waiting(enter: Enter) -> None:
    ours = enter(0, "")  # the training thread waits for its background thread
    theirs = enter(1, "barrier/7")
    time.sleep(0.5)
    assert not ours.reasons + theirs.reasons
    enter(0, "gradients/3", is_background=True)
    until(lambda: ours.reasons and theirs.reasons)


@pytest.mark.parametrize("waited_before", [True, False])
def test_a_rank_whose_training_goes_on_beside_a_background_collective_does_not_count_as_waiting(
    enter: Enter, ranks: list[Peers], waited_before: bool
) -> None:
    if waited_before:
        with ranks[0].waiting("in earlier", "earlier/1", (0, 1), print):
            pass
    background, theirs = enter(0, "average/2", is_background=True), enter(1, "barrier/7")
    time.sleep(0.5)
    assert not background.reasons + theirs.reasons

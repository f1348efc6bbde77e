"""Properties of readiness as a state machine, against a simple model of S2.4."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bagua_ref.scheduling.engine import Readiness


class ReadinessMachine(RuleBasedStateMachine):
    """The model keeps a list of the round's marks and finds what may run by looking at every bucket
    again.
    """

    @initialize(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def start(self, sizes: list[int]) -> None:
        self.buckets = [[(place, item) for item in range(size)] for place, size in enumerate(sizes)]
        self.readiness: Readiness[Any] = Readiness(self.buckets)
        self.issued: list[int] = []
        self.new_round()

    def new_round(self) -> None:
        self.marked: list[Any] = []
        self.scheduled: list[int] = []

    def complete(self) -> bool:
        return len(self.scheduled) == len(self.buckets)

    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.buckets) - 1))
        item = data.draw(st.sampled_from(self.buckets[place]))
        if place in self.scheduled:
            with pytest.raises(ValueError, match=r"marked again .* already been scheduled"):
                self.readiness.mark(item)
            return
        self.marked.append(item)
        expected = []
        while not self.complete() and all(
            i in self.marked for i in self.buckets[len(self.scheduled)]
        ):
            expected.append(len(self.scheduled))
            self.scheduled.append(len(self.scheduled))
        assert self.readiness.mark(item) == expected
        self.issued += expected
        if self.complete() and not self.readiness.hold:
            self.new_round()

    @rule()
    def hold(self) -> None:
        self.readiness.hold = True

    @rule()
    def release(self) -> None:
        self.readiness.hold = False
        assert self.readiness.complete == self.complete()
        if self.complete():
            self.readiness.reset()
            self.new_round()

    @precondition(lambda self: self.marked)
    @rule()
    def reset(self) -> None:
        self.readiness.reset()
        self.issued = self.issued[: len(self.issued) - len(self.scheduled)]
        self.new_round()

    @invariant()
    def test_S2_4_buckets_run_in_the_order_registered_round_after_round(self) -> None:
        if hasattr(self, "buckets"):
            assert self.issued == [i % len(self.buckets) for i in range(len(self.issued))]

    @invariant()
    def test_S2_5_unscheduled_buckets_name_their_unmarked_items(self) -> None:
        if hasattr(self, "buckets"):
            expected = {
                place: [i for i in items if i not in self.marked]
                for place, items in enumerate(self.buckets)
                if place not in self.scheduled
            }
            assert self.readiness.unmarked() == expected
            assert self.readiness.idle == (not self.marked)
            assert self.readiness.complete == (not expected)


TestReadiness = ReadinessMachine.TestCase


def test_S2_6_an_item_in_two_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match="in two buckets"):
        Readiness([["a"], ["b", "a"]])

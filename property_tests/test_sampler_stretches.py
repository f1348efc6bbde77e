"""Properties of positions that survive another number of replicas (S7.6), and of batches under a
budget (S7.7).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from property_tests.test_samplers import make

from bagua_ref.conformance.cases.sampler_cases import budgets, cases, cut, few_or_many
from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.contrib import BudgetBatchSampler, LoadBalancingDistributedBatchSampler

replica_counts = st.integers(1, 5)


def _quadratic(size: int, largest: Any) -> Any:
    return size * largest * largest


Makers = tuple[Callable[[int, int], Any], Callable[[list[tuple[int, int]], int], Any]]
"""What makes a sampler of some replicas and a rank, and what plans the stretches after a
history.
"""


@st.composite
def samples(draw: st.DrawFn) -> Makers:
    values, _, options = draw(cases())
    return (
        lambda replicas, rank: make(values, replicas, rank, options, complexities=values),
        lambda history, replicas: samplers_plain.stretches_of(values, history, replicas, **options),
    )


@st.composite
def batches(draw: st.DrawFn) -> Makers:
    values, _, options = draw(cases())
    rule, options = (
        (draw(st.sampled_from([cut(2), cut(3), few_or_many])), draw(st.booleans())),
        {**options, "drop_last": False},
    )
    return (
        lambda replicas, rank: LoadBalancingDistributedBatchSampler(
            make(values, replicas, rank, options, complexities=values), *rule
        ),
        lambda history, replicas: samplers_plain.stretches_of(
            values, history, replicas, *rule, **options
        ),
    )


@st.composite
def batches_under_a_budget(draw: st.DrawFn) -> Makers:
    costs, most, options = draw(budgets())
    options["drop_last"] = False
    if draw(st.booleans()):
        most, options["padded"] = max(1, most * max(costs)), _quadratic
    given = {name: value for name, value in options.items() if name != "epoch"}

    def start(replicas: int, rank: int) -> BudgetBatchSampler:
        sampler = BudgetBatchSampler(costs, most, num_replicas=replicas, rank=rank, **given)
        sampler.set_epoch(options["epoch"])
        return sampler

    return start, lambda history, replicas: samplers_plain.budget_stretches(
        costs, most, history, replicas, **options
    )


@given(makers=st.one_of(samples(), batches(), batches_under_a_budget()), data=st.data())
def test_S7_6_S7_7_a_stretch_draws_what_earlier_ones_have_left_whatever_the_history(makers, data):
    start, plan = makers
    history: list[tuple[int, int]] = []
    state: Any = None
    for _ in range(data.draw(st.integers(1, 4))):
        replicas = data.draw(replica_counts)
        continues = bool(history) and history[-1][0] == replicas
        ended, already = (history[:-1], history[-1][1]) if continues else (history, 0)
        wanted = plan(ended, replicas)[-1]
        rank = data.draw(st.integers(0, replicas - 1))
        sampler = start(replicas, rank)
        if state is not None:
            sampler.load_state_dict(state)
        assert len(sampler) == len(wanted[rank])
        taken = data.draw(st.integers(0, len(sampler) - already))
        iterator = iter(sampler)
        assert [next(iterator) for _ in range(taken)] == wanted[rank][already : already + taken]
        others = [start(replicas, other) for other in range(replicas)]
        for other, sampled in zip(others, wanted, strict=True):
            if state is not None:
                other.load_state_dict(state)
            assert list(other) == sampled[already:]
        state = json.loads(json.dumps(sampler.state_dict()))
        if already + taken:
            history = [*ended, (replicas, already + taken)]
            loaded = start(replicas, 0)
            loaded.load_state_dict(state)
            assert loaded.state_dict() == sampler.state_dict()


@given(case=cases(), data=st.data())
def test_S7_6_every_sample_is_drawn_and_few_twice(case, data):
    values, _, options = case
    drawn: Counter[int] = Counter()
    state, replica_numbers, ended = None, [], False
    for last in (False, False, True):
        replicas = data.draw(replica_counts)
        samplers = [
            make(values, replicas, rank, options, complexities=values) for rank in range(replicas)
        ]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        left = len(samplers[0]) - (
            state["samples"] if state is not None and state["num_replicas"] == replicas else 0
        )
        taken = left if last else data.draw(st.integers(0, left))
        for sampler in samplers:
            drawn.update(itertools.islice(sampler, taken))
        state = samplers[0].state_dict()
        if taken or not ended:
            replica_numbers.append(replicas)
        ended = 0 < state["samples"] == state["num_samples"]
    if options["drop_last"]:
        assert max(drawn.values(), default=1) == 1
        assert len(values) - len(drawn) < replica_numbers[-1]
    else:
        assert len(drawn) == len(values)
        assert drawn.total() - len(values) <= sum(number - 1 for number in replica_numbers)


@given(case=budgets(), replicas=replica_counts, drop_last=st.booleans())
def test_S7_7_each_sample_once_within_the_budget_and_equal_counts(case, replicas, drop_last):
    costs, most, options = case
    options |= {"drop_last": drop_last, "epoch": 0}
    wanted = samplers_plain.budget_stretches(costs, most, [], replicas, **options)[0]
    del options["epoch"]
    if not wanted[0]:
        with pytest.raises(ValueError, match="leaves no batch"):
            BudgetBatchSampler(costs, most, num_replicas=replicas, rank=0, **options)
    else:
        samplers = [
            BudgetBatchSampler(costs, most, num_replicas=replicas, rank=rank, **options)
            for rank in range(replicas)
        ]
        batches = [list(sampler) for sampler in samplers]
        assert batches == wanted
        assert all(
            samplers_plain.batch_cost(costs, batch, options["padded"]) <= most
            for own in batches
            for batch in own
        )
        drawn = Counter(index for own in batches for batch in own for index in batch)
        if options["drop_last"]:
            assert max(drawn.values()) == 1
            assert samplers[0].dropped < replicas
            assert (len(drawn) == len(costs)) == (samplers[0].dropped == 0)
        else:
            assert len(drawn) == len(costs)
            assert drawn.total() - len(costs) < replicas
            assert drawn.total() == len(costs) or all(
                len(batch) == 1 for own in batches for batch in own
            )


@given(case=budgets(), data=st.data())
def test_S7_7_a_later_stretch_drops_what_its_replicas_cannot_share(case, data):
    costs, most, options = case
    options |= {"drop_last": True, "epoch": 0}
    batches = len(samplers_plain.budget_stretches(costs, most, [], 1, **options)[0][0])
    assume(batches > 1)
    before, replicas = data.draw(st.permutations(range(1, min(batches, 6) + 1)))[:2]
    first = samplers_plain.budget_stretches(costs, most, [], before, **options)[0]
    taken = data.draw(st.integers(1, len(first[0])))
    wanted = samplers_plain.budget_stretches(costs, most, [(before, taken)], replicas, **options)[
        -1
    ]
    del options["epoch"]
    state = BudgetBatchSampler(costs, most, num_replicas=before, rank=0, **options).state_dict(
        batches=taken
    )
    samplers = [
        BudgetBatchSampler(costs, most, num_replicas=replicas, rank=rank, **options)
        for rank in range(replicas)
    ]
    for sampler, own in zip(samplers, wanted, strict=True):
        if not own and taken < len(first[0]):
            with pytest.raises(ValueError, match="leaves no batch"):
                sampler.load_state_dict(state)
        else:
            sampler.load_state_dict(state)
            assert list(sampler) == own

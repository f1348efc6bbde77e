"""Properties of positions that survive another number of replicas (S7.6), and of batches under a
budget (S7.7).
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests.test_samplers import make

from bagua_ref.conformance.cases.sampler_cases import budgets, cases
from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.contrib import BudgetBatchSampler

replica_counts = st.integers(1, 5)


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

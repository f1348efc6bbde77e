"""The balanced samplers of every backend against S7 in plain Python."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from property_tests.strategies import every_backend

from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.contrib import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

few = st.integers(-3, 3)
any_int = st.one_of(
    few,
    st.integers(0, 10**6),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**80), 2**80),
    st.sampled_from([10**400, -(10**400)]),
)
EDGES = [sign * 2**power for power in (15, 16, 31, 32, 53, 62, 63, 64) for sign in (1, -1)]
near_an_edge = st.sampled_from(EDGES).flatmap(lambda edge: st.integers(edge - 3, edge + 3))
any_float = st.one_of(
    st.floats(-4, 4),
    few.map(float),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([-0.0, 0.0, 5e-324, 2.0**53]),
)
mixed = st.one_of(any_int, any_float, near_an_edge, near_an_edge.map(float))


def as_scalar(number: Any) -> st.SearchStrategy[Any]:
    """The same number as a sample's complexity may come: as it is, as 0-d or one-element tensor, as NumPy scalar."""
    forms: list[Any] = [number]
    if isinstance(number, float):
        forms += [torch.tensor(number, dtype=torch.float64), torch.tensor([number], dtype=torch.float64), np.float64(number)]
    elif -(2**63) <= number < 2**63:
        forms += [torch.tensor(number), torch.tensor([[number]]), np.int64(number)]
        if number in (0, 1):
            forms += [bool(number), np.bool_(number), torch.tensor(bool(number))]
    return st.sampled_from(forms)


def lists(kind: st.SearchStrategy[Any]) -> st.SearchStrategy[list]:
    return st.lists(kind, min_size=1, max_size=40)


def about(edge: int) -> st.SearchStrategy[list]:
    """Integers and floats that one dtype hardly tells apart."""
    close = st.integers(edge - 3, edge + 3)
    return st.one_of(lists(close), lists(st.one_of(close, close.map(float))))


complexities = st.one_of(*map(lists, (few, any_int, near_an_edge, any_float, mixed)), st.sampled_from(EDGES).flatmap(about))
levels = st.one_of(st.sampled_from([0, 1, 0.0, 0.1, 0.5, 1.0]), st.floats(0, 1))


@st.composite
def cases(draw: Any) -> tuple[list, int, dict[str, Any]]:
    """Complexities, the number of replicas (at times more than samples) and options, such that S7 has an answer."""
    values = draw(complexities)
    options = {
        "shuffle": draw(st.booleans()),
        "seed": draw(st.one_of(st.integers(0, 5), st.integers(-(2**40), 2**40))),
        "epoch": draw(st.integers(0, 5)),
        "drop_last": draw(st.booleans()),
        "random_level": draw(levels),
    }
    if options["shuffle"]:
        try:
            limit = samplers_plain.noise_limit(values, options["random_level"])
        except (OverflowError, ValueError):
            limit = 2**64
        assume(limit < 2**63)
    return values, draw(st.integers(1, 9)), options


def make(values: list, replicas: int, rank: int, options: dict[str, Any], **more: Any) -> LoadBalancingDistributedSampler:
    given_at_once = {name: value for name, value in options.items() if name != "epoch"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # all complexities may well be equal here
        sampler = LoadBalancingDistributedSampler(values, more.pop("complexity_fn", None), replicas, rank, **given_at_once, **more)
    sampler.set_epoch(options["epoch"])
    return sampler


def all_ranks(case: tuple[list, int, dict[str, Any]]) -> list[list[int]]:
    values, replicas, options = case
    return [list(make(values, replicas, rank, options, complexities=values)) for rank in range(replicas)]


@every_backend
@given(case=cases(), data=st.data())
def test_S7_3_indices_are_those_of_the_clause(backend, case, data):
    values, replicas, options = case
    rank = data.draw(st.integers(0, replicas - 1))
    sampler = make(values, replicas, rank, options, complexity_fn=lambda value: value, backend=backend)
    assert list(sampler) == samplers_plain.indices(values, replicas, rank, **options)
    assert list(sampler) == list(sampler)
    assert len(sampler) == sampler.num_samples == len(list(sampler))


@every_backend
@given(case=cases(), data=st.data())
def test_S7_2_a_complexity_in_any_form_is_its_number_and_stays_as_it_was(backend, case, data):
    values, replicas, options = case
    dataset = [data.draw(as_scalar(value)) for value in values]
    sampler = make(dataset, replicas, 0, options, complexity_fn=lambda sample: sample, backend=backend)
    for epoch in range(options["epoch"], options["epoch"] + 3):
        sampler.set_epoch(epoch)
        assert list(sampler) == samplers_plain.indices(values, replicas, 0, **{**options, "epoch": epoch})
    assert [sample.item() if hasattr(sample, "item") else sample for sample in dataset] == values


@given(case=cases(), data=st.data())
def test_S7_2_complexities_are_those_that_the_function_returns(case, data):
    values, replicas, options = case
    kinds = set(map(type, values))
    forms = [values, tuple(values)]
    if kinds == {float}:
        forms += [np.array(values), torch.tensor(values, dtype=torch.float64)]
    elif kinds == {int} and all(-(2**63) <= value < 2**63 for value in values):
        forms += [np.array(values, dtype=np.int64), torch.tensor(values)]
    if kinds == {int} and all(0 <= value < 2**64 for value in values):
        forms += [np.array(values, dtype=np.uint64)]
    sampler = make(values, replicas, 0, options, complexities=data.draw(st.sampled_from(forms)))
    assert list(sampler) == samplers_plain.indices(values, replicas, 0, **options)


@given(values=complexities, level=levels)
def test_S7_2_noise_that_has_no_number_is_refused_and_without_shuffle_not_missed(values, level):
    try:
        refused = samplers_plain.noise_limit(values, level) >= 2**63
    except (OverflowError, ValueError):
        assume(level != 0)  # an integer 0 and 0.0 are the same here
        refused = True
    options = {"shuffle": True, "seed": 0, "epoch": 0, "drop_last": False, "random_level": level}
    if refused:
        with pytest.raises(ValueError, match=r"too far apart|64 bits"):
            make(values, 2, 0, options, complexities=values)
    else:
        make(values, 2, 0, options, complexities=values)
    in_order = make(values, 1, 0, {**options, "shuffle": False}, complexities=values)
    assert list(in_order) == sorted(range(len(values)), key=values.__getitem__)


@given(case=cases())
def test_S7_1_all_ranks_draw_as_many(case):
    values, replicas, options = case
    drawn = all_ranks(case)
    assert {len(indices) for indices in drawn} == {samplers_plain.num_samples(len(values), replicas, options["drop_last"])}
    assert make(values, replicas, 0, options, complexities=values).total_size == sum(map(len, drawn))


@given(case=cases())
def test_S7_3_together_ranks_draw_the_order_and_what_wraps_around(case):
    values, replicas, options = case
    order, _ = samplers_plain.order_and_chunks(values, replicas, **options)
    total = sum(map(len, all_ranks(case)))
    assert Counter(index for indices in all_ranks(case) for index in indices) == Counter(
        order[place % len(order)] for place in range(total)
    )
    if not options["drop_last"]:
        assert {index for indices in all_ranks(case) for index in indices} == set(range(len(values)))


@given(case=cases())
def test_S7_3_ranks_draw_neighbours_of_the_order_at_each_step(case):
    values, replicas, options = case
    order, _ = samplers_plain.order_and_chunks(values, replicas, **options)
    place = {index: position for position, index in enumerate(order)}
    for step in zip(*all_ranks(case), strict=True):
        first = place[step[0]]
        assert [place[index] for index in step] == [(first + i) % len(order) for i in range(replicas)]


@given(case=cases())
def test_S7_3_chunks_are_what_ranks_draw(case):
    values, replicas, options = case
    chunks, numbers = make(values, replicas, 0, options, complexities=values).shuffle_chunks()
    assert len(chunks) == max(1, samplers_plain.num_samples(len(values), replicas, options["drop_last"]))
    assert [[chunks[number][rank] for number in numbers] for rank in range(replicas)] == all_ranks(case)


def cut(values: list, limit: int) -> Any:
    """Return a batch_fn: a batch ends where a sample of its own would, by a rule that sees indices and complexities."""

    def batches(indices: list[int]) -> list[list[int]]:
        found: list[list[int]] = [[]]
        for index in indices:
            if found[-1] and (len(found[-1]) == limit or hash((index, values[index])) % 3 == 0):
                found.append([])
            found[-1].append(index)
        return found

    return batches


@given(case=cases(), limit=st.integers(1, 5), drop_last=st.booleans())
def test_S7_4_replicas_draw_equally_many_batches_those_of_the_clause(case, limit, drop_last):
    values, replicas, options = case
    options = {**options, "drop_last": False}
    batch_fn = cut(values, limit)
    drawn = []
    for rank in range(replicas):
        sampler = make(values, replicas, rank, {**options, "epoch": 0}, complexities=values)
        batch_sampler = LoadBalancingDistributedBatchSampler(sampler, batch_fn, drop_last)
        batch_sampler.set_epoch(options["epoch"])
        drawn.append(list(batch_sampler))
        assert len(batch_sampler) == len(drawn[-1])
    plain = [batch_fn(samplers_plain.indices(values, replicas, rank, **options)) for rank in range(replicas)]
    assert drawn == samplers_plain.equal_batches(plain, drop_last)


@given(case=cases(), data=st.data())
def test_S7_3_a_saved_place_is_found_again_on_any_rank(case, data):
    values, replicas, options = case
    rank = data.draw(st.integers(0, replicas - 1))
    whole = list(make(values, replicas, rank, options, complexities=values))
    taken = data.draw(st.integers(0, len(whole)))
    saving = make(values, replicas, data.draw(st.integers(0, replicas - 1)), options, complexities=values)
    iterator = iter(saving)
    for _ in range(taken):
        next(iterator)
    resumed = make(values, replicas, rank, {**options, "epoch": 0}, complexities=values)
    resumed.load_state_dict(saving.state_dict())
    resumed.set_epoch(options["epoch"])
    assert list(resumed) == whole[taken:]
    assert list(resumed) == whole


@given(case=cases(), data=st.data(), drop_last=st.booleans())
def test_S7_4_a_saved_batch_is_found_again(case, data, drop_last):
    values, replicas, options = case
    options = {**options, "drop_last": False}

    def batches() -> LoadBalancingDistributedBatchSampler:
        sampler = make(values, replicas, replicas - 1, options, complexities=values)
        return LoadBalancingDistributedBatchSampler(sampler, cut(values, 2), drop_last)

    whole, saving, resumed = list(batches()), batches(), batches()
    taken = data.draw(st.integers(0, len(whole)))
    iterator = iter(saving)
    for _ in range(taken):
        next(iterator)
    resumed.set_epoch(9)
    resumed.load_state_dict(saving.state_dict())
    assert list(resumed) == whole[taken:]
    assert list(resumed) == whole


@given(values=st.lists(mixed, max_size=8), place=st.integers(0, 8), nan=st.sampled_from(["float", "tensor", "numpy"]))
def test_S7_5_nan_is_refused_wherever_it_is(values, place, nan):
    number = {"float": float("nan"), "tensor": torch.tensor(float("nan")), "numpy": np.float32("nan")}[nan]
    values.insert(min(place, len(values)), number)
    for arguments in ({"complexity_fn": lambda value: value}, {"complexity_fn": None, "complexities": values}):
        with pytest.raises(ValueError, match="NaN"):
            LoadBalancingDistributedSampler(values, num_replicas=1, rank=0, shuffle=False, **arguments)


@given(
    level=st.one_of(
        st.floats(max_value=0, exclude_max=True),
        st.floats(min_value=1, exclude_min=True),
        st.just(float("nan")),
        st.integers(2),
        st.integers(max_value=-1),
    )
)
def test_S7_5_a_random_level_outside_0_to_1_is_refused(level):
    with pytest.raises(ValueError, match="random_level"):
        LoadBalancingDistributedSampler([1, 2], None, 1, 0, random_level=level, complexities=[1, 2])


@given(replicas=st.integers(-3, 9), rank=st.integers(-3, 9))
def test_S7_5_a_rank_that_is_none_of_the_replicas_is_refused(replicas, rank):
    if 0 <= rank < replicas:
        LoadBalancingDistributedSampler([1, 2], None, replicas, rank, complexities=[1, 2])
    else:
        with pytest.raises(ValueError, match="num_replicas" if replicas < 1 else "rank"):
            LoadBalancingDistributedSampler([1, 2], None, replicas, rank, complexities=[1, 2])

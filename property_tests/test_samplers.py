"""Properties of the balanced samplers beyond the suite: complexities in every form, and the public
chunks (S7).
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from property_tests.strategies import every_backend

from bagua_ref.conformance.cases.sampler_cases import cases, complexities, levels
from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.contrib import LoadBalancingDistributedSampler


def as_scalar(number: Any) -> st.SearchStrategy[Any]:
    """A number in every form that a complexity may have: plain, 0-d or one-element tensor, NumPy
    scalar.
    """
    forms: list[Any] = [number]
    if isinstance(number, float):
        forms += [
            torch.tensor(number, dtype=torch.float64),
            torch.tensor([number], dtype=torch.float64),
            np.float64(number),
        ]
    elif -(2**63) <= number < 2**63:
        forms += [torch.tensor(number), torch.tensor([[number]]), np.int64(number)]
        if number in (0, 1):
            forms += [bool(number), np.bool_(number), torch.tensor(bool(number))]
    return st.sampled_from(forms)


def make(
    values: list, replicas: int, rank: int, options: dict[str, Any], **more: Any
) -> LoadBalancingDistributedSampler:
    given_at_once = {name: value for name, value in options.items() if name != "epoch"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # warns if all complexities are equal
        sampler = LoadBalancingDistributedSampler(
            values, more.pop("complexity_fn", None), replicas, rank, **given_at_once, **more
        )
    sampler.set_epoch(options["epoch"])
    return sampler


def all_ranks(case: tuple[list, int, dict[str, Any]]) -> list[list[int]]:
    values, replicas, options = case
    return [
        list(make(values, replicas, rank, options, complexities=values)) for rank in range(replicas)
    ]


@every_backend
@given(case=cases(), data=st.data())
def test_S7_2_a_complexity_in_any_form_is_its_number_and_stays_as_it_was(backend, case, data):
    values, replicas, options = case
    dataset = [data.draw(as_scalar(value)) for value in values]
    read: list[Any] = []
    sampler = make(
        dataset,
        replicas,
        0,
        options,
        complexity_fn=lambda sample: read.append(sample) or sample,
        backend=backend,
    )
    for epoch in range(options["epoch"], options["epoch"] + 3):
        sampler.set_epoch(epoch)
        assert list(sampler) == samplers_plain.indices(
            values, replicas, 0, **{**options, "epoch": epoch}
        )
    assert len(read) == len(dataset)
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
        assume(level != 0)  # integer 0 and 0.0 are treated alike
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
def test_S7_3_chunks_are_what_ranks_draw(case):
    values, replicas, options = case
    chunks, numbers = make(values, replicas, 0, options, complexities=values).shuffle_chunks()
    assert make(values, replicas, 0, options, complexities=values).total_size == sum(
        map(len, all_ranks(case))
    )
    assert len(chunks) == max(
        1, samplers_plain.num_samples(len(values), replicas, options["drop_last"])
    )
    assert [[chunks[number][rank] for number in numbers] for rank in range(replicas)] == all_ranks(
        case
    )

"""Strategies for balanced samplers: complexities, options, and a rule that cuts batches (S7)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from bagua_ref.conformance.cases.strategies import seeds
from bagua_ref.conformance.expected import samplers_plain

_few = st.integers(-3, 3)
_near_edges = st.sampled_from(
    [s * 2**p for p in (15, 16, 31, 32, 53, 62, 63) for s in (1, -1)]
).flatmap(lambda edge: st.integers(edge - 3, edge + 3))
_numbers = (
    _few,
    _few.map(float),
    st.integers(0, 1000),
    st.floats(-4, 4),
    st.one_of(_near_edges, st.integers(-(2**80), 2**80)),
    st.floats(allow_nan=False, allow_infinity=False),
    st.one_of(_few, st.floats(-4, 4), st.sampled_from([-0.0, 0.0, 2.0**53, 2**53 + 1])),
)


@st.composite
def about_an_edge(draw: st.DrawFn) -> list[Any]:
    """Integers, and floats among them, so close to a power of two that some dtypes cannot
    distinguish them.
    """
    edge = draw(
        st.sampled_from(
            [sign * 2**power for power in (24, 53, 54, 58, 61, 63, 80) for sign in (1, -1)]
        )
    )
    close = st.integers(edge - 3, edge + 3)
    if draw(st.booleans()):
        return [edge + number - 3 for number in _many(draw(seeds), 20, 7)]
    return draw(
        st.lists(
            draw(st.sampled_from([close, st.one_of(close, close.map(float))])),
            min_size=2,
            max_size=20,
        )
    )


def _many(seed: int, size: int, most: int) -> list[int]:
    return torch.randint(most, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


_long = st.builds(
    _many, seeds, st.sampled_from([7, 16, 23, 40, 100]), st.sampled_from([2, 10, 1000])
)
complexities = st.one_of(
    _long,
    _long,
    about_an_edge(),
    *(st.lists(number, min_size=1, max_size=40) for number in _numbers),
)
levels = st.one_of(st.sampled_from([0, 1, 0.0, 0.1, 0.5, 1.0]), st.floats(0, 1))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Any], int, dict[str, Any]]:
    """Complexities, a number of replicas (sometimes more than samples) and options for which S7
    defines a result.
    """
    values = draw(complexities)
    if draw(st.integers(0, 5)) == 5:
        # which replicas may have to repeat more than once
        values = values[: draw(st.integers(1, 3))]
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
    return values, draw(st.one_of(st.integers(1, 9), st.sampled_from([8, 12, 16, 33]))), options


@st.composite
def noisy_cases(draw: st.DrawFn) -> tuple[list[float], int, dict[str, Any]]:
    """Inputs whose noise limit is sensitive to rounding: ranges and levels whose product, or its
    sum with 1, depends on the rounding; epochs beyond narrow integers.
    """
    low, span = draw(st.integers(-5, 5)), draw(st.sampled_from([10, 70, 100, 1_000]))
    values: list[float] = [
        low + place * span // 7 for place in draw(st.permutations([0, 0, 1, 2, 3, 5, 7, 7]))
    ]
    level = draw(st.sampled_from([0.3, 0.7, 0.9, 0.29]))
    if draw(st.booleans()):  # the product is below 1, but its sum with 1 an integer
        most, level = (
            draw(st.sampled_from([1.0, 2.0, 4.0, 8.0])),
            draw(st.sampled_from([1.0, 1, 0.5])),
        )
        values = [
            0.0,
            math.nextafter(most, 0.0) / level,
            *(most / level * place / 8 for place in range(8)),
        ]
    options = {
        "shuffle": True,
        "seed": draw(st.integers(0, 5)),
        "epoch": draw(
            st.sampled_from([2**power + more for power in (8, 16, 24, 31) for more in (-1, 0, 1)])
        ),
        "drop_last": False,
        "random_level": level,
    }
    return values, draw(st.integers(1, 3)), options


@st.composite
def budgets(draw: st.DrawFn) -> tuple[list[Any], Any, dict[str, Any]]:
    """Costs, a budget and options of S7.7, without ``drop_last``."""
    # sums and products of tenths are often at the budget but for their last bit
    tenths = st.integers(1, 9).map(lambda number: number / 10)
    number = draw(
        st.sampled_from(
            [st.integers(1, 9), st.integers(1, 300), st.floats(0.125, 50), st.just(7), tenths]
        )
    )
    costs = draw(st.lists(number, min_size=1, max_size=60))
    padded = draw(st.sampled_from([True, False, True, False, samplers_plain.FORMULAS["m * h * h"]]))
    alone = samplers_plain.batch_cost([max(costs)], [0], padded)
    most = max(1, alone * draw(st.sampled_from([1, 1.5, 2, 4, 10])))
    shuffle, seed, epoch = draw(st.booleans()), draw(st.integers(0, 5)), draw(st.integers(0, 3))
    return (
        costs,
        most,
        {
            "padded": padded,
            "shuffle": shuffle,
            "seed": seed,
            "epoch": epoch,
            "mix": draw(st.sampled_from([1, 2, 3, 4, 8])),
        },
    )


def cut(limit: int) -> Callable[[list[int]], list[list[int]]]:
    """Return a batch_fn: batches of 1 to ``limit`` samples, by a rule that sees each index."""

    def batches(drawn: list[int]) -> list[list[int]]:
        found: list[list[int]] = []
        for index in drawn:
            if not found or len(found[-1]) == limit or index % 3 == 0:
                found.append([])
            found[-1].append(index)
        return found

    return batches


def few_or_many(drawn: list[int]) -> list[list[int]]:
    """A batch_fn with which replicas' numbers of batches differ by more than a factor of two."""
    few = [part for part in (drawn[:1], drawn[1:]) if part]
    return few if drawn[0] % 2 else [[index] for index in drawn]


def one_to_five(drawn: list[int]) -> list[list[int]]:
    """A batch_fn whose number of batches depends only on the first sample, so that it differs even
    between replicas with one sample.
    """
    return [[drawn[place % len(drawn)], place] for place in range(1 + drawn[0] % 5)]


def many_for(sample: int) -> Callable[[list[int]], list[list[int]]]:
    """Return a batch_fn that gives three batches to replicas with a certain sample, and one to the
    others.
    """
    return lambda drawn: [drawn] * (3 if sample in drawn else 1)


def identity(sample: Any) -> Any:
    """Return a sample as its complexity."""
    return sample

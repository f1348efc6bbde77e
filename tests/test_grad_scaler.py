"""GradScaler: ranks skip steps together where each has gradients of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.test_uneven import wrapped
from tests.trainings import batch, by_name, network, on_every_rank, simulate, weights
from torch import nn

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from bagua_ref.errors import CommunicationError

Overflows = dict[int, set[int]]
"""The steps in which a rank's loss is infinite."""


def low_precision() -> Algorithm:
    return LowPrecisionDecentralizedAlgorithm(hierarchical=False)


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    rank: int,
    steps: int,
    overflows: Overflows,
) -> list[float]:
    """Return the scale after each step."""
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        factor = torch.inf if step in overflows.get(rank, ()) else 1.0
        scaler.scale(module(batch(rank, step)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def skipping(rank: int, fused: bool = False) -> tuple[list[float], list[int], bool]:
    module = network()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01, fused=fused)
    module.with_bagua([optimizer], low_precision())
    scaler = bagua_ref.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    scales = train(module, optimizer, scaler, rank, 6, {1: {1}, 2: {4}})
    taken = int(optimizer.state[next(module.parameters())]["step"])
    return scales, [taken], bool(weights(module).isfinite().all())


@pytest.mark.parametrize("fused", [False, True])
@on_every_rank(3)
def test_all_ranks_skip_a_step_in_which_one_overflows(r: int, fused: bool) -> None:
    assert skipping(r, fused) == ([16.0, 8.0, 8.0, 8.0, 4.0, 4.0], [4], True)


@on_every_rank(3)
def test_torchs_own_scaler_is_an_error_that_names_the_step(r: int) -> None:
    module, optimizer = wrapped(low_precision())
    with pytest.raises(CommunicationError) as caught:
        train(module, optimizer, torch.amp.GradScaler("cpu"), r, 3, {1: {1}})
    said = str(caught.value)
    assert (
        "rank 1 has taken 2 optimizer steps, ranks 0, 2 have taken 3 optimizer steps" in said
        or "backward passes since" in said
    )


@on_every_rank(3)
def test_one_rank_with_torchs_scaler_is_an_error_on_all(r: int) -> None:
    module, optimizer = wrapped(low_precision())
    scaler = torch.amp.GradScaler("cpu") if r == 1 else bagua_ref.GradScaler("cpu")
    said = (
        "rank 1 is about to exchange buckets, ranks 0, 2 are about to decide whether to skip an"
        " optimizer step"
    )
    with pytest.raises(CommunicationError, match=said):
        train(module, optimizer, scaler, r, 3, {})
    with pytest.raises(CommunicationError, match="cannot train on"):
        module(batch(r, 0))


@pytest.mark.parametrize("first", [0, 1])
@on_every_rank(2)
def test_with_two_optimizers_only_the_one_that_overflows_skips(r: int, first: int) -> None:
    module = network()
    optimizers = [torch.optim.Adam(module[place].parameters()) for place in (0, 2)]
    module.with_bagua(optimizers, low_precision())
    scaler = bagua_ref.GradScaler("cpu", init_scale=16.0)
    for step in range(3):
        module.zero_grad()
        scaler.scale(module(batch(r, step)).square().mean()).backward()
        if (r, step) == (1, 1):
            module[2 * first].weight.grad[0, 0] = torch.inf
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0
    assert [
        int(o.state[module[2 * place].weight]["step"]) for place, o in enumerate(optimizers)
    ] == [[2, 3], [3, 2]][first]


@pytest.mark.parametrize("counts", [[[5, 2, 0], [1, 0, 3]], [[3, 3, 3], [2, 2, 2]]])
@on_every_rank(3)
def test_ranks_without_batches_take_part_and_end_with_the_same_scale(
    r: int, counts: list[list[int]]
) -> None:
    module, optimizer = wrapped(low_precision())
    scaler = bagua_ref.GradScaler("cpu", init_scale=16.0)
    for epoch in counts:
        with bagua_ref.join([module, scaler]):
            train(module, optimizer, scaler, r, epoch[r], {0: {1, 4}})
    assert (module._bagua.steps_of_optimizers, scaler.get_scale()) == (
        [sum(map(max, counts)) - 2],
        4.0,
    )


@pytest.mark.parametrize("algorithm", [low_precision, GradientAllReduceAlgorithm])
@on_every_rank(2)
def test_inside_join_a_scaler_must_be_listed(r: int, algorithm: Any) -> None:
    module, optimizer = wrapped(algorithm())
    bagua_ref.barrier()  # or one rank may fail while another one is still wrapping
    with (
        pytest.raises(
            RuntimeError, match=r"must be among its joinables.*join\(\[model, scaler\]\)"
        ),
        bagua_ref.join([module]),
    ):
        train(module, optimizer, bagua_ref.GradScaler("cpu"), r, 1, {})


@on_every_rank(2)
def test_a_scaler_that_is_not_enabled_does_nothing(r: int) -> None:
    module, optimizer = wrapped(low_precision())
    with bagua_ref.join([module]):
        assert train(
            module, optimizer, bagua_ref.GradScaler("cpu", enabled=False), r, 1 + r, {}
        ) == [1.0] * (1 + r)


ALIKE: list[tuple[str, dict[str, Any]]] = [
    ("gradient_allreduce", {}),
    ("bytegrad", {"hierarchical": False}),
    ("async", {"sync_interval_ms": 0, "warmup_steps": 10}),
    ("qadam", {"hierarchical": False}),
]
APART: list[tuple[str, dict[str, Any]]] = [
    ("decentralized", {"hierarchical": False}),
    ("async", {"sync_interval_ms": 0}),
]


def scales_and_notes(
    name: str, options: dict[str, Any], scaler_class: Any
) -> list[tuple[list[float], int]]:
    """Return, for each rank, the scale after each step in which rank 1 overflows, and the number of
    notes exchanged.
    """
    counts = {}

    def rank(r: int) -> list[float]:
        module = network()
        scaler = scaler_class("cpu", init_scale=16.0)
        optimizer, algorithm = by_name(
            name, module, **options, **({"grad_scaler": scaler} if name == "qadam" else {})
        )
        module.with_bagua([optimizer], algorithm)  # type: ignore[operator]
        comm = module._bagua.rounds.group.get_global_communicator()
        exchange, counts[r] = comm.exchange_ints, 0

        def counting(*args: Any, **options: Any) -> Any:
            counts[r] += 1
            return exchange(*args, **options)

        comm.exchange_ints = counting
        return train(module, optimizer, scaler, r, 5, {1: {1, 4}})

    scales = simulate(3, rank)
    return [(mine, counts[r]) for r, mine in enumerate(scales)]


@pytest.mark.parametrize(("name", "options"), ALIKE, ids=str)
def test_where_gradients_are_equal_nothing_more_is_sent(name: str, options: dict[str, Any]) -> None:
    ours = scales_and_notes(name, options, bagua_ref.GradScaler)
    assert ours == scales_and_notes(name, options, torch.amp.GradScaler)
    assert [scales for scales, _ in ours] == [[16.0, 8.0, 8.0, 8.0, 4.0]] * 3


@pytest.mark.parametrize(("name", "options"), APART, ids=str)
def test_where_ranks_may_take_different_steps_each_skips_its_own(
    name: str, options: dict[str, Any]
) -> None:
    ours = scales_and_notes(name, options, bagua_ref.GradScaler)
    assert ours == scales_and_notes(name, options, torch.amp.GradScaler)
    assert [scales[-1] for scales, _ in ours] == [16.0, 4.0, 16.0]

"""Tests of training as a context, and of torch's DistributedDataParallel as well: one reduction, or
an error.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from tests.launch import launch, on_every_process
from tests.test_bypassing import ALGORITHMS, Net, batch
from tests.trainings import by_name, on_every_rank, simulate, weights
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm, GradientAllReduceAlgorithm, LocalSGDAlgorithm

WORKING = [name for name in ALGORITHMS if name != "async"]


def trained(rank: int, algorithm: str, in_context: bool) -> torch.Tensor:
    """Train 6 steps: one without a backward pass, and each of the others with an accumulating one
    before.
    """
    module = Net()
    optimizer, made = by_name(
        algorithm,
        module,
        momentum=0.9,
        **({"period": 2} if algorithm in ("local_sgd", "diloco") else {}),
    )
    before = set(module.__dict__)
    with (
        bagua_ref.train(module, [optimizer], made)
        if in_context
        else nullcontext(module.with_bagua([optimizer], made))
    ):
        forward = module.training_step if in_context else lambda x: module(x).square().mean()
        for step in range(6):
            optimizer.zero_grad()
            if step == 2:
                continue
            with module.no_sync():
                forward(batch(rank, 50 + step)).backward()
            forward(batch(rank, step)).backward()
            optimizer.step()
    if in_context:
        assert set(module.__dict__) == before
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    return weights(module)


@pytest.mark.parametrize("algorithm", WORKING)
def test_the_context_gives_the_bits_of_with_bagua(algorithm: str) -> None:
    expected = simulate(2, lambda r: trained(r, algorithm, False))
    for ours, theirs in zip(
        simulate(2, lambda r: trained(r, algorithm, True)), expected, strict=True
    ):
        assert torch.equal(ours, theirs)


@on_every_rank(2)
def test_training_twice_and_asynchronous_averaging_are_refused_and_an_error_leaves_cleanly(
    r: int,
) -> None:
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def fail() -> None:
        with bagua_ref.train(module, [optimizer], GradientAllReduceAlgorithm()):
            module.with_bagua([optimizer], GradientAllReduceAlgorithm())

    with pytest.raises(ValueError, match=r"by train\(\) already"):
        fail()
    assert "_bagua" not in module.__dict__
    with pytest.raises(NotImplementedError, match="AsyncModelAverageAlgorithm"):
        bagua_ref.train(module, [optimizer], Algorithm.init("async")).__enter__()
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    with pytest.raises(ValueError, match=r"by with_bagua\(\) already"):
        bagua_ref.train(module, [optimizer], GradientAllReduceAlgorithm()).__enter__()


def test_no_step_follows_a_backward_pass_that_failed() -> None:
    def refuse(gradient: torch.Tensor) -> None:
        raise KeyError

    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    bagua_ref.init_process_group()
    with bagua_ref.train(module, [optimizer], GradientAllReduceAlgorithm()):
        hidden = module.body(batch(0))
        hidden.register_hook(refuse)
        with pytest.raises(KeyError):
            module.head(hidden).sum().backward()
        with pytest.raises(RuntimeError, match="a backward pass failed"):
            optimizer.step()
    bagua_ref.destroy_process_group()


@on_every_process(2)
def test_DistributedDataParallel_over_the_same_ranks_is_refused() -> None:
    for in_context in (False, True):
        module = Net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        made = GradientAllReduceAlgorithm()
        with (
            bagua_ref.train(module, [optimizer], made)
            if in_context
            else nullcontext(module.with_bagua([optimizer], made))
        ):
            around = nn.parallel.DistributedDataParallel(module)
            with pytest.raises(
                RuntimeError, match=r"around this module.*both reduce over ranks \[0, 1\].*drop"
            ):
                around(batch(0))
    inside = nn.parallel.DistributedDataParallel(Net())
    with pytest.raises(
        RuntimeError, match=r"inside this module.*both reduce over ranks \[0, 1\].*drop"
    ):
        inside.with_bagua(
            [torch.optim.SGD(inside.parameters(), lr=0.1)], GradientAllReduceAlgorithm()
        )


def in_node_and_between() -> torch.Tensor:
    rank = dist.get_rank()
    in_node = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    between = [bagua_ref.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ddp = nn.parallel.DistributedDataParallel(module, process_group=in_node)
    with bagua_ref.train(module, [optimizer], LocalSGDAlgorithm(period=2), between):
        for step in range(4):
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            optimizer.step()
    return weights(module)


def test_DistributedDataParallel_in_nodes_and_local_sgd_between_them_work() -> None:
    first, *others = launch(in_node_and_between, 4)
    assert all(torch.equal(first, other) for other in others)

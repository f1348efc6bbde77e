"""A step on several ranks is that of one process, or the planted reason why not is named."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.simulation.same_as_one import Layout, same_as_one

WORDS = 11
BATCH = {
    "x": torch.arange(48).view(8, 6) * 7 % WORDS,
    "labels": torch.arange(48).view(8, 6) * 5 % WORDS,
}
EQUAL, ACCUMULATED = Layout(2), Layout(1, 2)
UNEQUAL, NONE = Layout(2, 2, "unequal"), Layout(2, 1, "none")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS))


def ddp() -> nn.Module:
    return DistributedDataParallel(net())


def sharded() -> nn.Module:
    model = net()
    for layer in list(model)[1:]:
        fully_shard(layer) if list(layer.parameters()) else None
    fully_shard(model)
    return model


def loss_of(model: nn.Module, part: Any, reduction: str = "mean") -> torch.Tensor:
    logits = model(part["x"]).flatten(0, 1)
    return F.cross_entropy(logits, part["labels"].flatten(), reduction=reduction)


def by_tokens(model: nn.Module, parts: list[Any], over_ranks: bool = True) -> None:
    """The right way: divide by the tokens of all microbatches of all ranks."""
    count = torch.tensor(float(sum(int((p["labels"] != -100).sum()) for p in parts)))
    if over_ranks:
        dist.all_reduce(count)
        count /= dist.get_world_size()
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        no_sync = getattr(model, "no_sync", None)
        with no_sync() if no_sync and not is_last else contextlib.nullcontext():
            (loss_of(model, part, "sum") / count).backward()


def mean_of_means(model: nn.Module, parts: list[Any]) -> None:
    for part in parts:
        (loss_of(model, part) / len(parts)).backward()


def divided_by_own_tokens(model: nn.Module, parts: list[Any]) -> None:
    for part in parts:
        counts = part["labels"] != -100
        ((model(part["x"]).logsumexp(-1) * counts).sum() / counts.sum()).backward()


def not_divided(model: nn.Module, parts: list[Any]) -> None:
    for part in parts:
        loss_of(model, part).backward()


def reduced(op: Any, skip: int = 0, divide: bool = False) -> Any:
    def step(model: nn.Module, parts: list[Any]) -> None:
        by_tokens(model, parts)
        for parameter in list(model.parameters())[skip:]:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, op=op)
            parameter.grad /= dist.get_world_size() if divide else 1

    return step


def norm_of_ranks(model: nn.Module, parts: list[Any]) -> None:
    by_tokens(model, parts)
    squares = torch.stack(
        [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    ).sum()
    dist.all_reduce(squares)  # BUG: the gradients are the same on all ranks already
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= min(1.0, float(0.01 / squares.sqrt()))
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def rate_by_ranks(model: nn.Module, parts: list[Any]) -> None:
    by_tokens(model, parts)
    torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size()).step()


def frozen_on_a_rank(model: nn.Module, parts: list[Any]) -> None:
    if dist.get_rank() == 1:
        next(model.parameters()).requires_grad_(False)
    by_tokens(model, parts)


PLANTED = {
    "per rank": (lambda m, parts: by_tokens(m, parts, over_ranks=False), ddp, UNEQUAL,
                 "rank 0's microbatch 0: 0.594 x, rank 0's microbatch 1: 0.594 x, rank 1's microbatch 0: 3.17 x"),
    "per microbatch": (mean_of_means, ddp, Layout(1, 2, "unequal"), "rank 0's microbatch 0: 0.667 x, rank 0's microbatch 1: 2 x"),
    "no tokens": (mean_of_means, ddp, NONE, "counts the one that has no tokens"),
    "NaN": (divided_by_own_tokens, ddp, NONE, "not finite"),
    "summed": (reduced(dist.ReduceOp.SUM), net, EQUAL, "2 x those of one process: summed over ranks"),
    "divided twice": (reduced(dist.ReduceOp.AVG, divide=True), net, EQUAL, "divided once too often by the number of ranks"),
    "accumulated": (not_divided, ddp, ACCUMULATED, "summed over microbatches"),
    "one tensor": (reduced(dist.ReduceOp.AVG, skip=1), net, EQUAL, "only '0.weight' differ, also between ranks"),
    "no reduction": (by_tokens, net, EQUAL, "the ranks' gradients differ from each other"),
    "norm": (norm_of_ranks, ddp, EQUAL, "agrees before clipping, and is 0.707 x after"),
    "rate": (rate_by_ranks, ddp, EQUAL, "though gradients agree"),
    "frozen": (frozen_on_a_rank, net, EQUAL, "there is no gradient of '0.weight' on rank 1"),
    "crash": (lambda m, parts: dist.barrier() if dist.get_rank() == 0 else 1 / 0, net, EQUAL, "fails: "),
}  # fmt: skip


@pytest.mark.parametrize(("step", "model", "layout", "words"), PLANTED.values(), ids=PLANTED)
def test_a_planted_error_is_named(step: Any, model: Any, layout: Layout, words: str) -> None:
    report = same_as_one(step, BATCH, [layout], model=model)
    assert words in report.differences[layout]
    assert words in str(report)


def clipped(model: nn.Module, parts: list[Any]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    by_tokens(model, parts)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def with_bagua(parts: list[Any]) -> nn.Module:
    dist.init_process_group("gloo")
    bagua_ref.init_process_group()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))  # type: ignore[operator]
    by_tokens(wrapped, parts)
    optimizer.step()
    return model


def trained_by_hand(parts: list[Any]) -> nn.Module:
    dist.init_process_group("gloo")
    model = net()
    reduced(dist.ReduceOp.AVG)(model, parts)
    torch.optim.Adam(model.parameters()).step()
    return model


def closed(model: nn.Module, parts: list[Any]) -> None:
    """All but the first microbatch are the closure's, as Lightning does it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = torch.tensor(float(sum(int((p["labels"] != -100).sum()) for p in parts)))
    dist.all_reduce(count)
    losses = [(p, count / dist.get_world_size()) for p in parts]

    def closure() -> None:
        for part, total in losses:
            (loss_of(model, part, "sum") / total).backward()

    if len(losses) > 1:
        part, total = losses.pop(0)
        with model.no_sync():  # type: ignore[operator]
            (loss_of(model, part, "sum") / total).backward()
    optimizer.step(closure)  # type: ignore[call-overload]


RIGHT = {
    "closure": (closed, ddp),
    "DDP": (clipped, ddp),
    "FSDP2": (clipped, sharded),
    "by hand": (trained_by_hand, None),
    "with_bagua": (with_bagua, None),
    "bfloat16": (by_tokens, lambda: DistributedDataParallel(net().bfloat16())),
    "dropout": (by_tokens, lambda: DistributedDataParallel(net().append(nn.Dropout(0.5)))),
}


@pytest.mark.parametrize(("step", "model"), RIGHT.values(), ids=RIGHT)
def test_a_right_step_is_that_of_one_process(step: Any, model: Any) -> None:
    report = same_as_one(step, BATCH, [Layout(4), Layout(2, 2), UNEQUAL, NONE], model=model)
    assert not report.differences, str(report)
    assert len(report.layouts) == 4


def test_what_cannot_be_compared_is_said() -> None:
    x = torch.rand(8, 3)
    normed = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    report = same_as_one(
        lambda model, parts: sum(model(p).sum() for p in parts), x, model=lambda: normed
    )
    assert not report.is_comparable
    assert "BatchNorm" in str(report)
    assert any("no integer labels" in note for note in report.notes)


@pytest.mark.parametrize(
    ("batch", "step", "error", "words"),
    [
        (
            torch.rand(6, 3),
            lambda model, parts: None,
            ValueError,
            "6 samples must be a multiple of 4",
        ),
        ("text", lambda model, parts: None, TypeError, "batch=str must be a tensor"),
        (torch.rand(4), lambda parts: 3, TypeError, "step returned int"),
    ],
)
def test_wrong_arguments_are_refused(batch: Any, step: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        same_as_one(step, batch, [Layout(4)], model=net)

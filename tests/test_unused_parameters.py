"""Tests of parameters that no rank reaches with find_unused_parameters: their gradients stay as
they were, as in DDP (S2.5).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.launch import on_every_process
from tests.trainings import batch, by_name, on_every_rank, simulate, weights, wrap
from torch import nn

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    TopKAlgorithm,
)
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.errors import CommunicationError

FLATTEN = pytest.mark.parametrize("do_flatten", [True, False])


class Partly(nn.Module):
    """Layers of which each forward pass uses those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        return sum(getattr(self, name)(x) for name in used)  # type: ignore[no-any-return]


def averaging() -> dict[str, Any]:
    """Return what makes each algorithm that averages gradients, without memory."""
    return {
        "gradient_allreduce": lambda o: GradientAllReduceAlgorithm(),
        "gradient_allreduce, hierarchical": lambda o: GradientAllReduceAlgorithm(hierarchical=True),
        "bytegrad": lambda o: ByteGradAlgorithm(hierarchical=False),
        "bytegrad, hierarchical": lambda o: ByteGradAlgorithm(),
        "bytegrad, OneBit": lambda o: ByteGradAlgorithm(compression="OneBit"),
        "topk": lambda o: TopKAlgorithm(0.2, error_feedback=False),
        "powersgd": lambda o: PowerSGDAlgorithm(
            warmup_steps=0, min_compression_rate=0.1, memory=None
        ),
        "powersgd, warm-up": lambda o: PowerSGDAlgorithm(warmup_steps=100),
        "async, warm-up": lambda o: AsyncModelAverageAlgorithm(
            sync_interval_ms=0, warmup_steps=100
        ),
        "local_sgd, warm-up": lambda o: LocalSGDAlgorithm(2, warmup_steps=100),
        "local_sgd, in nodes": lambda o: LocalSGDAlgorithm(2, hierarchical=True),
        "diloco, warm-up": lambda o: DiLoCoAlgorithm(2, warmup_steps=100),
        "qadam, warm-up": lambda o: QAdamAlgorithm(o),
    }


def adam(module: nn.Module, name: str = "") -> torch.optim.Optimizer:
    if name.startswith("qadam"):
        return QAdamOptimizer(module.parameters(), lr=0.1, warmup_steps=100, weight_decay=0.1)
    return torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)


@pytest.mark.filterwarnings("ignore:compression='OneBit'")
@pytest.mark.parametrize(
    ("name", "do_flatten"),
    [*((name, True) for name in averaging()), ("bytegrad", False), ("topk", False)],
)
def test_S2_5_what_no_rank_reaches_keeps_its_gradient_and_does_not_move(
    name: str, do_flatten: bool
) -> None:
    def rank(r: int) -> list[torch.Tensor]:
        module = Partly()
        optimizer = adam(module, name)
        flat = do_flatten or "async" in name  # which takes nothing else
        module.with_bagua(
            [optimizer], averaging()[name](optimizer), do_flatten=flat, find_unused_parameters=True
        )
        module(batch(r, 0), "abc").square().mean().backward()
        optimizer.step()  # so there is a state that could move it
        seen = []
        for step in range(1, 4):
            optimizer.zero_grad()
            still = module.c.weight.detach().clone()
            kept = module.c.bias.grad = torch.full((3,), 5.0)
            module(batch(r, step), "ab" if r == 0 else "a").square().mean().backward()
            assert module.c.weight.grad is None
            assert module.c.bias.grad is kept
            assert torch.equal(kept, torch.full((3,), 5.0))
            assert r // 2 > 0 or module.b.weight.grad.any(), "rank 0 has reached it"
            seen += [
                p.grad.clone()
                for layer in (module.a, module.b)
                for p in layer.parameters()
                if p.grad is not None
            ]
            optimizer.step()
            # what averages weights may round them
            assert torch.equal(module.c.weight, still) or "local" in name
        return seen

    seen = simulate(4, rank, nodes=(2, 2))
    assert [len(mine) for mine in seen] == (
        [12, 12, 6, 6] if name == "local_sgd, in nodes" else [12] * 4
    )
    for mine, neighbours in zip(seen[0], seen[1], strict=True):
        assert torch.equal(mine, neighbours)


WITH_MEMORY: dict[str, Any] = {
    "topk": lambda: TopKAlgorithm(0.1),
    "bytegrad": lambda: ByteGradAlgorithm(hierarchical=False, error_feedback=True),
    "bytegrad, OneBit": lambda: ByteGradAlgorithm(
        hierarchical=False, compression="OneBit", error_feedback=True
    ),
    "powersgd": lambda: PowerSGDAlgorithm(warmup_steps=0, min_compression_rate=0.1),
}


@pytest.mark.parametrize(
    ("name", "do_flatten"),
    [*((name, True) for name in WITH_MEMORY), ("bytegrad", False), ("topk", False)],
)
def test_S2_5_what_an_error_memory_delivers_is_a_gradient(name: str, do_flatten: bool) -> None:
    """What was applied, and the mean of the memories, is the sum of the mean gradients, also where
    no rank reached anything.
    """

    def rank(r: int) -> Any:
        module, given, applied = Partly(), torch.zeros(3, 6), torch.zeros(3, 6)
        module.with_bagua(
            [], WITH_MEMORY[name](), do_flatten=do_flatten, find_unused_parameters=True
        )
        late = 0
        for step in range(6):
            module.zero_grad()
            used = "ac" if step == 0 else "a"
            x = batch(r, step)
            if step == 0:
                (given,) = torch.autograd.grad(
                    module.c(x).mul(torch.arange(1.0, 4)).sum(), module.c.weight
                )
            (module(x, used) * torch.arange(1.0, 4)).sum().backward()
            assert module.b.weight.grad is None or name == "bytegrad, OneBit"
            if module.c.weight.grad is not None:
                late += step > 0
                applied += module.c.weight.grad
        algorithm = module.bagua_algorithm
        if name.startswith("bytegrad"):
            (bucket,) = algorithm.error_memories.state()
            places = [tensor.split()[0] for tensor in bucket["tensors"]]
            start = sum(
                module.get_parameter(place).numel() for place in places[: places.index("c.weight")]
            )
            server = torch.zeros(bucket["numel"])
            server.view(2, -1)[r] = bucket["server"]
            left = (bucket["worker"] / 2 + server)[start : start + 18].view(3, 6)
        else:
            left = algorithm.memories["c.weight"] / 2
        return given / 2, applied, left, late

    results = simulate(2, rank)
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][3] > 0
    want = sum(given for given, _, _, _ in results)
    torch.testing.assert_close(
        results[0][1] + sum(left for _, _, left, _ in results), want, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("hierarchical", "error_feedback", "do_flatten"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
@on_every_rank(4, nodes=(2, 2))
def test_S2_5_qadam_leaves_the_momentum_and_memory_of_what_no_rank_reaches(
    r: int, hierarchical: bool, error_feedback: bool, do_flatten: bool
) -> None:
    module = Partly()
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=2)
    algorithm = QAdamAlgorithm(optimizer, hierarchical, error_feedback=error_feedback)
    module.with_bagua([optimizer], algorithm, do_flatten=do_flatten, find_unused_parameters=True)

    def kept(layer: nn.Module) -> list[torch.Tensor]:
        found = [x for p in layer.parameters() for x in (p, optimizer.state[p]["exp_avg"])]
        for bucket in algorithm_of.error_memories.state():
            start = 0
            for name in [tensor.split()[0] for tensor in bucket["tensors"]]:
                end = start + module.get_parameter(name).numel()
                if module.get_parameter(name) in set(layer.parameters()):
                    found.append(bucket["worker"][start:end])
                    chunk = len(bucket["server"])
                    first = (r // 2 if hierarchical else r) * chunk
                    found.append(bucket["server"][max(start - first, 0) : max(end - first, 0)])
                start = end
        return [x.detach().clone() for x in found]

    algorithm_of = module.bagua_algorithm
    for step in range(8):
        optimizer.zero_grad()
        before = [kept(module.b), kept(module.c)]
        module(
            batch(r, step), ("abc" if step in (0, 1, 2, 5) else "ab" if r == 1 else "a")
        ).square().mean().backward()
        optimizer.step()
        same = [
            all(map(torch.equal, *pair))
            for pair in zip([kept(module.b), kept(module.c)], before, strict=True)
        ]
        assert same == [False, step not in (0, 1, 2, 5)]
        assert (module.c.weight.grad is None) == same[1]


@FLATTEN
@on_every_rank(2)
def test_S2_5_qadam_leaves_the_momentum_that_it_had_before_an_overflow(
    r: int, do_flatten: bool
) -> None:
    module = Partly()
    optimizer, scaler = (
        QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=2),
        bagua_ref.GradScaler("cpu"),
    )
    algorithm = QAdamAlgorithm(optimizer, False, grad_scaler=scaler)
    module.with_bagua([optimizer], algorithm, do_flatten=do_flatten, find_unused_parameters=True)
    momenta = []
    for step in range(6):
        optimizer.zero_grad()
        loss = module(batch(r, step), "a" if step == 4 else "abc").square().mean()
        scaler.scale(loss * (torch.inf if step == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        momenta.append(optimizer.state[module.c.weight]["exp_avg"].clone())
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(momenta[4], momenta[2])
    assert momenta[5].isfinite().all()
    assert not torch.equal(momenta[5], momenta[4])


@pytest.mark.filterwarnings("ignore:qadam freezes v")
@pytest.mark.parametrize(
    "name", ["gradient_allreduce", "bytegrad", "topk", "powersgd, warm-up", "qadam"]
)
@on_every_rank(3)
def test_S2_5_ranks_without_batches_take_part(r: int, name: str) -> torch.Tensor:
    module = Partly()
    # whose warm-up ends while ranks have no batches
    optimizer, algorithm = by_name("qadam", module, hierarchical=False)
    if name != "qadam":
        optimizer = adam(module)
        algorithm = averaging()[name](optimizer)
    module.with_bagua([optimizer], algorithm, find_unused_parameters=True)  # type: ignore[operator]
    still = module.c.weight.detach().clone()
    with bagua_ref.join([module], divide_by_initial_world_size=name != "qadam"):
        for step in range([2, 5, 0][r]):
            optimizer.zero_grad()
            module(batch(r, step), "ab" if step == 1 else "a").square().mean().backward()
            assert module.c.weight.grad is None
            assert (module.b.weight.grad is None) == (step != 1)
            optimizer.step()
    assert torch.equal(module.c.weight, still)
    return weights(module)


@pytest.mark.parametrize(
    "algorithm", [GradientAllReduceAlgorithm(), TopKAlgorithm(0.5)], ids=["alike", "not alike"]
)
@on_every_rank(2)
def test_ranks_that_have_lost_step_are_told_in_what(r: int, algorithm: Algorithm) -> None:
    module, optimizer = wrap(Partly(), algorithm, lr=0.1, find_unused_parameters=True)
    module(batch(r, 0), "a").sum().backward()
    if r != 1:
        optimizer.step()
    with pytest.raises(CommunicationError, match="rank 1 has taken 0 optimizer steps"):
        module(batch(r, 1), "a").sum().backward()


def missing(model: Any, rank: int) -> list[Any]:
    """Train with AdamW, sometimes with two batches for a step; return which gradients were missing,
    and the weights.
    """
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1), []
    used = ["abc", "a", "ab" if rank else "a", "a", "bc", "a"]
    for step, names in enumerate(used):
        optimizer.zero_grad()
        if step == 3:
            with model.no_sync():
                model(batch(rank, 10), "ac" if rank else "a").square().mean().backward()
        model(batch(rank, step), names).square().mean().backward()
        seen.append([p.grad is None for p in model.parameters()])
        optimizer.step()
    return [seen, weights(model)]


@pytest.mark.slow
@on_every_process(2)
def test_S2_5_the_wrapper_leaves_the_gradients_that_torchs_ddp_leaves() -> None:
    (ours, weights_of_ours), (theirs, weights_of_theirs) = (
        missing(kind(Partly(), find_unused_parameters=True), dist.get_rank())
        for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel)
    )
    assert ours == theirs
    torch.testing.assert_close(weights_of_ours, weights_of_theirs, rtol=1e-5, atol=1e-6)


@FLATTEN
@on_every_rank(3)
def test_S2_5_inside_train(r: int, do_flatten: bool) -> None:
    module = Partly()
    optimizer = torch.optim.AdamW(module.parameters())
    with bagua_ref.train(
        module, optimizer, "topk", do_flatten=do_flatten, find_unused_parameters=True
    ):
        module(batch(r, 0), "a").square().mean().backward()
        optimizer.step()
        assert [p.grad is None for p in module.parameters()] == [False] * 2 + [True] * 4


@on_every_rank(2)
def test_a_rank_whose_backward_fails_does_not_keep_the_others_waiting(r: int) -> None:
    module = Partly()
    module.with_bagua([], GradientAllReduceAlgorithm(), find_unused_parameters=True)
    if r == 1:
        module.a.weight.register_hook(lambda grad: pytest.fail("on purpose"))
        with pytest.raises(pytest.fail.Exception):
            module(batch(r, 0), "ab").sum().backward()
    with pytest.raises(CommunicationError, match="backward passes failed"):
        module(batch(r, 0), "ab").sum().backward()

"""Ranks with equal weights must take equal steps, which they compare in the next round; ranks whose
steps may differ are not accused. In the simulated world, but for ZeroRedundancyOptimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.launch import on_every_process
from tests.trainings import by_name, simulate, weights
from tests.trainings import small_batch as batch
from tests.trainings import small_network as network
from tests.trainings import small_step as step
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import bagua_ref
from bagua_ref.algorithms import GradientAllReduceAlgorithm
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.errors import CommunicationError

EQUAL: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "qadam": {"hierarchical": False},
    "topk": {},
    "powersgd": {"warmup_steps": 2},
    "local_sgd": {"period": 1, "warmup_steps": 100},
    "async": {"warmup_steps": 100, "sync_interval_ms": 0},
}
"""Algorithms whose ranks have equal weights, at least in the warm-up, and options."""
APART: dict[str, dict[str, Any]] = {
    "local_sgd": {"period": 2},
    "diloco": {"period": 2},
    "decentralized": {"hierarchical": False},
    "low_precision_decentralized": {"hierarchical": False},
}
"""Algorithms whose ranks have weights of their own, and options."""


def groups(module: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [module[0].weight]}, {"params": [*module.parameters()][1:]}]  # type: ignore[index]


def refusals(ranks: int, main: Callable[[int], Any]) -> list[str]:
    """Return the message of the CommunicationError in ``main(rank)`` on each rank."""

    def rank(r: int) -> str:
        with pytest.raises(CommunicationError, match="disagree") as refused:
            main(r)
        return str(refused.value).partition("disagree: ")[2]

    return simulate(ranks, rank)


# Different steps are refused, on all ranks, in the next round


@pytest.mark.parametrize("algorithm", EQUAL)
def test_another_learning_rate_is_named_on_every_rank(algorithm: str) -> None:
    def main(r: int) -> None:
        module = network()
        optimizer, made = by_name(algorithm, module, **EQUAL[algorithm])
        module.with_bagua([optimizer], made)  # type: ignore[operator]
        for number in range(4):
            optimizer.param_groups[0]["lr"] = 0.05 if (r, number) == (1, 2) else 0.1
            step(module, optimizer, r, number)
            assert number < 3, "the difference of the third step is seen in the fourth"

    first, *others = refusals(3, main)
    kind = "QAdamOptimizer" if algorithm == "qadam" else "SGD"
    assert f"rank 1 has lr 0.05, ranks 0, 2 have lr 0.1 in group 0 of {kind}" in first
    assert "mean of the loss" in first
    assert "bagua_resynchronize" in first
    assert [first] * 2 == others


OPTIONS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any], str]] = {
    "weight decay": (
        lambda module: torch.optim.SGD(groups(module), lr=0.1),
        lambda o: o.param_groups[1].update(weight_decay=0.01),
        "rank 1 has weight_decay 0.01, ranks 0, 2 have weight_decay 0 in group 1 of SGD",
    ),
    "momentum": (
        lambda module: torch.optim.SGD(groups(module), lr=0.1, momentum=0.9),
        lambda o: o.param_groups[0].update(momentum=0.95),
        "rank 1 has momentum 0.95, ranks 0, 2 have momentum 0.9 in group 0 of SGD",
    ),
    "betas": (
        lambda module: torch.optim.Adam(module.parameters(), lr=0.1),
        lambda o: o.param_groups[0].update(betas=(0.8, 0.999)),
        "rank 1 has betas (0.8, 0.999), ranks 0, 2 have betas (0.9, 0.999) in group 0 of Adam",
    ),
    "lr in a tensor": (
        lambda module: torch.optim.Adam(module.parameters(), lr=torch.tensor(0.5)),
        lambda o: o.param_groups[0]["lr"].fill_(0.25),
        "rank 1 has lr 0.25, ranks 0, 2 have lr 0.5 in group 0 of Adam",
    ),
    "groups": (
        lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        lambda o: o.add_param_group({"params": [torch.zeros(2)]}),
        "rank 1 has stepped SGD with 2 groups, ranks 0, 2 have stepped SGD with 1 groups",
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("passed", [True, False])
def test_other_options_are_named(option: str, passed: bool) -> None:
    make, change, message = OPTIONS[option]

    def main(r: int) -> None:
        module = network()
        optimizer = make(module)
        module.with_bagua([optimizer] if passed else [], GradientAllReduceAlgorithm())  # type: ignore[operator]
        for number in range(3):
            if (r, number) == (1, 1):
                change(optimizer)
            step(module, optimizer, r, number)

    assert all(message in text for text in refusals(3, main))


def test_a_step_before_the_last_one_counts_too() -> None:
    def main(r: int) -> None:
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
        step(module, optimizer, r)
        optimizer.param_groups[0]["lr"] = 0.1 + r
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        step(module, optimizer, r, 1)

    assert all("steps with options of checksum" in text for text in refusals(2, main))


def test_another_kind_of_optimizer_is_named() -> None:
    def main(r: int) -> None:
        module = network()
        module.with_bagua([], GradientAllReduceAlgorithm())  # type: ignore[operator]
        make: Any = torch.optim.Adam if r else torch.optim.SGD
        optimizer = make(module.parameters(), lr=0.1)
        for number in range(2):
            step(module, optimizer, r, number)

    message = "rank 0 has stepped SGD with 1 groups, rank 1 has stepped Adam with 1 groups"
    assert all(message in text for text in refusals(2, main))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_that_one_rank_skips_is_noticed_without_optimizers_too(ranks: int) -> None:
    def main(r: int) -> None:
        module = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for number in range(3):
            module(batch(r, number)).square().mean().backward()
            if (r, number) != (1, 1):
                optimizer.step()
            assert number < 2

    few = "rank 1 has taken 0 optimizer steps since the last round"
    assert all(few in text for text in refusals(ranks, main))


# What may differ


def trains(ranks: int, main: Callable[[int], nn.Module], equal: bool = True) -> None:
    first, *others = simulate(ranks, lambda r: weights(main(r)))
    if equal:
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("algorithm", APART)
def test_ranks_with_weights_of_their_own_may_step_differently(algorithm: str) -> None:
    def main(r: int) -> nn.Module:
        module = network()
        optimizer, made = by_name(algorithm, module, **APART[algorithm])
        module.with_bagua([optimizer], made)  # type: ignore[operator]
        for number in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + r)
            step(module, optimizer, r, number)
        return module

    trains(3, main, equal=False)


def test_schedulers_may_step_at_different_moments() -> None:
    def main(r: int) -> nn.Module:
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number in range(4):
            for _ in range(2):  # two backward passes a step
                module(batch(r, number)).square().mean().backward()
            if r and number:
                scheduler.step()
            optimizer.step()
            if not r:
                scheduler.step()
        return module

    trains(2, main)


def test_the_last_bits_of_a_cosine_may_differ() -> None:
    def main(r: int) -> nn.Module:
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
        for number in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + r * 2**-52)
            step(module, optimizer, r, number)
        return module

    trains(2, main, equal=False)


def test_options_of_groups_that_are_not_synchronized_and_of_the_implementation_may_differ() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, parameters: Any, rank: int) -> None:
            super().__init__(parameters, lr=0.1, foreach=bool(rank))
            self.defaults["rank"] = rank
            for group in self.param_groups:
                group["rank"] = rank

    def main(r: int) -> nn.Module:
        module = network()
        module._bagua_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
        optimizer = Own(groups(module), r)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + r)
        module.with_bagua([], GradientAllReduceAlgorithm())  # type: ignore[operator]
        for number in range(3):
            step(module, optimizer, r, number)
        return module[2]

    trains(2, main)


def test_all_ranks_skip_what_overflows() -> None:
    def main(r: int) -> nn.Module:
        module = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # type: ignore[attr-defined]
        for number in range(4):
            optimizer.zero_grad()
            inputs = batch(r, number) * (torch.inf if (r, number) == (1, 2) else 1)
            scaler.scale(module(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return module

    trains(2, main)


def test_closures_may_run_several_rounds_in_a_step() -> None:
    def main(r: int) -> nn.Module:
        module = network()
        optimizer = torch.optim.LBFGS(module.parameters(), max_iter=3)
        module.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(batch(r)).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)  # type: ignore[arg-type]
        return module

    trains(2, main)


@pytest.mark.parametrize("passed", [True, False])
def test_ranks_without_batches_take_no_steps(passed: bool) -> None:
    def main(r: int) -> nn.Module:
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.with_bagua([optimizer] if passed else [], GradientAllReduceAlgorithm())  # type: ignore[operator]
        for _ in range(2):
            with bagua_ref.join([module]):
                for number in range(3 - r):
                    step(module, optimizer, r, number)
        step(module, optimizer, r, 9)
        return module

    trains(3, main)


def test_a_rank_that_only_joins_learns_how_the_others_differ() -> None:
    def main(r: int) -> None:
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1 if r < 2 else 0.2)
        module.with_bagua([], GradientAllReduceAlgorithm())  # type: ignore[operator]
        with bagua_ref.join([module]):
            for number in range(3 if r else 0):
                step(module, optimizer, r, number)

    message = "rank 1 has lr 0.1, rank 2 has lr 0.2 in group 0 of SGD"
    assert all(message in text for text in refusals(3, main))


@pytest.mark.slow
@on_every_process(3, over_gloo=True)
def test_ZeRO_gives_each_rank_other_parameters_and_the_last_one_none() -> None:
    module = nn.Linear(4, 2)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    module.with_bagua([], GradientAllReduceAlgorithm())  # type: ignore[operator]
    for number in range(3):
        step(module, optimizer, bagua_ref.get_rank(), number)
    optimizer.param_groups[0]["lr"] = 0.1 + bagua_ref.get_rank()
    step(module, optimizer, bagua_ref.get_rank(), 3)
    with pytest.raises(CommunicationError, match=r"rank 0 has lr 0\.1, rank 1 has lr 1\.1"):
        step(module, optimizer, bagua_ref.get_rank(), 4)


def test_a_number_in_a_tensor_is_as_good_as_a_number() -> None:
    def main(r: int) -> nn.Module:
        module = network()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        module.with_bagua([], GradientAllReduceAlgorithm())  # type: ignore[operator]
        for number in range(3):
            optimizer.param_groups[0]["lr"] = torch.tensor(0.1) if r else 0.1
            step(module, optimizer, r, number)
        return module

    trains(2, main, equal=False)

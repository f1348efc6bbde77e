"""Tests of optimizer steps that communication does not know of: inside backward, or by an optimizer
made after wrapping.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.launch import on_every_process
from tests.trainings import by_name, on_every_rank, simulate, weights
from tests.trainings import small_batch as batch
from tests.trainings import small_network as network
from tests.trainings import small_step as step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import optimizer as torch_optimizer

import bagua_ref
from bagua_ref.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua_ref.contrib import fuse_optimizer
from bagua_ref.data_parallel import DistributedDataParallel

NEEDING: dict[str, dict[str, Any]] = {
    "local_sgd": {"period": 1},
    "diloco": {"period": 1},
    "low_precision_decentralized": {},
    "decentralized": {},
    "async": {"sync_interval_ms": 0},
    "qadam": {},
    "powersgd": {"warmup_steps": 10},
    "topk": {"warmup_steps": 10},
}
"""Algorithms that count steps or send weights, with options."""
OTHERS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {},
    "powersgd": {"warmup_steps": 0},
    "topk": {"warmup_steps": 0},
}


def sgd(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, **options})


def wrapped(
    algorithm: str, options: dict[str, Any], optimizers: list[torch.optim.Optimizer] | None = None
) -> nn.Module:
    module = network()
    optimizer, made_for = by_name(algorithm, module, **options)
    (optimizers if optimizers is not None else []).append(optimizer)
    return module.with_bagua([optimizer], made_for)  # type: ignore[operator, no-any-return]


def end(module: Any) -> None:
    if hasattr(module.bagua_algorithm, "abort"):
        module.bagua_algorithm.abort(module)


def refused_without_change(
    module: nn.Module, optimizer: Any, act: Callable[[], None], message: str
) -> None:
    before, state = weights(module), len(optimizer.state) if hasattr(optimizer, "state") else 0
    with pytest.raises(RuntimeError, match=message):
        act()
    assert torch.equal(weights(module), before)
    assert not hasattr(optimizer, "state") or len(optimizer.state) == state


# An optimizer made after wrapping


LATER: list[Callable[[nn.Module], Any]] = [
    lambda module: torch.optim.Adam(module.parameters(), fused=True),
    lambda module: torch.optim.Adam([{"params": [p]} for p in module.parameters()]),
    lambda module: torch.optim.SGD([module[2].bias], lr=0.1),
    lambda module: fuse_optimizer(sgd(module), do_flatten=False),
]


@pytest.mark.parametrize(
    ("algorithm", "make"),
    [*((algorithm, sgd) for algorithm in NEEDING), *zip(NEEDING, 2 * LATER, strict=True)],
)
@on_every_rank(2)
def test_an_optimizer_made_after_wrapping_is_refused_where_steps_count_or_weights_are_sent(
    r: int, algorithm: str, make: Any
) -> None:
    known: list[Any] = []
    module = wrapped(algorithm, NEEDING[algorithm], known)
    step(module, known[0], r)
    later = make(module)
    module(batch(r)).square().mean().backward()
    act = later.fuse_step if hasattr(later, "fuse_step") else later.step
    refused_without_change(
        module,
        later,
        act,
        r"not among the optimizers when it was wrapped.*Call with_bagua\(\) again",
    )
    module.bagua_resynchronize()  # type: ignore[operator]
    step(module, known[0], r)
    if algorithm in ("local_sgd", "diloco", "powersgd", "topk"):
        options = {**NEEDING[algorithm]}
        module.with_bagua([sgd(module)], Algorithm.init(algorithm, **options))  # type: ignore[operator]
        step(module, module.bagua_optimizers[0], r, 1)  # type: ignore[index]
        assert module._bagua.steps_of_optimizers == [1]  # type: ignore[union-attr]
    end(module)


@pytest.mark.parametrize("algorithm", OTHERS)
@pytest.mark.parametrize("wrapper", [False, True])
@on_every_rank(2)
def test_gradient_algorithms_take_any_optimizer(
    r: int, algorithm: str, wrapper: bool
) -> torch.Tensor:
    module = network()
    named = Algorithm.init(algorithm, **OTHERS[algorithm])
    model = (
        DistributedDataParallel(module, algorithm=named)
        if wrapper
        else module.with_bagua([sgd(module)], named)
    )
    for phase, options in enumerate(({}, {"momentum": 0.9}, {"lr": 0.01})):
        optimizer = sgd(module, **options)
        for number in range(2):
            step(model, optimizer, r, 2 * phase + number)
    return weights(module)


@on_every_rank(2)
def test_they_take_it_as_training_on_the_whole_batch(r: int) -> None:
    found = []
    for ranks in ([r], [0, 1]):
        module = network()
        optimizer = sgd(module)
        if ranks == [r]:
            module.with_bagua([optimizer], GradientAllReduceAlgorithm())
        for number in range(4):
            optimizer = sgd(module, momentum=0.9) if number == 1 else optimizer
            optimizer.zero_grad()
            module(torch.cat([batch(rank, number) for rank in ranks])).square().mean().backward()
            optimizer.step()
        found.append(weights(module))
    torch.testing.assert_close(*found)


@on_every_rank(2)
def test_powersgd_and_topk_take_any_optimizer_after_their_warm_up(r: int) -> torch.Tensor:
    results = []
    for algorithm in ("powersgd", "topk"):
        known: list[Any] = []
        module = wrapped(algorithm, {"warmup_steps": 2}, known)
        later = sgd(module)
        for number in range(2):
            step(module, known[0], r, number)
        step(module, later, r, 2)
        results.append(weights(module))
    return torch.cat(results)


@pytest.mark.parametrize("algorithm", NEEDING)
@on_every_rank(2)
def test_what_steps_no_trained_parameter_is_never_refused(r: int, algorithm: str) -> None:
    known: list[Any] = []
    module = wrapped(algorithm, NEEDING[algorithm], known)
    average = torch.optim.swa_utils.AveragedModel(module)
    scaler = bagua_ref.GradScaler("cpu", init_scale=2.0)
    other = nn.Linear(4, 1)
    for number in range(3):
        known[0].zero_grad()
        scaler.scale(
            module(batch(r, number)).square().mean() * (torch.inf if number == 1 else 1)
        ).backward()
        scaler.unscale_(known[0])
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(known[0])
        scaler.update()
        average.update_parameters(module)
    own = weights(module)
    trained = copy.deepcopy(module)
    for model in (other, trained, average.module):  # copies train alone
        step(model, sgd(model), r)
    module.load_state_dict(average.module.state_dict())
    nn.utils.vector_to_parameters(own, module.parameters())
    known[0].load_state_dict(known[0].state_dict())
    later = sgd(module, momentum=0.9)
    later.load_state_dict(later.state_dict())
    # torch.distributed.checkpoint lets an optimizer make its state by such a step
    unused = sgd(module, lr=0.0)
    unused.step()
    known[0].add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    assert torch.equal(weights(module), own)
    end(module)


@on_every_rank(1)
def test_loading_the_state_of_such_an_optimizer_is_not_refused(r: int) -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    known: list[Any] = []
    module = wrapped("local_sgd", NEEDING["local_sgd"], known)
    step(module, known[0], r)
    module.zero_grad()  # else torch makes no state
    later = torch.optim.Adam(module.parameters())
    before = weights(module)
    set_optimizer_state_dict(module, later, get_optimizer_state_dict(module, later))
    assert len(later.state) == 4
    assert torch.equal(weights(module), before)


@on_every_rank(2)
def test_an_optimizer_that_consists_of_others_may_step_if_it_was_passed(r: int) -> torch.Tensor:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base = base
            super().__init__(base.param_groups, {})

        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            self.base.step()
            return loss

    module = network()
    optimizer = Lookahead(sgd(module))
    module.with_bagua([optimizer], Algorithm.init("local_sgd", period=2))
    for number in range(2):
        step(module, optimizer, r, number)
    assert module._bagua.steps_of_optimizers == [2]

    def closure() -> torch.Tensor:
        loss = module(batch(r, 2)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        optimizer.step(closure)
    with pytest.raises(RuntimeError, match="with_bagua"):
        optimizer.base.step()
    return weights(module)


@pytest.mark.parametrize("passed", [True, False])
@on_every_rank(2)
def test_LBFGS_steps_with_its_closure(r: int, passed: bool) -> torch.Tensor:
    module = network()
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
    module.with_bagua([optimizer] if passed else [], GradientAllReduceAlgorithm())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(batch(0)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return weights(module)


@on_every_rank(2)
def test_a_closure_whose_backward_passes_do_not_all_bypass_the_module_may_run_again(
    r: int,
) -> torch.Tensor:
    known: list[Any] = []
    module = wrapped("gradient_allreduce", {}, known)

    def closure() -> torch.Tensor:
        known[0].zero_grad(set_to_none=False)
        loss = module(batch(r)).square().mean()
        loss.backward()
        module.eval()
        module(batch(0)).square().mean().backward()
        module.train()
        return loss

    for _ in range(2):
        known[0].step(closure)
    return weights(module)


@on_every_rank(2)
def test_a_backward_pass_that_bypasses_the_module_stops_any_optimizer(r: int) -> None:
    module = network().with_bagua([], Algorithm.init("decentralized"))
    for optimizer in (sgd(module), torch.optim.Adam(module.parameters(), fused=True)):
        step(module, optimizer, r)
        module[2](module[0](batch(r))).square().mean().backward()
        refused_without_change(module, optimizer, optimizer.step, "gradients of this rank alone")
        optimizer.zero_grad()
        module.bagua_resynchronize()


# Steps inside backward


def step_in_backward(
    module: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> dict[Any, Any]:
    optimizers = {p: make([p]) for p in module.parameters()}

    def hook(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return optimizers


@pytest.mark.parametrize(  # qadam takes no other optimizer when wrapping
    ("algorithm", "when"),
    [
        (algorithm, when)
        for algorithm in (*NEEDING, "gradient_allreduce", "bytegrad")
        for when in ("before", "after", "passed")
        if (
            when == "after"
            if algorithm == "qadam"
            else when == "before" or algorithm in ("local_sgd", "gradient_allreduce")
        )
    ],
)
@on_every_rank(2)
def test_a_step_inside_backward_is_refused_before_weights_change(
    r: int, algorithm: str, when: str
) -> None:
    known: list[Any] = []
    if when == "after":
        module: Any = wrapped(algorithm, NEEDING.get(algorithm, {}), known)
        step_in_backward(module, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    else:
        module = network()
        optimizers = step_in_backward(
            module, lambda parameters: torch.optim.Adam(parameters, fused=True)
        )
        options = NEEDING.get(algorithm, {})
        passed = list(optimizers.values()) if when == "passed" else [sgd(module)]
        module.with_bagua(passed, Algorithm.init(algorithm, **options))
    loss = module(batch(r)).square().mean()
    refused_without_change(
        module,
        None,
        loss.backward,
        r"inside backward\(\).*Call step\(\) after backward\(\) has returned",
    )
    end(module)


@on_every_rank(2)
def test_a_step_of_another_module_inside_backward_is_not_refused(r: int) -> torch.Tensor:
    module, other = network(), nn.Linear(4, 1)
    optimizer, of_other = sgd(module), sgd(other)
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    module[0].weight.register_post_accumulate_grad_hook(lambda p: of_other.step())
    other(batch(r)).sum().backward()
    before = weights(other)
    step(module, optimizer, r)
    assert not torch.equal(weights(other), before)
    return weights(module)


# torch's hook


def test_torch_has_a_global_hook_only_while_something_is_wrapped() -> None:
    hooks = torch_optimizer._global_optimizer_pre_hooks
    gc.collect()
    before = len(hooks)

    def rank(r: int) -> None:
        modules = [wrapped("local_sgd", NEEDING["local_sgd"]) for _ in range(2)]
        assert len(hooks) == before + 1
        with bagua_ref.train(network(), [sgd(network())], GradientAllReduceAlgorithm()):
            pass
        modules.append(modules[0].with_bagua([sgd(modules[0])], GradientAllReduceAlgorithm()))  # type: ignore[operator]
        assert len(hooks) == before + 1

    simulate(2, rank)
    gc.collect()
    assert len(hooks) == before
    bagua_ref.init_process_group()
    try:
        module, trainings = network(), []
        for _ in range(2):
            with bagua_ref.train(module, [sgd(module)], GradientAllReduceAlgorithm()):
                trainings.append(module._bagua)
                assert len(hooks) == before + 1
            assert len(hooks) == before
        sgd(module).step()
    finally:
        bagua_ref.destroy_process_group()


# Other optimizers and shards


@pytest.mark.slow
@on_every_process(2, over_gloo=True)
def test_ZeroRedundancyOptimizer_is_an_optimizer_as_others() -> None:
    module = network()
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    module.with_bagua([], GradientAllReduceAlgorithm())
    for number in range(3):
        step(module, optimizer, bagua_ref.get_rank(), number)
    first = weights(module)
    bagua_ref.broadcast(first, 0)
    assert torch.equal(weights(module), first)
    other = wrapped("powersgd", {"warmup_steps": 10})
    with pytest.raises(RuntimeError, match="powersgd acts on the steps"):
        ZeroRedundancyOptimizer(other.parameters(), torch.optim.SGD, lr=0.1).step()


@pytest.mark.slow
@on_every_process(4)
def test_shards_are_trained_parameters_too() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module: Any = network()
    fully_shard(module, mesh=mesh["shard"])
    optimizer = sgd(module)
    module.with_bagua([optimizer], Algorithm.init("local_sgd", period=1), mesh["replicate"])
    step(module, optimizer, bagua_ref.get_rank())
    later = sgd(module)
    with pytest.raises(RuntimeError, match="local_sgd acts on the steps"):
        step(module, later, bagua_ref.get_rank())
    module.bagua_resynchronize()
    module.zero_grad()
    step_in_backward(module, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(RuntimeError, match="inside backward"):
        module(batch(bagua_ref.get_rank())).square().mean().backward()


@pytest.mark.proof
@on_every_process(2)
def test_a_compiled_module_knows_its_optimizers_and_compiled_steps_of_others_stay_whole() -> None:
    module = network()
    optimizer = sgd(module)
    called = torch.compile(module, backend="eager").with_bagua(
        [optimizer], Algorithm.init("local_sgd", period=1)
    )
    step(called, optimizer, bagua_ref.get_rank())
    with pytest.raises(RuntimeError, match="local_sgd acts on the steps"):
        step(called, sgd(module), bagua_ref.get_rank())
    other = nn.Linear(4, 1)
    of_other = sgd(other)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(of_other.step, backend="eager")
    other(torch.ones(1, 4)).sum().backward()
    compiled()
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) <= 1  # torch's own

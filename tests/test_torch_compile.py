"""Tests of torch.compile and torch.jit: importing changes no module, and compiled modules train
like others.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
import torch._dynamo.utils
from tests.launch import launch, on_every_process
from tests.trainings import by_name
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.distributed import BaguaModule

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {},
    "decentralized": {"peer_selection_mode": "shift_one", "hierarchical": False},
    "low_precision_decentralized": {},
    "qadam": {},
    "async": {"sync_interval_ms": 1, "warmup_steps": 3},
    "local_sgd": {"period": 2, "warmup_steps": 1},
    "diloco": {"period": 4, "fragments": 2, "delay": 1, "mix": 0.5},
    "powersgd": {"warmup_steps": 1, "min_compression_rate": 0.5},
    "topk": {"ratio": 0.2},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


class Containing(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_importing_leaves_modules_that_are_not_wrapped_alone() -> None:
    for name in BaguaModule.__annotations__:
        assert not hasattr(nn.Linear(2, 2), name)
        assert name not in dir(nn.Linear(2, 2))
    x = torch.ones(1, 2)
    module = nn.Linear(2, 2)
    for other in (
        torch.compile(module, backend="eager", fullgraph=True),
        torch.jit.script(module),
        torch.jit.trace(module, x),
        torch.export.export(module, (x,)).module(),
    ):
        assert torch.equal(other(x), module(x))
    saved = io.BytesIO()
    torch.jit.save(torch.jit.script(Net()), saved)
    assert b"bagua" not in saved.getvalue()


def test_exporting_a_wrapped_module_is_no_step() -> None:
    bagua_ref.init_process_group()
    try:
        module = Net().with_bagua([], Algorithm.init("gradient_allreduce"))
        x = torch.ones(1, 4)
        assert torch.equal(torch.export.export(module, (x,)).module()(x), module.eval()(x))
        assert module.bagua_train_step_counter == 0
    finally:
        bagua_ref.destroy_process_group()


def _after(
    wrap: Callable[[nn.Module], nn.Module], module: nn.Module, how: dict[str, Any]
) -> nn.Module:
    return torch.compile(wrap(module), **how)


def _before(
    wrap: Callable[[nn.Module], nn.Module], module: nn.Module, how: dict[str, Any]
) -> nn.Module:
    return wrap(torch.compile(module, **how))


def _method_after(
    wrap: Callable[[nn.Module], nn.Module], module: nn.Module, how: dict[str, Any]
) -> nn.Module:
    wrapped = wrap(module)
    wrapped.compile(**how)
    return wrapped


def _method_before(
    wrap: Callable[[nn.Module], nn.Module], module: nn.Module, how: dict[str, Any]
) -> nn.Module:
    module.compile(**how)
    return wrap(module)


def _method_inside(
    wrap: Callable[[nn.Module], nn.Module], module: nn.Module, how: dict[str, Any]
) -> nn.Module:
    wrapped = wrap(module)
    module.compile(**how)
    return wrapped


def _container(
    wrap: Callable[[nn.Module], nn.Module], module: nn.Module, how: dict[str, Any]
) -> nn.Module:
    return torch.compile(Containing(wrap(module)), **how)


FORMS = (_after, _before, _method_after, _method_before, _method_inside, _container)


def _train(
    algorithm: str, form: Any, fullgraph: bool, backend: Any = "eager"
) -> tuple[list[torch.Tensor], int]:
    """Return the weights after six steps, and the number of training forwards counted."""
    torch._dynamo.reset()
    module = Net()
    optimizer, made = by_name(algorithm, module, momentum=0.9, **ALGORITHMS[algorithm])
    how = {"backend": backend, "fullgraph": fullgraph}

    def wrap(given: nn.Module) -> nn.Module:
        return given.with_bagua([optimizer], made)

    called = wrap(module) if form is None else form(wrap, module, how)
    generator = torch.Generator().manual_seed(bagua_ref.get_rank())
    for _ in range(6):
        optimizer.zero_grad()
        called(torch.randn(3, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    if algorithm == "async":
        module.bagua_algorithm.abort(module if form is _container else called)
    steps = (
        called.bagua_train_step_counter
        if form is not _container
        else module.bagua_train_step_counter
    )
    return [p.detach().clone() for p in module.parameters()], steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        name if name == "gradient_allreduce" else pytest.param(name, marks=pytest.mark.proof)
        for name in ALGORITHMS
    ],
)
@on_every_process(2)
def test_compiled_modules_train_bit_for_bit_as_others(algorithm: str) -> None:
    expected, _ = _train(algorithm, None, fullgraph=False)
    for form in (
        FORMS if algorithm == "gradient_allreduce" else (_after, _before, _method_after, _container)
    ):
        for fullgraph in (True, False) if form is _after else (form is not _container,):
            weights, steps = _train(algorithm, form, fullgraph)
            assert steps == 6, (form, fullgraph, steps)
            if algorithm != "async":  # its rounds depend on timing
                for mine, theirs in zip(weights, expected, strict=True):
                    assert torch.equal(mine, theirs), (form, fullgraph)


@torch.compile(backend="eager")
def _called_by(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "before_wrapping", "algorithm"),
    [(Net, True, "gradient_allreduce"), (sequential, False, "decentralized")],
)
@pytest.mark.parametrize("form", ["function", "compile", "method", "container"])
def test_a_module_of_the_same_class_may_be_compiled_and_run_before(
    form: str, make: Callable[[], nn.Module], before_wrapping: bool, algorithm: str
) -> None:
    """The other one runs between steps, too, as a copy that is evaluated does."""
    # as it is unless another test has wrapped a module
    torch._dynamo.config.skip_nnmodule_hook_guards = True

    def called(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        if form == "function":
            return lambda x: _called_by(module, x)
        if form == "method":
            module.compile(backend="eager")
            return module
        return torch.compile(Containing(module) if form == "container" else module, backend="eager")

    bagua_ref.init_process_group()
    try:
        other, module = called(make()), make()
        x = torch.ones(3, 4)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if before_wrapping:
            other(x).sum().backward()
        module.with_bagua([optimizer], Algorithm.init(algorithm))
        other(x).sum().backward()
        run, copied = called(module), called(copy.deepcopy(module))
        for step in range(2):
            run(x).sum().backward()
            optimizer.step()
            other(x).sum().backward()
            copied(x).sum().backward()
            assert module.bagua_train_step_counter == step + 1
    finally:
        bagua_ref.destroy_process_group()


def _count_breaks(
    wrap: Callable[[nn.Module], nn.Module],
) -> dict[tuple[str, str, bool], int | None]:
    """Return the graph breaks for each way to compile; None where it cannot be compiled."""
    found: dict[tuple[str, str, bool], int | None] = {}
    for form in FORMS:
        for make in (Net, sequential):
            for fullgraph in (False, True):
                torch._dynamo.reset()
                torch._dynamo.utils.counters.clear()
                try:
                    module = form(
                        wrap,
                        make(),
                        {"backend": torch._dynamo.testing.CompileCounter(), "fullgraph": fullgraph},
                    )
                    for _ in range(2):
                        module(torch.ones(2, 4)).sum().backward()
                    breaks: int | None = sum(torch._dynamo.utils.counters["graph_break"].values())
                except Exception:
                    breaks = None
                found[form.__name__, make.__name__, fullgraph] = breaks
    return found


def _count_ours_and_torchs() -> list[dict[tuple[str, str, bool], int | None]]:
    def with_bagua(module: nn.Module) -> nn.Module:
        return module.with_bagua([], Algorithm.init("gradient_allreduce"))

    return [_count_breaks(wrap) for wrap in (TorchDDP, with_bagua, DistributedDataParallel)]


@pytest.mark.proof
def test_graphs_break_no_more_often_than_with_torchs_ddp() -> None:
    (torchs, *ours), _ = launch(_count_ours_and_torchs, 2)
    assert sum(breaks is not None for breaks in torchs.values()) > 12
    for counted in ours:
        for case, breaks in torchs.items():
            if breaks is not None:
                assert counted[case] is not None, case
                assert counted[case] <= breaks, case


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", ["gradient_allreduce", pytest.param("decentralized", marks=pytest.mark.proof)]
)
@on_every_process(2)
def test_a_training_step_can_be_compiled_as_a_whole(algorithm: str) -> None:
    """It ends with the weights of others, and dynamo traces nothing of this package."""
    os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = "100"
    torch._dynamo.config.recompile_limit = 2  # fewer variants of a function than there are hooks
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        traced.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    def train(compiled: Callable[[Callable[..., None]], Callable[..., None]]) -> torch.Tensor:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.with_bagua([optimizer], Algorithm.init(algorithm, **ALGORITHMS[algorithm]))

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()

        run = compiled(step)
        for turn in range(4):
            run(torch.full((3, 4), float(bagua_ref.get_rank() + turn)))
        return torch.cat([p.detach().reshape(-1) for p in module.parameters()])

    plain, compiled = train(lambda step: step), train(torch.compile(backend=backend))
    assert any(traced)
    assert not [trace for trace in traced if "bagua_ref/" in trace]
    assert torch.equal(plain, compiled)

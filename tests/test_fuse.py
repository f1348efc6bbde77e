"""Tests of the fused optimizer: known classes, fusion, storage and bad input (S6)."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.optimizer_pairs import assert_same, copies, give_gradients, parameters
from torch import Tensor, nn

import bagua_ref.contrib
from bagua_ref.contrib.fuse.optimizer import (
    ELEMENTWISE,
    NOT_ELEMENTWISE,
    fuse_optimizer,
    fuse_step,
    is_fused_optimizer,
)

Optimizer = torch.optim.Optimizer


def twins(
    make: Callable[[list[Any]], Optimizer], *shapes: Any, **flags: Any
) -> tuple[list[Any], Any, list[Any], Optimizer]:
    ps = parameters(*shapes)
    qs = copies(ps)
    return ps, fuse_optimizer(make(ps), **flags), qs, make(qs)


def adam(params: Any) -> Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def test_the_names_are_there() -> None:
    assert bagua_ref.contrib.fuse_optimizer is fuse_optimizer
    optimizer = adam(parameters())
    assert not is_fused_optimizer(optimizer)
    assert fuse_optimizer(optimizer) is optimizer
    assert is_fused_optimizer(optimizer)
    assert optimizer._bagua_fused_optimizer is not None
    assert optimizer._bagua_fused_count == 0
    assert "fuse_step" not in vars(torch.optim.Adam)
    give_gradients(0, optimizer.param_groups[0]["params"])
    assert fuse_step(optimizer) is None
    assert optimizer.fuse_step(closure=None) is None
    assert optimizer._bagua_fused_count == 2


def test_bad_input_is_named() -> None:
    optimizer = adam(parameters())
    with pytest.raises(ValueError, match="Adam is not fused; call fuse_optimizer"):
        fuse_step(optimizer)
    fuse_optimizer(optimizer)
    with pytest.raises(RuntimeError, match="this Adam is already fused"):
        fuse_optimizer(optimizer)
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, not list"):
        fuse_optimizer([nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match="closure=3 must be callable"):
        optimizer.fuse_step(3)


def test_a_weight_is_saved_alone_and_can_be_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [nn.Sequential(*[nn.Linear(40, 40) for _ in range(30)]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    fused, plain = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    fuse_optimizer(fused)
    for dtype in (torch.float32, torch.float64):
        for model, step in zip(models, (fused.fuse_step, plain.step), strict=True):
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                model.to(dtype)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
            model(torch.ones(2, 40, dtype=dtype)).square().mean().backward()
            for p in model.parameters():  # safetensors refuses others
                assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
            if dtype is torch.float64 and model is models[0]:
                with pytest.warns(UserWarning, match="60 of 60 parameters have left the storage"):
                    step()
            else:
                step()
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
        stream = io.BytesIO()
        torch.save(models[0][3].state_dict(), stream)
        assert len(stream.getvalue()) < 1.4 * 41 * 40 * dtype.itemsize


def test_what_lies_beside_each_other_is_fused_where_it_is() -> None:
    storage = torch.randn(100)  # the suite compares bits, places and what lies between
    ps: list[Tensor] = [nn.Parameter(storage[a:b]) for a, b in ((5, 15), (15, 40), (50, 60))]
    fused: Any = fuse_optimizer(sgd(ps), do_flatten=False)
    give_gradients(0, ps)
    fused.fuse_step()
    assert fused._bagua_fused_count == 1


def test_gradients_that_are_neighbours_by_chance_are_copied() -> None:
    ps, fused, qs, plain = twins(sgd, (4,), (4,))
    for step in range(4):
        memory = torch.zeros(8).numpy()  # the second gradient lies first, as the last weight does
        give_gradients(step, qs)
        ps[1].grad, ps[0].grad = torch.from_numpy(memory[:4]), torch.from_numpy(memory[4:])
        for p, q in zip(ps, qs, strict=True):
            p.grad.copy_(q.grad)
        fused.fuse_step()
        plain.step()
    assert_same(fused, plain)
    assert fused._bagua_fused_count == 4


def test_kept_gradients_move_together_once_and_new_ones_stay_where_they_are() -> None:
    ps, fused, _, _ = twins(sgd)
    for step in range(3):
        give_gradients(step, ps, kept=True)
        held = [p.grad for p in ps]
        fused.fuse_step()
        assert all(p.grad is grad for p, grad in zip(ps, held, strict=True))
    assert len({p.grad.untyped_storage().data_ptr() for p in ps}) == 1
    for step in range(3):
        fused.zero_grad(set_to_none=True)
        give_gradients(step, ps)
        held = [(p.grad, p.grad.data_ptr()) for p in ps]
        fused.fuse_step()
        assert [(id(p.grad), p.grad.data_ptr()) for p in ps] == [
            (id(grad), pointer) for grad, pointer in held
        ]


@pytest.mark.parametrize("replace_step", [False, True])
@pytest.mark.parametrize(
    "make",
    [sgd, adam],
)
def test_a_deep_copy_and_a_pickle_are_ordinary_and_leave_the_original_alone(
    make: Any, replace_step: bool
) -> None:
    ps, fused, qs, plain = twins(make, replace_step=replace_step)
    for step in range(3):
        give_gradients(step, ps, qs)
        fused.fuse_step()
        plain.step()
    pointers = [p.data_ptr() for p in ps]
    copied_ones = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), copy.copy(fused)]
    assert [p.data_ptr() for p in ps] == pointers
    for copied in copied_ones:
        assert type(copied) is type(plain)
        assert not is_fused_optimizer(copied)
        assert_same(copied, plain)
    copied = copied_ones[0]
    give_gradients(3, [p for group in copied.param_groups for p in group["params"]], qs)
    copied.step()
    plain.step()
    assert_same(copied, plain)
    copied.add_param_group({"params": parameters((3,))})
    plain.add_param_group({"params": parameters((3,))})
    fuse_optimizer(copied)
    for step in range(3, 6):
        give_gradients(
            step,
            *(
                [p for group in each.param_groups for p in group["params"]]
                for each in (copied, plain)
            ),
        )
        copied.fuse_step()
        plain.step()
        assert_same(copied, plain)
    assert copied._bagua_fused_count == 3
    assert fused._bagua_fused_count == 3


@pytest.mark.parametrize("do_flatten", [True, False])
def test_weights_of_a_later_group_move_when_it_is_added_and_never_in_a_step(
    do_flatten: bool,
) -> None:
    ps, late, qs = parameters(), parameters((4,), (2, 3)), parameters()
    late_twins = copy.deepcopy(late)
    fused, plain = fuse_optimizer(adam(ps), do_flatten=do_flatten), adam(qs)
    here = [p.data_ptr() for p in late]
    fused.add_param_group({"params": late, "lr": 0.5})
    plain.add_param_group({"params": late_twins, "lr": 0.5})
    assert ([p.data_ptr() for p in late] != here) == do_flatten
    appended = parameters((3,), (3,))
    fused.param_groups[0]["params"] += appended
    plain.param_groups[0]["params"] += copy.deepcopy(appended)
    aliases = [p.data for p in (*ps, *late, *appended)]
    for step in range(3):
        give_gradients(
            step,
            fused.param_groups[0]["params"] + late,
            plain.param_groups[0]["params"] + late_twins,
        )
        fused.fuse_step()
        plain.step()
        for p, alias in zip((*ps, *late, *appended), aliases, strict=True):
            assert p.data_ptr() == alias.data_ptr()
            assert torch.equal(p, alias)
    assert_same(fused, plain)
    assert fused._bagua_fused_count == (6 if do_flatten else 0)


class ByParameter(torch.optim.SGD):
    """Looks up a factor by parameter, so it is not element-wise."""

    def __init__(self, params: Any, factors: dict[Tensor, float]) -> None:
        super().__init__(params, lr=0.1)
        self.factors = factors

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-self.factors.get(p, 1.0))


class Signs(Optimizer):
    """Element-wise: a Python number and a new tensor in each step as state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["calls"] = state.get("calls", 0) + 1
            state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
            p.sub_(state["m"].sign(), alpha=0.1 / state["calls"])


class Rows(Signs):
    """Has a state that cannot be split."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] = [p.grad]


class Wrapper(Optimizer):
    """Hands steps to another optimizer, as accelerate's and ZeRO's do."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups


def test_a_class_that_is_not_known_needs_someone_to_vouch_for_it() -> None:
    ps = parameters()
    mine = type("MyAdam", (torch.optim.Adam,), {})(ps)
    for optimizer in (ByParameter(ps, {ps[1]: 5.0}), Signs(ps), mine):
        name = type(optimizer).__name__
        with pytest.raises(ValueError, match=f"optimizer={name} is not a class.*elementwise=True"):
            fuse_optimizer(optimizer)
        assert not is_fused_optimizer(optimizer)
    ps, fused, qs, plain = twins(Signs, elementwise=True)
    for step in range(5):
        give_gradients(step, ps, qs)
        fused.fuse_step() if step != 3 else fused.step()
        plain.step()
        assert_same(fused, plain)
    assert fused._bagua_fused_count == 4
    rows = fuse_optimizer(Rows(ps := parameters()), elementwise=True)
    give_gradients(0, ps)
    with pytest.raises(RuntimeError, match=r"'rows'.* is a list, which cannot be split"):
        rows.fuse_step()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name in NOT_ELEMENTWISE if hasattr(torch.optim, name)])
@pytest.mark.parametrize("elementwise", [True, False])
def test_what_is_known_to_couple_elements_is_refused(name: str, elementwise: bool) -> None:
    optimizer = getattr(torch.optim, name)(parameters((3, 2)), lr=0.1)
    with pytest.raises(ValueError, match=f"{name} cannot be fused: {NOT_ELEMENTWISE[name][:20]}"):
        fuse_optimizer(optimizer, elementwise=elementwise)


def test_every_optimizer_of_torch_is_in_a_table() -> None:
    found = [cls for cls in vars(torch.optim).values() if isinstance(cls, type)]
    names = {cls.__name__ for cls in found if issubclass(cls, Optimizer)} - {"Optimizer"}
    assert names <= {*ELEMENTWISE, *NOT_ELEMENTWISE}


@pytest.mark.parametrize("elementwise", [True, False])
def test_a_wrapper_is_refused_and_names_its_inner_optimizer(elementwise: bool) -> None:
    inner = sgd(parameters())
    with pytest.raises(
        ValueError, match=r"Wrapper wraps the SGD .*fuse_optimizer\(optimizer.inner, replace_step"
    ):
        fuse_optimizer(Wrapper(inner), elementwise=elementwise)
    inner.other = adam(parameters())  # type: ignore[attr-defined] # no wrapper, but SGD
    fuse_optimizer(inner)


def test_groups_of_one_tensor_are_said_to_be_nothing_to_fuse() -> None:
    ps, qs = ([{"params": [p]} for p in parameters(*[(3,)] * 465)] for _ in range(2))
    with pytest.warns(UserWarning, match="nothing to fuse: 465 groups of one tensor"):
        fused: Any = fuse_optimizer(sgd(ps))
    plain = sgd(qs)
    for groups in (ps, qs):
        give_gradients(0, [p for group in groups for p in group["params"]])
    fused.fuse_step()
    plain.step()
    assert_same(fused, plain)
    assert fused._bagua_fused_count == 0


@pytest.mark.parametrize("name", ["SGD", "Adam", "Rprop"])
def test_biases_of_three_and_one_elements_are_fused_as_in_bagua_s_own_test(name: str) -> None:
    """51 of 101 steps are fused, with weights and biases as two groups: that counts 102."""

    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid())
        groups = [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
            {"params": [model[0].bias, model[2].bias]},
        ]
        if name == "Rprop":  # has no weight decay
            del groups[0]["weight_decay"]
        return model, getattr(torch.optim, name)(groups)

    (ours, fused), (theirs, plain) = make(), make()
    fuse_optimizer(fused)
    inputs = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    for epoch in range(101):
        for model, optimizer in ((ours, fused), (theirs, plain)):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            if optimizer is fused and epoch % 2 == 0:
                optimizer.fuse_step()
            else:
                optimizer.step()
        assert_same(fused, plain)
    assert fused._bagua_fused_count == 102


def test_weights_that_are_parts_of_a_larger_storage_stay_there() -> None:
    """Its owner may read it whole, as FSDP's and ZeroRedundancyOptimizer's flat tensors."""
    owner = torch.ones(40_010)
    ps = [nn.Parameter(owner[:4]), nn.Parameter(owner[5:20_005].view(200, 100)), *parameters((4,))]
    fuse_optimizer(sgd(ps))
    assert ps[0].data_ptr() == owner.data_ptr()

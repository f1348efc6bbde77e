"""Tests of the fused optimizer: fusion, storage, memory and bad input (S6)."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bagua_ref.contrib
from bagua_ref.conformance.lab.twins import assert_twins, copies, give_gradients, no_warning
from bagua_ref.conformance.lab.twins import parameters as lab_parameters
from bagua_ref.contrib.fuse.optimizer import (
    ELEMENTWISE,
    fuse_optimizer,
    fuse_step,
    is_fused_optimizer,
)

Optimizer = torch.optim.Optimizer


def parameters(*shapes: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return parameters, which differ from each other, of usual shapes if none are given."""
    return lab_parameters(0, shapes or [(3, 5), (7,), (2, 3, 4), (64,)], dtype)


def give(step: int, *sides: list[Any], kept: bool = False) -> None:
    """Give the parameters of each side the same gradients."""
    for side in sides:
        give_gradients(step, side, side, kept)


def assert_alike(fused: Any, plain: Optimizer) -> None:
    assert_twins(fused, plain)
    assert list(fused.state_dict()["state"]) == list(plain.state_dict()["state"])


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


class Plain(torch.optim.Optimizer):
    """Plain gradient descent, the base of optimizers that do one thing more: their `update` of one
    parameter.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)
        return loss

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        p.add_(grad, alpha=-group["lr"] * getattr(p, "lr_mult", 1.0))


def test_the_names_are_there() -> None:
    assert bagua_ref.contrib.fuse_optimizer is fuse_optimizer
    optimizer = adam(parameters())
    assert not is_fused_optimizer(optimizer)
    assert fuse_optimizer(optimizer) is optimizer
    assert is_fused_optimizer(optimizer)
    assert optimizer._bagua_fused_optimizer is not None
    assert optimizer._bagua_fused_count == 0
    assert "fuse_step" not in vars(torch.optim.Adam)
    give(0, optimizer.param_groups[0]["params"])
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


OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9, "weight_decay": 0.1}, "Rprop": {}}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_small_and_large_parameters_have_the_bits_of_step(name: str) -> None:
    options = OPTIONS.get(name, {"weight_decay": 0.1})
    shapes = [(33,), (200, 90), (5,), (9, 4), (), (7, 3), (20_000,), (1,)]
    ps, qs = parameters(*shapes), parameters(*shapes)
    large = [p.data_ptr() for p in (ps[1], ps[6])]
    fused, plain = (getattr(torch.optim, name)(params, lr=0.1, **options) for params in (ps, qs))
    fuse_optimizer(fused)
    for step in range(7):
        give(step, ps, qs, kept=step < 4)
        if step in (4, 5):  # state of these appears later, or not at all
            ps[0].grad = qs[0].grad = ps[6].grad = qs[6].grad = None
        held = [ps[place].grad for place in (1, 3)]
        fused.step() if step == 3 else fused.fuse_step()
        plain.step()
        assert_alike(fused, plain)
        assert [ps[place].grad for place in (1, 3)] == held
    assert [p.data_ptr() for p in (ps[1], ps[6])] == large
    assert fused._bagua_fused_count == 6


def test_attributes_of_parameters_are_honoured() -> None:
    ps, qs = ([nn.Parameter(part) for part in torch.linspace(-1, 1, 28).split(4)] for _ in range(2))
    for side in (ps, qs):
        side[1].lr_mult = side[3].lr_mult = 0.5
        side[5].lr_mult, side[6].lr_mult = torch.tensor(3.0), torch.tensor(7.0)
    fused, plain = fuse_optimizer(Plain(ps)), Plain(qs)
    for step in range(6):
        give(step, ps, qs, kept=True)
        for side in (ps, qs):
            if step == 2:
                side[0].lr_mult = 4.0
            if step == 3:
                del side[1].lr_mult
            if step == 4:
                side[3].lr_mult = torch.tensor(0.25)
        fused.fuse_step()
        plain.step()
        assert_alike(fused, plain)
    assert fused._bagua_fused_count == 6


def test_a_class_that_needs_an_attribute_is_tried_with_it() -> None:
    class Needs(Plain):
        def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
            p.add_(p.grad, alpha=-p.factor)

    class Orthogonal(Plain):  # as Muon, which steps only matrices of hidden layers so
        def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
            p.sub_(p.grad / p.grad.norm() if getattr(p, "is_hidden", False) else p.grad)

    class Writes(Plain):
        def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
            p.count = getattr(p, "count", 0) + 1

    ps = parameters()
    with pytest.raises(
        ValueError,
        match=(
            r"Needs cannot be fused: step\(\) of a small copy of it raised AttributeError.*factor"
        ),
    ):
        fuse_optimizer(Needs(ps))
    for p in ps:
        p.factor = 0.5
    fuse_optimizer(Needs(ps))
    fuse_optimizer(Orthogonal(ps))
    ps[2].is_hidden = True
    with pytest.raises(ValueError, match=r"Orthogonal cannot be fused: .*combines elements"):
        fuse_optimizer(Orthogonal(ps))
    with pytest.raises(
        ValueError, match=r"Writes cannot be fused: .* different attributes for a parameter"
    ):
        fuse_optimizer(Writes(ps))


class Madgrad(Plain):
    """Counts steps in the state, under a string, as MADGRAD does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.k = self.state.setdefault("k", torch.zeros(1))
        super().step()
        self.state["k"] += 1
        self.state["last"] = float(self.k)

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        state.setdefault("sum", torch.zeros_like(p)).add_(p.grad * (self.k + 1).sqrt())
        p.sub_(state["sum"])


@pytest.mark.parametrize("steps_before", [0, 2])
def test_state_under_strings_is_left_where_it_is(steps_before: int) -> None:
    ps, qs = parameters(), parameters()
    fused, plain = Madgrad(ps), Madgrad(qs)
    for step in range(steps_before + 4):
        if step == steps_before:
            fuse_optimizer(fused)
        give(step, ps, qs)
        plain.step()
        fused.fuse_step() if step >= steps_before else fused.step()
        assert_alike(fused, plain)
        assert fused.state["k"] == plain.state["k"] == step + 1
    assert fused._bagua_fused_count == 4


class DiffGrad(Plain):
    """Multiplies by a sigmoid, whose last bits depend on an element's place in memory, as DiffGrad
    does.
    """

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        before = state.get("before", torch.zeros_like(p))
        p.sub_(group["lr"] * p.grad * torch.sigmoid((before - p.grad).abs()))
        state["before"] = p.grad.clone()


class DAdapt(Plain):
    """Learns its step size from sums over all parameters, as D-Adaptation does; the first steps do
    not show it.
    """

    d = 1e-6

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        state.setdefault("s", torch.zeros_like(p)).add_(p.grad, alpha=self.d)
        self.d = max(self.d, float(state["s"].abs().sum()) - 1e30)
        p.sub_(p.grad, alpha=self.d)


@pytest.mark.parametrize(
    ("cls", "why"),
    [(DiffGrad, "rounds differently"), (DAdapt, r"combines elements .* by sum\(\)")],
    ids=["DiffGrad", "DAdapt"],
)
def test_classes_whose_bits_would_change_are_refused(cls: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"optimizer={cls.__name__} cannot be fused: .*{why}"):
        fuse_optimizer(cls(parameters(), lr=1e-6))


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


def test_each_dtype_of_a_group_is_fused() -> None:
    ps = [*parameters((3,), (4,)), *parameters((3,), (4,), dtype=torch.float64)]
    fused: Any = fuse_optimizer(adam(ps))
    give(0, ps)
    fused.fuse_step()
    (stepped,) = fused._bagua_fused_optimizer._plan.stepped
    assert {(p.dtype, p.numel()) for p in stepped} == {(torch.float32, 7), (torch.float64, 7)}
    assert fused._bagua_fused_count == 1  # once a step and group (S6)


def test_check_flatten_without_do_flatten_does_nothing() -> None:
    ps = parameters()
    before = [p.data_ptr() for p in ps]
    optimizer = fuse_optimizer(adam(ps), do_flatten=False, check_flatten=True)
    assert [p.data_ptr() for p in ps] == before
    give(0, ps)
    with no_warning():
        optimizer.fuse_step()
        ps[0].data = ps[0].data.clone()
        optimizer.fuse_step()
    assert optimizer._bagua_fused_count == 0


def test_weights_move_beside_each_other_in_the_order_of_buckets() -> None:
    ps = parameters()
    fuse_optimizer(adam(ps))
    sizes = [4 * p.numel() for p in ps]
    assert [p.data_ptr() - ps[-1].data_ptr() for p in ps] == [
        sum(sizes[place + 1 :]) for place in range(4)
    ]


def test_what_lies_beside_each_other_is_fused_where_it_is() -> None:
    storage = torch.randn(100)  # the suite compares bits, places and what lies between
    ps: list[Tensor] = [nn.Parameter(storage[a:b]) for a, b in ((5, 15), (15, 40), (50, 60))]
    fused: Any = fuse_optimizer(sgd(ps), do_flatten=False)
    give(0, ps)
    fused.fuse_step()
    (stepped,) = fused._bagua_fused_optimizer._plan.stepped
    assert [p.numel() for p in stepped] == [35, 10]
    assert fused._bagua_fused_count == 1


def test_gradients_that_are_neighbours_by_chance_are_copied() -> None:
    ps, fused, qs, plain = twins(sgd, (4,), (4,))
    for step in range(4):
        memory = torch.zeros(8).numpy()  # the second gradient lies first, as the last weight does
        give(step, qs)
        ps[1].grad, ps[0].grad = torch.from_numpy(memory[:4]), torch.from_numpy(memory[4:])
        for p, q in zip(ps, qs, strict=True):
            p.grad.copy_(q.grad)
        fused.fuse_step()
        plain.step()
    assert_alike(fused, plain)
    assert fused._bagua_fused_count == 4


def test_a_parameter_of_a_class_of_its_own_is_stepped_by_itself() -> None:
    class Special(nn.Parameter):
        pass

    ps = [
        *parameters((3,), (4,)),
        Special(torch.ones(5)),
        nn.UninitializedParameter(requires_grad=False),
    ]
    pointer = ps[2].data_ptr()
    fused, plain = (
        fuse_optimizer(sgd(ps)),
        sgd(qs := [*parameters((3,), (4,)), nn.Parameter(torch.ones(5))]),
    )
    for step in range(3):
        give(step, ps[:3], qs)
        fused.fuse_step()
        plain.step()
    assert all(map(torch.equal, ps[:3], qs))
    assert ps[2].data_ptr() == pointer
    assert fused._bagua_fused_count == 3


def test_kept_gradients_move_together_once_and_new_ones_stay_where_they_are() -> None:
    ps, fused, _, _ = twins(sgd)
    for step in range(3):
        give(step, ps, kept=True)
        held = [p.grad for p in ps]
        fused.fuse_step()
        assert all(p.grad is grad for p, grad in zip(ps, held, strict=True))
    assert len({p.grad.untyped_storage().data_ptr() for p in ps}) == 1
    for step in range(3):
        fused.zero_grad(set_to_none=True)
        give(step, ps)
        held = [(p.grad, p.grad.data_ptr()) for p in ps]
        fused.fuse_step()
        assert [(id(p.grad), p.grad.data_ptr()) for p in ps] == [
            (id(grad), pointer) for grad, pointer in held
        ]


def test_a_step_without_change_plans_nothing_and_allocates_no_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = torch.zeros(110)
    ps: list[Tensor] = [nn.Parameter(part) for part in storage.split(22)]
    fused: Any = fuse_optimizer(sgd(ps))
    for step in range(3):
        give(step, ps, kept=True)
        fused.fuse_step()
    give(3, ps, kept=True)
    monkeypatch.setattr("bagua_ref.contrib.fuse.fuser.FusionPlan", None)
    with Storages(
        [*ps, *(p.grad for p in ps), *(state["momentum_buffer"] for state in fused.state.values())]
    ) as storages:
        fused.fuse_step()
    assert storages.start == 3 * 4 * 110
    assert storages.peak - storages.start <= 8  # one scalar of an operation


@pytest.mark.parametrize(
    ("flags", "allow_inexact"), [({}, False), ({"fused": True}, False), ({"fused": True}, True)]
)
def test_a_graph_may_use_a_weight_after_a_fused_step_only_if_it_had_no_gradient(
    flags: Any, allow_inexact: bool
) -> None:
    ps = parameters((3, 5), (7,), (20_000,), (1,))  # a run, a large one, and a single element
    fused: Any = fuse_optimizer(torch.optim.SGD(ps, lr=0.1, **flags), allow_inexact=allow_inexact)
    for without in (None, 3):
        losses = [(p * p).sum() for p in ps]
        give(0, ps)
        if without is not None:
            ps[without].grad = None
        fused.fuse_step()
        for place, loss in enumerate(losses):
            if place == without:
                loss.backward()
                assert torch.equal(ps[place].grad, 2 * ps[place])
            else:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()


class Storages(TorchDispatchMode):
    """Track the bytes of storage held by given tensors and by results of operations."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.see(tensors)
        self.start = self.now()

    def see(self, results: Any) -> None:
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())

    def now(self) -> int:
        return sum(size for storage, size in self.known.values() if not storage.expired())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(result)
        return result


@pytest.mark.parametrize("stepped", [False, True])
def test_flattening_holds_one_copy_at_most_and_keeps_none(stepped: bool) -> None:
    ps = parameters(*[(50,)] * 40)
    optimizer = sgd(ps)
    give(0, ps)
    if stepped:
        optimizer.step()
    kept = 3 if stepped else 2  # weights, gradients, momentum
    size = sum(4 * p.numel() for p in ps)
    tensors = [
        *ps,
        *(p.grad for p in ps),
        *(state["momentum_buffer"] for state in optimizer.state.values()),
    ]
    with Storages(tensors) as storages:
        del tensors
        fuse_optimizer(optimizer)
        assert storages.start == kept * size
        # a weight's storage is counted beside the flat one of which it is a part
        assert storages.peak <= (kept + 2) * size
        assert storages.now() <= (kept + 1) * size
        for _ in range(4):
            optimizer.fuse_step()
        gc.collect()
        assert storages.now() <= 4 * size
        assert storages.peak <= 5 * size + 50 * 4


class Whole(torch.optim.SGD):
    """An optimizer that is copied with all its attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


@pytest.mark.parametrize("replace_step", [False, True])
@pytest.mark.parametrize(
    "make",
    [sgd, adam, lambda params: Whole(params, lr=0.1, momentum=0.9)],
    ids=["SGD", "Adam", "Whole"],
)
def test_a_deep_copy_and_a_pickle_are_ordinary_and_leave_the_original_alone(
    make: Any, replace_step: bool
) -> None:
    ps, fused, qs, plain = twins(make, replace_step=replace_step)
    for step in range(3):
        give(step, ps, qs)
        fused.fuse_step()
        plain.step()
    pointers = [p.data_ptr() for p in ps]
    copied_ones = [copy.deepcopy(fused)]
    if not isinstance(fused, Whole):
        copied_ones += [pickle.loads(pickle.dumps(fused)), copy.copy(fused)]
    assert [p.data_ptr() for p in ps] == pointers
    for copied in copied_ones:
        assert type(copied) is type(plain)
        assert not is_fused_optimizer(copied)
        assert_alike(copied, plain)
    copied = copied_ones[0]
    give(3, [p for group in copied.param_groups for p in group["params"]], qs)
    copied.step()
    plain.step()
    assert_alike(copied, plain)
    copied.add_param_group({"params": parameters((3,))})
    plain.add_param_group({"params": parameters((3,))})
    fuse_optimizer(copied)
    for step in range(3, 6):
        give(
            step,
            *(
                [p for group in each.param_groups for p in group["params"]]
                for each in (copied, plain)
            ),
        )
        copied.fuse_step()
        plain.step()
        assert_alike(copied, plain)
    assert copied._bagua_fused_count == 3
    assert fused._bagua_fused_count == 3


def test_a_state_that_is_replaced_behind_its_back_counts() -> None:
    ps, fused, qs, plain = twins(adam)
    held: dict[str, Tensor] = {}
    for step in range(12):
        give(step, ps, qs)
        if step == 2:
            # a held entry can change later without another look-up in the state
            held = fused.state[ps[1]]
        if step == 6:
            held["exp_avg"] = torch.ones_like(ps[1])
            plain.state[qs[1]]["exp_avg"] = torch.ones_like(qs[1])
        if step == 8:
            held["exp_avg_sq"].data = torch.full_like(ps[1], 2.0)
            plain.state[qs[1]]["exp_avg_sq"].fill_(2)
        if step == 9:
            held["step"].fill_(3)
            plain.state[qs[1]]["step"].fill_(3)
        if step == 10:
            for optimizer, p in ((fused, ps[2]), (plain, qs[2])):
                del optimizer.state[p]
        fused.fuse_step()
        plain.step()
        assert_alike(fused, plain)


def test_state_is_shared_by_two_optimizers_as_torch_shares_it() -> None:
    (ps, fused, qs, plain), (rs, other, ss, simple) = twins(adam), twins(adam)
    give(0, ps, qs)
    fused.fuse_step()
    plain.step()
    other.load_state_dict(fused.state_dict())
    simple.load_state_dict(plain.state_dict())
    for step in range(1, 4):
        give(step, ps, qs, rs, ss)
        for optimizer in (fused, other):
            optimizer.fuse_step()
        for optimizer in (plain, simple):
            optimizer.step()
        assert_alike(fused, plain)
        assert_alike(other, simple)


@pytest.mark.parametrize(
    "option",
    [
        {"lr": torch.tensor(0.01, dtype=torch.float64)},
        {"lr": torch.tensor(0.01)},
        {"weight_decay": torch.tensor(0.1, dtype=torch.float64)},
        {"betas": tuple(torch.tensor([0.9, 0.99], dtype=torch.float64)), "lr": 0.01},
    ],
    ids=str,
)
def test_a_parameter_of_shape_nothing_has_the_bits_of_step_also_if_options_are_tensors(
    option: dict[str, Any],
) -> None:
    """Torch combines two scalars in the wider of their dtypes, and a vector with a scalar in the
    vector's dtype.
    """
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        ps = [
            torch.nn.Parameter(torch.randn(shape, generator=generator))
            for shape in ((), (3,), (2, 2), ())
        ]
        qs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
        fused = fuse_optimizer(torch.optim.AdamW(ps, lr=0.01, foreach=False))
        plain = torch.optim.AdamW(qs, lr=0.01, foreach=False)
        for step in range(4):
            for p, q in zip(ps, qs, strict=True):
                p.grad = torch.randn(p.shape, generator=generator)
                q.grad = p.grad.clone()
            if step == 1:  # after the plan was made
                for optimizer in (fused, plain):
                    optimizer.param_groups[0].update(option)
            fused.fuse_step()
            plain.step()
            assert all(map(torch.equal, ps, qs))
        assert fused._bagua_fused_count == 4


def test_named_parameters_keep_their_names() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = fuse_optimizer(torch.optim.Adam(model.named_parameters()))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.fuse_step()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == [
        name for name, _ in model.named_parameters()
    ]
    assert optimizer._bagua_fused_count == 1


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
        give(
            step,
            fused.param_groups[0]["params"] + late,
            plain.param_groups[0]["params"] + late_twins,
        )
        fused.fuse_step()
        plain.step()
        for p, alias in zip((*ps, *late, *appended), aliases, strict=True):
            assert p.data_ptr() == alias.data_ptr()
            assert torch.equal(p, alias)
    assert_alike(fused, plain)
    assert fused._bagua_fused_count == (6 if do_flatten else 0)


def test_weights_that_are_read_as_another_dtype_where_they_are_leave_their_run() -> None:
    ps: list[Tensor] = [nn.Parameter(torch.full((4,), 2.0, dtype=torch.float16)) for _ in range(3)]
    fused = fuse_optimizer(torch.optim.SGD(ps, lr=0.5), allow_inexact=True)
    give(0, ps)
    fused.fuse_step()
    ps[1].data = ps[1].data.view(torch.bfloat16)
    for p in ps:
        p.grad = torch.ones_like(p)
    before = ps[1].detach().clone()
    fused.fuse_step()
    assert torch.equal(ps[1], before - 0.5)


def test_a_weight_that_is_tied_to_another_one_later_is_updated_in_turn() -> None:
    ps = [nn.Parameter(torch.ones(4, dtype=torch.float32)), *parameters((4,), (4,))]
    qs = copy.deepcopy(ps)
    fused, plain = (
        torch.optim.SGD([{"params": each}], lr=0.1, weight_decay=0.5, foreach=False)
        for each in (ps, qs)
    )
    for each in (ps, qs):
        each[0].data = torch.ones(8)[::2]  # not contiguous, so not part of any run
    fused = fuse_optimizer(fused)
    for step in range(4):
        if step == 2:
            for each in (ps, qs):
                each[0].data = each[2].data
        give(step, ps, qs)
        fused.fuse_step()
        plain.step()
        assert_alike(fused, plain)

"""Properties of fuse_step against step: after the same steps, fused and plain optimizers are equal to the bit (S6)."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.lab.twins import takes_later_parameters
from bagua_ref.contrib.fuse.optimizer import fuse_optimizer
from bagua_ref.contrib.fuse.verify import ELEMENTWISE

OPTIONS: dict[str, dict[str, list[Any]]] = {
    "ASGD": {"lambd": [1e-4, 0.1], "t0": [1, 1e6], "alpha": [0.75]},
    "Adadelta": {"rho": [0.9, 0.5]},
    "Adagrad": {"lr_decay": [0, 0.1], "initial_accumulator_value": [0, 0.5]},
    "Adam": {"betas": [(0.9, 0.999), (0.0, 0.9), (0.5, 0.0)], "amsgrad": [False, True], "decoupled_weight_decay": [False, True]},
    "AdamW": {"betas": [(0.9, 0.999), (0.0, 0.9)], "amsgrad": [False, True]},
    "Adamax": {"betas": [(0.9, 0.999), (0.0, 0.9)]},
    "NAdam": {"betas": [(0.9, 0.999), (0.0, 0.9)], "momentum_decay": [4e-3], "decoupled_weight_decay": [False, True]},
    "RAdam": {"betas": [(0.9, 0.999), (0.0, 0.9)], "decoupled_weight_decay": [False, True]},
    "RMSprop": {"alpha": [0.99, 0.0], "momentum": [0, 0.9], "centered": [False, True]},
    "Rprop": {"etas": [(0.5, 1.2)]},
    "SGD": {"momentum": [0, 0.9], "dampening": [0, 0.5], "nesterov": [False, True]},
}
COMMON: dict[str, list[Any]] = {
    "lr": [1e-2, 0.3],
    "weight_decay": [0, 0.1],
    "maximize": [False, True],
    "foreach": [None, False, True],
    "differentiable": [False, False, True],
}
SHAPES = [(), (1,), (0,), (3,), (2, 3), (0, 4), (17,), (5, 1), (9, 4), (33,)]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]

every_optimizer = pytest.mark.parametrize("name", ELEMENTWISE)


@st.composite
def options(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Return options of a class that the installed torch supports."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    chosen = {key: draw(st.sampled_from(values)) for key, values in {**COMMON, **OPTIONS[name]}.items() if key in known}
    if chosen.get("differentiable"):
        chosen["foreach"] = False
    if chosen.get("nesterov"):
        chosen["momentum"], chosen["dampening"] = 0.9, 0
    return chosen


@st.composite
def parameter(draw: st.DrawFn) -> torch.nn.Parameter:
    """A parameter of any shape, alone or inside a larger storage, possibly frozen or not row-major."""
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    size = torch.Size(shape).numel()
    offset = draw(st.sampled_from([None, None, 0, 1, 5]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randn(size + 2 * (offset or 0), generator=generator).to(dtype)
    values = values if offset is None else values[offset : offset + size]
    values = values.view(shape)
    if len(shape) == 2 and draw(st.integers(0, 9)) == 0:
        values = values.t()
    return torch.nn.Parameter(values, requires_grad=draw(st.integers(0, 7)) > 0)


def groups(name: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    group = st.builds(
        lambda params, chosen: {"params": params, **chosen}, st.lists(parameter(), min_size=1, max_size=7), options(name)
    )
    return st.lists(group, min_size=1, max_size=3)


class Twins:
    """An optimizer and its fused twin."""

    def __init__(self, name: str, groups: list[dict[str, Any]], **flags: Any) -> None:
        self.cls = getattr(torch.optim, name)
        self.plain = self.cls(copy.deepcopy(groups))
        self.fused = fuse_optimizer(self.cls(groups), **flags)
        self.generator = torch.Generator().manual_seed(7)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (p, q)
            for ours, theirs in zip(self.fused.param_groups, self.plain.param_groups, strict=True)
            for p, q in zip(ours["params"], theirs["params"], strict=True)
        ]

    def give_gradients(self, kept: bool, without: list[int]) -> None:
        """Give all parameters except some the same gradients, in existing tensors or new ones."""
        for place, (p, q) in enumerate(self.pairs()):
            if not p.requires_grad:
                continue
            grad = torch.randn(p.shape, generator=self.generator).to(p.dtype)
            grad = torch.where(grad.abs() < 0.3, torch.zeros_like(grad).copysign(grad), grad)  # zeros of both signs
            for twin in (p, q):
                if place in without:
                    twin.grad = None
                elif kept and twin.grad is not None:
                    twin.grad.copy_(grad)
                else:
                    twin.grad = grad.clone()

    def step(self, how: str) -> None:
        if how == "fuse_step":
            assert self.fused.fuse_step() is None
        elif how == "step":
            self.fused.step()
        else:
            calls = []
            loss = self.fused.fuse_step(lambda: calls.append(torch.is_grad_enabled()) or 5.0)
            assert (loss, calls) == (5.0, [True])
        self.plain.step()

    def round_trip(self, into_new: bool) -> None:
        """Load each twin's own state, or replace the fused one by an ordinary copy that is fused again."""
        self.plain.load_state_dict(copy.deepcopy(self.plain.state_dict()))
        state = copy.deepcopy(self.fused.state_dict())
        if into_new:
            fresh = self.cls([{**group} for group in self.fused.param_groups])
            fresh.load_state_dict(state)
            self.fused = fuse_optimizer(fresh)
        else:
            self.fused.load_state_dict(state)

    def check(self) -> None:
        for p, q in self.pairs():
            same(p, q, "weights")
            same(p.grad, q.grad, "gradient")
            ours, theirs = self.fused.state.get(p, {}), self.plain.state.get(q, {})
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                same(ours[key], value, key)
        ours, theirs = self.fused.state_dict(), self.plain.state_dict()
        assert ours["state"].keys() == theirs["state"].keys()
        assert str(ours["param_groups"]) == str(theirs["param_groups"])


def same(ours: Any, theirs: Any, what: str) -> None:
    """Assert that both twins are equal in every bit and type."""
    assert type(ours) is type(theirs), what
    if not isinstance(theirs, Tensor):
        assert ours == theirs, what
        return
    assert (ours.shape, ours.dtype, ours.requires_grad) == (theirs.shape, theirs.dtype, theirs.requires_grad), what
    a, b = ours.detach(), theirs.detach()
    assert bool(((a == b) | (a.isnan() & b.isnan())).all()), what
    assert torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan()), what


days = st.lists(
    st.tuples(
        st.sampled_from(["fuse_step", "fuse_step", "closure", "step"]),
        st.booleans(),
        st.lists(st.integers(0, 20), max_size=4),
        st.sampled_from(["", "", "", "zero", "none", "lr", "load", "again", "group", "append", "look", "freeze"]),
    ),
    min_size=1,
    max_size=8,
)


def live(twins: Twins, days: list[tuple[str, bool, list[int], str]], extra: list[dict[str, Any]]) -> None:
    """Take the steps, each after an event, and compare after each."""
    for how, kept, without, event in days:
        everyone = [(p, q) for p, q in twins.pairs()]
        if event in ("zero", "none"):
            twins.fused.zero_grad(set_to_none=event == "none")
            twins.plain.zero_grad(set_to_none=event == "none")
        elif event == "lr":
            for optimizer in (twins.fused, twins.plain):
                optimizer.param_groups[0]["lr"] *= 0.5
        elif event in ("load", "again"):
            twins.round_trip(into_new=event == "again")
        elif event in ("group", "append") and extra and not takes_later_parameters(twins.cls):
            return
        elif event == "group" and extra:
            group = extra.pop()
            twins.plain.add_param_group(copy.deepcopy(group))
            twins.fused.add_param_group(group)
        elif event == "append" and extra:
            group = extra.pop()
            twins.plain.param_groups[0]["params"] += copy.deepcopy(group["params"])
            twins.fused.param_groups[0]["params"] += group["params"]
        elif event == "look":
            for p, q in everyone:
                for key, value in twins.plain.state.get(q, {}).items():
                    if isinstance(value, Tensor) and value.numel() and value.shape == q.shape and key != "step":
                        value.mul_(0.5)
                        twins.fused.state[p][key].mul_(0.5)
                        break
        elif event == "freeze":
            for twin in everyone[len(without) % len(everyone)]:
                twin.requires_grad_(not twin.requires_grad)
        twins.give_gradients(kept, without)
        twins.step(how)
        twins.check()


@every_optimizer
@given(data=st.data())
def test_S6_fuse_step_is_step_bit_for_bit(name: str, data: st.DataObject) -> None:
    twins = Twins(name, data.draw(groups(name)), do_flatten=data.draw(st.integers(0, 4)) > 0)
    live(twins, data.draw(days), data.draw(groups(name)))


def put(stray: str, x: Tensor) -> Tensor:
    """Return another view of the memory of ``x``, or its values in other memory."""
    if stray == "transposed":
        return x.transpose(0, -1) if x.ndim else x
    if stray == "row repeated":
        return x[:1].expand(x.shape) if x.ndim else x
    if stray == "element repeated":
        return x.as_strided(x.shape, [0] * x.ndim)
    if stray == "shorter":
        return x[:1] if x.ndim else x
    if stray == "every second":
        return x[::2] if x.ndim else x
    if stray == "flat":
        return x.view(-1) if x.is_contiguous() else x
    if stray == "channels_last":
        return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
    return x.clone()


STRAYS = [
    "transposed",
    "transposed",
    "row repeated",
    "element repeated",
    "shorter",
    "every second",
    "flat",
    "channels_last",
    "moved",
]
turns = st.lists(
    st.tuples(st.sampled_from(["weight", "gradient", "state"]), st.integers(0, 9), st.sampled_from(STRAYS), st.booleans()),
    max_size=3,
)


@pytest.mark.filterwarnings("ignore:.*have left the storage")
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@given(
    shapes=st.lists(
        st.sampled_from([(3, 3), (3, 3), (2, 3), (4,), (4,), (1, 3), (2, 2, 2, 2), (2, 3, 2, 2)]), min_size=2, max_size=5
    ),
    kept=st.booleans(),
    momentum=st.sampled_from([0, 0.9]),
    days=st.lists(turns, min_size=1, max_size=5),
)
def test_S6_tensors_that_are_turned_or_cut_in_their_memory_are_stepped_as_by_step(
    name: str, shapes: list[tuple[int, ...]], kept: bool, momentum: float, days: list[list[tuple[str, int, str, bool]]]
) -> None:
    options = {"momentum": momentum} if name == "SGD" else {}
    twins = Twins(name, [{"params": [torch.nn.Parameter(torch.randn(shape)) for shape in shapes], "lr": 0.1, **options}])
    for day in [[], [], *days]:  # the plan has been made and used before the first tensor changes
        stale = kept
        for what, place, stray, as_data in day:
            pair = twins.pairs()[place % len(shapes)]
            for twin, optimizer in zip(pair, (twins.fused, twins.plain), strict=True):
                if what == "weight":
                    twin.data = put(stray, twin.data)
                    stale = stale and twin.grad.shape == twin.shape
                elif what == "gradient" and put(stray, twin.grad).shape == twin.shape:
                    twin.grad = put(stray, twin.grad)
                elif what == "state":
                    for key, value in optimizer.state[twin].items():
                        if key != "step" and as_data:
                            value.data = put(stray, value.data)
                        elif key != "step":
                            optimizer.state[twin][key] = put(stray, value)
        if not any(what == "gradient" for what, *_ in day):
            repeated = any(p.grad is not None and 0 in p.grad.stride() for p, _ in twins.pairs())
            twins.give_gradients(kept=stale and not repeated, without=[])
        try:
            twins.plain.step()
        except RuntimeError:  # shapes no longer match, or the memory is too small
            return
        twins.fused.fuse_step()
        for p, q in twins.pairs():
            same(p, q, "weights")
            same(p.grad, q.grad, "gradient")
            for key, value in twins.plain.state[q].items():
                same(twins.fused.state[p][key], value, key)

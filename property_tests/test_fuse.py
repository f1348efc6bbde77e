"""Properties of fuse_step: any program of steps and of what happens between them leaves the bits
that step() of the same optimizer leaves (S6).
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.optimizer_pairs import assert_same, copies, give_gradients, parameters

from bagua_ref.contrib.fuse.optimizer import ELEMENTWISE, fuse_optimizer

OPTIONS = {
    "momentum": [0.9, 0.5],
    "dampening": [0.5],
    "nesterov": [True],
    "betas": [(0.5, 0.9), (0.0, 0.9)],
    "amsgrad": [True],
    "decoupled_weight_decay": [True],
    "lr_decay": [0.1],
    "initial_accumulator_value": [0.5],
    "alpha": [0.5, 0.0],
    "centered": [True],
    "rho": [0.5],
    "etas": [(0.5, 1.5)],
    "lambd": [0.1],
    "t0": [1],
    "weight_decay": [0.1],
    "maximize": [True],
    "foreach": [True, False],
    "fused": [True],
}
SHAPES = [(), (1,), (1,), (0,), (3,), (2, 3), (17,), (5, 1), (3, 3), (2, 3, 2, 2)]
DTYPES = [torch.float32] * 3 + [torch.float64, torch.bfloat16, torch.float16]
VIEWS = {
    "transposed": lambda x: x.transpose(0, -1) if x.ndim else x,
    "shorter": lambda x: x[:1] if x.ndim else x,
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "flat": lambda x: x.reshape(-1),
    "moved": torch.clone,
}
"""Other views of a tensor's memory, or its values in other memory."""
EVENTS = ["", "", "zero", "none", "lr", "load", "again", "group", "append", "freeze", "state"]
EVENTS += ["weight", "view of state", "layout", "expanded"]
STEPS = ["fuse_step", "fuse_step", "step", "closure", "autocast", "raises"]


@st.composite
def options_of(draw, name):
    """A learning rate and a few options that the installed torch has for a class."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    keys = [key for key in OPTIONS if key in known]
    keys = draw(st.lists(st.sampled_from(keys), max_size=3, unique=True))
    chosen = {key: draw(st.sampled_from(OPTIONS[key])) for key in keys}
    if chosen.get("nesterov"):
        chosen |= {"momentum": 0.9, "dampening": 0}
    if chosen.get("fused"):
        chosen |= {"foreach": False}
    return {"lr": draw(st.sampled_from([0.1, 0.01])), **chosen}


def stop(*_):
    raise KeyboardInterrupt


class Pair:
    """An optimizer that is fused, and one that is not, with equal parameters."""

    def __init__(self, cls, ps, options, **flags):
        self.cls, self.options, self.flags = cls, options, flags
        self.fused, self.plain = (
            fuse_optimizer(cls(ps, **options), **flags),
            cls(copies(ps), **options),
        )

    def parameters(self):
        return [
            [p for group in optimizer.param_groups for p in group["params"]]
            for optimizer in (self.fused, self.plain)
        ]

    def happen(self, event, number, view):
        """Let ``event`` happen to both."""
        for name, ps in zip(("fused", "plain"), self.parameters(), strict=True):
            optimizer, p = getattr(self, name), ps[number % len(ps)]
            own = {
                key: value
                for key, value in optimizer.state.get(p, {}).items()
                if isinstance(value, torch.Tensor) and value.shape == p.shape and key != "step"
            }
            if event in ("zero", "none"):
                optimizer.zero_grad(set_to_none=event == "none")
            elif event == "lr":
                optimizer.param_groups[0]["lr"] *= 0.5
            elif event == "group":
                later = parameters((3,), (1,), (2, 3), seed=number)
                optimizer.add_param_group({"params": later})
            elif event == "append" and self.cls is not torch.optim.Adagrad:  # it makes state first
                optimizer.param_groups[0]["params"] += parameters((3,), (2, 3), seed=number)
            elif event == "freeze":
                p.requires_grad_(not p.requires_grad)
            elif event == "state":
                for value in own.values():
                    value.mul_(0.5)
            elif event == "weight":
                p.data, p.grad = VIEWS[view](p.data), None
            elif event == "view of state":
                optimizer.state.get(p, {}).update({k: VIEWS[view](v) for k, v in own.items()})
            elif event in ("load", "again"):
                state = copy.deepcopy(optimizer.state_dict())
                if event == "again" and name == "fused":  # as after a restart
                    groups = [{**group} for group in optimizer.param_groups]
                    optimizer = fuse_optimizer(self.cls(groups, **self.options), **self.flags)
                    self.fused = optimizer
                optimizer.load_state_dict(state)

    def step(self, how):
        """Step both, unless the plain one cannot; return whether they did."""
        if how == "raises":
            hook = self.fused.register_step_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                self.fused.fuse_step(lambda: None)
            hook.remove()
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                self.plain.step()
        except (
            RuntimeError,
            IndexError,
            TypeError,
        ):  # shapes no longer match, or the memory is too small
            return False
        if how == "closure":
            calls = []
            assert self.fused.fuse_step(lambda: calls.append(torch.is_grad_enabled()) or 5.0) == 5.0
            assert calls == [True]
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                self.fused.step() if how == "step" else self.fused.fuse_step()
        return True


@pytest.mark.filterwarnings("ignore:.*have left the storage", "ignore:nothing to fuse")
@pytest.mark.parametrize("name", ELEMENTWISE)
@given(
    data=st.data(),
    sizes=st.lists(
        st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=7
    ),
    program=st.lists(
        st.tuples(
            st.sampled_from(STEPS),
            st.sampled_from(EVENTS),
            st.sampled_from(list(VIEWS)),
            st.booleans(),
            st.sets(st.integers(0, 9), max_size=4),
        ),
        min_size=1,
        max_size=8,
    ),
    do_flatten=st.booleans(),
)
def test_S6_any_program_of_fused_steps_has_the_bits_of_plain_ones(
    name, data, sizes, program, do_flatten
):
    ps = [
        p
        for index, (shape, dtype) in enumerate(sizes)
        for p in parameters(shape, seed=index, dtype=dtype)
    ]
    options = data.draw(options_of(name))
    pair = Pair(getattr(torch.optim, name), ps, options, do_flatten=do_flatten)
    for number, (how, event, view, kept, without) in enumerate(program):
        pair.happen(event, number, view)
        sides = pair.parameters()
        give_gradients(number, *sides, kept=kept, without=without)
        for p in (p for side in sides for p in side[number::2] if p.grad is not None and p.numel()):
            if event == "layout" and VIEWS[view](p.grad).shape == p.shape:
                p.grad = VIEWS[view](p.grad)
            elif event == "expanded" and not options.get("nesterov"):  # torch refuses some
                p.grad = p.grad.reshape(-1)[:1].view([1] * p.ndim).expand(p.shape)
        if not pair.step(how):
            break
        assert_same(pair.fused, pair.plain)

"""Properties of fuse_step beyond the suite: any program of steps and of what happens between them,
for every optimizer (S6).
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_ref.conformance.lab.twins import (
    assert_same_state_dict,
    assert_twins,
    copies,
    give_gradients,
    parameters,
    takes_later_parameters,
)
from bagua_ref.conformance.suites.fused_optimizer import OPTIONS, options_of
from bagua_ref.contrib.fuse.optimizer import fuse_optimizer

shapes = st.sampled_from(
    [(), (1,), (0,), (3,), (2, 3), (17,), (5, 1), (3, 3), (3, 3), (2, 3, 2, 2)]
)
dtypes = st.sampled_from(
    [torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
STRAYS = {
    "transposed": lambda x: x.transpose(0, -1) if x.ndim else x,
    "repeated": lambda x: x.as_strided(x.shape, [0] * x.ndim) if x.numel() > 1 else x,
    "shorter": lambda x: x[:1] if x.ndim else x,
    "every second": lambda x: x[::2] if x.ndim else x,
    "flat": lambda x: x.reshape(-1),
    "moved": torch.clone,
}
"""Other views of a tensor's memory, or its values in other memory."""
EVENTS = [
    "nothing",
    "nothing",
    "zero",
    "none",
    "lr",
    "load",
    "again",
    "group",
    "append",
    "freeze",
    "touch",
    "view",
]
programs = st.lists(
    st.tuples(
        st.sampled_from(["fuse_step", "fuse_step", "closure", "autocast", "step"]),
        st.sampled_from(EVENTS),
        st.booleans(),
        st.sets(st.integers(0, 9), max_size=4),
    ),
    min_size=1,
    max_size=8,
)


class Twins:
    """An optimizer, its fused twin, and their parameters, side by side."""

    def __init__(self, cls, ours, options, **flags):
        self.cls, self.ours, self.theirs, self.options = cls, ours, copies(ours), options
        self.fused, self.plain = (
            fuse_optimizer(cls(ours, **options), **flags),
            cls(self.theirs, **options),
        )

    def happen(self, event, number, stray, what):
        """Let ``event`` happen to both."""
        for side, optimizer in ((self.ours, self.fused), (self.theirs, self.plain)):
            p = side[number % len(side)]
            if event in ("zero", "none"):
                optimizer.zero_grad(set_to_none=event == "none")
            elif event == "lr":
                optimizer.param_groups[0]["lr"] *= 0.5
            elif event in ("group", "append") and takes_later_parameters(self.cls):
                later = parameters(number, [(3,), (2, 3)])
                side += later
                if event == "group":
                    optimizer.add_param_group({"params": later})
                else:
                    optimizer.param_groups[0]["params"] += later
            elif event == "freeze":
                p.requires_grad_(not p.requires_grad)
            elif event == "touch":
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, torch.Tensor) and value.shape == p.shape and key != "step":
                        value.mul_(0.5)
            elif event == "view" and what == "weight":
                p.data = STRAYS[stray](p.data)
                p.grad = None
            elif event == "view":
                state = optimizer.state.get(p, {})
                for key in [
                    key
                    for key, value in state.items()
                    if isinstance(value, torch.Tensor) and key != "step"
                ]:
                    state[key] = STRAYS[stray](state[key])
            elif event in ("load", "again"):
                state = copy.deepcopy(optimizer.state_dict())
                if event == "again" and optimizer is self.fused:
                    optimizer = self.cls(
                        [{**group} for group in optimizer.param_groups], **self.options
                    )
                    self.fused = fuse_optimizer(optimizer)
                optimizer.load_state_dict(state)

    def step(self, how):
        """Step both, unless the plain one cannot; return whether they did."""
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                self.plain.step()
        except (RuntimeError, IndexError):  # shapes no longer match, or the memory is too small
            return False
        if how == "closure":
            calls = []
            assert self.fused.fuse_step(lambda: calls.append(torch.is_grad_enabled()) or 5.0) == 5.0
            assert calls == [True]
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                getattr(self.fused, how.replace("autocast", "fuse_step"))()
        return True


@pytest.mark.filterwarnings("ignore:.*have left the storage")
@pytest.mark.parametrize("name", OPTIONS)
@given(
    data=st.data(),
    sizes=st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=7),
    program=programs,
    flat=st.booleans(),
)
def test_S6_any_program_of_fused_steps_has_the_bits_of_plain_ones(name, data, sizes, program, flat):
    ours = [
        p for place, (shape, dtype) in enumerate(sizes) for p in parameters(place, [shape], dtype)
    ]
    twins = Twins(getattr(torch.optim, name), ours, data.draw(options_of(name)), do_flatten=flat)
    for number, (how, event, kept, without) in enumerate(program):
        twins.happen(
            event,
            number,
            data.draw(st.sampled_from(list(STRAYS))),
            data.draw(st.sampled_from(["weight", "state"])),
        )
        give_gradients(number, twins.ours, twins.theirs, kept=kept, without=without)
        if not twins.step(how):
            break
        assert_twins(twins.fused, twins.plain)
        assert_same_state_dict(twins.fused, twins.plain)

"""Scripts about a fused optimizer and its unfused twin (S6)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from hypothesis import strategies as st

from bagua_ref.conformance.inputs.strategies import Draw
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.play import Play

__all__ = ["FLAGS", "MOMENTA", "OPTIONS", "TwinPlay", "any_twins", "groups_of", "long_twins", "options_of", "seeds"]

OPTIONS: dict[str, dict[str, list[Any]]] = {
    "SGD": {"momentum": [0.9, 0.5], "dampening": [0.5], "nesterov": [True]},
    "Adam": {"betas": [(0.5, 0.9), (0.0, 0.9)], "amsgrad": [True], "decoupled_weight_decay": [True]},
    "AdamW": {"betas": [(0.5, 0.9), (0.0, 0.9)], "amsgrad": [True]},
    "Adagrad": {"lr_decay": [0.1], "initial_accumulator_value": [0.5]},
    "RMSprop": {"alpha": [0.5], "momentum": [0.9], "centered": [True]},
    "Adadelta": {"rho": [0.5]},
    "Adamax": {"betas": [(0.5, 0.9)]},
    "NAdam": {"betas": [(0.5, 0.9)], "decoupled_weight_decay": [True]},
    "RAdam": {"betas": [(0.5, 0.9)], "decoupled_weight_decay": [True]},
    "Rprop": {"etas": [(0.5, 1.5)]},
    "ASGD": {"lambd": [0.1], "t0": [1]},
}
"""Torch's element-wise optimizers, best known first, with values to try for their options."""

_COMMON: dict[str, list[Any]] = {"weight_decay": [0.1], "maximize": [True], "foreach": [True, False]}
_WITH_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
MOMENTA = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
"""Optimizers for which S6 requires that equal parameters are fused."""

FLAGS = st.sampled_from(["", ", do_flatten=False"])
"""Options of ``fuse_optimizer``, as source."""

_shapes = st.sampled_from([(3,), (2, 3), (17,), (9, 4), (5, 1), (33,), (1,), (), (0,)])
seeds = st.integers(0, 2**16)


@st.composite
def options_of(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """A learning rate and a few options that the installed torch has for a class."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    all_of_them = {key: values for key, values in {**OPTIONS[name], **_COMMON}.items() if key in known}
    keys = draw(st.lists(st.sampled_from(list(all_of_them)), max_size=3, unique=True))
    chosen = {"lr": draw(st.sampled_from([0.1, 0.01])), **{key: draw(st.sampled_from(all_of_them[key])) for key in keys}}
    if chosen.get("nesterov"):
        chosen |= {"momentum": 0.9, "dampening": 0}
    return chosen


class TwinPlay(Play):
    """A script about the optimizer ``fused`` with parameters ``ps`` and its unfused twin ``plain`` with parameters ``qs``."""

    def __init__(self, lab: Lab, draw: Draw) -> None:
        super().__init__(lab, "fuse_optimizer", "from bagua_ref.conformance.lab.twins import *")
        self.draw, self.steps = draw, 0

    def make_parameters(self, sizes: list[int], dtype: str = "float32") -> None:
        """Make parameters for groups of these sizes."""
        self.make([self.draw(_shapes) for _ in range(sum(sizes))], dtype)

    def make(self, shapes: list[tuple[int, ...]], dtype: str = "float32") -> None:
        """Make parameters of these shapes."""
        self.lab.dtypes((dtype,))
        self.do(f"ps = parameters({self.draw(seeds)}, {shapes}, torch.{dtype})\nqs = copies(ps)")

    def fuse(self, name: str, sizes: list[int], options: list[dict[str, Any]], flags: str = "") -> None:
        """Make both optimizers, with groups of these sizes."""
        cls = f"torch.optim.{name}" if hasattr(torch.optim, name) else name
        self.do(f"plain = {cls}({groups_of('qs', sizes, options)})")
        self.do(f"fused = fuse_optimizer({cls}({groups_of('ps', sizes, options)}){flags})")

    def gradients(self, kept: bool = False, without: list[int] | None = None, order: list[int] | None = None) -> None:
        """Give the next gradients."""
        more = (", kept=True" if kept else "") + (f", without={without}" if without else "") + (f", order={order}" if order else "")
        self.do(f"give_gradients({self.steps}, ps, qs{more})")
        self.steps += 1

    def step(self, how: str = "fused.fuse_step()") -> None:
        """Step both, and compare."""
        self.do(how)
        self.do("plain.step()")
        self.do("assert_twins(fused, plain)")

    def take_steps(self, least: int = 2, most: int = 3) -> None:
        """Take some steps, with gradients that are new tensors or not."""
        for kept in self.draw(st.lists(st.booleans(), min_size=least, max_size=most)):
            self.gradients(kept)
            self.step()


def groups_of(name: str, sizes: list[int], options: list[dict[str, Any]]) -> str:
    """Return the source of groups of these sizes, of the parameters in the list ``name``."""
    groups, start = [], 0
    for size, chosen in zip(sizes, options, strict=True):
        more = "".join(f', "{key}": {value!r}' for key, value in chosen.items())
        groups.append(f'{{"params": {name}[{start}:{start + size}]{more}}}')
        start += size
    return f"[{', '.join(groups)}]"


def any_twins(lab: Lab, draw: Draw, dtype: str = "float32", flags: str = "") -> TwinPlay:
    """Fuse any element-wise optimizer with one to three groups of one to five parameters."""
    twins, name = TwinPlay(lab, draw), draw(st.sampled_from(list(OPTIONS)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    twins.make_parameters(sizes, dtype)
    twins.fuse(name, sizes, [draw(options_of(name)) for _ in sizes], flags)
    return twins


def long_twins(lab: Lab, draw: Draw, dtype: str, flags: str = "") -> TwinPlay:
    """Fuse parameters whose sizes are not multiples of a vector's, with torch's fused steps unless the dtype has 16 bits."""
    twins, name = TwinPlay(lab, draw), draw(st.sampled_from(_WITH_FUSED if dtype == "float32" else MOMENTA))
    sizes = draw(st.lists(st.sampled_from([1, 5, 13, 17, 33, 67]), min_size=3, max_size=6))
    chosen = {key: value for key, value in draw(options_of(name)).items() if key != "foreach"}
    known = "fused" in inspect.signature(getattr(torch.optim, name)).parameters
    more = {"fused": True} if dtype == "float32" and known else {}
    twins.make([(size,) for size in sizes], dtype)
    twins.fuse(name, [len(sizes)], [{**chosen, **more}], flags)
    return twins

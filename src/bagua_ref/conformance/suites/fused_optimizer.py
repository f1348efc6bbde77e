"""Fused optimizers compared with unfused twins (S6): a target's ``fuse_optimizer`` takes the
parameters of ours.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from hypothesis import strategies as st

from bagua_ref.conformance.inputs.strategies import Draw
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.play import Play
from bagua_ref.conformance.lab.twins import takes_later_parameters
from bagua_ref.conformance.suites.checks import check

__all__ = ["FLAGS", "MOMENTA", "OPTIONS", "TwinPlay", "any_twins", "options_of", "seeds"]

OPTIONS: dict[str, dict[str, list[Any]]] = {
    "SGD": {"momentum": [0.9, 0.5], "dampening": [0.5], "nesterov": [True]},
    "Adam": {
        "betas": [(0.5, 0.9), (0.0, 0.9)],
        "amsgrad": [True],
        "decoupled_weight_decay": [True],
    },
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

_COMMON: dict[str, list[Any]] = {
    "weight_decay": [0.1],
    "maximize": [True],
    "foreach": [True, False],
}
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
    all_of_them = {
        key: values for key, values in {**OPTIONS[name], **_COMMON}.items() if key in known
    }
    keys = draw(st.lists(st.sampled_from(list(all_of_them)), max_size=3, unique=True))
    chosen = {
        "lr": draw(st.sampled_from([0.1, 0.01])),
        **{key: draw(st.sampled_from(all_of_them[key])) for key in keys},
    }
    if chosen.get("nesterov"):
        chosen |= {"momentum": 0.9, "dampening": 0}
    return chosen


class TwinPlay(Play):
    """A script about the optimizer ``fused`` with parameters ``ps`` and its unfused twin ``plain``
    with parameters ``qs``.
    """

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

    def fuse(
        self, name: str, sizes: list[int], options: list[dict[str, Any]], flags: str = ""
    ) -> None:
        """Make both optimizers, with groups of these sizes."""
        cls = f"torch.optim.{name}" if hasattr(torch.optim, name) else name
        self.do(f"plain = {cls}({groups_of('qs', sizes, options)})")
        self.do(f"fused = fuse_optimizer({cls}({groups_of('ps', sizes, options)}){flags})")

    def gradients(
        self, kept: bool = False, without: list[int] | None = None, order: list[int] | None = None
    ) -> None:
        """Give the next gradients."""
        more = (
            (", kept=True" if kept else "")
            + (f", without={without}" if without else "")
            + (f", order={order}" if order else "")
        )
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
    """Fuse parameters whose sizes are not multiples of a vector's, with torch's fused steps unless
    the dtype has 16 bits.
    """
    twins, name = (
        TwinPlay(lab, draw),
        draw(st.sampled_from(_WITH_FUSED if dtype == "float32" else MOMENTA)),
    )
    sizes = draw(st.lists(st.sampled_from([1, 5, 13, 17, 33, 67]), min_size=3, max_size=6))
    chosen = {key: value for key, value in draw(options_of(name)).items() if key != "foreach"}
    known = "fused" in inspect.signature(getattr(torch.optim, name)).parameters
    more = {"fused": True} if dtype == "float32" and known else {}
    twins.make([(size,) for size in sizes], dtype)
    twins.fuse(name, [len(sizes)], [{**chosen, **more}], flags)
    return twins


_without: st.SearchStrategy[list[int]] = st.one_of(
    st.just([]), st.just([]), st.just([]), st.lists(st.integers(0, 5), max_size=3, unique=True)
)


def prepare() -> None:
    """Take a step, as the first one imports torch's compiler."""
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()


@check("fused_optimizer", "S6", "bits", dtypes=("float32", "float64"), effort=1.2)
def bits(lab: Lab, draw: Draw) -> None:
    """Weights and state after fused steps equal those after step(), bit for bit."""
    any_twins(lab, draw, lab.dtype_name).take_steps(most=4)


@check("fused_optimizer", "S6", "mixed", effort=1.5)
def mixed(lab: Lab, draw: Draw) -> None:
    """`step()` may be called between fused steps, and parameters without gradients are skipped as
    step() skips them.
    """
    twins = any_twins(
        lab, draw, flags=draw(st.sampled_from(["", ", do_flatten=False", ", check_flatten=False"]))
    )
    for how in draw(
        st.lists(
            st.sampled_from(["fused.fuse_step()", "fused.fuse_step()", "fused.step()"]),
            min_size=4,
            max_size=6,
        )
    ):
        twins.gradients(draw(st.booleans()), draw(_without))
        twins.step(how)


@check("fused_optimizer", "S6", "zero_grad", effort=0.7)
def zero_grad(lab: Lab, draw: Draw) -> None:
    """Gradients that zero_grad has replaced are used again, without a warning."""
    twins = any_twins(lab, draw)
    for to_none in draw(st.lists(st.booleans(), min_size=2, max_size=4)):
        twins.do(f"fused.zero_grad(set_to_none={to_none})\nplain.zero_grad(set_to_none={to_none})")
        twins.gradients(kept=True)
        twins.step("with no_warning():\n    fused.fuse_step()")


@check("fused_optimizer", "S6", "identity", effort=0.5)
def identity(lab: Lab, draw: Draw) -> None:
    """Fusing returns the optimizer itself, and parameters keep their identity, values, shapes and
    strides.
    """
    twins, name = TwinPlay(lab, draw), draw(st.sampled_from(MOMENTA))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    twins.make_parameters(sizes)
    twins.do(
        "optimizer ="
        f" torch.optim.{name}({groups_of('ps', sizes, [draw(options_of(name)) for _ in sizes])})"
    )
    twins.do("before = [(id(p), p.shape, p.stride(), p.requires_grad, p.is_leaf) for p in ps]")
    twins.do(
        "fused = fuse_optimizer(optimizer)\nassert fused is optimizer, 'fuse_optimizer must return"
        " the optimizer itself'"
    )
    for _ in range(2):
        twins.do(
            "found = [p for group in fused.param_groups for p in group['params']]\n"
            "after = [(id(p), p.shape, p.stride(), p.requires_grad, p.is_leaf) for p in found]\n"
            "assert after == before, f'parameters were {before} and are {after}'"
        )
        twins.do("for p, q in zip(ps, qs):\n    assert torch.equal(p, q), 'values changed'")
        twins.do(
            "give_gradients(0, ps, qs, without=range(100))\nfused.fuse_step()  # without gradients"
            " nothing is done"
        )


@check("fused_optimizer", "S6", "groups", effort=1.2)
def groups(lab: Lab, draw: Draw) -> None:
    """Groups with options, several dtypes, frozen or transposed parameters, and groups added later
    behave as in step().
    """
    twins, name = TwinPlay(lab, draw), draw(st.sampled_from(MOMENTA))
    sizes = draw(st.lists(st.integers(2, 4), min_size=2, max_size=3))
    twins.make_parameters(sizes)
    for place in draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=2, unique=True)):
        wide = f"each[{place}] = torch.nn.Parameter(each[{place}].detach().double())"
        turned = f"each[{place}] = torch.nn.Parameter(each[{place}].detach().t())"
        changes = [
            turned,
            f"each[{place}].requires_grad_(False)",
            *[wide] * ("float64" in lab.dtypes(("float32", "float64"))),
        ]
        twins.do(f"for each in (ps, qs):\n    {draw(st.sampled_from(changes))}")
    options = [draw(options_of(name)) for _ in sizes]
    late = draw(st.booleans()) and takes_later_parameters(getattr(torch.optim, name))
    known = slice(0, -1 if late else None)
    twins.fuse(name, sizes[known], options[known], draw(FLAGS))
    for turn in range(3):
        if late and turn == 1:
            start = sum(sizes[:-1])
            for optimizer, each in (("fused", "ps"), ("plain", "qs")):
                group = f"dict({groups_of(f'{each}[{start}:]', sizes[-1:], options[-1:])[1:-1]})"
                twins.do(f"{optimizer}.add_param_group({group})")
        if draw(st.integers(0, 2)) == 0:
            number, key = (
                draw(st.integers(0, len(sizes) - 2)),
                draw(st.sampled_from(["lr", "weight_decay"])),
            )
            twins.do(
                f"for each in (fused, plain):\n    each.param_groups[{number}]['{key}'] ="
                f" {draw(st.sampled_from([0, 0.2]))}"
            )
        twins.gradients(draw(st.booleans()))
        twins.step()


@check("fused_optimizer", "S6", "state_dict", effort=0.8)
def state_dict(lab: Lab, draw: Draw) -> None:
    """`state_dict()` has the keys and values of the unfused optimizer, and each can load the
    other's.
    """
    twins = any_twins(lab, draw)
    twins.do("import copy")
    for _ in range(draw(st.integers(1, 2))):
        twins.gradients(draw(st.booleans()), draw(_without))
        twins.step()
    twins.do("assert_same_state_dict(fused, plain)")
    other = draw(st.sampled_from(["fused.state_dict()", "plain.state_dict()", "earlier"]))
    if other == "earlier":
        twins.do("earlier = copy.deepcopy(plain.state_dict())")
        twins.gradients()
        twins.step()
    twins.do(
        "saved ="
        f" {other}\nfused.load_state_dict(copy.deepcopy(saved))\nplain.load_state_dict(copy.deepcopy(saved))"
    )
    twins.do("assert_twins(fused, plain)")
    twins.take_steps(2, 2)
    twins.do("assert_same_state_dict(fused, plain)")


@check("fused_optimizer", "S6", "closure", effort=0.5)
def closure(lab: Lab, draw: Draw) -> None:
    """The closure runs once, with gradients enabled and before parameters are grouped, and its
    result is returned.
    """
    twins = any_twins(lab, draw)
    twins.do(
        "def compute(ps):\n"
        "    ran.append(torch.is_grad_enabled())\n"
        "    for p in ps:\n"
        "        p.grad = None\n"
        "    loss = sum((p * p * 0.5).sum() for p in ps)\n"
        "    loss.backward()\n"
        "    return loss\n"
    )
    for _ in range(draw(st.integers(1, 3))):
        twins.do(
            "ran = []\nloss = fused.fuse_step(lambda: compute(ps))\nwanted = plain.step(lambda:"
            " compute(qs))"
        )
        twins.do(
            "assert ran == [True, True], f'both closures must run once, with gradients enabled:"
            " {ran}'"
        )
        twins.do(
            "assert torch.equal(loss, wanted), f'fuse_step returned {loss} instead of {wanted}'"
        )
        twins.do("assert_twins(fused, plain)")


@check("fused_optimizer", "S6", "hooks", effort=0.5)
def hooks(lab: Lab, draw: Draw) -> None:
    """Step hooks and learning rate schedulers see fuse_step as one step on the usual parameters."""
    twins = any_twins(lab, draw)
    twins.do("hooks = StepHooks(fused)")
    scheduled = draw(st.booleans())
    if scheduled:
        twins.do(
            "schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (fused, plain)]"
        )
    for _ in range(2):
        twins.gradients()
        twins.step()
        twins.do("hooks.assert_one_step()")
        if scheduled:
            twins.do("with no_warning():\n    for schedule in schedules:\n        schedule.step()")


@check("fused_optimizer", "S6", "count", effort=0.7)
def count(lab: Lab, draw: Draw) -> None:
    """_bagua_fused_count increases by one for each step and group in which parameters were
    fused.
    """
    twins, name = TwinPlay(lab, draw), draw(st.sampled_from(MOMENTA))
    # a group of 6 has two runs then: one fused
    mixed = draw(st.booleans()) and "float64" in lab.dtypes(("float32", "float64"))
    sizes = draw(
        st.lists(st.sampled_from([2, 6, 6] if mixed else [1, 2, 3, 6]), min_size=1, max_size=3)
    )
    shapes = [draw(st.sampled_from([(3,), (2, 3), (17,), (33,)])) for _ in range(sum(sizes))]
    twins.make(shapes)
    if mixed:
        twins.do(
            "for each in (ps, qs):\n    each[::2] = [torch.nn.Parameter(p.detach().double()) for p"
            " in each[::2]]"
        )
    twins.fuse(name, sizes, [{"lr": 0.1} for _ in sizes])
    twins.do("assert fused._bagua_fused_count == 0")
    fused, idle = 0, draw(st.integers(-1, len(sizes) - 1))
    left_out = list(range(sum(sizes[:idle]), sum(sizes[: idle + 1]))) if idle >= 0 else []
    for _ in range(draw(st.integers(1, 3))):
        twins.gradients(draw(st.booleans()), left_out)
        twins.step(
            draw(
                st.sampled_from(
                    ["fused.fuse_step()", "fused.fuse_step()", "fused.fuse_step(closure=None)"]
                )
            )
        )
        fused += sum(size > 1 + mixed for place, size in enumerate(sizes) if place != idle)
        twins.do(
            f"assert fused._bagua_fused_count == {fused}, f'_bagua_fused_count is"
            f" {{fused._bagua_fused_count}}, not {fused}'"
        )
    twins.do("fused.step()")
    twins.do(f"assert fused._bagua_fused_count == {fused}, 'step() is no fused step'")


@check("fused_optimizer", "S6", "old_graphs", effort=0.4)
def old_graphs(lab: Lab, draw: Draw) -> None:
    """A backward through weights that a fused step has changed since raises an error if it does so
    after step().
    """
    twins = any_twins(lab, draw, draw(st.sampled_from(["float32", "float64"])))
    twins.do(
        "def raises(loss):\n    try:\n        loss.backward()\n    except RuntimeError:\n       "
        " return True\n    return False\n"
    )
    for _ in range(2):
        twins.gradients(draw(st.booleans()), draw(_without))
        twins.do("losses = [[(p * p).sum() for p in each] for each in (ps, qs)]")
        twins.step()
        twins.do("found, wanted = ([raises(loss) for loss in each] for each in losses)")
        twins.do(
            "assert found == wanted, f'errors of backward are {found} instead of {wanted}: its"
            " gradients would be wrong'"
        )


@check("fused_optimizer", "S6", "sixteen_bits", dtypes=("float16", "bfloat16"), effort=0.6)
def sixteen_bits(lab: Lab, draw: Draw) -> None:
    """16-bit parameters on a CPU equal those after step(), bit for bit."""
    long_twins(lab, draw, lab.dtype_name).take_steps()


@check("fused_optimizer", "S6", "fused_true", effort=0.8)
def fused_true(lab: Lab, draw: Draw) -> None:
    """Groups with fused=True equal those after torch's own fused step, bit for bit."""
    long_twins(lab, draw, "float32").take_steps()


@check("fused_optimizer", "S6", "inexact", dtypes=("bfloat16", "float32"), effort=0.4)
def inexact(lab: Lab, draw: Draw) -> None:
    """With allow_inexact=True, results for 16-bit parameters and fused=True differ in the last bits
    at most.
    """
    twins = long_twins(lab, draw, lab.dtype_name, ", allow_inexact=True")
    for kept in draw(st.lists(st.booleans(), min_size=1, max_size=2)):
        twins.gradients(kept)
        twins.do("fused.fuse_step()\nplain.step()\nassert_twins(fused, plain, SUM(8))")


@check("fused_optimizer", "S6", "other_classes", effort=0.1)
def other_classes(lab: Lab, draw: Draw) -> None:
    """An element-wise optimizer from outside torch gives the results of step(), bit for bit."""
    twins, sizes = TwinPlay(lab, draw), draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    twins.make_parameters(sizes)
    twins.fuse(
        "Lion",
        sizes,
        [{"lr": 0.1, "weight_decay": draw(st.sampled_from([0.0, 0.1]))} for _ in sizes],
    )
    twins.take_steps()


@check("fused_optimizer", "S6", "refuses", effort=0.5)
def refuses(lab: Lab, draw: Draw) -> None:
    """Optimizers that are not element-wise raise an error that names them, and fusing twice raises
    a RuntimeError.
    """
    names = ["LBFGS", "Adafactor", "Muon", "SparseAdam", "LAMB", "twice"]
    name = draw(
        st.sampled_from(
            [name for name in names if hasattr(torch.optim, name) or name in ("LAMB", "twice")]
        )
    )
    twins = TwinPlay(lab, draw)
    twins.make([(3, 5), (2, 4), (7, 3)])
    twins.gradients()
    if name == "twice":
        twins.do(f"fused = fuse_optimizer(torch.optim.{draw(st.sampled_from(MOMENTA))}(ps))")
        twins.refuses(
            "fuse_optimizer(fused)", "RuntimeError", "'fusing twice must raise a RuntimeError'"
        )
    else:
        twins.do(
            f"assert_refused(fuse_optimizer, {'' if name == 'LAMB' else 'torch.optim.'}{name}(ps))"
        )

"""Fused optimizers compared with unfused twins (S6): a target's ``fuse_optimizer`` takes the parameters of ours."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from bagua_ref.conformance.lab.play import Play
from bagua_ref.conformance.lab.twins import takes_later_parameters
from bagua_ref.conformance.suites.checks import check

if TYPE_CHECKING:
    from bagua_ref.conformance.inputs.strategies import Draw
    from bagua_ref.conformance.lab.lab import Lab

_OPTIONS: dict[str, dict[str, list[Any]]] = {
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
_MOMENTA = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
"""Optimizers for which S6 requires that equal parameters are fused."""

_shapes = st.sampled_from([(3,), (2, 3), (17,), (9, 4), (5, 1), (33,), (1,), (), (0,)])
_seeds = st.integers(0, 2**16)
_without: st.SearchStrategy[list[int]] = st.one_of(
    st.just([]), st.just([]), st.just([]), st.lists(st.integers(0, 5), max_size=3, unique=True)
)


def prepare() -> None:
    """Take a step, as the first one imports torch's compiler."""
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()


@st.composite
def _options(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """A learning rate and a few options that the installed torch has for a class."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    all_of_them = {key: values for key, values in {**_OPTIONS[name], **_COMMON}.items() if key in known}
    keys = draw(st.lists(st.sampled_from(list(all_of_them)), max_size=3, unique=True))
    chosen = {"lr": draw(st.sampled_from([0.1, 0.01])), **{key: draw(st.sampled_from(all_of_them[key])) for key in keys}}
    if chosen.get("nesterov"):
        chosen |= {"momentum": 0.9, "dampening": 0}
    return chosen


class _Twins(Play):
    """A script about the optimizer ``fused`` with parameters ``ps`` and its unfused twin ``plain`` with parameters ``qs``."""

    def __init__(self, lab: Lab, draw: Draw) -> None:
        helpers = "assert_twins, copies, give_gradients, parameters"
        super().__init__(lab, "fuse_optimizer", f"from bagua_ref.conformance.lab.twins import {helpers}")
        self.draw, self.steps = draw, 0

    def use(self, names: str) -> None:
        """Import more helpers."""
        self.do(f"from bagua_ref.conformance.lab.twins import {names}")

    def make_parameters(self, sizes: list[int], dtype: str = "float32") -> None:
        """Make parameters for groups of these sizes."""
        shapes = [self.draw(_shapes) for _ in range(sum(sizes))]
        self.do(f"ps = parameters({self.draw(_seeds)}, {shapes}, torch.{dtype})\nqs = copies(ps)")

    def fuse(self, name: str, sizes: list[int], options: list[dict[str, Any]], flags: str = "") -> None:
        """Make both optimizers, with groups of these sizes."""
        cls = f"torch.optim.{name}" if hasattr(torch.optim, name) else name
        self.do(f"plain = {cls}({_groups('qs', sizes, options)})")
        self.do(f"fused = fuse_optimizer({cls}({_groups('ps', sizes, options)}){flags})")

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


def _groups(name: str, sizes: list[int], options: list[dict[str, Any]]) -> str:
    groups, start = [], 0
    for size, chosen in zip(sizes, options, strict=True):
        more = "".join(f', "{key}": {value!r}' for key, value in chosen.items())
        groups.append(f'{{"params": {name}[{start}:{start + size}]{more}}}')
        start += size
    return f"[{', '.join(groups)}]"


def _any_twins(lab: Lab, draw: Draw, dtype: str = "float32", flags: str = "") -> _Twins:
    """Fuse any element-wise optimizer with one to three groups of one to five parameters."""
    twins, name = _Twins(lab, draw), draw(st.sampled_from(list(_OPTIONS)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    twins.make_parameters(sizes, dtype)
    twins.fuse(name, sizes, [draw(_options(name)) for _ in sizes], flags)
    return twins


@check("fused_optimizer", "S6", "bits", dtypes=("float32", "float64"), effort=1.2)
def bits(lab: Lab, draw: Draw) -> None:
    """Weights and state after fused steps equal those after step(), bit for bit."""
    twins = _any_twins(lab, draw, lab.dtype_name)
    for kept in draw(st.lists(st.booleans(), min_size=2, max_size=4)):
        twins.gradients(kept)
        twins.step()


@check("fused_optimizer", "S6", "mixed", effort=1.5)
def mixed(lab: Lab, draw: Draw) -> None:
    """Step() may be called between fused steps, and parameters without gradients are skipped as step() skips them."""
    twins = _any_twins(lab, draw, flags=draw(st.sampled_from(["", ", do_flatten=False", ", check_flatten=False"])))
    for how in draw(st.lists(st.sampled_from(["fused.fuse_step()", "fused.fuse_step()", "fused.step()"]), min_size=4, max_size=6)):
        twins.gradients(draw(st.booleans()), draw(_without))
        twins.step(how)


@check("fused_optimizer", "S6", "zero_grad", effort=0.7)
def zero_grad(lab: Lab, draw: Draw) -> None:
    """Gradients that zero_grad has replaced are used again, without a warning."""
    twins = _any_twins(lab, draw)
    twins.use("no_warning")
    for to_none in draw(st.lists(st.booleans(), min_size=2, max_size=4)):
        twins.do(f"fused.zero_grad(set_to_none={to_none})\nplain.zero_grad(set_to_none={to_none})")
        twins.gradients(kept=True)
        twins.step("with no_warning():\n    fused.fuse_step()")


@check("fused_optimizer", "S6", "storages", dtypes=("float32", "float64"), effort=1.5)
def storages(lab: Lab, draw: Draw) -> None:
    """Weights and gradients may be views of larger storages: with gaps, in any order, overlapping, transposed."""
    twins, name = _Twins(lab, draw), draw(st.sampled_from(_MOMENTA))
    kind = draw(st.sampled_from(["transposed", "over", "beside", "gaps", "shuffled"]))
    sizes = draw(st.lists(st.integers(3, 12), min_size=2, max_size=4))
    step = {"gaps": draw(st.integers(1, 3)), "over": -1}.get(kind, 0)
    starts = [draw(st.sampled_from([0, 1, 7]))]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size + step)
    spans = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    if kind == "shuffled":
        spans = draw(st.permutations(spans))
    parts = [f"memory[{start}:{end}]" for start, end in spans]
    if kind == "transposed":
        spans.append((spans[-1][1], spans[-1][1] + 6))
        parts.append(f"memory[{spans[-1][0]}:{spans[-1][1]}].view(2, 3).t()")
    size = max(end for _, end in spans) + draw(st.sampled_from([0, 5]))
    twins.do(
        "from bagua_ref.conformance import EXACT, assert_equal\nfrom bagua_ref.conformance.lab.twins import assert_place, numbers"
    )
    twins.do(f"memory = numbers({draw(_seeds)}, [{size}], torch.{lab.dtype_name})\nother = memory.clone()")
    twins.do(f"def lying_in(memory):\n    return [torch.nn.Parameter(part) for part in [{', '.join(parts)}]]\n")
    twins.do("ps, qs = lying_in(memory), lying_in(other)\npointers = [p.data_ptr() for p in ps]")
    flatten = kind == "over" or draw(st.booleans())
    twins.fuse(name, [len(parts)], [draw(_options(name))], "" if flatten else ", do_flatten=False")
    for _ in range(draw(st.integers(2, 3))):
        order = draw(st.permutations(range(len(parts)))) if draw(st.booleans()) else None
        twins.gradients(draw(st.booleans()), order=order)
        twins.step()
    used = {place for start, end in spans for place in range(start, end)}
    rest = [place for place in range(size) if place not in used] if flatten else list(range(size))
    twins.do(
        f"rest = {rest}  # {'no parameter is there' if flatten else 'everything'}\nassert_equal(memory[rest], other[rest], EXACT)"
    )
    if not flatten:
        twins.do("assert_place(ps, pointers)")


@check("fused_optimizer", "S6", "identity", effort=0.5)
def identity(lab: Lab, draw: Draw) -> None:
    """Fusing returns the optimizer itself, and parameters keep their identity, values, shapes and strides."""
    twins, name = _Twins(lab, draw), draw(st.sampled_from(_MOMENTA))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    twins.make_parameters(sizes)
    twins.do(f"optimizer = torch.optim.{name}({_groups('ps', sizes, [draw(_options(name)) for _ in sizes])})")
    twins.do("before = [(id(p), p.shape, p.stride(), p.requires_grad, p.is_leaf) for p in ps]")
    twins.do("fused = fuse_optimizer(optimizer)\nassert fused is optimizer, 'fuse_optimizer must return the optimizer itself'")
    for _ in range(2):
        twins.do(
            "found = [p for group in fused.param_groups for p in group['params']]\n"
            "after = [(id(p), p.shape, p.stride(), p.requires_grad, p.is_leaf) for p in found]\n"
            "assert after == before, f'parameters were {before} and are {after}'"
        )
        twins.do("for p, q in zip(ps, qs):\n    assert torch.equal(p, q), 'values changed'")
        twins.do("give_gradients(0, ps, qs, without=range(100))\nfused.fuse_step()  # without gradients nothing is done")


@check("fused_optimizer", "S6", "groups", effort=1.2)
def groups(lab: Lab, draw: Draw) -> None:
    """Groups with options, several dtypes, frozen or transposed parameters, and groups added later behave as in step()."""
    twins, name = _Twins(lab, draw), draw(st.sampled_from(_MOMENTA))
    sizes = draw(st.lists(st.integers(2, 4), min_size=2, max_size=3))
    twins.make_parameters(sizes)
    for place in draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=2, unique=True)):
        wide = f"each[{place}] = torch.nn.Parameter(each[{place}].detach().double())"
        turned = f"each[{place}] = torch.nn.Parameter(each[{place}].detach().t())"
        changes = [turned, wide, f"each[{place}].requires_grad_(False)"]
        twins.do(f"for each in (ps, qs):\n    {draw(st.sampled_from(changes))}")
    options = [draw(_options(name)) for _ in sizes]
    late = draw(st.booleans()) and takes_later_parameters(getattr(torch.optim, name))
    known = slice(0, -1 if late else None)
    twins.fuse(name, sizes[known], options[known], draw(st.sampled_from(["", ", do_flatten=False"])))
    for turn in range(3):
        if late and turn == 1:
            start = sum(sizes[:-1])
            for optimizer, each in (("fused", "ps"), ("plain", "qs")):
                group = f"dict({_groups(f'{each}[{start}:]', sizes[-1:], options[-1:])[1:-1]})"
                twins.do(f"{optimizer}.add_param_group({group})")
        if draw(st.integers(0, 2)) == 0:
            number, key = draw(st.integers(0, len(sizes) - 2)), draw(st.sampled_from(["lr", "weight_decay"]))
            twins.do(f"for each in (fused, plain):\n    each.param_groups[{number}]['{key}'] = {draw(st.sampled_from([0, 0.2]))}")
        twins.gradients(draw(st.booleans()))
        twins.step()


@check("fused_optimizer", "S6", "state_dict", effort=0.8)
def state_dict(lab: Lab, draw: Draw) -> None:
    """State_dict has the keys and values of the unfused optimizer, and each can load the other's."""
    twins = _any_twins(lab, draw)
    twins.do("import copy\n\nfrom bagua_ref.conformance.lab.twins import assert_same_state_dict\n")
    for _ in range(draw(st.integers(1, 2))):
        twins.gradients(draw(st.booleans()), draw(_without))
        twins.step()
    twins.do("assert_same_state_dict(fused, plain)")
    other = draw(st.sampled_from(["fused.state_dict()", "plain.state_dict()", "earlier"]))
    if other == "earlier":
        twins.do("earlier = copy.deepcopy(plain.state_dict())")
        twins.gradients()
        twins.step()
    twins.do(f"saved = {other}\nfused.load_state_dict(copy.deepcopy(saved))\nplain.load_state_dict(copy.deepcopy(saved))")
    twins.do("assert_twins(fused, plain)")
    for _ in range(2):
        twins.gradients(draw(st.booleans()))
        twins.step()
    twins.do("assert_same_state_dict(fused, plain)")


@check("fused_optimizer", "S6", "closure", effort=0.5)
def closure(lab: Lab, draw: Draw) -> None:
    """The closure runs once, with gradients enabled and before parameters are grouped, and its result is returned."""
    twins = _any_twins(lab, draw)
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
        twins.do("ran = []\nloss = fused.fuse_step(lambda: compute(ps))\nwanted = plain.step(lambda: compute(qs))")
        twins.do("assert ran == [True, True], f'both closures must run once, with gradients enabled: {ran}'")
        twins.do("assert torch.equal(loss, wanted), f'fuse_step returned {loss} instead of {wanted}'")
        twins.do("assert_twins(fused, plain)")


@check("fused_optimizer", "S6", "hooks", effort=0.5)
def hooks(lab: Lab, draw: Draw) -> None:
    """Step hooks and learning rate schedulers see fuse_step as one step on the usual parameters."""
    twins = _any_twins(lab, draw)
    twins.use("StepHooks, no_warning")
    twins.do("hooks = StepHooks(fused)")
    scheduled = draw(st.booleans())
    if scheduled:
        twins.do("schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (fused, plain)]")
    for _ in range(2):
        twins.gradients()
        twins.step()
        twins.do("hooks.assert_one_step()")
        if scheduled:
            twins.do("with no_warning():\n    for schedule in schedules:\n        schedule.step()")


@check("fused_optimizer", "S6", "count", effort=0.7)
def count(lab: Lab, draw: Draw) -> None:
    """_bagua_fused_count increases by one for each step and group in which parameters were fused."""
    twins, name = _Twins(lab, draw), draw(st.sampled_from(_MOMENTA))
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 6]), min_size=1, max_size=3))
    shapes = [draw(st.sampled_from([(3,), (2, 3), (17,), (33,)])) for _ in range(sum(sizes))]
    twins.do(f"ps = parameters({draw(_seeds)}, {shapes})\nqs = copies(ps)")
    twins.fuse(name, sizes, [{"lr": 0.1} for _ in sizes])
    twins.do("assert fused._bagua_fused_count == 0")
    fused, idle = 0, draw(st.integers(-1, len(sizes) - 1))
    left_out = list(range(sum(sizes[:idle]), sum(sizes[: idle + 1]))) if idle >= 0 else []
    for _ in range(draw(st.integers(1, 3))):
        twins.gradients(draw(st.booleans()), left_out)
        twins.step(draw(st.sampled_from(["fused.fuse_step()", "fused.fuse_step()", "fused.fuse_step(closure=None)"])))
        fused += sum(size > 1 for place, size in enumerate(sizes) if place != idle)
        twins.do(f"assert fused._bagua_fused_count == {fused}, f'_bagua_fused_count is {{fused._bagua_fused_count}}, not {fused}'")
    twins.do("fused.step()")
    twins.do(f"assert fused._bagua_fused_count == {fused}, 'step() is no fused step'")


@check("fused_optimizer", "S6", "sixteen_bits", dtypes=("float16", "bfloat16"), effort=0.6)
def sixteen_bits(lab: Lab, draw: Draw) -> None:
    """16-bit parameters on a CPU equal those after step(), bit for bit."""
    twins = _long_twins(lab, draw, lab.dtype_name)
    for kept in draw(st.lists(st.booleans(), min_size=2, max_size=3)):
        twins.gradients(kept)
        twins.step()


def _long_twins(lab: Lab, draw: Draw, dtype: str, flags: str = "") -> _Twins:
    """Fuse parameters whose sizes are not multiples of a vector's, with torch's fused steps unless the dtype has 16 bits."""
    twins, name = _Twins(lab, draw), draw(st.sampled_from(_WITH_FUSED if dtype == "float32" else _MOMENTA))
    sizes = draw(st.lists(st.sampled_from([1, 5, 13, 17, 33, 67]), min_size=3, max_size=6))
    chosen = {key: value for key, value in draw(_options(name)).items() if key != "foreach"}
    known = "fused" in inspect.signature(getattr(torch.optim, name)).parameters
    more = {"fused": True} if dtype == "float32" and known else {}
    twins.do(f"ps = parameters({draw(_seeds)}, {[(size,) for size in sizes]}, torch.{dtype})\nqs = copies(ps)")
    twins.fuse(name, [len(sizes)], [{**chosen, **more}], flags)
    return twins


@check("fused_optimizer", "S6", "fused_true", effort=0.8)
def fused_true(lab: Lab, draw: Draw) -> None:
    """Groups with fused=True equal those after torch's own fused step, bit for bit."""
    twins = _long_twins(lab, draw, "float32")
    for kept in draw(st.lists(st.booleans(), min_size=2, max_size=3)):
        twins.gradients(kept)
        twins.step()


@check("fused_optimizer", "S6", "inexact", dtypes=("bfloat16", "float32"), effort=0.4)
def inexact(lab: Lab, draw: Draw) -> None:
    """With allow_inexact=True, results for 16-bit parameters and fused=True differ in the last bits at most."""
    twins = _long_twins(lab, draw, lab.dtype_name, ", allow_inexact=True")
    twins.do("from bagua_ref.conformance import SUM")
    for kept in draw(st.lists(st.booleans(), min_size=1, max_size=2)):
        twins.gradients(kept)
        twins.do("fused.fuse_step()\nplain.step()\nassert_twins(fused, plain, SUM(8))")


@check("fused_optimizer", "S6", "other_classes", effort=0.1)
def other_classes(lab: Lab, draw: Draw) -> None:
    """An element-wise optimizer from outside torch gives the results of step(), bit for bit."""
    twins, sizes = _Twins(lab, draw), draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    twins.use("Lion")
    twins.make_parameters(sizes)
    twins.fuse("Lion", sizes, [{"lr": 0.1, "weight_decay": draw(st.sampled_from([0.0, 0.1]))} for _ in sizes])
    for kept in draw(st.lists(st.booleans(), min_size=2, max_size=3)):
        twins.gradients(kept)
        twins.step()


@check("fused_optimizer", "S6", "refuses", effort=0.5)
def refuses(lab: Lab, draw: Draw) -> None:
    """Optimizers that are not element-wise raise an error that names them, and fusing twice raises a RuntimeError."""
    names = ["LBFGS", "Adafactor", "Muon", "SparseAdam", "LAMB", "twice"]
    name = draw(st.sampled_from([name for name in names if hasattr(torch.optim, name) or name in ("LAMB", "twice")]))
    twins = _Twins(lab, draw)
    twins.do(f"ps = parameters({draw(_seeds)}, [(3, 5), (2, 4), (7, 3)])\nqs = copies(ps)\ngive_gradients(0, ps, qs)")
    if name == "twice":
        twins.do(f"fused = fuse_optimizer(torch.optim.{draw(st.sampled_from(_MOMENTA))}(ps))")
        twins.do(
            "try:\n    fuse_optimizer(fused)\nexcept RuntimeError:\n    pass\n"
            "else:\n    raise AssertionError('fusing twice must raise a RuntimeError')"
        )
        return
    twins.use("LAMB, assert_refused" if name == "LAMB" else "assert_refused")
    twins.do(f"assert_refused(fuse_optimizer, {'' if name == 'LAMB' else 'torch.optim.'}{name}(ps))")


@check("fused_optimizer", "S6", "moved", effort=0.5)
def moved(lab: Lab, draw: Draw) -> None:
    """Weights that were moved to another storage cause a warning and are updated where they are."""
    twins, name = _Twins(lab, draw), draw(st.sampled_from(_MOMENTA))
    sizes = [draw(st.integers(3, 6))]
    shapes = [draw(st.sampled_from([(3,), (2, 3), (17,)])) for _ in range(sizes[0])]
    twins.use("expect_warning")
    twins.do(f"ps = parameters({draw(_seeds)}, {shapes})\nqs = copies(ps)")
    twins.fuse(name, sizes, [{"lr": 0.1}])
    for _ in range(draw(st.integers(0, 2))):
        twins.gradients()
        twins.step()
    place = draw(st.integers(0, sizes[0] - 1))
    twins.do(f"ps[{place}].data = ps[{place}].data.clone()")
    twins.gradients(draw(st.booleans()))
    twins.step("with expect_warning():\n    fused.fuse_step()")
    twins.gradients()
    twins.step()

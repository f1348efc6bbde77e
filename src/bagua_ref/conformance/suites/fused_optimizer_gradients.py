"""Fused optimizers whose gradients lie in memory in unusual ways or are sparse, and whose steps raise (S6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from bagua_ref.conformance.inputs.strategies import Draw
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.twin_play import OPTIONS, TwinPlay, any_twins, options_of, seeds
from bagua_ref.conformance.lab.twins import LAYOUTS
from bagua_ref.conformance.suites.checks import check

SHARING = LAYOUTS[-3:]
"""Layouts in which elements share memory."""

_matrices = st.sampled_from([(2, 3), (9, 4), (5, 1), (1, 4), (2, 3, 2), (3, 3)])
REFUSING = ("Adam", "AdamW", "RMSprop")
"""Optimizers that raise an error for sparse gradients before they change any weight."""


@check("fused_optimizer", "S6", "gradient_layouts", dtypes=("float32", "float64"), effort=0.8)
def gradient_layouts(lab: Lab, draw: Draw) -> None:
    """Gradients may be transposed, expanded or parts of larger tensors, and a step leaves them as they are."""
    name = draw(st.sampled_from(list(OPTIONS)))
    shapes = draw(st.lists(_matrices, min_size=2, max_size=4))
    options = draw(options_of(name))
    if options.get("nesterov"):
        options.pop("foreach", None)  # with it, torch adds to the gradients in place, which shared memory forbids
    _step_with_layouts(lab, draw, name, options, shapes, LAYOUTS)


@check("fused_optimizer", "S6", "expanded_gradients", effort=0.5)
def expanded_gradients(lab: Lab, draw: Draw) -> None:
    """Gradients that repeat numbers without a copy give step()'s bits: torch's plain SGD adds them in another way than copies."""
    shapes = draw(st.lists(st.sampled_from([(33, 5), (65, 3)]), min_size=2, max_size=4))
    _step_with_layouts(lab, draw, "SGD", {"lr": 0.1}, shapes, ("columns",))


def _step_with_layouts(
    lab: Lab, draw: Draw, name: str, options: dict[str, Any], shapes: list[tuple[int, ...]], layouts: Sequence[str]
) -> None:
    """Take steps in each of which some gradients have one of ``layouts``."""
    twins = TwinPlay(lab, draw)
    twins.use("assert_gradients, lay_gradients")
    twins.do(f"ps = parameters({draw(seeds)}, {shapes}, {lab.dtype})\nqs = copies(ps)")
    twins.fuse(name, [len(shapes)], [options], draw(st.sampled_from(["", ", do_flatten=False"])))
    shares = False
    for _ in range(draw(st.integers(2, 4))):
        twins.gradients(kept=not shares and draw(st.booleans()))
        chosen = draw(st.lists(st.sampled_from(["", *layouts]), min_size=len(shapes), max_size=len(shapes)))
        shares = any(layout in SHARING for layout in chosen)
        twins.do(f"lay_gradients({chosen}, ps, qs)\ngiven = [p.grad.clone() for p in ps]")
        twins.step()
        twins.do("assert_gradients(given, ps, qs)")


@check("fused_optimizer", "S6", "sparse", effort=0.6)
def sparse(lab: Lab, draw: Draw) -> None:
    """Sparse gradients give what step() gives, or an error: the error of step() is one of fuse_step, too."""
    twins = TwinPlay(lab, draw)
    name = draw(st.one_of(st.sampled_from(["SGD", "Adagrad"]), st.sampled_from(list(OPTIONS))))
    options = {"lr": 0.1} if draw(st.booleans()) else draw(options_of(name))
    count = draw(st.integers(3, 5))
    embedding = draw(st.integers(0, count - 1))
    shapes = [(6, 3) if place == embedding else draw(_matrices) for place in range(count)]
    twins.use("sparse_gradients, step_or_refuse")
    twins.do(f"ps = parameters({draw(seeds)}, {shapes})\nqs = copies(ps)")
    twins.fuse(name, [count], [options])
    for dense in draw(st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=3)):
        twins.gradients()
        if not dense:
            rows = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
            twins.do(f"sparse_gradients({draw(seeds)}, {rows}, {embedding}, ps, qs)")
        twins.do("both = step_or_refuse(fused, plain)")
        if not twins.names["both"]:
            return
        twins.do("assert_twins(fused, plain)")


@check("fused_optimizer", "S6", "interrupted", effort=0.8)
def interrupted(lab: Lab, draw: Draw) -> None:
    """After a closure or hook that raised, weights, gradients and state are what step() leaves, and so are those of later steps."""
    twins = any_twins(lab, draw)
    twins.use("assert_gradients, assert_raises, stop")
    for _ in range(draw(st.integers(0, 2))):
        twins.gradients()
        twins.step()
    twins.gradients(draw(st.booleans()))
    where = draw(st.sampled_from(["closure", "pre", "post"]))
    if where == "closure":
        early = "    stop()\n" if draw(st.booleans()) else ""
        twins.do(f"def compute(ps):\n{early}    for p in ps:\n        p.grad = torch.full_like(p, 2.0)\n    stop()\n")
        twins.do("assert_raises(lambda: fused.fuse_step(lambda: compute(ps)))")
        twins.do("assert_raises(lambda: plain.step(lambda: compute(qs)))\ngiven = [q.grad for q in qs]")
    else:
        twins.do("given = [p.grad.clone() for p in ps]")
        call = draw(st.sampled_from(["", "lambda: 1.0"]))
        twins.do(f"hooks = [each.register_step_{where}_hook(stop) for each in (fused, plain)]")
        twins.do(f"assert_raises(lambda: fused.fuse_step({call}))\nassert_raises(lambda: plain.step({call}))")
        twins.do("for hook in hooks:\n    hook.remove()")
    _go_on(twins, draw)


@check("fused_optimizer", "S6", "raises", effort=0.5)
def raises(lab: Lab, draw: Draw) -> None:
    """After a step that raised in one group, earlier groups are stepped as by step(), or none is; later steps are as usual."""
    twins, name = TwinPlay(lab, draw), draw(st.sampled_from(REFUSING))
    shapes = [*draw(st.lists(_matrices, min_size=2, max_size=4)), (6, 3)]
    twins.use("assert_gradients, assert_raises, sparse_gradients")
    twins.do(f"ps = parameters({draw(seeds)}, {shapes})\nqs = copies(ps)")
    twins.fuse(name, [len(shapes) - 1, 1], [draw(options_of(name)) for _ in range(2)])
    for _ in range(draw(st.integers(1, 2))):
        twins.gradients()
        twins.step()
    twins.gradients(draw(st.booleans()))
    twins.do(f"sparse_gradients({draw(seeds)}, [0, 2, 2], -1, ps, qs)\ngiven = [p.grad.clone() for p in ps]")
    twins.do("import copy\n\nbefore, saved = [q.detach().clone() for q in qs], copy.deepcopy(plain.state_dict())")
    twins.do("assert_raises(fused.fuse_step, RuntimeError)\nassert_raises(plain.step, RuntimeError)")
    twins.do(
        "if all(map(torch.equal, ps, before)):  # nothing was stepped, which is right, too\n"
        "    for q, value in zip(qs, before):\n"
        "        q.data.copy_(value)\n"
        "    plain.load_state_dict(saved)"
    )
    _go_on(twins, draw, "\nps[-1].grad = qs[-1].grad = None")


def _go_on(twins: TwinPlay, draw: Draw, then: str = "") -> None:
    """Compare twins after a step that raised, and take more steps."""
    twins.use("assert_same_state_dict")
    twins.do(f"assert_twins(fused, plain)\nassert_same_state_dict(fused, plain)\nassert_gradients(given, ps, qs){then}")
    for how in draw(st.lists(st.sampled_from(["fused.fuse_step()", "fused.step()"]), min_size=1, max_size=2)):
        twins.gradients(draw(st.booleans()))
        twins.step(f"assert {how} is None, 'the closure was that of an earlier step'")

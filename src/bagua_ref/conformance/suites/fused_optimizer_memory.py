"""Fused optimizers whose weights and gradients lie anywhere in memory, and whose steps raise
(S6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from bagua_ref.conformance.inputs.strategies import Draw
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.twins import LAYOUTS
from bagua_ref.conformance.suites.checks import check
from bagua_ref.conformance.suites.fused_optimizer import (
    FLAGS,
    MOMENTA,
    OPTIONS,
    TwinPlay,
    any_twins,
    options_of,
    seeds,
)

SHARING = LAYOUTS[-3:]
"""Layouts in which elements share memory."""

_matrices = st.sampled_from([(2, 3), (9, 4), (5, 1), (1, 4), (2, 3, 2), (3, 3)])
REFUSING = ("Adam", "AdamW", "RMSprop")
"""Optimizers that raise an error for sparse gradients before they change any weight."""


@check("fused_optimizer", "S6", "storages", dtypes=("float32", "float64"), effort=1.5)
def storages(lab: Lab, draw: Draw) -> None:
    """Weights and gradients may be views of larger storages: with gaps, in any order, overlapping,
    transposed.
    """
    twins, name = TwinPlay(lab, draw), draw(st.sampled_from(MOMENTA))
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
        f"memory = numbers({draw(seeds)}, [{size}], torch.{lab.dtype_name})\nother = memory.clone()"
    )
    twins.do(
        "def lying_in(memory):\n    return [torch.nn.Parameter(part) for part in"
        f" [{', '.join(parts)}]]\n"
    )
    twins.do("ps, qs = lying_in(memory), lying_in(other)\npointers = [p.data_ptr() for p in ps]")
    flatten = kind == "over" or draw(st.booleans())
    twins.fuse(
        name, [len(parts)], [draw(options_of(name))], "" if flatten else ", do_flatten=False"
    )
    for _ in range(draw(st.integers(2, 3))):
        order = draw(st.permutations(range(len(parts)))) if draw(st.booleans()) else None
        twins.gradients(draw(st.booleans()), order=order)
        twins.step()
    used = {place for start, end in spans for place in range(start, end)}
    rest = [place for place in range(size) if place not in used] if flatten else list(range(size))
    twins.do(
        f"rest = {rest}  #"
        f" {'no parameter is there' if flatten else 'everything'}\nassert_equal(memory[rest],"
        " other[rest], EXACT)"
    )
    if not flatten:
        twins.do("assert_place(ps, pointers)")


@check("fused_optimizer", "S6", "moved", effort=0.5)
def moved(lab: Lab, draw: Draw) -> None:
    """Weights that were moved to another storage cause a warning and are updated where they are."""
    twins, name = TwinPlay(lab, draw), draw(st.sampled_from(MOMENTA))
    sizes = [draw(st.integers(3, 6))]
    shapes = [draw(st.sampled_from([(3,), (2, 3), (17,)])) for _ in range(sizes[0])]
    twins.make(shapes)
    twins.fuse(name, sizes, [{"lr": 0.1}])
    twins.take_steps(0, 2)
    place = draw(st.integers(0, sizes[0] - 1))
    twins.do(f"ps[{place}].data = ps[{place}].data.clone()")
    twins.gradients(draw(st.booleans()))
    twins.step("with expect_warning():\n    fused.fuse_step()")
    twins.gradients()
    twins.step()


@check("fused_optimizer", "S6", "transposed_in_place", effort=0.7)
def transposed_in_place(lab: Lab, draw: Draw) -> None:
    """Weights and gradients that are transposed or cut from one step to the next, in the same
    memory, are read as they lie.
    """
    twins, name = TwinPlay(lab, draw), draw(st.sampled_from(MOMENTA))
    count = draw(st.integers(2, 5))
    twins.make([(3, 3)] * count)
    twins.fuse(name, [count], [draw(options_of(name))], draw(FLAGS))
    twins.gradients(kept=True)
    twins.step()
    for _ in range(draw(st.integers(2, 4))):
        what = draw(st.sampled_from(["weights", "gradients", "nothing"]))
        twins.gradients(kept=draw(st.booleans()))
        for place in draw(st.sets(st.integers(0, count - 1), min_size=1)):
            if what == "weights":
                twins.do(f"for x in (ps[{place}], qs[{place}]):\n    x.data = x.data.t()")
            elif what == "gradients":
                twins.do(f"for x in (ps[{place}], qs[{place}]):\n    x.grad = x.grad.t()")
        twins.step()


@check("fused_optimizer", "S6", "gradient_layouts", dtypes=("float32", "float64"), effort=0.8)
def gradient_layouts(lab: Lab, draw: Draw) -> None:
    """Gradients may be transposed, expanded or parts of larger tensors, and a step leaves them as
    they are.
    """
    name = draw(st.sampled_from(list(OPTIONS)))
    shapes = draw(st.lists(_matrices, min_size=2, max_size=4))
    options = draw(options_of(name))
    if options.get("nesterov"):
        # with it, torch adds to the gradients in place, which shared memory forbids
        options.pop("foreach", None)
    _step_with_layouts(lab, draw, name, options, shapes, LAYOUTS)


@check("fused_optimizer", "S6", "expanded_gradients", effort=0.5)
def expanded_gradients(lab: Lab, draw: Draw) -> None:
    """Gradients that repeat numbers without a copy give step()'s bits: torch's plain SGD adds them
    in another way than copies.
    """
    shapes = draw(st.lists(st.sampled_from([(33, 5), (65, 3)]), min_size=2, max_size=4))
    _step_with_layouts(lab, draw, "SGD", {"lr": 0.1}, shapes, ("columns",))


def _step_with_layouts(
    lab: Lab,
    draw: Draw,
    name: str,
    options: dict[str, Any],
    shapes: list[tuple[int, ...]],
    layouts: Sequence[str],
) -> None:
    """Take steps in each of which some gradients have one of ``layouts``."""
    twins = TwinPlay(lab, draw)
    twins.make(shapes, lab.dtype_name or "float32")
    twins.fuse(name, [len(shapes)], [options], draw(FLAGS))
    shares = False
    for _ in range(draw(st.integers(2, 4))):
        twins.gradients(kept=not shares and draw(st.booleans()))
        chosen = draw(
            st.lists(st.sampled_from(["", *layouts]), min_size=len(shapes), max_size=len(shapes))
        )
        shares = any(layout in SHARING for layout in chosen)
        twins.do(f"lay_gradients({chosen}, ps, qs)\ngiven = [p.grad.clone() for p in ps]")
        twins.step()
        twins.do("assert_gradients(given, ps, qs)")


@check("fused_optimizer", "S6", "sparse", effort=0.6)
def sparse(lab: Lab, draw: Draw) -> None:
    """Sparse gradients give what step() gives, or an error: the error of step() is one of
    fuse_step, too.
    """
    twins = TwinPlay(lab, draw)
    name = draw(st.one_of(st.sampled_from(["SGD", "Adagrad"]), st.sampled_from(list(OPTIONS))))
    options = {"lr": 0.1} if draw(st.booleans()) else draw(options_of(name))
    count = draw(st.integers(3, 5))
    embedding = draw(st.integers(0, count - 1))
    shapes = [(6, 3) if place == embedding else draw(_matrices) for place in range(count)]
    twins.make(shapes)
    twins.fuse(name, [count], [options])
    for dense in draw(st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=3)):
        twins.gradients()
        if not dense:
            rows = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
            twins.do(f"sparse_gradients({draw(seeds)}, {rows}, {embedding}, ps, qs)")
        twins.do("both = step_or_refuse(fused, plain)")
        if not twins.names["both"]:
            break
        twins.do("assert_twins(fused, plain)")


@check("fused_optimizer", "S6", "interrupted", effort=0.4)
def interrupted(lab: Lab, draw: Draw) -> None:
    """After a closure or hook that raised, weights, gradients and state equal those of step(), and
    so do those of later steps.
    """
    twins = any_twins(lab, draw)
    twins.take_steps(0, 2)
    for where in draw(st.permutations(["closure", "pre", "post"])):
        twins.gradients(draw(st.booleans()))
        if where == "closure":
            early = "    stop()\n" if draw(st.booleans()) else ""
            twins.do(
                f"def compute(ps):\n{early}    for p in ps:\n        p.grad = torch.full_like(p,"
                " 2.0)\n    stop()\n"
            )
            twins.do("assert_raises(lambda: fused.fuse_step(lambda: compute(ps)))")
            twins.do(
                "assert_raises(lambda: plain.step(lambda: compute(qs)))\ngiven = [q.grad for q"
                " in qs]"
            )
        else:
            twins.do("given = [p.grad.clone() for p in ps]")
            call = draw(st.sampled_from(["", "lambda: 1.0"]))
            twins.do(f"hooks = [each.register_step_{where}_hook(stop) for each in (fused, plain)]")
            twins.do(
                f"assert_raises(lambda: fused.fuse_step({call}))\nassert_raises(lambda:"
                f" plain.step({call}))"
            )
            twins.do("for hook in hooks:\n    hook.remove()")
        _go_on(twins, draw)


@check("fused_optimizer", "S6", "raises", effort=0.5)
def raises(lab: Lab, draw: Draw) -> None:
    """After a step that raised in one group, earlier groups are stepped as by step(), or none is;
    later steps are as usual.
    """
    twins, name = TwinPlay(lab, draw), draw(st.sampled_from(REFUSING))
    shapes = [*draw(st.lists(_matrices, min_size=2, max_size=4)), (6, 3)]
    twins.make(shapes)
    twins.fuse(name, [len(shapes) - 1, 1], [draw(options_of(name)) for _ in range(2)])
    twins.take_steps(1, 2)
    twins.gradients(draw(st.booleans()))
    twins.do(
        f"sparse_gradients({draw(seeds)}, [0, 2, 2], -1, ps, qs)\ngiven = [p.grad.clone() for p"
        " in ps]"
    )
    twins.do(
        "import copy\n\nbefore, saved = [q.detach().clone() for q in qs],"
        " copy.deepcopy(plain.state_dict())"
    )
    twins.do(
        "assert_raises(fused.fuse_step, RuntimeError)\nassert_raises(plain.step, RuntimeError)"
    )
    twins.do(
        "if all(map(torch.equal, ps, before)):  # nothing was stepped, which is right, too\n"
        "    for q, value in zip(qs, before):\n"
        "        q.data.copy_(value)\n"
        "    plain.load_state_dict(saved)"
    )
    _go_on(twins, draw, "\nps[-1].grad = qs[-1].grad = None")


def _go_on(twins: TwinPlay, draw: Draw, then: str = "") -> None:
    """Compare twins after a step that raised, and take more steps."""
    twins.do(
        "assert_twins(fused, plain)\nassert_same_state_dict(fused, plain)\nassert_gradients(given,"
        f" ps, qs){then}"
    )
    for how in draw(
        st.lists(st.sampled_from(["fused.fuse_step()", "fused.step()"]), min_size=1, max_size=2)
    ):
        twins.gradients(draw(st.booleans()))
        twins.step(f"assert {how} is None, 'the closure was that of an earlier step'")

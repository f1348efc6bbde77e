"""Fused optimizers whose weights and gradients lie anywhere in memory, and move there (S6)."""

from __future__ import annotations

from hypothesis import strategies as st

from bagua_ref.conformance.inputs.strategies import Draw
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.twin_play import MOMENTA, TwinPlay, options_of, seeds
from bagua_ref.conformance.suites.checks import check


@check("fused_optimizer", "S6", "storages", dtypes=("float32", "float64"), effort=1.5)
def storages(lab: Lab, draw: Draw) -> None:
    """Weights and gradients may be views of larger storages: with gaps, in any order, overlapping, transposed."""
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
        "from bagua_ref.conformance import EXACT, assert_equal\nfrom bagua_ref.conformance.lab.twins import assert_place, numbers"
    )
    twins.do(f"memory = numbers({draw(seeds)}, [{size}], torch.{lab.dtype_name})\nother = memory.clone()")
    twins.do(f"def lying_in(memory):\n    return [torch.nn.Parameter(part) for part in [{', '.join(parts)}]]\n")
    twins.do("ps, qs = lying_in(memory), lying_in(other)\npointers = [p.data_ptr() for p in ps]")
    flatten = kind == "over" or draw(st.booleans())
    twins.fuse(name, [len(parts)], [draw(options_of(name))], "" if flatten else ", do_flatten=False")
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


@check("fused_optimizer", "S6", "moved", effort=0.5)
def moved(lab: Lab, draw: Draw) -> None:
    """Weights that were moved to another storage cause a warning and are updated where they are."""
    twins, name = TwinPlay(lab, draw), draw(st.sampled_from(MOMENTA))
    sizes = [draw(st.integers(3, 6))]
    shapes = [draw(st.sampled_from([(3,), (2, 3), (17,)])) for _ in range(sizes[0])]
    twins.use("expect_warning")
    twins.do(f"ps = parameters({draw(seeds)}, {shapes})\nqs = copies(ps)")
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


@check("fused_optimizer", "S6", "transposed_in_place", effort=0.7)
def transposed_in_place(lab: Lab, draw: Draw) -> None:
    """Weights and gradients that are transposed or cut from one step to the next, in the same memory, are read as they lie."""
    twins, name = TwinPlay(lab, draw), draw(st.sampled_from(MOMENTA))
    count = draw(st.integers(2, 5))
    twins.do(f"ps = parameters({draw(seeds)}, {[(3, 3)] * count})\nqs = copies(ps)")
    twins.fuse(name, [count], [draw(options_of(name))], draw(st.sampled_from(["", ", do_flatten=False"])))
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

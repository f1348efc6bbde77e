"""Kernels other than the codec compared with scalar implementations (S1, S2.3, S3, S5.5, S7.2)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.answers import answer
from bagua_ref.conformance.cases.case import Case
from bagua_ref.conformance.cases.collective_cases import MOVABLE
from bagua_ref.conformance.cases.strategies import (
    FLOATS,
    Draw,
    bulk,
    chunked,
    dtype_named,
    numbers,
    operands,
    tensors,
)
from bagua_ref.conformance.cases.table import INTEGERS, rows_of
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected.kernels_numpy import wide
from bagua_ref.conformance.lab.lab import Lab, smallest

_factors = st.one_of(
    st.sampled_from([1 / 3, -5 / 3, 0.1, -0.5, 0.0, 1.0, 1e-30, 1e30]),
    st.floats(-4, 4),
    numbers(torch.float64, finite=True),
)
_divisors = st.one_of(
    st.integers(1, 1025).map(float),
    st.sampled_from([1.5, 4 / 3, 3.5, 7 / 3, -3.0, 0.1]),
    st.floats(-1e6, 1e6).filter(lambda value: abs(value) > 1e-30),
)
Arguments = dict[str, Any]


def _two(draw: Draw, x: Tensor, y: Tensor) -> Arguments:
    return {"x": x, "y": y}


def _add_scaled(draw: Draw, x: Tensor, y: Tensor) -> Arguments:
    factor = draw(_factors)
    if draw(st.booleans()):  # the remainder shows whether the product was rounded
        x = (-factor * y.double()).to(x.dtype)
    return {"x": x, "y": y, "factor": factor}


def _divide(draw: Draw, x: Tensor) -> Arguments:
    return {"x": x, "divisor": draw(_divisors)}


def _combine_ring(draw: Draw, x: Tensor, *others: Tensor) -> Arguments:
    left, right, weight = (x.clone() for _ in others) if draw(st.booleans()) else others
    return {"x": x, "left": left, "right": right, "weight": weight}


def _async_average(draw: Draw, x: Tensor, snapshot: Tensor) -> Arguments:
    nranks, reduced = draw(st.integers(1, 1025)), draw(tensors(wide(x.dtype), x.numel()))
    if draw(st.booleans()):
        snapshot = (reduced.double() / nranks).to(x.dtype)
        x = (snapshot.double() * draw(st.sampled_from([0.0, 1e-3, 1.0]))).to(x.dtype)
    return {"x": x, "reduced": reduced, "snapshot": snapshot, "nranks": nranks}


def _update_momentum(draw: Draw, m: Tensor, grad: Tensor) -> Arguments:
    beta1 = draw(st.one_of(st.sampled_from([0.0, 0.9, 0.99, 0.1, 1.0]), st.floats(0, 1)))
    if beta1 < 1 and draw(st.booleans()):
        grad = (-beta1 / (1 - beta1) * m.double()).to(m.dtype)
    return {"m": m, "grad": grad, "beta1": beta1}


_ELEMENTWISE: dict[str, tuple[str, int, Callable[..., Arguments], str]] = {
    "add": ("S1", 2, _two, "x + y is rounded once."),
    "subtract": ("S1", 2, _two, "x - y is rounded once."),
    "average": ("S3.4", 2, _two, "The sum is rounded, then halved, even where it overflows."),
    "add_scaled": (
        "S1",
        2,
        _add_scaled,
        "The product is rounded, then the sum; there is no fused multiply-add.",
    ),
    "divide": ("S3.3", 1, _divide, "x is divided, not multiplied by a reciprocal."),
    "combine_ring": (
        "S3.5",
        4,
        _combine_ring,
        "x is rounded to its dtype after each of the three steps.",
    ),
    "async_average": (
        "S3.6",
        2,
        _async_average,
        "The change reduced / n - snapshot is computed in float32.",
    ),
    "update_momentum": ("S5.5", 2, _update_momentum, "Both products are rounded, then their sum."),
}
"""Element-wise kernels: clause, number of tensors to draw, arguments, and sentence of their
checks.
"""


def _judge(lab: Lab, name: str, arguments: Arguments) -> None:
    """Compare the first argument of a kernel after a call; on failure, report as few columns as
    possible.
    """
    first = next(iter(arguments))

    def judge(start: int, end: int) -> None:
        part = {
            key: x[..., start:end].contiguous().view(-1) if isinstance(x, Tensor) else x
            for key, x in arguments.items()
        }
        wanted = answer(f"kernels/{name}", lab.dtype_name, part, {})["x"]
        lab.compare(lab.call(f"{name}_", part, (first,)), first, wanted)

    smallest(judge, arguments[first].shape[-1])


def _elementwise(lab: Lab, name: str) -> None:
    _, count, given, _ = _ELEMENTWISE[name]
    _judge(lab, name, given(lab.draw, *lab.draw(operands(lab.dtype, count))))


def _rows(lab: Lab, name: str) -> list[Case]:
    """Return a kernel's fixed cases of the check's dtype, or of all dtypes that the target
    supports.
    """
    dtypes = [lab.dtype_name] if lab.dtype_name else lab.dtypes((*FLOATS, *INTEGERS))
    cases = [case for dtype in dtypes for case in rows_of("kernels", dtype)]
    return [case for case in cases if case.operation == f"kernels/{name}"]


def _walk(lab: Lab, name: str) -> None:
    """Check the fixed cases of a kernel that changes its first argument, x."""
    for case in _rows(lab, name):
        call = lab.call(f"{name}_", {**case.inputs, **case.parameters}, ("x",))
        lab.compare(call, "x", case.outputs["x"])


for _name, (_clause, *_, _sentence) in _ELEMENTWISE.items():
    check(
        f"kernels.{_clause}.{_name}",
        dtypes=FLOATS,
        needs=(f"{_name}_",),
        sentence=_sentence,
        walk=partial(_walk, name=_name),
    )(partial(_elementwise, name=_name))


def _reduce(lab: Lab, chunks: Tensor, average: bool) -> None:
    target = lab.integer(0, len(chunks) - 1)
    given = {"num_chunks": len(chunks), "target_chunk": target, "average": average}
    _judge(lab, "reduce_chunks", {"x": chunks, **given})


@check(
    "kernels.S3.7.reduce_chunks",
    dtypes=FLOATS,
    needs=("reduce_chunks_",),
    effort=0.8,
    walk=partial(_walk, name="reduce_chunks"),
)
def reduce_chunks(lab: Lab) -> None:
    """Chunks are added in order, starting from +0, and only one chunk changes."""
    x, count = lab.draw(chunked(lab.dtype))
    chunks, mean = x.view(count, x.numel() // count), lab.flag()
    if count > 2 and lab.flag():
        chunks[-1] = -chunks[:-1].double().sum(0)
    if mean and lab.dtype.itemsize == 2 and lab.flag():
        chunks = _means_near_ties(lab, lab.choice([3, 6, 7, 11, 13]))
    _reduce(lab, chunks, mean)


@check(
    "kernels.S3.7.many_chunks",
    dtypes=("float16", "bfloat16"),
    needs=("reduce_chunks_",),
    effort=0.05,
)
def many_chunks(lab: Lab) -> None:
    """A mean is divided by the number of chunks even if their dtype cannot represent it, as
    bfloat16 cannot represent 259.
    """
    count = round(2 / torch.finfo(lab.dtype).eps) + lab.choice([1, 3, 7])
    _reduce(lab, _means_near_ties(lab, count), True)


def _means_near_ties(lab: Lab, count: int) -> Tensor:
    """Chunks whose means are ties of a 16-bit dtype, or one float32 step beside a tie.

    Only there does a wrong last bit of the float32 mean change the rounded result.
    """
    generator, size = torch.Generator().manual_seed(lab.seed()), 32
    steps = round(1 / torch.finfo(lab.dtype).eps)
    halfway = (torch.randint(steps, 2 * steps, (size,), generator=generator) + 0.5) / steps
    total = (halfway * count).float()
    for direction in (0.0, torch.inf):
        moved = torch.randint(3, (size,), generator=generator) == 0
        total = torch.where(moved, torch.nextafter(total, torch.tensor(direction)), total)
    chunks = torch.zeros(count, size, dtype=lab.dtype)
    for place in torch.randperm(count, generator=generator)[:3].tolist():
        chunks[place] = total
        total = total - chunks[place].float()
    return chunks


def _numbers(size: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Numbers that differ from their neighbours, need all bits of their dtype, and reach its ends:
    a copy by way of another dtype would change them.
    """
    place = torch.arange(start, start + size)
    x = place.remainder(251)
    if dtype is torch.bool:
        return x % 3 == 0
    if not dtype.is_floating_point and not dtype.is_complex:
        limits = torch.iinfo(dtype)
        ends = torch.tensor([limits.min, limits.max, limits.max - 1]).to(dtype)
        return torch.where(place % 7 < 3, ends[place % 7 % 3], x.to(dtype))
    real = torch.finfo(dtype)
    part = torch.float32 if dtype is torch.complex64 else torch.float64
    ends = torch.tensor([-0.0, real.tiny / 4, real.max, -math.inf], dtype=torch.float64)
    wide = torch.where(place % 7 < 4, ends[place % 7 % 4], (x + 1).double() * (1 + real.eps))
    return (
        torch.complex(wide.to(part), -wide.to(part).roll(1)) if dtype.is_complex else wide.to(dtype)
    )


def _pieces(lab: Lab) -> tuple[list[Tensor], torch.dtype]:
    """Draw tensors of one dtype and any shapes, some transposed or with gaps; return them and the
    dtype.

    Without tensors the dtype is float32, as a program could not know any other.
    """
    names, of_one = lab.dtypes(MOVABLE), st.lists(st.integers(0, 5), max_size=3)
    fewest = 0 if "float32" in names else 1
    shapes = lab.draw(st.lists(of_one, min_size=fewest, max_size=5))
    dtype = dtype_named(lab.choice(names) if shapes else "float32")
    chosen, found = random.Random(lab.seed()), []  # noqa: S311 - reproducible, not secret
    for number, shape in enumerate(shapes):
        whole = _numbers(2 * math.prod(shape), dtype, 40 * number)
        piece = whole.view(*shape, 2)[..., number % 2]
        axes = chosen.sample(range(len(shape)), len(shape))
        found.append((piece if chosen.random() < 0.5 else piece.contiguous()).permute(axes))
    return found, dtype


def _gather(lab: Lab, pieces: list[Tensor], wanted: Tensor) -> None:
    arguments = {"tensors": pieces, "flat": torch.full_like(wanted, 3)}
    lab.compare(lab.call("gather_flat", arguments, ("flat",)), "flat", wanted)


def _scatter(lab: Lab, pieces: list[Tensor], flat: Tensor) -> None:
    call = lab.call("scatter_flat", {"flat": flat, "tensors": pieces}, ("tensors",))
    parts = flat.split([piece.numel() for piece in pieces])
    for number, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        name = f"tensors[{number}]"
        call.results[name] = call.results["tensors"][number].contiguous()
        lab.compare(call, name, part.view(piece.shape))


def _arranged(dtype: torch.dtype) -> list[Tensor]:
    """Tensors in several orders of memory, channels_last among them, one with gaps and one without
    dimensions.
    """
    found = [_numbers(1, dtype, 3).view(()), _numbers(18, dtype, 80)[::2]]
    for shape, axes in (
        ((4, 3), (1, 0)),
        ((3, 2, 4), (1, 2, 0)),
        ((2, 4, 5, 3), (0, 3, 1, 2)),
        ((2, 2, 3, 2, 3), (0, 4, 1, 2, 3)),
    ):
        found.append(_numbers(math.prod(shape), dtype, 40 * len(shape)).view(shape).permute(axes))
    return found


def _walk_gathering(lab: Lab) -> None:
    for name in lab.dtypes(MOVABLE):
        pieces = _arranged(dtype_named(name))
        _gather(lab, pieces, torch.cat([piece.reshape(-1) for piece in pieces]))
    for case in _rows(lab, "gather_flat"):
        # a program that gets no tensors could not know another dtype than float32
        if case.inputs or case.outputs["flat"].dtype == torch.float32:
            _gather(lab, [*case.inputs.values()], case.outputs["flat"])


def _walk_scattering(lab: Lab) -> None:
    for name in lab.dtypes(MOVABLE):
        pieces = _arranged(dtype_named(name))
        _scatter(lab, pieces, _numbers(sum(map(Tensor.numel, pieces)), dtype_named(name)))
    for case in _rows(lab, "scatter_flat"):
        _scatter(lab, [*case.outputs.values()], case.inputs["flat"])


@check("kernels.S2.3.gather_flat", needs=("gather_flat",), effort=1.4, walk=_walk_gathering)
def gather_flat(lab: Lab) -> None:
    """Tensors of any strides are copied one after another in row-major order."""
    pieces, dtype = _pieces(lab)
    values = [value for piece in pieces for value in piece.reshape(-1).tolist()]
    _gather(lab, pieces, torch.tensor(values, dtype=dtype))


@check("kernels.S2.3.scatter_flat", needs=("scatter_flat",), effort=1.4, walk=_walk_scattering)
def scatter_flat(lab: Lab) -> None:
    """Flat elements are copied into tensors of any strides in row-major order."""
    pieces, dtype = _pieces(lab)
    size = sum(piece.numel() for piece in pieces)
    _scatter(lab, pieces, _numbers(size, dtype))


@check("kernels.S2.3.long", needs=("gather_flat", "scatter_flat"), effort=0.05)
def long_flat(lab: Lab) -> None:
    """Long tensors, and many of them, are copied correctly, index by index."""
    dtype = dtype_named(lab.choice(lab.dtypes(MOVABLE)))
    turn = lab.integer(0, 3)
    # possibly more tensors than an implementation processes at once
    many = [[(turn + place * place) % 4 for place in range(count)] for count in _MANY]
    for sizes in (lab.draw(st.permutations([*lab.long_sizes, 9_973, 3])), *many):
        flat = _numbers(sum(sizes), dtype)
        pieces = [
            part if (turn + place) % 2 else torch.stack([part, part.flip(0)], dim=1)[:, 0]
            for place, part in enumerate(flat.split(sizes))
        ]
        _gather(lab, pieces, flat)
        _scatter(lab, pieces, flat.roll(1))


_MANY = (9, 17, 33, 65, 129, 300)


def _walk_orders(lab: Lab) -> None:
    for case in _rows(lab, "order_by_complexity"):
        _check_order(lab, case.inputs["keys"])


@check(
    "kernels.S7.2.order_by_complexity",
    dtypes=(*FLOATS, *INTEGERS),
    needs=("order_by_complexity",),
    walk=_walk_orders,
)
def order_by_complexity(lab: Lab) -> None:
    """The order is ascending and stable, -0 equals 0, NaN comes last."""
    if lab.dtype.is_floating_point:
        few = lab.draw(st.lists(numbers(lab.dtype), min_size=1, max_size=5))
    else:
        limits = torch.iinfo(lab.dtype)
        number = st.integers(limits.min, limits.max) | st.integers(limits.max // 4, limits.max)
        few = lab.draw(st.lists(number, min_size=3, max_size=6))
        # large ones and their neighbours, which a float64 may not tell apart
        few += [key ^ 1 for key in few] + [limits.min, limits.max]
    # Many are equal, and few or many: libraries sort short lists in another way.
    size = lab.draw(st.integers(0, 40) | st.sampled_from([17, 100, 1000]))
    chosen = random.Random(lab.seed())  # noqa: S311 - reproducible, not secret
    distinct = list(dict.fromkeys(few))  # may be sorted by another algorithm
    drawn = chosen.sample(distinct, len(distinct)) if lab.flag() else chosen.choices(few, k=size)
    exact = torch.float64 if lab.dtype.is_floating_point else torch.int64
    keys = torch.tensor(drawn, dtype=exact).to(lab.dtype)
    if lab.dtype.is_floating_point and lab.flag():
        keys = lab.draw(operands(lab.dtype, 1))[0]
    _check_order(lab, keys)


def _check_order(lab: Lab, keys: Tensor) -> None:
    def judge(start: int, end: int) -> None:
        part = keys[start:end]
        order = answer("kernels/order_by_complexity", lab.dtype_name, {"keys": part}, {})["order"]
        lab.compare(lab.call("order_by_complexity", {"keys": part}), "result", order)

    smallest(judge, len(keys))


@check(
    "kernels.S7.2.long",
    dtypes=("float32", "float64", "int64"),
    needs=("order_by_complexity",),
    effort=0.025,
)
def long_order(lab: Lab) -> None:
    """The order of many keys is ascending and stable, too."""
    generator = torch.Generator().manual_seed(lab.seed())
    for size in lab.long_sizes:
        most = lab.choice([2, 1_000, 10 * size])
        _check_order(lab, torch.randint(most, (size,), generator=generator).to(lab.dtype))


@check("kernels.S1.long", dtypes=FLOATS, effort=0.025)
def long(lab: Lab) -> None:
    """Long tensors get the results of short ones, element by element."""
    for size in lab.long_sizes:
        rows = bulk(lab.dtype, "tame", lab.seed(), 4 * size).view(4, size)
        reduced = {"num_chunks": 4, "target_chunk": lab.integer(0, 3), "average": True}
        cases = {
            name: given(lab.draw, *rows[:count])
            for name, (_, count, given, _) in _ELEMENTWISE.items()
        }
        for name, arguments in (cases | {"reduce_chunks": {"x": rows, **reduced}}).items():
            if hasattr(lab.target.kernels, f"{name}_"):
                _judge(lab, name, arguments)

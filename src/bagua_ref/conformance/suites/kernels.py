"""Kernels other than the codec compared with scalar implementations (S1, S2.3, S3, S5.5, S7.2)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected import kernels_scalar
from bagua_ref.conformance.inputs.strategies import FLOATS, Draw, bulk, chunked, dtype_named, numbers, operands, seeds, tensors
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.violation import Violation
from bagua_ref.conformance.suites.checks import check

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


_BINARY = {
    "add": ("S1", "x + y is rounded once."),
    "subtract": ("S1", "x - y is rounded once."),
    "average": ("S3.4", "The sum is rounded, then halved, even where it overflows."),
}
"""Kernels of two tensors: clause and sentence of their checks."""


def _binary(lab: Lab, draw: Draw, name: str) -> None:
    x, y = draw(operands(lab.dtype, 2))
    lab.elementwise(f"{name}_", {"x": x, "y": y}, getattr(kernels_scalar, name))


for _name, (_clause, _sentence) in _BINARY.items():
    check("kernels", _clause, _name, dtypes=FLOATS, needs=(f"{_name}_",), sentence=_sentence)(partial(_binary, name=_name))


@check("kernels", "S1", "add_scaled", dtypes=FLOATS, needs=("add_scaled_",))
def add_scaled(lab: Lab, draw: Draw) -> None:
    """The product is rounded, then the sum; there is no fused multiply-add."""
    factor = draw(_factors)
    x, y = draw(operands(lab.dtype, 2))
    if draw(st.booleans()):
        x = _nearly(-factor * y.double(), lab.dtype)  # what is left shows whether the product was rounded
    lab.elementwise("add_scaled_", {"x": x, "y": y, "factor": factor}, kernels_scalar.add_scaled)


@check("kernels", "S3.3", "divide", dtypes=FLOATS, needs=("divide_",))
def divide(lab: Lab, draw: Draw) -> None:
    """x is divided, not multiplied by a reciprocal."""
    divisor = draw(_divisors)
    (x,) = draw(operands(lab.dtype, 1))
    lab.elementwise("divide_", {"x": x, "divisor": divisor}, kernels_scalar.quotient)


@check("kernels", "S3.5", "combine_ring", dtypes=FLOATS, needs=("combine_ring_",))
def combine_ring(lab: Lab, draw: Draw) -> None:
    """x is rounded to its dtype after each of the three steps."""
    x, left, right, weight = draw(operands(lab.dtype, 4))
    if draw(st.booleans()):
        left, right, weight = (_nearly(tensor.double(), lab.dtype) for tensor in (x, x, x))
    arguments = {"x": x, "left": left, "right": right, "weight": weight}
    lab.elementwise("combine_ring_", arguments, kernels_scalar.combine_ring)


@check("kernels", "S3.6", "async_average", dtypes=FLOATS, needs=("async_average_",))
def async_average(lab: Lab, draw: Draw) -> None:
    """The change reduced / n - snapshot is computed in float32."""
    nranks = draw(st.integers(1, 1025))
    x, snapshot = draw(operands(lab.dtype, 2))
    wide = torch.float64 if lab.dtype is torch.float64 else torch.float32
    reduced = draw(tensors(wide, x.numel()))
    if draw(st.booleans()):
        snapshot = _nearly(reduced.double() / nranks, lab.dtype)
        x = _nearly(snapshot.double() * draw(st.sampled_from([0.0, 1e-3, 1.0])), lab.dtype)
    arguments = {"x": x, "reduced": reduced, "snapshot": snapshot, "nranks": nranks}
    lab.elementwise("async_average_", arguments, kernels_scalar.async_average)


@check("kernels", "S5.5", "update_momentum", dtypes=FLOATS, needs=("update_momentum_",))
def update_momentum(lab: Lab, draw: Draw) -> None:
    """Both products are rounded, then their sum."""
    beta1 = draw(st.one_of(st.sampled_from([0.0, 0.9, 0.99, 0.1, 1.0]), st.floats(0, 1)))
    m, grad = draw(operands(lab.dtype, 2))
    if beta1 < 1 and draw(st.booleans()):
        grad = _nearly(-beta1 / (1 - beta1) * m.double(), lab.dtype)
    lab.elementwise("update_momentum_", {"m": m, "grad": grad, "beta1": beta1}, kernels_scalar.update_momentum)


@check("kernels", "S3.7", "reduce_chunks", dtypes=FLOATS, needs=("reduce_chunks_",), effort=1.5)
def reduce_chunks(lab: Lab, draw: Draw) -> None:
    """Chunks are added in order, starting from +0, and only one chunk changes."""
    x, num_chunks = draw(chunked(lab.dtype))
    size = x.numel() // num_chunks
    if num_chunks > 2 and draw(st.booleans()):
        x[-size or x.numel() :] = _nearly(-x[: x.numel() - size].view(num_chunks - 1, size).double().sum(0), lab.dtype)
    mean = draw(st.booleans())
    if mean and lab.dtype.itemsize == 2 and draw(st.booleans()):
        num_chunks, size = draw(st.sampled_from([3, 6, 7, 11, 13])), 64
        x = _means_near_ties(lab.dtype, num_chunks, size, draw(seeds))
    target = draw(st.integers(0, num_chunks - 1))
    _check_reduction(lab, x.view(num_chunks, size), target, mean)


@check("kernels", "S3.7", "many_chunks", dtypes=("float16", "bfloat16"), needs=("reduce_chunks_",), effort=0.05)
def many_chunks(lab: Lab, draw: Draw) -> None:
    """A mean is divided by the number of chunks, also where their dtype has no such number, as bfloat16 has no 259."""
    num_chunks = round(2 / torch.finfo(lab.dtype).eps) + draw(st.sampled_from([1, 3, 7]))
    x = _means_near_ties(lab.dtype, num_chunks, 16, draw(seeds)).view(num_chunks, 16)
    _check_reduction(lab, x, draw(st.integers(0, num_chunks - 1)), True)


def _means_near_ties(dtype: torch.dtype, num_chunks: int, size: int, seed: int) -> Tensor:
    """Chunks whose sums are num_chunks times a number halfway between two of a 16-bit dtype, or float32's next to that.

    Only there does a mean whose last float32 bit is wrong become another number when it is stored.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = round(1 / torch.finfo(dtype).eps)
    halfway = (torch.randint(steps, 2 * steps, (size,), generator=generator) + 0.5) / steps
    total = (halfway * num_chunks).float()
    for direction in (0.0, torch.inf):
        moved = torch.randint(3, (size,), generator=generator) == 0
        total = torch.where(moved, torch.nextafter(total, torch.tensor(direction)), total)
    chunks = torch.zeros(num_chunks, size, dtype=dtype)
    for place in torch.randperm(num_chunks, generator=generator)[:3].tolist():
        chunks[place] = total
        total = total - chunks[place].float()
    return chunks.view(-1)


def _check_reduction(lab: Lab, chunks: Tensor, target: int, mean: bool) -> None:
    num_chunks = chunks.shape[0]
    wanted = chunks.clone()
    columns = [kernels_scalar.reduce_in_order(lab.dtype_name, column, mean) for column in chunks.T.tolist()]
    wanted[target] = torch.tensor(columns, dtype=torch.float64).to(lab.dtype)
    arguments = {"x": chunks.reshape(-1), "num_chunks": num_chunks, "target_chunk": target, "average": mean}
    call = lab.call("reduce_chunks_", arguments, ("x",))
    try:
        lab.compare(call, "x", wanted.view(-1))
    except Violation:
        if chunks.shape[1] > 1:
            found = call.results["x"].view_as(wanted)
            same = (found == wanted) | (wanted.isnan() & found.isnan())
            column = int((~same.all(dim=0)).int().argmax())
            _check_reduction(lab, chunks[:, column : column + 1].contiguous(), target, mean)
        raise


_MOVED = (*FLOATS, "int64", "uint8")


def _pieces(lab: Lab, draw: Draw) -> tuple[list[Tensor], torch.dtype]:
    """Draw tensors of one dtype, of any shape, some of them transposed or with gaps; return them and the dtype.

    Without tensors it is float32, as a program could not know another one.
    """
    names = lab.dtypes(_MOVED)
    dtype, found = dtype_named(draw(st.sampled_from(names))), []
    if draw(st.integers(0, 4)) == 4:  # more than an implementation may take at once
        count, seed = draw(st.sampled_from([9, 17, 33, 65, 129, 257, 300])), draw(seeds)
        sizes = [(seed + place * place) % 4 for place in range(count)]
        flat = torch.arange(2 * sum(sizes)).remainder(251).to(dtype)
        return [
            part[::2] if (seed >> place % 32) & 1 else part[: part.numel() // 2]
            for place, part in enumerate(flat.split([2 * size for size in sizes]))
        ], dtype
    for _ in range(draw(st.integers(0 if "float32" in names else 1, 5))):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        start = draw(st.integers(0, 100))
        whole = torch.arange(start, start + math.prod(shape) * 2, dtype=torch.float64).to(dtype).view(*shape, 2)
        tensor = whole[..., draw(st.integers(0, 1))] if draw(st.booleans()) else whole[..., 0].contiguous()
        found.append(tensor.permute(draw(st.permutations(range(len(shape))))))
    return found, dtype if found else torch.float32


@check("kernels", "S2.3", "gather_flat", needs=("gather_flat",), effort=3)
def gather_flat(lab: Lab, draw: Draw) -> None:
    """Tensors of any strides are copied one after another in row-major order."""
    pieces, dtype = _pieces(lab, draw)
    values = [value for piece in pieces for value in piece.reshape(-1).tolist()]
    arguments = {"tensors": pieces, "flat": torch.full((len(values),), 3, dtype=dtype)}
    lab.compare(lab.call("gather_flat", arguments, ("flat",)), "flat", torch.tensor(values, dtype=dtype))


@check("kernels", "S2.3", "scatter_flat", needs=("scatter_flat",), effort=3)
def scatter_flat(lab: Lab, draw: Draw) -> None:
    """Flat elements are copied into tensors of any strides in row-major order."""
    pieces, dtype = _pieces(lab, draw)
    flat = torch.arange(sum(piece.numel() for piece in pieces), dtype=torch.float64).remainder(200).to(dtype)
    call = lab.call("scatter_flat", {"flat": flat, "tensors": pieces}, ("tensors",))
    parts = flat.split([piece.numel() for piece in pieces])
    for number, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        call.results[f"tensors[{number}]"] = call.results["tensors"][number].contiguous()
        lab.compare(call, f"tensors[{number}]", part.view(piece.shape))


@check("kernels", "S2.3", "long", needs=("gather_flat", "scatter_flat"), effort=0.1)
def long_flat(lab: Lab, draw: Draw) -> None:
    """Long tensors are copied as short ones are, place by place."""
    dtype = dtype_named(draw(st.sampled_from(lab.dtypes(_MOVED))))
    sizes = draw(st.permutations([*lab.long_sizes, 9_973, 3]))
    flat = torch.arange(sum(sizes)).remainder(251).to(dtype)
    pieces = [torch.stack([part, part + 1], dim=1)[:, 0] if draw(st.booleans()) else part for part in flat.split(sizes)]
    lab.compare(lab.call("gather_flat", {"tensors": pieces, "flat": torch.full_like(flat, 3)}, ("flat",)), "flat", flat)
    moved = flat + 1
    call = lab.call("scatter_flat", {"flat": moved, "tensors": pieces}, ("tensors",))
    for number, part in enumerate(moved.split(sizes)):
        call.results[f"tensors[{number}]"] = call.results["tensors"][number].contiguous()
        lab.compare(call, f"tensors[{number}]", part)


@check(
    "kernels",
    "S7.2",
    "order_by_complexity",
    dtypes=(*FLOATS, "int64", "uint8", "int8", "int16", "int32"),
    needs=("order_by_complexity",),
)
def order_by_complexity(lab: Lab, draw: Draw) -> None:
    """The order is ascending and stable, -0 equals 0, NaN comes last."""
    if lab.dtype.is_floating_point:
        few = draw(st.lists(numbers(lab.dtype), min_size=1, max_size=5))
        keys = draw(st.one_of(_mostly(few, lab.dtype), operands(lab.dtype, 1).map(lambda found: found[0])))
    else:
        limits = torch.iinfo(lab.dtype)
        near_powers = st.tuples(st.integers(0, limits.bits - 2), st.integers(-2, 2)).map(
            lambda pair: min(2 ** pair[0] + pair[1], limits.max)
        )
        few = draw(
            st.lists(
                st.one_of(st.integers(limits.min, limits.max), near_powers.filter(lambda key: key >= 0)), min_size=1, max_size=5
            )
        )
        few += [key - 1 for key in few if key > limits.min]  # neighbours, which a float64 may not tell apart
        keys = draw(_mostly(few, lab.dtype))
    values = keys.tolist()
    order = sorted(range(len(values)), key=lambda i: (values[i] != values[i], 0 if values[i] != values[i] else values[i]))
    call = lab.call("order_by_complexity", {"keys": keys})
    lab.compare(call, "result", torch.tensor(order, dtype=torch.int64))


@check("kernels", "S7.2", "long", dtypes=("float32", "float64", "int64"), needs=("order_by_complexity",), effort=0.025)
def long_order(lab: Lab, draw: Draw) -> None:
    """The order of many keys is ascending and stable, too."""
    generator = torch.Generator().manual_seed(draw(seeds))
    for size in lab.long_sizes:
        keys = torch.randint(draw(st.sampled_from([2, 1_000, 10 * size])), (size,), generator=generator).to(lab.dtype)
        values = keys.tolist()
        order = sorted(range(size), key=values.__getitem__)
        lab.compare(lab.call("order_by_complexity", {"keys": keys}), "result", torch.tensor(order))


def _mostly(few: list[Any], dtype: torch.dtype) -> st.SearchStrategy[Tensor]:
    """Keys of which many are equal, short and long: libraries sort short lists in another way."""
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    return st.one_of(
        st.lists(st.sampled_from(few), max_size=40),
        st.builds(
            lambda seed, size: [few[i] for i in torch.randint(len(few), (size,), generator=torch.Generator().manual_seed(seed))],
            seeds,
            st.sampled_from([17, 100, 1000]),
        ),
    ).map(lambda values: torch.tensor(values, dtype=wide).to(dtype))


@check("kernels", "S1", "long", dtypes=FLOATS, effort=0.025)
def long(lab: Lab, draw: Draw) -> None:
    """What holds for short tensors holds for long ones, place by place.

    Past every block, warp and vector: the long result is that of its pieces, which the other checks judge.
    """
    given = [draw(seeds) for _ in range(4)]
    for size in lab.long_sizes:
        _compare_with_pieces(lab, given, size)


def _compare_with_pieces(lab: Lab, given: list[int], size: int, piece: int = 9_973) -> None:
    make = [bulk(lab.dtype, "tame", seed, size) for seed in given]
    wide = make[3].double() if lab.dtype is torch.float64 else make[3].float()
    cases: list[tuple[str, dict[str, Any]]] = [
        *((f"{name}_", {"x": make[0], "y": make[1]}) for name in _BINARY),
        ("add_scaled_", {"x": make[0], "y": make[1], "factor": 0.3}),
        ("divide_", {"x": make[0], "divisor": 3.0}),
        ("combine_ring_", {"x": make[0], "left": make[1], "right": make[2], "weight": make[3]}),
        ("async_average_", {"x": make[0], "reduced": wide, "snapshot": make[1], "nranks": 3}),
        ("update_momentum_", {"m": make[0], "grad": make[1], "beta1": 0.9}),
    ]
    has = partial(hasattr, lab.target.kernels)
    for method, arguments in [case for case in cases if has(case[0])]:
        first = next(iter(arguments))
        whole = lab.call(method, arguments, (first,))
        parts = []
        for start in range(0, size, piece):
            part = {name: value[start : start + piece] if isinstance(value, Tensor) else value for name, value in arguments.items()}
            parts.append(lab.call(method, part, (first,)).results[first])
        lab.compare(whole, first, torch.cat(parts))
    for chunks in [torch.stack(make[:3])] if has("reduce_chunks_") else []:
        _check_long_reduction(lab, chunks, piece)


def _check_long_reduction(lab: Lab, chunks: Tensor, piece: int) -> None:
    whole = lab.call("reduce_chunks_", {"x": chunks.view(-1), "num_chunks": 3, "target_chunk": 1, "average": True}, ("x",))
    wanted, size = chunks.clone(), chunks.shape[1]
    for start in range(0, size, piece):
        part_of = chunks[:, start : start + piece]
        arguments = {"x": part_of.reshape(-1), "num_chunks": 3, "target_chunk": 1, "average": True}
        wanted[1, start : start + piece] = lab.call("reduce_chunks_", arguments, ("x",)).results["x"].view(3, -1)[1]
    lab.compare(whole, "x", wanted.view(-1))


def _nearly(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).contiguous().clone()

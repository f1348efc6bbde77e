"""Kernels other than the codec compared with scalar implementations (S1, S2.3, S3, S5.5, S7.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.case import Case
from bagua_ref.conformance.cases.strategies import (
    FLOATS,
    Draw,
    bulk,
    chunked,
    dtype_named,
    numbers,
    operands,
    seeds,
    tensors,
)
from bagua_ref.conformance.cases.table import INTEGERS, rows_of
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected import kernels_scalar
from bagua_ref.conformance.expected.algorithms_numpy import wide
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


def _two(lab: Lab, draw: Draw) -> dict[str, Any]:
    return dict(zip("xy", draw(operands(lab.dtype, 2)), strict=True))


def _add_scaled(lab: Lab, draw: Draw) -> dict[str, Any]:
    factor = draw(_factors)
    given = _two(lab, draw)
    if draw(st.booleans()):
        # what is left shows whether the product was rounded
        given["x"] = _nearly(-factor * given["y"].double(), lab.dtype)
    return {**given, "factor": factor}


def _divide(lab: Lab, draw: Draw) -> dict[str, Any]:
    divisor = draw(_divisors)
    return {"x": draw(operands(lab.dtype, 1))[0], "divisor": divisor}


def _combine_ring(lab: Lab, draw: Draw) -> dict[str, Any]:
    x, *others = draw(operands(lab.dtype, 4))
    if draw(st.booleans()):
        others = [_nearly(x.double(), lab.dtype) for _ in others]
    return {"x": x, **dict(zip(("left", "right", "weight"), others, strict=True))}


def _async_average(lab: Lab, draw: Draw) -> dict[str, Any]:
    nranks = draw(st.integers(1, 1025))
    x, snapshot = draw(operands(lab.dtype, 2))
    reduced = draw(tensors(wide(lab.dtype), x.numel()))
    if draw(st.booleans()):
        snapshot = _nearly(reduced.double() / nranks, lab.dtype)
        x = _nearly(snapshot.double() * draw(st.sampled_from([0.0, 1e-3, 1.0])), lab.dtype)
    return {"x": x, "reduced": reduced, "snapshot": snapshot, "nranks": nranks}


def _update_momentum(lab: Lab, draw: Draw) -> dict[str, Any]:
    beta1 = draw(st.one_of(st.sampled_from([0.0, 0.9, 0.99, 0.1, 1.0]), st.floats(0, 1)))
    m, grad = draw(operands(lab.dtype, 2))
    if beta1 < 1 and draw(st.booleans()):
        grad = _nearly(-beta1 / (1 - beta1) * m.double(), lab.dtype)
    return {"m": m, "grad": grad, "beta1": beta1}


_ELEMENTWISE: dict[str, tuple[str, Callable[[Lab, Draw], dict[str, Any]], str]] = {
    "add": ("S1", _two, "x + y is rounded once."),
    "subtract": ("S1", _two, "x - y is rounded once."),
    "average": ("S3.4", _two, "The sum is rounded, then halved, even where it overflows."),
    "add_scaled": (
        "S1",
        _add_scaled,
        "The product is rounded, then the sum; there is no fused multiply-add.",
    ),
    "divide": ("S3.3", _divide, "x is divided, not multiplied by a reciprocal."),
    "combine_ring": (
        "S3.5",
        _combine_ring,
        "x is rounded to its dtype after each of the three steps.",
    ),
    "async_average": (
        "S3.6",
        _async_average,
        "The change reduced / n - snapshot is computed in float32.",
    ),
    "update_momentum": ("S5.5", _update_momentum, "Both products are rounded, then their sum."),
}
"""Kernels of which each element depends on its own place alone: clause, arguments and sentence of
their checks.
"""


def _expected(lab: Lab, name: str, arguments: dict[str, Any]) -> Tensor:
    """Return the first argument of an elementwise kernel after a call."""
    scalar = getattr(kernels_scalar, "quotient" if name == "divide" else name)
    tensors = [value.tolist() for value in arguments.values() if isinstance(value, Tensor)]
    others = [value for value in arguments.values() if not isinstance(value, Tensor)]
    found = [scalar(lab.dtype_name, *row, *others) for row in zip(*tensors, strict=True)]
    return torch.tensor(found, dtype=torch.float64).to(lab.dtype)


def _elementwise(lab: Lab, draw: Draw, name: str) -> None:
    """Compare the first argument after a call, element by element."""
    arguments = _ELEMENTWISE[name][1](lab, draw)
    wanted, first = _expected(lab, name, arguments), next(iter(arguments))

    def judge(start: int, end: int) -> None:
        part = {k: x[start:end] if isinstance(x, Tensor) else x for k, x in arguments.items()}
        lab.compare(lab.call(f"{name}_", part, (first,)), first, wanted[start:end])

    smallest(judge, wanted.numel())


def _rows(lab: Lab, name: str) -> list[Case]:
    """Return a kernel's rows of the case table, of the dtype, or of all that the target has."""
    dtypes = [lab.dtype_name] if lab.dtype_name else lab.dtypes((*FLOATS, *INTEGERS))
    cases = [case for dtype in dtypes for case in rows_of("kernels", dtype)]
    return [case for case in cases if case.operation == f"kernels/{name}"]


def _walk(lab: Lab, name: str) -> None:
    """Judge the rows of a kernel that changes its first argument, x."""
    for case in _rows(lab, name):
        call = lab.call(f"{name}_", {**case.inputs, **case.parameters}, ("x",))
        lab.compare(call, "x", case.outputs["x"])


for _name, (_clause, _, _sentence) in _ELEMENTWISE.items():
    check(
        _clause,
        _name,
        dtypes=FLOATS,
        needs=(f"{_name}_",),
        sentence=_sentence,
        walk=partial(_walk, name=_name),
    )(partial(_elementwise, name=_name))


@check(
    "S3.7",
    "reduce_chunks",
    dtypes=FLOATS,
    needs=("reduce_chunks_",),
    effort=1.5,
    walk=partial(_walk, name="reduce_chunks"),
)
def reduce_chunks(lab: Lab, draw: Draw) -> None:
    """Chunks are added in order, starting from +0, and only one chunk changes."""
    x, num_chunks = draw(chunked(lab.dtype))
    size = x.numel() // num_chunks
    if num_chunks > 2 and draw(st.booleans()):
        x[-size or x.numel() :] = _nearly(
            -x[: x.numel() - size].view(num_chunks - 1, size).double().sum(0), lab.dtype
        )
    mean = draw(st.booleans())
    if mean and lab.dtype.itemsize == 2 and draw(st.booleans()):
        num_chunks, size = draw(st.sampled_from([3, 6, 7, 11, 13])), 64
        x = _means_near_ties(lab.dtype, num_chunks, size, draw(seeds))
    target = draw(st.integers(0, num_chunks - 1))
    _check_reduction(lab, x.view(num_chunks, size), target, mean)


@check(
    "S3.7",
    "many_chunks",
    dtypes=("float16", "bfloat16"),
    needs=("reduce_chunks_",),
    effort=0.05,
)
def many_chunks(lab: Lab, draw: Draw) -> None:
    """A mean is divided by the number of chunks, also where their dtype has no such number, as
    bfloat16 has no 259.
    """
    num_chunks = round(2 / torch.finfo(lab.dtype).eps) + draw(st.sampled_from([1, 3, 7]))
    x = _means_near_ties(lab.dtype, num_chunks, 16, draw(seeds)).view(num_chunks, 16)
    _check_reduction(lab, x, draw(st.integers(0, num_chunks - 1)), True)


def _means_near_ties(dtype: torch.dtype, num_chunks: int, size: int, seed: int) -> Tensor:
    """Chunks whose sums are num_chunks times a number halfway between two of a 16-bit dtype, or
    float32's next to that.

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


def _reduced(lab: Lab, chunks: Tensor, target: int, mean: bool) -> Tensor:
    """Return chunks of which one is replaced by the sum or mean of all."""
    wanted = chunks.clone()
    columns = [
        kernels_scalar.reduce_in_order(lab.dtype_name, column, mean) for column in chunks.T.tolist()
    ]
    wanted[target] = torch.tensor(columns, dtype=torch.float64).to(lab.dtype)
    return wanted


def _check_reduction(lab: Lab, chunks: Tensor, target: int, mean: bool) -> None:
    wanted = _reduced(lab, chunks, target, mean)

    def judge(start: int, end: int) -> None:
        arguments = {
            "x": chunks[:, start:end].contiguous().view(-1),
            "num_chunks": len(chunks),
            "target_chunk": target,
            "average": mean,
        }
        call = lab.call("reduce_chunks_", arguments, ("x",))
        lab.compare(call, "x", wanted[:, start:end].reshape(-1))

    smallest(judge, chunks.shape[1])


_MOVED = (*FLOATS, *INTEGERS, "bool", "complex64")


def _pieces(lab: Lab, draw: Draw) -> tuple[list[Tensor], torch.dtype]:
    """Draw tensors of one dtype, of any shape, some of them transposed or with gaps; return them
    and the dtype.

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
        whole = (
            torch.arange(start, start + math.prod(shape) * 2, dtype=torch.float64)
            .to(dtype)
            .view(*shape, 2)
        )
        tensor = (
            whole[..., draw(st.integers(0, 1))]
            if draw(st.booleans())
            else whole[..., 0].contiguous()
        )
        found.append(tensor.permute(draw(st.permutations(range(len(shape))))))
    return found, dtype if found else torch.float32


def _gather(lab: Lab, pieces: list[Tensor], wanted: Tensor) -> None:
    lab.compare(
        lab.call("gather_flat", {"tensors": pieces, "flat": torch.full_like(wanted, 3)}, ("flat",)),
        "flat",
        wanted,
    )


def _scatter(lab: Lab, flat: Tensor, pieces: list[Tensor]) -> None:
    call = lab.call("scatter_flat", {"flat": flat, "tensors": pieces}, ("tensors",))
    for number, (piece, part) in enumerate(
        zip(pieces, flat.split([piece.numel() for piece in pieces]), strict=True)
    ):
        call.results[f"tensors[{number}]"] = call.results["tensors"][number].contiguous()
        lab.compare(call, f"tensors[{number}]", part.view(piece.shape))


def _walk_gathering(lab: Lab) -> None:
    for case in _rows(lab, "gather_flat"):
        _gather(lab, [*case.inputs.values()], case.outputs["flat"])


def _walk_scattering(lab: Lab) -> None:
    for case in _rows(lab, "scatter_flat"):
        _scatter(lab, case.inputs["flat"], [*case.outputs.values()])


@check("S2.3", "gather_flat", needs=("gather_flat",), effort=3, walk=_walk_gathering)
def gather_flat(lab: Lab, draw: Draw) -> None:
    """Tensors of any strides are copied one after another in row-major order."""
    pieces, dtype = _pieces(lab, draw)
    _gather(
        lab,
        pieces,
        torch.tensor(
            [value for piece in pieces for value in piece.reshape(-1).tolist()], dtype=dtype
        ),
    )


@check("S2.3", "scatter_flat", needs=("scatter_flat",), effort=3, walk=_walk_scattering)
def scatter_flat(lab: Lab, draw: Draw) -> None:
    """Flat elements are copied into tensors of any strides in row-major order."""
    pieces, dtype = _pieces(lab, draw)
    flat = (
        torch.arange(sum(piece.numel() for piece in pieces), dtype=torch.float64)
        .remainder(200)
        .to(dtype)
    )
    _scatter(lab, flat, pieces)


@check("S2.3", "long", needs=("gather_flat", "scatter_flat"), effort=0.1)
def long_flat(lab: Lab, draw: Draw) -> None:
    """Long tensors are copied as short ones are, place by place."""
    dtype = dtype_named(draw(st.sampled_from(lab.dtypes(_MOVED))))
    sizes = draw(st.permutations([*lab.long_sizes, 9_973, 3]))
    flat = torch.arange(sum(sizes)).remainder(251).to(dtype)
    pieces = [
        torch.stack([part, part.flip(0)], dim=1)[:, 0] if draw(st.booleans()) else part
        for part in flat.split(sizes)
    ]
    _gather(lab, pieces, flat)
    _scatter(lab, flat.roll(1), pieces)


_KEYS = (*FLOATS, *INTEGERS)


def _walk_orders(lab: Lab) -> None:
    for case in _rows(lab, "order_by_complexity"):
        _check_order(lab, case.inputs["keys"])


@check(
    "S7.2",
    "order_by_complexity",
    dtypes=_KEYS,
    needs=("order_by_complexity",),
    walk=_walk_orders,
)
def order_by_complexity(lab: Lab, draw: Draw) -> None:
    """The order is ascending and stable, -0 equals 0, NaN comes last."""
    if lab.dtype.is_floating_point:
        few = draw(st.lists(numbers(lab.dtype), min_size=1, max_size=5))
        keys = draw(
            st.one_of(_mostly(few, lab.dtype), operands(lab.dtype, 1).map(lambda found: found[0]))
        )
    else:
        limits = torch.iinfo(lab.dtype)
        # often large ones
        powers = st.integers(0, limits.bits - 2) | st.integers(
            limits.bits * 53 // 64, limits.bits - 2
        )
        near_powers = st.tuples(powers, st.integers(-2, 2)).map(
            lambda pair: min(2 ** pair[0] + pair[1], limits.max)
        )
        few = draw(
            st.lists(
                st.one_of(
                    st.integers(limits.min, limits.max), near_powers.filter(lambda key: key >= 0)
                ),
                min_size=3,
                max_size=6,
            )
        )
        # neighbours, which a float64 may not tell apart
        few += [key - 1 for key in few if key > limits.min]
        keys = draw(_mostly(few, lab.dtype))
    _check_order(lab, keys)


def _check_order(lab: Lab, keys: Tensor) -> None:
    order = kernels_scalar.ascending(keys.tolist())
    lab.compare(
        lab.call("order_by_complexity", {"keys": keys}),
        "result",
        torch.tensor(order, dtype=torch.int64),
    )


@check(
    "S7.2",
    "long",
    dtypes=("float32", "float64", "int64"),
    needs=("order_by_complexity",),
    effort=0.025,
)
def long_order(lab: Lab, draw: Draw) -> None:
    """The order of many keys is ascending and stable, too."""
    generator = torch.Generator().manual_seed(draw(seeds))
    for size in lab.long_sizes:
        keys = torch.randint(
            draw(st.sampled_from([2, 1_000, 10 * size])), (size,), generator=generator
        ).to(lab.dtype)
        _check_order(lab, keys)


def _mostly(few: list[Any], dtype: torch.dtype) -> st.SearchStrategy[Tensor]:
    """Keys of which many are equal, short and long: libraries sort short lists in another way."""
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    return st.one_of(
        st.lists(st.sampled_from(few), max_size=40),
        st.builds(
            lambda seed, size: [
                few[i]
                for i in torch.randint(
                    len(few), (size,), generator=torch.Generator().manual_seed(seed)
                )
            ],
            seeds,
            st.sampled_from([17, 100, 1000]),
        ),
    ).map(lambda values: torch.tensor(values, dtype=wide).to(dtype))


_PERIOD = 997
"""Long inputs repeat so many elements: a prime, so that what belongs to another block differs."""


@check("S1", "long", dtypes=FLOATS, effort=0.025)
def long(lab: Lab, draw: Draw) -> None:
    """What holds for short tensors holds for long ones, place by place."""
    x, y, z, other = (bulk(lab.dtype, "tame", draw(seeds), _PERIOD) for _ in range(4))
    two, target = {"x": x, "y": y}, draw(st.integers(0, 2))
    average = {"x": x, "reduced": other.to(wide(lab.dtype)), "snapshot": y, "nranks": 3}
    cases: dict[str, dict[str, Any]] = {
        **dict.fromkeys(("add", "subtract", "average"), two),
        "add_scaled": {**two, "factor": 0.3},
        "divide": {"x": x, "divisor": 3.0},
        "combine_ring": {"x": x, "left": y, "right": z, "weight": other},
        "async_average": average,
        "update_momentum": {"m": x, "grad": y, "beta1": 0.9},
        "reduce_chunks": {
            "x": torch.stack([x, y, z]),
            "num_chunks": 3,
            "target_chunk": target,
            "average": True,
        },
    }
    for name, arguments in cases.items():
        if not hasattr(lab.target.kernels, f"{name}_"):
            continue
        first = next(iter(arguments))
        if name == "reduce_chunks":
            wanted = _reduced(lab, arguments[first], target, True)
        else:
            wanted = _expected(lab, name, arguments)
        for size in lab.long_sizes:
            long = {
                key: _repeated(value, size) if isinstance(value, Tensor) else value
                for key, value in arguments.items()
            }
            lab.compare(lab.call(f"{name}_", long, (first,)), first, _repeated(wanted, size))


def _repeated(x: Tensor, size: int) -> Tensor:
    """Return each row, repeated up to so many elements, as one tensor."""
    return torch.cat([row.repeat(-(-size // len(row)))[:size] for row in x.view(-1, x.shape[-1])])


def _nearly(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).contiguous().clone()

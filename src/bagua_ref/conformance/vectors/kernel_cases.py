"""Cases of the kernels other than the codec: S1, S2.3, S3.4 to S3.7, S5.5, S7.2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends import get_backend
from bagua_ref.backends.base import FLOATS
from bagua_ref.conformance.vectors.case import Case, canonical, case_id, name_of, seed_of
from bagua_ref.conformance.vectors.numbers import KINDS, Numbers

__all__ = ["kernel_cases"]

_SIZE = 33

_ELEMENTWISE: tuple[tuple[str, str, tuple[str, ...], tuple[dict[str, Any], ...]], ...] = (
    ("add", "S1", ("y",), ({},)),
    ("subtract", "S1", ("y",), ({},)),
    ("add_scaled", "S3.5", ("y",), ({"factor": 1 / 3}, {"factor": -5 / 3}, {"factor": 0.1})),
    ("average", "S3.4", ("y",), ({},)),
    ("divide", "S3.3", (), ({"divisor": 3.0}, {"divisor": 1.5}, {"divisor": 7.0})),
    ("combine_ring", "S3.5", ("left", "right", "weight"), ({},)),
    ("async_average", "S3.6", ("reduced", "snapshot"), ({"nranks": 1}, {"nranks": 3}, {"nranks": 8})),
    ("update_momentum", "S5.5", ("grad",), ({"beta1": 0.9}, {"beta1": 0.99}, {"beta1": 0.0}, {"beta1": 1.0})),
)
"""Operation, clause, what it reads beside x, and the parameters it is tried with. ``x`` is m for update_momentum."""

_REDUCTIONS = ((1, 5), (2, 9), (3, 8), (4, 1), (5, 33), (8, 4), (16, 33), (64, 1))
"""Numbers of chunks and their sizes: also such that a library would add pairwise."""


def kernel_cases() -> Iterator[Case]:
    """Yield every case of suite ``kernels``."""
    for dtype in FLOATS:
        for kind, (flag, draw) in KINDS.items():
            for operation, clause, others, choices in _ELEMENTWISE:
                for place, parameters in enumerate(choices):
                    name = f"{kind}-{place}" if len(choices) > 1 else kind
                    numbers = Numbers(seed_of(case_id("kernels", operation, name_of(dtype), name)))
                    inputs = {key: draw(numbers, _SIZE, dtype) for key in ("x", *others)}
                    yield _elementwise(operation, clause, dtype, name, inputs, parameters, flag)
        for operation, clause, others, choices in _ELEMENTWISE:
            nothing = {key: torch.empty(0, dtype=dtype) for key in ("x", *others)}
            yield _elementwise(operation, clause, dtype, "empty", nothing, choices[0], "edge")
        yield from _reductions(dtype)
        yield from _movements(dtype)
        yield from _orders(dtype)
    for dtype in (torch.uint8, torch.int64):
        yield from _movements(dtype)
        yield from _orders(dtype)


def _elementwise(
    operation: str, clause: str, dtype: torch.dtype, name: str, inputs: dict[str, Tensor], parameters: dict[str, Any], flag: str
) -> Case:
    if operation == "async_average" and dtype is not torch.float64:
        inputs["reduced"] = inputs["reduced"].float()
    inputs = {key: canonical(value) for key, value in inputs.items()}
    x = inputs["x"].clone()
    others = [value for key, value in inputs.items() if key != "x"]
    getattr(get_backend("reference"), f"{operation}_")(x, *others, **parameters)
    return Case("kernels", operation, clause, name_of(dtype), name, inputs, {"x": canonical(x)}, dict(parameters), (flag,))


def _reductions(dtype: torch.dtype) -> Iterator[Case]:
    """Yield chunk reductions (S3.7)."""
    rows = [("plain", *shape) for shape in _REDUCTIONS] + [(kind, 3, 9) for kind in KINDS if kind != "plain"] + [("plain", 4, 0)]
    for kind, num_chunks, size in rows:
        for average in (False, True):
            name = f"{kind}-{num_chunks}x{size}-{'mean' if average else 'sum'}"
            numbers = Numbers(seed_of(case_id("kernels", "reduce_chunks", name_of(dtype), name)))
            flag, draw = KINDS[kind]
            x = canonical(draw(numbers, num_chunks * size, dtype))
            result, target = x.clone(), numbers.below(num_chunks)
            get_backend("reference").reduce_chunks_(result, num_chunks, target, average)
            parameters = {"num_chunks": num_chunks, "target_chunk": target, "average": average}
            flags = (flag if size else "edge",)
            outputs = {"x": canonical(result)}
            yield Case("kernels", "reduce_chunks", "S3.7", name_of(dtype), name, {"x": x}, outputs, parameters, flags)


def _movements(dtype: torch.dtype) -> Iterator[Case]:
    """Yield gathering into and scattering out of a flat tensor (S2.3)."""
    for name, shapes in (("some", [[2, 3], [], [4], [1, 2, 2]]), ("with-empty", [[0], [3], [2, 0]]), ("none", [])):
        numbers = Numbers(seed_of(case_id("kernels", "gather_flat", name_of(dtype), name)))
        parts = {f"t{place}": _any(numbers, shape, dtype) for place, shape in enumerate(shapes)}
        flat = torch.empty(sum(part.numel() for part in parts.values()), dtype=dtype)
        get_backend("reference").gather_flat(list(parts.values()), flat)
        flags = ("valid",) if name == "some" else ("edge",)
        yield Case("kernels", "gather_flat", "S2.3", name_of(dtype), name, parts, {"flat": flat}, {}, flags)
        if parts:
            parameters = {"shapes": shapes}
            yield Case("kernels", "scatter_flat", "S2.3", name_of(dtype), name, {"flat": flat}, parts, parameters, flags)


def _orders(dtype: torch.dtype) -> Iterator[Case]:
    """Yield stable orders (S7.2)."""
    for kind in ("plain", "ties", "special", "empty") if dtype.is_floating_point else ("ties", "empty"):
        numbers = Numbers(seed_of(case_id("kernels", "order_by_complexity", name_of(dtype), kind)))
        if kind in ("plain", "special"):
            keys = canonical(KINDS[kind][1](numbers, 40, dtype))
        else:
            keys = torch.tensor([numbers.below(7) for _ in range(40 if kind == "ties" else 0)]).to(dtype)
        order = get_backend("reference").order_by_complexity(keys)
        flags = ("edge",) if kind in ("special", "empty") else ("valid",)
        yield Case("kernels", "order_by_complexity", "S7.2", name_of(dtype), kind, {"keys": keys}, {"order": order}, {}, flags)


def _any(numbers: Numbers, shape: list[int], dtype: torch.dtype) -> Tensor:
    values = torch.tensor([numbers.below(200) for _ in range(torch.Size(shape).numel())])
    return (values / 8).to(dtype).view(shape) if dtype.is_floating_point else values.to(dtype).view(shape)

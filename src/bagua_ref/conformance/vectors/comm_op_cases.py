"""Cases of whole bucket operations over 1 to 8 ranks, one row of every tensor for each rank (S3.1 to S3.6, S5.5)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bagua_ref.backends import get_backend
from bagua_ref.backends.base import FLOATS
from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.conformance.vectors.case import Case, canonical, case_id, name_of, seed_of
from bagua_ref.conformance.vectors.numbers import KINDS, Numbers
from bagua_ref.conformance.vectors.world import averaged_async, averaged_decentralized, combined_on_ring, reduced

__all__ = ["comm_op_cases"]

_Nodes: TypeAlias = "tuple[int, ...]"

_SOME_WORLDS: tuple[_Nodes, ...] = ((1,), (3,), (8,), (3, 1), (1, 3, 2))

_WORLDS: tuple[_Nodes, ...] = ((1,), (2,), (3,), (4,), (8,), (1, 1), (3, 1), (1, 3, 2), (4, 4), (2, 1, 1, 4))
"""How many ranks each node has."""


def comm_op_cases() -> Iterator[Case]:
    """Yield every case of suite ``comm_ops``."""
    for dtype in COMPRESSIBLE:
        yield from _low_precision(dtype)
        yield from _ring(dtype)
        yield from _momenta(dtype)
    for dtype in FLOATS:
        yield from _scatter_gather(dtype)
        yield from _full_precision(dtype)
        yield from _decentralized(dtype)
        yield from _async(dtype)


def _numbers(operation: str, dtype: torch.dtype, name: str) -> Numbers:
    return Numbers(seed_of(case_id("comm_ops", operation, name_of(dtype), name)))


def _drawn(numbers: Numbers, kind: str, ranks: int, size: int, dtype: torch.dtype) -> Tensor:
    return canonical(KINDS[kind][1](numbers, ranks * size, dtype)).view(ranks, size)


def _world(nodes: tuple[int, ...], hierarchical: bool, **more: Any) -> dict[str, Any]:
    return {"nodes": list(nodes), "hierarchical": hierarchical, **more}


def _name(nodes: tuple[int, ...], hierarchical: bool, *more: str) -> str:
    return "-".join(["+".join(map(str, nodes)), "hierarchical" if hierarchical else "flat", *more])


def _worlds() -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield worlds of one node, flat, and of several, hierarchical; one node can be that, too, and then L is 1."""
    yield from ((nodes, len(nodes) > 1) for nodes in _WORLDS)
    yield (3,), True


def _low_precision(dtype: torch.dtype) -> Iterator[Case]:
    """Yield S3.2, and S3.3 with it between leaders."""
    rows = [(nodes, hierarchical, "plain") for nodes, hierarchical in _worlds()]
    rows += [((3,), False, kind) for kind in KINDS if kind != "plain"] + [((2, 1), True, kind) for kind in ("special", "huge")]
    for nodes, hierarchical, kind in rows:
        for average in (True, False):
            name = _name(nodes, hierarchical, kind, "mean" if average else "sum")
            n = sum(nodes)
            size = 7 * math.lcm(n, len(nodes)) if hierarchical else 11 * n
            x = _drawn(_numbers("centralized_low_precision", dtype, name), kind, n, size, dtype)
            result = reduced(nodes, x, hierarchical=hierarchical, average=average, scattergather=True, compression="MinMaxUInt8")
            flag = "poison" if result.isnan().any() else KINDS[kind][0]
            yield Case(
                "comm_ops", "centralized_low_precision", "S3.3" if hierarchical else "S3.2", name_of(dtype), name,
                {"x": x}, {"x": result}, _world(nodes, hierarchical, average=average), (flag,),
            )  # fmt: skip


def _scatter_gather(dtype: torch.dtype) -> Iterator[Case]:
    """Yield S3.1 in rank order."""
    rows: list[tuple[_Nodes, str]] = [(nodes, "plain") for nodes in ((1,), (2,), (3,), (5,), (8,))]
    rows += [((3,), kind) for kind in KINDS if kind != "plain"]
    for nodes, kind in rows:
        for average in (True, False):
            name = _name(nodes, False, kind, "mean" if average else "sum")
            n = sum(nodes)
            x = _drawn(_numbers("centralized_scatter_gather", dtype, name), kind, n, 5 * n, dtype)
            result = reduced(nodes, x, hierarchical=False, average=average, scattergather=True)
            yield Case(
                "comm_ops", "centralized_scatter_gather", "S3.1", name_of(dtype), name,
                {"x": x}, {"x": result}, _world(nodes, False, average=average), (KINDS[kind][0],),
            )  # fmt: skip


def _full_precision(dtype: torch.dtype) -> Iterator[Case]:
    """Yield S3.1 and S3.3, whose sums have no fixed order: within SUM, but exact where every order gives the same."""
    for nodes in _SOME_WORLDS:
        n = sum(nodes)
        for average in (True, False):
            for hierarchical in sorted({False, len(nodes) > 1}):
                name = _name(nodes, hierarchical, "any-order", "mean" if average else "sum")
                x = _drawn(_numbers("centralized_full_precision", dtype, name), "plain", n, 9, dtype)
                result = reduced(nodes, x, hierarchical=hierarchical, average=average)
                total = x.double().abs().sum(0) / (n if average else 1)
                yield Case(
                    "comm_ops", "centralized_full_precision", "S3.3" if hierarchical else "S3.1", name_of(dtype), name,
                    {"x": x}, {"x": result}, _world(nodes, hierarchical, average=average), ("valid",),
                    # Hierarchical sums are rounded once more on the way.
                    f"SUM({n + hierarchical})", {"x": total.expand(n, -1).contiguous()},
                )  # fmt: skip
        name = _name(nodes, False, "exact", "sum")
        numbers = _numbers("centralized_full_precision", dtype, name)
        x = torch.stack([numbers.eighths(9, dtype) for _ in range(n)])
        yield Case(
            "comm_ops", "centralized_full_precision", "S3.1", name_of(dtype), name, {"x": x},
            {"x": reduced(nodes, x, hierarchical=False, average=False)}, _world(nodes, False, average=False),
        )  # fmt: skip


def _decentralized(dtype: torch.dtype) -> Iterator[Case]:
    """Yield S3.4: one execution with every number of steps before it, and several with training between them."""
    worlds: list[tuple[_Nodes, bool]] = [((2,), False), ((4,), False), ((6,), False), ((8,), False)]
    worlds += [((3, 1), True), ((1, 1), True), ((2, 1, 1, 4), True), ((1, 2), True)]
    rows = [(nodes, hierarchical, "plain", 4) for nodes, hierarchical in worlds]
    rows += [((4,), False, kind, 2) for kind in ("huge", "special", "denormal")]
    for nodes, hierarchical, kind, steps in rows:
        name = _name(nodes, hierarchical, kind)
        n = sum(nodes)
        numbers = _numbers("decentralized_shift_one", dtype, name)
        x, updates = _drawn(numbers, kind, n, 6, dtype), _updates(numbers, steps, n, 6, dtype)
        result = averaged_decentralized(nodes, x, updates, hierarchical=hierarchical, mode="shift_one")
        yield Case(
            "comm_ops", "decentralized_shift_one", "S3.4", name_of(dtype), name,
            {"x": x, "updates": updates}, {"x": result}, _world(nodes, hierarchical), (KINDS[kind][0],),
        )  # fmt: skip
    for nodes in _SOME_WORLDS:
        n = sum(nodes)
        for hierarchical in sorted({False, len(nodes) > 1}):
            name = _name(nodes, hierarchical, "any-order")
            numbers = _numbers("decentralized_all", dtype, name)
            x, updates = _drawn(numbers, "plain", n, 6, dtype), torch.zeros(1, n, 6, dtype=dtype)
            result = averaged_decentralized(nodes, x, updates, hierarchical=hierarchical, mode="all")
            yield Case(
                "comm_ops", "decentralized_all", "S3.4", name_of(dtype), name, {"x": x}, {"x": result[0]},
                _world(nodes, hierarchical), ("valid",), f"SUM({n + hierarchical})",
                {"x": (x.double().abs().sum(0) / n).expand(n, -1).contiguous()},
            )  # fmt: skip


def _ring(dtype: torch.dtype) -> Iterator[Case]:
    """Yield S3.5 over several steps, with training between them."""
    rows: list[tuple[_Nodes, bool, str, int]] = [(nodes, False, "plain", 3) for nodes in ((1,), (2,), (3,), (5,), (8,))]
    rows += [(nodes, True, "plain", 3) for nodes in ((2,), (3, 1), (1, 3, 2), (2, 1, 1, 4))]
    rows += [((3,), False, kind, 2) for kind in ("wide", "denormal", "huge", "special")]
    for nodes, hierarchical, kind, steps in rows:
        name = _name(nodes, hierarchical, kind)
        n = sum(nodes)
        numbers = _numbers("low_precision_decentralized", dtype, name)
        # Wrapping makes all ranks' weights equal; they differ from then on.
        x = _drawn(numbers, kind, 1, 37, dtype).repeat(n, 1)
        updates = _updates(numbers, steps, n, 37, dtype)
        outputs = combined_on_ring(nodes, x, updates, hierarchical=hierarchical)
        flag = "poison" if outputs["x"].isnan().any() else KINDS[kind][0]
        yield Case(
            "comm_ops", "low_precision_decentralized", "S3.5", name_of(dtype), name,
            {"x": x, "updates": updates}, outputs, _world(nodes, hierarchical), (flag,),
        )  # fmt: skip


def _async(dtype: torch.dtype) -> Iterator[Case]:
    """Yield S3.6 on numbers whose sum every order gives alike."""
    for n in (1, 2, 3, 5, 8):
        numbers = _numbers("async_average", dtype, str(n))
        x = torch.stack([numbers.eighths(9, dtype) for _ in range(n)])
        updates = torch.stack([numbers.uniform(9, dtype, -0.1, 0.1) for _ in range(n)])
        result = averaged_async(x, updates)
        yield Case(
            "comm_ops", "async_average", "S3.6", name_of(dtype), str(n),
            {"x": x, "updates": updates}, {"x": result}, _world((n,), False),
        )  # fmt: skip


def _momenta(dtype: torch.dtype) -> Iterator[Case]:
    """Yield QAdam's operation after the warm-up: momentum from the local gradient, then S3.2 (S5.5)."""
    for nodes, hierarchical in (((1,), False), ((3,), False), ((4,), False), ((3, 1), True), ((1, 3, 2), True)):
        for beta1 in (0.9, 0.5):
            name = _name(nodes, hierarchical, str(beta1))
            n = sum(nodes)
            numbers = _numbers("qadam_momentum", dtype, name)
            size = 3 * math.lcm(n, len(nodes))
            momentum, gradients = _drawn(numbers, "plain", 1, size, dtype).view(-1), _drawn(numbers, "plain", n, size, dtype)
            x = momentum.repeat(n, 1)
            for rank in range(n):
                get_backend("reference").update_momentum_(x[rank], gradients[rank], beta1)
            result = reduced(nodes, x, hierarchical=hierarchical, average=True, scattergather=True, compression="MinMaxUInt8")
            yield Case(
                "comm_ops", "qadam_momentum", "S5.5", name_of(dtype), name,
                {"m": momentum, "grad": gradients}, {"m": result}, _world(nodes, hierarchical, beta1=beta1),
            )  # fmt: skip


def _updates(numbers: Numbers, steps: int, ranks: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return what training adds to each rank's weights before each step."""
    return numbers.uniform(steps * ranks * size, dtype, -0.25, 0.25).view(steps, ranks, size)

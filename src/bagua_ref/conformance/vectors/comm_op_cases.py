"""Cases of bucket operations (S3.1 to S3.6, S5.5, S13) and collectives (S3.9): a row of every
tensor for each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bagua_ref.backends.base import FLOATS
from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.conformance.expected.decentralized_numpy import doublings
from bagua_ref.conformance.vectors.case import KINDS, Case, Numbers, numbers_of, tensor_of

__all__ = ["collective_cases", "comm_op_cases", "graph_cases", "peer_cases"]

_Nodes: TypeAlias = "tuple[int, ...]"

_SOME_WORLDS: tuple[_Nodes, ...] = ((1,), (3,), (8,), (3, 1), (1, 3, 2))

_WORLDS: tuple[_Nodes, ...] = (
    (1,),
    (2,),
    (3,),
    (4,),
    (8,),
    (1, 1),
    (3, 1),
    (1, 3, 2),
    (4, 4),
    (2, 1, 1, 4),
)
"""How many ranks each node has."""

_GRAPH_WORLDS: tuple[_Nodes, ...] = (
    (1,),
    (2,),
    (3,),
    (4,),
    (5,),
    (8,),
    (3, 1),
    (1, 3, 2),
    (2, 1, 1, 4),
)

_INTEGERS = (torch.uint8, torch.int64)
_CHUNK = 3
"""Elements that a rank sends to each of the others in a collective."""

_GRAPHS = {
    "one_peer_exponential": "S13.1",
    "hypercube": "S13.2",
    "ring": "S13.3",
    "exponential": "S13.3",
}


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


def _world(nodes: _Nodes, hierarchical: bool, **more: Any) -> dict[str, Any]:
    return {"nodes": list(nodes), "hierarchical": hierarchical, **more}


def _name(nodes: _Nodes, hierarchical: bool, *more: str) -> str:
    return "-".join(["+".join(map(str, nodes)), "hierarchical" if hierarchical else "flat", *more])


def _case(
    operation: str,
    clause: str,
    dtype: torch.dtype,
    nodes: _Nodes,
    hierarchical: bool,
    kind: str,
    size: int,
    steps: int = 0,
    name: str = "",
    suite: str = "comm_ops",
    equal: bool = False,
    **parameters: Any,
) -> Case:
    """Return numbers of a kind on each rank, ``equal`` ones or not, and what training adds to them
    before each step.
    """
    name = name or _name(nodes, hierarchical, kind)
    if "average" in parameters:
        name += "-mean" if parameters["average"] else "-sum"
    n, numbers = sum(nodes), numbers_of(suite, operation, dtype, name)
    inputs = {
        "x": numbers.of(kind, (1, size), dtype).repeat(n, 1)
        if equal
        else numbers.of(kind, (n, size), dtype)
    }
    if steps:
        inputs["updates"] = numbers.uniform((steps, n, size), dtype, -0.25, 0.25)
    flags = (KINDS.get(kind, "valid"),)
    return Case(
        suite,
        operation,
        clause,
        dtype,
        name,
        inputs,
        _world(nodes, hierarchical, **parameters),
        flags,
    )


def _poisoned(case: Case) -> Case:
    """Return the case, flagged if a chunk is poisoned."""
    return replace(case, flags=("poison",)) if case.outputs["x"].isnan().any() else case


def _in_any_order(case: Case) -> Case:
    """Return the case of a sum, or a mean, that ranks may add in any order."""
    x, hierarchical = case.inputs["x"], case.parameters["hierarchical"]
    total = x.double().abs().sum(0) / (len(x) if case.parameters.get("average", True) else 1)
    # Hierarchical sums are rounded once more on the way.
    return replace(
        case,
        tolerance=f"SUM({len(x) + hierarchical})",
        magnitudes={"x": total.expand(len(x), -1).contiguous()},
    )


def _low_precision(dtype: torch.dtype) -> Iterator[Case]:
    """Yield S3.2, and S3.3 with it between leaders; one node can be hierarchical, too, and then L
    is 1.
    """
    rows = [(nodes, len(nodes) > 1, "plain") for nodes in _WORLDS] + [((3,), True, "plain")]
    rows += [((3,), False, kind) for kind in KINDS if kind != "plain"] + [
        ((2, 1), True, kind) for kind in ("special", "huge")
    ]
    for nodes, hierarchical, kind in rows:
        operation, clause = "centralized_low_precision", "S3.3" if hierarchical else "S3.2"
        size = 7 * math.lcm(sum(nodes), len(nodes)) if hierarchical else 11 * sum(nodes)
        for average in (True, False):
            yield _poisoned(
                _case(operation, clause, dtype, nodes, hierarchical, kind, size, average=average)
            )


def _scatter_gather(dtype: torch.dtype) -> Iterator[Case]:
    """Yield S3.1 in rank order."""
    for n, kind in [(n, "plain") for n in (1, 2, 3, 5, 8)] + [
        (3, kind) for kind in KINDS if kind != "plain"
    ]:
        for average in (True, False):
            yield _case(
                "centralized_scatter_gather",
                "S3.1",
                dtype,
                (n,),
                False,
                kind,
                5 * n,
                average=average,
            )


def _full_precision(dtype: torch.dtype) -> Iterator[Case]:
    """Yield S3.1 and S3.3, whose sums have no fixed order: within SUM, but exact where every order
    gives the same.
    """
    operation = "centralized_full_precision"
    for nodes in _SOME_WORLDS:
        for average in (True, False):
            for hierarchical in sorted({False, len(nodes) > 1}):
                clause, name = (
                    "S3.3" if hierarchical else "S3.1",
                    _name(nodes, hierarchical, "any-order"),
                )
                yield _in_any_order(
                    _case(
                        operation,
                        clause,
                        dtype,
                        nodes,
                        hierarchical,
                        "plain",
                        9,
                        name=name,
                        average=average,
                    )
                )
        yield _case(
            operation,
            "S3.1",
            dtype,
            nodes,
            False,
            "eighths",
            9,
            name=_name(nodes, False, "exact"),
            average=False,
        )


def _decentralized(dtype: torch.dtype) -> Iterator[Case]:
    """Yield S3.4: one execution with every number of steps before it, and several with training
    between them.
    """
    rows: list[tuple[_Nodes, str, int]] = [((n,), "plain", 4) for n in (2, 4, 6, 8)]
    rows += [(nodes, "plain", 4) for nodes in ((3, 1), (1, 1), (2, 1, 1, 4), (1, 2))]
    rows += [((4,), kind, 2) for kind in ("huge", "special", "denormal")]
    for nodes, kind, steps in rows:
        yield _case("decentralized_shift_one", "S3.4", dtype, nodes, len(nodes) > 1, kind, 6, steps)
    for nodes in _SOME_WORLDS:
        for hierarchical in sorted({False, len(nodes) > 1}):
            name = _name(nodes, hierarchical, "any-order")
            yield _in_any_order(
                _case(
                    "decentralized_all", "S3.4", dtype, nodes, hierarchical, "plain", 6, name=name
                )
            )


def _ring(dtype: torch.dtype) -> Iterator[Case]:
    """Yield S3.5 over several steps, with training between them."""
    rows: list[tuple[_Nodes, bool, str, int]] = [((n,), False, "plain", 3) for n in (1, 2, 3, 5, 8)]
    rows += [(nodes, True, "plain", 3) for nodes in ((2,), (3, 1), (1, 3, 2), (2, 1, 1, 4))]
    rows += [((3,), False, kind, 2) for kind in ("wide", "denormal", "huge", "special")]
    for nodes, between, kind, steps in rows:
        # Wrapping makes all ranks' weights equal; they differ from then on.
        yield _poisoned(
            _case(
                "low_precision_decentralized",
                "S3.5",
                dtype,
                nodes,
                between,
                kind,
                37,
                steps,
                equal=True,
            )
        )


def _async(dtype: torch.dtype) -> Iterator[Case]:
    """Yield S3.6 on numbers whose sum every order gives alike."""
    for n in (1, 2, 3, 5, 8):
        numbers = numbers_of("comm_ops", "async_average", dtype, str(n))
        x, updates = numbers.of("eighths", (n, 9), dtype), numbers.uniform((n, 9), dtype, -0.1, 0.1)
        yield Case(
            "comm_ops",
            "async_average",
            "S3.6",
            dtype,
            str(n),
            {"x": x, "updates": updates},
            _world((n,), False),
        )


def _momenta(dtype: torch.dtype) -> Iterator[Case]:
    """Yield QAdam's operation after the warm-up: momentum from the local gradient, then S3.2
    (S5.5).
    """
    for nodes, hierarchical in (
        ((1,), False),
        ((3,), False),
        ((4,), False),
        ((3, 1), True),
        ((1, 3, 2), True),
    ):
        for beta1 in (0.9, 0.5):
            name, n = _name(nodes, hierarchical, str(beta1)), sum(nodes)
            numbers, size = (
                numbers_of("comm_ops", "qadam_momentum", dtype, name),
                3 * math.lcm(n, len(nodes)),
            )
            inputs = {"m": numbers.uniform(size, dtype), "grad": numbers.uniform((n, size), dtype)}
            yield Case(
                "comm_ops",
                "qadam_momentum",
                "S5.5",
                dtype,
                name,
                inputs,
                _world(nodes, hierarchical, beta1=beta1),
            )


def peer_cases() -> Iterator[Case]:
    """Yield every case of suite ``peers``: who averages with whom."""
    for nranks in (2, 4, 6, 8, 10, 14, 16, 34, 64, 1024):
        # All ranks at many steps; from 16 ranks on some of each, also steps beyond 32 bits.
        ranks = (
            range(nranks)
            if nranks <= 16
            else sorted({0, 1, nranks // 2 - 1, nranks // 2, nranks // 2 + 1, nranks - 1})
        )
        steps = [*range(nranks + 2 if nranks <= 16 else 9), 1_000_003, 2**40 + 3]
        inputs = _queries([(rank, step) for step in steps for rank in ranks])
        name, flags = f"{nranks}-ranks", ("valid", "edge")
        yield Case(
            "peers", "shift_one_peer", "S3.4", torch.int64, name, inputs, {"nranks": nranks}, flags
        )


def _queries(queries: list[tuple[int, int]]) -> dict[str, Tensor]:
    return {
        "rank": torch.tensor([rank for rank, _ in queries]),
        "step": torch.tensor([step for _, step in queries]),
    }


def graph_cases() -> Iterator[Case]:
    """Yield every case of suite ``graphs``."""
    for graph in _GRAPHS:
        yield from _sources(graph)
    for dtype in FLOATS:
        for graph, clause in _GRAPHS.items():
            rows = [(nodes, "plain", 4) for nodes in _GRAPH_WORLDS if _fits(graph, _members(nodes))]
            for nodes, kind, steps in [
                *rows,
                *(((4,), kind, 2) for kind in ("huge", "special", "denormal", "zeros")),
            ]:
                yield _averages(dtype, graph, clause, graph, nodes, kind, steps)
        for nodes, kind, steps in [(nodes, "plain", 4) for nodes in _GRAPH_WORLDS] + [
            ((3,), "special", 2),
            ((3,), "zeros", 2),
        ]:
            numbers = numbers_of(f"graphs weights-{'+'.join(map(str, nodes))}-{kind}")
            graphs = [_mixture(_members(nodes), numbers) for _ in range(3)]
            yield _averages(dtype, "weights", "S13.4", graphs, nodes, kind, steps)


def _fits(graph: str, n: int) -> bool:
    """Return whether there is such a graph of n ranks: a hypercube needs a power of two."""
    return graph != "hypercube" or n == 2 ** doublings(n)


def _members(nodes: _Nodes) -> int:
    """Return the number of ranks that average: the leaders of several nodes."""
    return len(nodes) if len(nodes) > 1 else nodes[0]


def _mixture(n: int, numbers: Numbers) -> list[list[list[float]]]:
    """Return a mixture of three permutations, with weights of float32, and sources in an order of
    their own.
    """
    shares = [numbers.below(5) + 1 for _ in range(3)]
    weights: list[dict[int, int]] = [{} for _ in range(n)]
    for share in shares:
        left = list(range(n))
        for row in weights:
            source = left.pop(numbers.below(len(left)))
            row[source] = row.get(source, 0) + share
    graph = []
    for rank, row in enumerate(weights):
        sources = [*row] if rank in row else [rank, *row]
        rounded = tensor_of(
            [row.get(source, 0) / sum(shares) for source in sources], torch.float32
        ).tolist()
        graph.append([list(pair) for pair in zip(sources, rounded, strict=True)])
    return graph


def _averages(
    dtype: torch.dtype, called: str, clause: str, graph: Any, nodes: _Nodes, kind: str, steps: int
) -> Case:
    name, several = f"{called}-{'+'.join(map(str, nodes))}-{kind}", len(nodes) > 1
    case = _case(
        "decentralized_on_graph",
        clause,
        dtype,
        nodes,
        several,
        kind,
        6,
        steps,
        name,
        "graphs",
        graph=graph,
    )
    if kind == "zeros":
        case.inputs["updates"].fill_(-0.0)  # which leaves the signs of zeros as they are
    return case


def _sources(graph: str) -> Iterator[Case]:
    """Yield who averages with whom, for few ranks at many steps and for many at a few, some beyond
    32 bits.
    """
    for n in (2, 3, 4, 6, 7, 8, 16, 33, 64, 1024):
        if _fits(graph, n):
            ranks = range(n) if n <= 8 else sorted({0, 1, 2, n // 2, n - 2, n - 1})
            inputs = _queries(
                [
                    (rank, step)
                    for step in (*range(n.bit_length() + 1), 1_000_003, 2**40 + 3)
                    for rank in ranks
                ]
            )
            parameters, flags = {"graph": graph, "nranks": n}, ("valid", "edge")
            yield Case(
                "graphs",
                "graph_sources",
                _GRAPHS[graph],
                torch.int64,
                f"{graph}-{n}-ranks",
                inputs,
                parameters,
                flags,
            )


def collective_cases() -> Iterator[Case]:
    """Yield every case of suite ``collectives``."""
    for n in (1, 2, 3, 5):
        for dtype in (*FLOATS, *_INTEGERS):
            x = _values(
                numbers_of("collectives", "moves", dtype, str(n)), n * n * _CHUNK, dtype
            ).view(n, -1)
            root: dict[str, Any] = {"root": n // 2}
            yield Case("collectives", "broadcast", "S3.9", dtype, str(n), {"x": x}, root)
            yield Case("collectives", "gather", "S3.9", dtype, str(n), {"x": x}, root)
            yield Case("collectives", "allgather", "S3.9", dtype, str(n), {"x": x})
            yield Case(
                "collectives",
                "scatter",
                "S3.9",
                dtype,
                str(n),
                {"x": x[n // 2]},
                {**root, "nranks": n},
            )
            yield Case("collectives", "alltoall", "S3.9", dtype, str(n), {"x": x})
        yield _alltoall_v(n)
        yield _alltoall_v(n, shares=True)
    for n in (2, 3, 5):
        for dtype in FLOATS:
            for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
                yield from _reductions(n, dtype, op)
        for dtype in _INTEGERS:
            for op in ("SUM", "PRODUCT", "MIN", "MAX", "BOR", "BAND", "BXOR"):
                yield from _reductions(n, dtype, op)


def _alltoall_v(n: int, shares: bool = False) -> Case:
    """Return an exchange of unequal counts, some of them 0, with gaps between what is sent (or
    shared) and between what arrives.
    """
    counts = [
        [(2 * source + 3 * destination) % 4 for destination in range(n)] for source in range(n)
    ]
    arriving = [list(column) for column in zip(*counts, strict=True)]
    inputs = {
        "x": torch.arange(n * 5 * n).view(n, 5 * n) + 1000,
        "before": -torch.arange(n * 6 * n).view(n, 6 * n) - 1,
        "send_counts": torch.tensor(counts),
        "send_displs": torch.tensor(
            [[peer % 2 for peer in range(n)] if shares else _with_gaps(row, 1) for row in counts]
        ),
        "recv_counts": torch.tensor(arriving),
        "recv_displs": torch.tensor([_with_gaps(row, 2) for row in arriving]),
    }
    return Case(
        "collectives",
        "alltoall_v",
        "S3.9",
        torch.int64,
        f"shared-{n}" if shares else str(n),
        inputs,
    )


def _with_gaps(counts: list[int], gap: int) -> list[int]:
    """Return displacements at which the last peer's values come first, with a gap before each
    peer's.
    """
    displs, place = [0] * len(counts), 0
    for peer in reversed(range(len(counts))):
        place += gap
        displs[peer] = place
        place += counts[peer]
    return displs


def _reductions(n: int, dtype: torch.dtype, op: str) -> Iterator[Case]:
    """Yield a reduction to all, to one, and in chunks."""
    name = f"{op.lower()}-{n}"
    x = _terms(
        numbers_of("collectives", "reductions", dtype, name), op, n * n * _CHUNK, dtype
    ).view(n, -1)
    flags = ("valid", "edge") if op in ("MIN", "MAX") or not dtype.is_floating_point else ("valid",)
    mean = (x.double().abs().sum(0) / n).expand(n, -1).contiguous()
    for operation, settings in (
        ("allreduce", {}),
        ("reduce", {"root": n - 1}),
        ("reduce_scatter", {}),
    ):
        near: tuple[str, dict[str, Any]] = ("EXACT", {})
        if op == "AVG" and n & (n - 1):  # a quotient is rounded; where, is the library's choice
            near = (
                f"SUM({n})",
                {"out": mean[0].view(n, -1) if operation == "reduce_scatter" else mean},
            )
        yield Case(
            "collectives",
            operation,
            "S3.9",
            dtype,
            name,
            {"x": x},
            {"op": op, **settings},
            flags,
            *near,
        )


def _values(numbers: Numbers, size: int, dtype: torch.dtype) -> Tensor:
    """Return numbers that use all bits of the dtype."""
    if dtype.is_floating_point:
        return torch.where(
            torch.arange(size) % 4 == 0,
            numbers.of("special", size, dtype),
            numbers.of("wide", size, dtype),
        )
    bits = 8 * dtype.itemsize
    return (
        torch.tensor([numbers.below(256) - (0 if bits == 8 else 128) for _ in range(size)])
        .mul(1 << (bits - 8))
        .to(dtype)
    )


def _terms(numbers: Numbers, op: str, size: int, dtype: torch.dtype) -> Tensor:
    """Return terms whose reduction is the same in any order; integers wrap around, and the largest
    of a NaN is NaN.
    """
    if not dtype.is_floating_point:
        return _values(numbers, size, dtype) + torch.tensor(
            [numbers.below(8) for _ in range(size)]
        ).to(dtype)
    if op == "PRODUCT":
        return numbers.each(size, dtype, lambda: (1.0, -1.0, 2.0, -0.5, 3.0)[numbers.below(5)])
    if op in ("MIN", "MAX"):
        infinite = numbers.each(
            size, dtype, lambda: (1.0, math.inf, -math.inf, math.nan)[numbers.below(4)]
        )
        return torch.where(torch.arange(size) % 5 == 0, infinite, numbers.of("wide", size, dtype))
    return numbers.of("eighths", size, dtype)

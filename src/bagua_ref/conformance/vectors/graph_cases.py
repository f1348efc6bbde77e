"""Cases of graphs for decentralized averaging: who averages with whom, and the averages (S13)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bagua_ref.backends.base import FLOATS
from bagua_ref.conformance.vectors.case import Case, canonical, case_id, name_of, seed_of
from bagua_ref.conformance.vectors.numbers import KINDS, Numbers, tensor_of
from bagua_ref.conformance.vectors.world import averaged_decentralized
from bagua_ref.formulas.graphs import MODES, Graph, in_turn

__all__ = ["graph_cases"]

_NAMES = {"one_peer_exponential": "S13.1", "hypercube": "S13.2", "ring": "S13.3", "exponential": "S13.3"}
_SINCE = "2"

_WORLDS: tuple[tuple[int, ...], ...] = ((1,), (2,), (3,), (4,), (5,), (8,), (3, 1), (1, 3, 2), (2, 1, 1, 4))
"""How many ranks each node has; of several nodes, the leaders average."""


def graph_cases() -> Iterator[Case]:
    """Yield every case of suite ``graphs``."""
    for name in _NAMES:
        yield from _sources(name)
    for dtype in FLOATS:
        for name, clause in _NAMES.items():
            rows = [(nodes, "plain", 4) for nodes in _WORLDS if MODES[name].takes(_talking(nodes))]
            rows += [((4,), kind, 2) for kind in ("huge", "special", "denormal", "zeros")]
            for nodes, kind, steps in rows:
                yield _averages(dtype, f"{name}-{_plus(nodes)}-{kind}", clause, name, nodes, kind, steps)
        for nodes, kind, steps in [(nodes, "plain", 4) for nodes in _WORLDS] + [((3,), "special", 2), ((3,), "zeros", 2)]:
            name = f"weights-{_plus(nodes)}-{kind}"
            numbers = Numbers(seed_of(f"graphs {name}"))
            graphs = [_mixture(_talking(nodes), numbers) for _ in range(3)]
            yield _averages(dtype, name, "S13.4", graphs, nodes, kind, steps)


def _plus(nodes: tuple[int, ...]) -> str:
    return "+".join(map(str, nodes))


def _talking(nodes: tuple[int, ...]) -> int:
    return len(nodes) if len(nodes) > 1 else nodes[0]


def _mixture(n: int, numbers: Numbers) -> Graph:
    """Return a mixture of three permutations, with weights of float32, and sources in an order of their own."""
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
        rounded = tensor_of([row.get(source, 0) / sum(shares) for source in sources], torch.float32).tolist()
        graph.append(list(zip(sources, rounded, strict=True)))
    return graph


def _averages(
    dtype: torch.dtype, name: str, clause: str, graph: str | list[Graph], nodes: tuple[int, ...], kind: str, steps: int
) -> Case:
    n = sum(nodes)
    numbers = Numbers(seed_of(case_id("graphs", "decentralized_on_graph", name_of(dtype), name)))
    x = canonical(KINDS[kind][1](numbers, n * 6, dtype)).view(n, 6)
    updates = numbers.uniform(steps * n * 6, dtype, -0.25, 0.25).view(steps, n, 6)
    if kind == "zeros":
        updates.fill_(-0.0)  # which leaves the signs of zeros as they are
    mode: Any = graph if isinstance(graph, str) else in_turn(graph)
    result = averaged_decentralized(nodes, x, updates, hierarchical=len(nodes) > 1, mode=mode)
    given = graph if isinstance(graph, str) else [[[list(pair) for pair in row] for row in one] for one in graph]
    return Case(
        "graphs", "decentralized_on_graph", clause, name_of(dtype), name,
        {"x": x, "updates": updates}, {"x": result}, {"nodes": list(nodes), "hierarchical": len(nodes) > 1, "graph": given},
        (KINDS[kind][0],), since=_SINCE,
    )  # fmt: skip


def _sources(name: str) -> Iterator[Case]:
    """Yield who averages with whom, for few ranks at many steps and for many at a few, some beyond 32 bits."""
    for n in (2, 3, 4, 6, 7, 8, 16, 33, 64, 1024):
        if not MODES[name].takes(n):
            continue
        ranks = range(n) if n <= 8 else sorted({0, 1, 2, n // 2, n - 2, n - 1})
        queries = [(rank, step) for step in (*range(n.bit_length() + 1), 1_000_003, 2**40 + 3) for rank in ranks]
        graphs = {step: MODES[name].graph(step, n) for _, step in queries}
        sources = [sorted(source for source, _ in graphs[step][rank]) for rank, step in queries]
        inputs = {"rank": torch.tensor([rank for rank, _ in queries]), "step": torch.tensor([step for _, step in queries])}
        yield Case(
            "graphs", "graph_sources", _NAMES[name], "int64", f"{name}-{n}-ranks",
            inputs, {"sources": torch.tensor(sources)}, {"graph": name, "nranks": n}, ("valid", "edge"), since=_SINCE,
        )  # fmt: skip

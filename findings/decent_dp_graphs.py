"""Decent-DP's graphs, beside those of S13."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from findings.common import DIFFERS, Row, judged

from bagua_ref.conformance.expected.graphs_numpy import averaged
from bagua_ref.conformance.expected.tolerances import SUM, assert_equal

PEER = "decent-dp==0.2.3"
RANKS = 8


def complaint(topology: str, mode: str) -> str | None:
    """Return where the averages along the edges of a topology, one rank per node, leave those of a mode of S13."""
    from decent_dp import topo

    edges = getattr(topo, topology)._get_topo_edges(SimpleNamespace(_world_size=RANKS, _local_world_size=1, _n_nodes=RANKS))
    x = torch.randn(RANKS, 3, generator=torch.Generator().manual_seed(0))
    try:
        for t in range(2 * len(edges)):
            found = x.clone()
            for edge in edges[t % len(edges)]:
                found[edge.ranks] = (x[edge.ranks] * edge.weight + x[edge.ranks].sum(0) * edge.weight - x[edge.ranks] * edge.weight)
            wanted = torch.from_numpy(averaged(x.numpy(), mode, t))
            assert_equal(found, wanted, SUM(RANKS), magnitude=1.0)
    except AssertionError as error:
        return f"round {t}: {error}"
    return None

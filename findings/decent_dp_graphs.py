"""Decent-DP's graphs, beside those of S13."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from findings.common import DIFFERS, Row, judged

from bagua_ref.conformance.expected.decentralized_numpy import averaged
from bagua_ref.conformance.expected.tolerances import SUM, assert_equal

PEER = "decent-dp==0.2.3"
RANKS = 8


def complaint(topology: str, mode: str) -> str | None:
    """Return where means along the edges of a topology, one rank per node, leave the averages of a
    mode of S13.
    """
    from decent_dp import topo

    world = SimpleNamespace(_world_size=RANKS, _local_world_size=1, _n_nodes=RANKS)
    edges = getattr(topo, topology)._get_topo_edges(world)
    x = torch.randn(RANKS, 3, generator=torch.Generator().manual_seed(0))
    try:
        for t in range(2 * len(edges)):
            found = x.clone()
            for edge in edges[t % len(edges)]:
                assert edge.weight == 1 / len(edge.ranks), (
                    f"weight {edge.weight} among {len(edge.ranks)} ranks"
                )
                found[edge.ranks] = x[edge.ranks].mean(0)
            assert_equal(
                found, torch.from_numpy(averaged(x.numpy(), mode, t)), SUM(RANKS), magnitude=1.0
            )
    except AssertionError as error:
        return f"round {t}: {error}"
    return None


def find() -> Iterator[Row]:
    given = f"the edges of {RANKS} ranks on as many nodes; N(0, 1) values"
    one_peer, ring = (
        f"Decent-DP {name} ({PEER})" for name in ("OnePeerExpTopology", "RingTopology")
    )
    yield judged(
        one_peer,
        "S13.2",
        "edges of each round, as hypercube",
        complaint("OnePeerExpTopology", "hypercube"),
        given=given,
    )
    yield judged(
        one_peer,
        "S13.1",
        "edges of each round, as one_peer_exponential",
        complaint("OnePeerExpTopology", "one_peer_exponential"),
        DIFFERS,
        given=given,
        why=(
            "Ranks talk in pairs, in both directions; in the published one-peer exponential graph"
            " each sends to one rank and receives from another. Both give the mean after log2 n"
            " rounds."
        ),
        promise="The class is described by its name only.",
        effect="None on what is averaged in log2 n rounds.",
    )
    yield judged(
        ring,
        "S13.3",
        "edges of each round, as ring",
        complaint("RingTopology", "ring"),
        DIFFERS,
        given=given,
        why=(
            "Each rank averages with one neighbour at a time; the specification's ring averages"
            " with both at once."
        ),
        promise="It is described as a ring with one peer in each round.",
        effect="Half the traffic of a round; it mixes more slowly.",
    )

"""Rounds of powersgd and topk on all ranks of a simulated world at once (S10, S11.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bagua_ref.backends import get_backend
from bagua_ref.comm_ops import LowRank, TopK
from bagua_ref.comm_ops.low_rank import Matrix
from bagua_ref.conformance.vectors.in_order import InOrder
from bagua_ref.simulation import SimulatedWorld

__all__ = ["powersgd_round", "topk_round"]


def powersgd_round(
    xs: Sequence[Tensor],
    matrices: Sequence[Matrix],
    factors: Sequence[dict[str, Tensor]],
    errors: Sequence[dict[str, Tensor]],
    k: int,
    **options: Any,
) -> list[Tensor]:
    """Return every rank's flat bucket after a round.

    Args:
        xs: flat buckets, by rank.
        matrices: what is compressed.
        factors: Q by rank and name, 0 where there is none yet; changed.
        errors: e by rank and name; changed.
        k: rounds before this one.
        options: ``memory``, ``seed`` and ``warm_start``.
    """

    def rank(comm: Any) -> Tensor:
        r = comm.rank()
        op = LowRank(comm, get_backend("reference"), matrices, factors[r], errors[r], round_number=lambda: k, **options)
        x: Tensor = xs[r].clone()
        with InOrder():
            op(x)
        return x

    return SimulatedWorld(len(xs)).run(rank)


def topk_round(xs: Sequence[Tensor], errors: Sequence[Tensor] | None, ratio: float) -> list[Tensor]:
    """Return every rank's flat bucket after a round; ``errors`` are e by rank, and are changed."""

    def rank(comm: Any) -> Tensor:
        x: Tensor = xs[comm.rank()].clone()
        error = None if errors is None else errors[comm.rank()]
        kept = None if error is None else lambda: error
        TopK(comm, get_backend("reference"), x.numel(), ratio, kept, lambda: True, x.dtype)(x)
        return x

    return SimulatedWorld(len(xs)).run(rank)

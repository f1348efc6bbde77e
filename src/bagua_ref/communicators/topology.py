"""The layout of ranks over nodes, and the nodes' leaders (S1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """The layout of a group's ranks over nodes.

    Args:
        ranks: the group's global ranks, in group order.
        node_of: the node of every global rank, by global rank.

    >>> Topology((0, 1, 2, 3, 4), node_of=(0, 0, 0, 1, 1)).leaders
    (0, 3)
    """

    ranks: tuple[int, ...]
    node_of: Sequence[int]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The lowest group rank of each node, as global ranks in group order (S1)."""
        first: dict[int, int] = {}
        for rank in self.ranks:
            first.setdefault(self.node_of[rank], rank)
        return tuple(first.values())

    def node(self, rank: int) -> tuple[int, ...]:
        """The group's ranks on global ``rank``'s node, in group order; its first is the leader (S1)."""
        return tuple(r for r in self.ranks if self.node_of[r] == self.node_of[rank])

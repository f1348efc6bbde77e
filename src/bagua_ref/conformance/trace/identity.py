"""Rank, world size and nodes of a recorder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from bagua_ref.base.runtime import World

__all__ = ["find_identity"]


def find_identity(world: World, rank: int | None, world_size: int | None, nodes: Sequence[int] | None) -> dict[str, Any]:
    """Return ``rank``, ``world_size`` and ``nodes`` for the manifest: as given, else as bagua_ref, torch or the environment says.

    Raises:
        ValueError: a number is out of range.
        TypeError: one is not an int.
    """
    ours = world.transport is not None
    torchs = not ours and dist.is_available() and dist.is_initialized()
    if rank is None:
        rank = dist.get_rank() if torchs else world.identity.rank
    if world_size is None:
        world_size = dist.get_world_size() if torchs else world.identity.world_size
    for name, value in (("rank", rank), ("world_size", world_size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be an int")
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be 1 or more")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} must be from 0 to world_size - 1 = {world_size - 1}")
    sizes = list(nodes) if nodes is not None else _known_nodes(world, world_size)
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes) or sum(sizes) != world_size:
        raise ValueError(f"nodes={sizes} must be numbers of ranks, each at least 1, that sum to world_size={world_size}")
    return {"rank": rank, "world_size": world_size, "nodes": sizes}


def _known_nodes(world: World, world_size: int) -> list[int]:
    if world.transport is not None and len(world.transport.node_of) == world_size:
        node_of = list(world.transport.node_of)
        found = [node_of.count(node) for node in dict.fromkeys(node_of)]
        in_order = [node for node, size in zip(dict.fromkeys(node_of), found, strict=True) for _ in range(size)]
        if in_order != node_of:
            raise ValueError(f"nodes: ranks are on nodes {node_of}; a replay needs consecutive ranks on each node")
        return found
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local) and world_size % int(local) == 0:
        return [int(local)] * (world_size // int(local))
    return [world_size]

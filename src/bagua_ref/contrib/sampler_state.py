"""State shared by the samplers: their replica, and the position in an epoch that is saved and restored."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from bagua_ref.base.runtime import RealWorld, current_world

__all__ = ["Place", "check_settings", "checked_count", "replica_of", "whole"]


class Place:
    """The number of items of an epoch that an iterator has returned."""

    def __init__(self, taken: int = 0) -> None:
        self.taken = taken


def replica_of(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of replicas and the rank; None is replaced from the process group, else from the environment.

    Raises:
        ValueError: num_replicas is below 1, or rank is out of range.
    """
    if num_replicas is None or rank is None:
        found_size, found_rank = _size_and_rank()
        num_replicas = found_size if num_replicas is None else num_replicas
        rank = found_rank if rank is None else rank
    count, place = whole("num_replicas", num_replicas), whole("rank", rank)
    if count < 1:
        raise ValueError(f"num_replicas={count} must be at least 1")
    if not 0 <= place < count:
        raise ValueError(f"rank={place} must be from 0 to num_replicas - 1 = {count - 1}")
    return count, place


def whole(name: str, value: Any) -> int:
    """Return ``value`` of the argument ``name`` as an int; raise unless it is an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be an int") from None


def checked_count(name: str, value: int, most: int) -> int:
    """Return ``value`` as an int; raise unless it is from 0 to ``most``."""
    number = whole(name, value)
    if not 0 <= number <= most:
        raise ValueError(f"{name}={number} must be from 0 to {most}, the number of {name} in the epoch")
    return number


def check_settings(state_dict: Mapping[str, Any], here: Mapping[str, Any], unit: str) -> None:
    """Raise if the state was saved with other settings."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict is a {type(state_dict).__name__}; it must be a dict that state_dict() returned")
    if missing := [name for name in (*here, "epoch", unit) if name not in state_dict]:
        raise ValueError(f"state_dict lacks {', '.join(missing)}; it must come from state_dict() of the same kind of sampler")
    for name, value in here.items():
        if state_dict[name] == value:
            continue
        if name == "complexities":
            raise ValueError("state_dict was saved with other complexities, so its place is not one in this order")
        advice = (
            f"; which {unit} are left cannot be told exactly. Resume with {state_dict[name]} replicas, or call set_epoch"
            f"({state_dict['epoch'] + 1}) to begin the next epoch"
            if name == "num_replicas"
            else ""
        )
        raise ValueError(f"state_dict was saved with {name}={state_dict[name]}, and here it is {value}{advice}")


def _size_and_rank() -> tuple[int, int]:
    world = current_world()
    if isinstance(world, RealWorld) and world.known_identity is None and dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()  # only torch was initialized, perhaps without a launcher
    return world.identity.world_size, world.identity.rank

"""The store through which a job's processes find each other: the caller's, the launcher's, or one served by rank 0 (S1)."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from bagua_ref.errors import CommunicationError
from bagua_ref.launch_environment import Identity, read_launch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["job_store"]

_logger = logging.getLogger(__name__)


def job_store(store: Any, rank: int, world_size: int, timeout: float) -> tuple[Store, int, int]:
    """Return the job's store, this rank and the number of ranks.

    Args:
        store: a torch store, given with ``rank`` and ``world_size``; None: taken from the environment.
        rank: the rank of this process; -1: taken from the environment.
        world_size: the number of processes; -1: taken from the environment.
        timeout: seconds to wait for the store.

    Raises:
        ValueError: arguments or the launcher's variables are incomplete, out of range or contradictory.
        CommunicationError: rank 0 cannot listen on the port.
    """
    from torch.distributed.rendezvous import rendezvous

    if store is not None:
        if not isinstance(store, dist.Store):  # type: ignore[attr-defined]
            raise TypeError(f"store={store!r} must be a torch.distributed store, such as a TCPStore, or None")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} and world_size={world_size} must be given with store, with 0 <= rank < world_size")
        return store, rank, world_size
    rank, world_size, url = _meeting_point(rank, world_size)
    if not url:
        return dist.HashStore(), rank, world_size  # type: ignore[attr-defined]
    try:
        found: tuple[Store, int, int] = next(rendezvous(url, rank, world_size, timeout=timedelta(seconds=timeout)))
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise CommunicationError(f"rank 0 cannot listen, as another program has the port; set MASTER_PORT ({error})") from error
    return found


def _meeting_point(rank: int, world_size: int) -> tuple[int, int, str]:
    """Return this rank, the number of ranks and the store's URL, "" in a world of one; -1 means as the environment says."""
    given = {"RANK": rank, "WORLD_SIZE": world_size}
    if -1 not in given.values() and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        launch = None
    else:
        launch, identity = read_launch(os.environ), Identity.from_environment()
        unknown = [name for name, value in given.items() if value == -1 and name not in os.environ] if launch is None else []
        if len(unknown) == 2:
            return 0, 1, ""
        if unknown:
            one, other = (f"{name} (or the argument {name.lower()})" for name in sorted(given, key=unknown.__contains__))
            raise ValueError(f"{one} is set, but {other} is not; set both, as torchrun does")
        rank, world_size = identity.rank if rank == -1 else rank, identity.world_size if world_size == -1 else world_size
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} and world_size={world_size}, as given or in the environment, must be 0 <= rank < world_size")
    if launch is None:
        _logger.info("rank %d of %d, as given or as RANK and WORLD_SIZE say", rank, world_size)
        return rank, world_size, "env://"
    _logger.info("rank %d of %d; the variables of %s say %s", rank, world_size, launch.launcher, launch)
    if world_size == 1:
        return 0, 1, ""
    address = launch.master_address()
    return rank, world_size, f"tcp://{f'[{address}]' if ':' in address else address}:{launch.port}"

"""The store through which a job's processes find each other: the caller's, the launcher's, or one served by rank 0 (S1)."""

from __future__ import annotations

import logging
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from bagua_ref.base.launch_environment import Identity, read_launch
from bagua_ref.communicators.rendezvous import NoReply, first_sentence, within
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError

__all__ = ["job_store"]

_logger = logging.getLogger(__name__)
_ADVICE = "MASTER_ADDR and MASTER_PORT must be an address of rank 0's machine and a free port there, the same on all ranks"


def job_store(store: Any, rank: int, world_size: int, timeout: float) -> tuple[Store, int, int]:
    """Return the job's store, this rank and the number of ranks.

    Args:
        store: a torch store, given with ``rank`` and ``world_size``; None: taken from the environment.
        rank: the rank of this process; -1: taken from the environment.
        world_size: the number of processes; -1: taken from the environment.
        timeout: seconds to wait for the store.

    Raises:
        ValueError: arguments or the launcher's variables are incomplete, out of range or contradictory.
        CommunicationTimeoutError: nobody serves the store at the address.
        CommunicationError: rank 0 cannot listen on the port, or another program has it.
    """
    if store is not None:
        if not isinstance(store, dist.Store):  # type: ignore[attr-defined]
            raise TypeError(f"store={store!r} must be a torch.distributed store, such as a TCPStore, or None")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} and world_size={world_size} must be given with store, with 0 <= rank < world_size")
        return store, rank, world_size
    rank, world_size, address = _store_address(rank, world_size)
    if address is None:
        return dist.HashStore(), rank, world_size  # type: ignore[attr-defined]
    host, port = address
    if not 0 <= port < 2**16:
        raise ValueError(f"MASTER_PORT={port} must be a port, 0 to 65535")
    return _open_store(host, port, rank, timeout), rank, world_size


def _open_store(host: str, port: int, rank: int, timeout: float) -> Store:
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not by_torchrun
    what = f"the job's store, which {'torchrun' if by_torchrun else 'rank 0'} serves at {host}:{port}"
    began, problem = time.monotonic(), "rank 0 cannot reach itself there" if serves else "no answer"

    def open_store() -> Store:
        nonlocal problem
        while not serves:
            try:
                socket.create_connection((host, port), timeout).close()
            except (OSError, UnicodeError) as error:
                problem = str(error)
                if time.monotonic() > began + timeout:
                    raise NoReply from None
                time.sleep(0.1)
            else:
                problem = "a program listens there, but does not answer as a store"
                break
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=serves,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,  # the rendezvous waits for them, and can name those that are missing
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )

    try:
        return within(open_store, timeout)
    except NoReply:
        raise CommunicationTimeoutError(
            f"rank {rank} timed out after {timeout:g} s connecting to {what} ({problem}); {_ADVICE}"
        ) from None
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise CommunicationError(
                f"rank 0 cannot listen at {host}:{port}, as another program has the port; set MASTER_PORT ({error})"
            ) from error
        raise CommunicationError(
            f"rank {rank} tried for {time.monotonic() - began:.1f} s to connect to {what}: {first_sentence(error)}; {_ADVICE}"
        ) from error


def _store_address(rank: int, world_size: int) -> tuple[int, int, tuple[str, int] | None]:
    """Return this rank, the number of ranks and the store's address, None in a world of one; -1 means as the environment says."""
    given = {"RANK": rank, "WORLD_SIZE": world_size}
    if -1 not in given.values() and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        launch = None
    else:
        launch, identity = read_launch(os.environ), Identity.from_environment()
        unknown = [name for name, value in given.items() if value == -1 and name not in os.environ] if launch is None else []
        if len(unknown) == 2:
            return 0, 1, None
        if unknown:
            one, other = (f"{name} (or the argument {name.lower()})" for name in sorted(given, key=unknown.__contains__))
            raise ValueError(f"{one} is set, but {other} is not; set both, as torchrun does")
        rank, world_size = identity.rank if rank == -1 else rank, identity.world_size if world_size == -1 else world_size
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} and world_size={world_size}, as given or in the environment, must be 0 <= rank < world_size")
    if launch is None:
        _logger.info("rank %d of %d, as given or as RANK and WORLD_SIZE say", rank, world_size)
        return rank, world_size, _address()
    _logger.info("rank %d of %d; the variables of %s say %s", rank, world_size, launch.launcher, launch)
    if world_size == 1:
        return 0, 1, None
    return rank, world_size, (launch.master_address(), launch.port)


def _address() -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"RANK and WORLD_SIZE are set or given, but {name} is not; set it, as torchrun does")
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal():
        raise ValueError(f"environment variable MASTER_PORT={port!r} must be an integer")
    return os.environ["MASTER_ADDR"], int(port)

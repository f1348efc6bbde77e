"""How the processes of a job recognise each other in a store that may hold what earlier jobs and attempts left behind."""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from bagua_ref.errors import CommunicationError, CommunicationTimeoutError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["another_connection", "meet", "prefixed"]


class _Prefixed(dist.PrefixStore):  # type: ignore[name-defined,misc]
    """A view of a store that knows what it is a view of; torch's own does not tell its prefix."""

    def __init__(self, name: str, store: Store) -> None:
        super().__init__(name, store)
        self.prefix, self.whole = name, store


def prefixed(name: str, store: Store) -> Store:
    """Return a view of ``store`` in which all keys start with ``name``."""
    return _Prefixed(name, store)


def another_connection(store: Store) -> Store:
    """Return a connection of its own to ``store``: one connection serves one request at a time, and some wait for other ranks.

    Each costs a look-up of the server's name, which can take seconds, so reuse them.

    Args:
        store: of torch, or a `prefixed` view of one.

    Raises:
        CommunicationError: its server cannot be reached.
    """
    try:
        if hasattr(store, "clone"):
            clone: Store = store.clone()
            return clone
        # torch 2.6 and its like
        if isinstance(store, _Prefixed):
            return prefixed(store.prefix, another_connection(store.whole))
        if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
            return dist.TCPStore(store.host, store.port, timeout=store.timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        return store  # files and memory serve all at once
    except RuntimeError as error:
        raise CommunicationError(f"the store through which the ranks find each other cannot be reached: {error}") from error


def meet(store: Store, rank: int, world_size: int, card: Any, timeout: float) -> tuple[str, list[Any]]:
    """Return a name that only this meeting has, and every rank's card, in rank order. Collective.

    Rank 0 proposes a new name, the others answer under that name with a new mark of their own, rank 0 publishes the answers. Who
    does not find its own mark there has read an earlier meeting's papers, and looks again. A launcher that restarts its workers
    may hand them the store of the attempt that failed, so neither names nor counts from outside can be trusted.

    Args:
        store: shared by all ranks.
        rank: this one, of ``world_size``.
        world_size: how many there are.
        card: what the others should know; anything that JSON can carry.
        timeout: seconds to wait for the others.

    Raises:
        CommunicationTimeoutError: they did not come in time.
    """
    mark = uuid.uuid4().hex
    if rank == 0:
        answers = [f"{mark}/answer{r}" for r in range(1, world_size)]
        store.set("proposed", mark)
        try:
            store.wait(answers, timedelta(seconds=timeout))
        except RuntimeError:
            missing = [r for r in range(1, world_size) if not store.check([f"{mark}/answer{r}"])]
            raise CommunicationTimeoutError(f"rank 0 waited {timeout:g} s in vain for ranks {missing} of {world_size}") from None
        papers = [[mark, card], *(json.loads(store.get(answer)) for answer in answers)]
        store.set(f"{mark}/all", json.dumps(papers))
        return mark, [card for _, card in papers]
    answered, pause, deadline = "", 0.002, time.monotonic() + timeout
    while time.monotonic() < deadline:
        proposed = store.get("proposed").decode() if store.check(["proposed"]) else ""
        if proposed != answered:
            store.set(f"{proposed}/answer{rank}", json.dumps([mark, card]))
            answered, pause = proposed, 0.002
        if answered and store.check([f"{answered}/all"]):
            papers = json.loads(store.get(f"{answered}/all"))
            if len(papers) == world_size and papers[rank][0] == mark:
                return answered, [card for _, card in papers]
        time.sleep(pause)
        pause = min(1.5 * pause, 0.2)
    raise CommunicationTimeoutError(f"rank {rank} waited {timeout:g} s in vain for all {world_size} ranks")

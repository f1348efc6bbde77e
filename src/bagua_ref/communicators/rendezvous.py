"""Rendezvous of a job's processes in a store that may hold keys of earlier jobs and attempts."""

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
    """A prefixed view of a store that remembers the store and the prefix; torch's PrefixStore does not reveal its prefix."""

    def __init__(self, name: str, store: Store) -> None:
        super().__init__(name, store)
        self.prefix, self.whole = name, store


def prefixed(name: str, store: Store) -> Store:
    """Return a view of ``store`` in which all keys start with ``name``."""
    return _Prefixed(name, store)


def another_connection(store: Store) -> Store:
    """Return a new connection to ``store``: a connection serves one request at a time, and some requests wait for other ranks.

    Connecting looks up the server's host name, which can take seconds, so reuse connections.

    Args:
        store: a torch store, or a `prefixed` view of one.

    Raises:
        CommunicationError: its server cannot be reached.
    """
    try:
        if hasattr(store, "clone"):
            clone: Store = store.clone()
            return clone
        # torch 2.6 and similar versions
        if isinstance(store, _Prefixed):
            return prefixed(store.prefix, another_connection(store.whole))
        if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
            return dist.TCPStore(store.host, store.port, timeout=store.timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        return store  # stores in files and memory serve concurrent requests
    except RuntimeError as error:
        raise CommunicationError(f"the store through which the ranks find each other cannot be reached: {error}") from error


def meet(store: Store, rank: int, world_size: int, card: Any, timeout: float) -> tuple[str, list[Any]]:
    """Return a name that is unique to this rendezvous, and every rank's card in rank order. Collective.

    Rank 0 proposes a new name, the other ranks answer under that name with a random mark each, and rank 0 publishes the answers.
    A rank that does not find its own mark has read the keys of an earlier rendezvous and tries again. A launcher that restarts
    its workers may give them the store of the failed attempt, so names and counts from outside cannot be trusted.

    Args:
        store: shared by all ranks.
        rank: this rank.
        world_size: the number of ranks.
        card: information for the other ranks, as JSON values.
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
            raise CommunicationTimeoutError(
                f"rank 0 timed out after {timeout:g} s waiting for ranks {missing} of {world_size}"
            ) from None
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
    raise CommunicationTimeoutError(f"rank {rank} timed out after {timeout:g} s waiting for all {world_size} ranks")

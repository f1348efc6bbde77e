"""The cache servers of a job, one per node: their start, and the exchange of their addresses
(S8.4).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.utils.data import get_worker_info

from bagua_ref.base.runtime import Identity, current_world
from bagua_ref.communicators.processes import machine, node_name
from bagua_ref.communicators.rendezvous import Prefixed, another_connection, parse_message
from bagua_ref.contrib.cache.fake_server import start_fake_server
from bagua_ref.contrib.cache.server import LOOPBACK, CacheServer, node_address, start_redis_server
from bagua_ref.env import get_master_addr
from bagua_ref.errors import BackendUnavailableError, CommunicationTimeoutError, NotInitializedError

__all__ = ["addresses", "shutdown"]

_WAIT_SECONDS = 300.0

_ADDRESS = {"host": str, "port": range(1, 2**16), "password": str}


class _Alone:
    """The job of a process without other ranks."""


_alone = _Alone()
_locks: dict[int, Any] = {}
"""The lock of each process: a child that is forked while another thread holds its parent's would
wait for ever.
"""
_own: dict[str, tuple[int, CacheServer]] = {}
"""For each kind, the process id and the server that the process started."""
_known: weakref.WeakKeyDictionary[Any, dict[str, tuple[list[dict[str, Any]], int]]] = (
    weakref.WeakKeyDictionary()
)
"""For each job and kind, the servers of all nodes, and the index of this node. Forked processes
inherit it.
"""
_rounds: dict[str, int] = {}
"""For each kind, the number of calls of `shutdown`, so that addresses of stopped servers are not
found.
"""


def addresses(kind: str, capacity: int, every_node: bool) -> list[dict[str, Any]]:
    """Return the addresses of this job's servers in node order; the first call starts this node's
    server in local rank 0.

    Every rank must make the first call; later calls return at once. Ranks find each other through
    torch's default store.

    Args:
        kind: "redis" or "fakeredis".
        capacity: bytes that each server may use.
        every_node: whether to wait for the other nodes' servers; otherwise only this node's is
            returned.

    Raises:
        BackendUnavailableError: this node's server cannot be started, on all ranks of the node.
        CommunicationTimeoutError: a node's server was not announced in time.
        NotInitializedError: there are several ranks and no process group yet.
        RuntimeError: the caller is a DataLoader worker.
    """
    with _locks.setdefault(os.getpid(), threading.RLock()):
        job = _job()
        known = _known.setdefault(job, {})
        if (
            kind in known
            and job is _alone
            and (server := _owned(kind)) is not None
            and not server.is_running()
        ):
            shutdown(kind)  # no other rank waits for this server
            known.pop(kind, None)
        if kind not in known:
            if get_worker_info() is not None:
                raise RuntimeError(
                    "this job's cache servers are started by its ranks, not by their DataLoader"
                    " workers; make the CacheLoader or CachedDataset before the DataLoader, or pass"
                    " hosts="
                )
            known[kind] = (
                ([_start(kind, capacity, LOOPBACK).address], 0)
                if job is _alone
                else _start_and_announce(kind, capacity)
            )
        server = _owned(kind)
        if server is not None and server.capacity != capacity:
            warnings.warn(
                f"capacity_per_node={capacity} has no effect: this job's server was already started"
                f" with {server.capacity}",
                stacklevel=5,
            )
        found, node = known[kind]
        return found if every_node else [found[node]]


def shutdown(kind: str) -> None:
    """Stop the server of ``kind`` if this process started it, and forget all nodes' servers: the
    next loader starts new ones.
    """
    with _locks.setdefault(os.getpid(), threading.RLock()):
        _rounds[kind] = _rounds.get(kind, 0) + 1
        for known in _known.values():
            known.pop(kind, None)
        server = _owned(kind)
        if server is not None:
            del _own[kind]
            server.stop()


def _owned(kind: str) -> CacheServer | None:
    pid, server = _own.get(kind, (0, None))
    return server if pid == os.getpid() else None


def _start(kind: str, capacity: int, host: str) -> CacheServer:
    """Return this process's server on ``host``, after starting it if it is not running."""
    server = _owned(kind)
    if server is not None and server.host == host and server.is_running():
        return server
    if server is not None:
        server.stop()
    server = (
        start_redis_server(host, capacity) if kind == "redis" else start_fake_server(host, capacity)
    )
    _own[kind] = (os.getpid(), server)
    return server


def _job() -> Any:
    """Return the object that identifies this job in this process: its transport, torch's default
    group, or `_alone`.
    """
    world = current_world()
    if world.transport is not None:
        # simulated ranks share one process
        return world.transport if hasattr(world.transport, "store") else _alone
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_group()
    if Identity.from_environment().world_size > 1:
        raise NotInitializedError(
            "this job has several ranks, which must exchange the addresses of their cache servers;"
            " call bagua_ref.init_process_group() first, or pass hosts="
        )
    return _alone


def _start_and_announce(kind: str, capacity: int) -> tuple[list[dict[str, Any]], int]:
    """Start this node's server if this is its first rank, announce it, and return all addresses and
    this node's index.
    """
    world = current_world()
    if world.transport is not None:
        store = cast("Any", world.transport).store
        rank, nodes = world.identity.rank, list(world.transport.node_of)
    else:
        store, rank = (
            Prefixed("bagua_ref", dist.distributed_c10d._get_default_store()),
            dist.get_rank(),
        )
        nodes = []
    store = Prefixed(f"cache/{kind}/{_rounds.get(kind, 0)}", another_connection(store))
    if not nodes:
        names = _exchange(store, "rank", rank, range(dist.get_world_size()), node_name())
        nodes = [list(dict.fromkeys(names)).index(name) for name in names]
    node, count = nodes[rank], max(nodes) + 1
    if nodes.index(node) == rank:
        hosts = _exchange(
            store, "node", node, range(count), f"{socket.gethostname()} {machine('net')}"
        )
        try:
            server = _start(
                kind,
                capacity,
                LOOPBACK if len(set(hosts)) == 1 else node_address(get_master_addr()),
            )
            mine: dict[str, Any] = {"address": server.address}
        except BackendUnavailableError as error:
            mine = {"error": str(error)}
        store.set(f"server/{node}", json.dumps(mine))
    announced = [
        _announcement(_read(store, f"server/{other}", f"the cache server of node {other}"), other)
        for other in range(count)
    ]
    for other, found in enumerate(announced):
        if "error" in found:
            raise BackendUnavailableError(
                f"node {other}: {found['error']}" if count > 1 else found["error"]
            )
    return [found["address"] for found in announced], node


def _announcement(data: bytes, node: int) -> dict[str, Any]:
    """Return a node's announcement of its server: its address, or the error for which it has
    none.
    """
    announced: dict[str, Any] = parse_message(
        data, {"address?": _ADDRESS, "error?": str}, f"node {node}"
    )
    return (
        announced
        if announced.get("error") is not None
        else parse_message(data, {"address": _ADDRESS}, f"node {node}")
    )


def _exchange(
    store: Any, what: str, mine: int, all_of_them: Sequence[int], value: str
) -> list[str]:
    """Publish this rank's value and return the values of all."""
    store.set(f"{what}/{mine}", value)
    return [
        _read(store, f"{what}/{other}", f"{what} {other} of {len(all_of_them)}").decode()
        for other in all_of_them
    ]


def _read(store: Any, key: str, whose: str) -> bytes:
    started = time.monotonic()
    try:
        store.wait([key], timedelta(seconds=_WAIT_SECONDS))
    except RuntimeError as error:  # timed out, or the store is gone
        waited = time.monotonic() - started
        raise CommunicationTimeoutError(
            f"timed out after {waited:.3g} s waiting for {whose}; every rank must make its first"
            f" CacheLoader with hosts=None ({error})"
        ) from None
    return cast("bytes", store.get(key))

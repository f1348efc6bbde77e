"""Bucket operations on all ranks of a simulated world at once: rows in, rows out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends import get_backend
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.conformance.vectors.case import canonical
from bagua_ref.groups.process_group import init_process_group
from bagua_ref.simulation import SimulatedWorld

__all__ = ["averaged_async", "averaged_decentralized", "combined_on_ring", "reduced"]


def reduced(nodes: tuple[int, ...], x: Tensor, **options: Any) -> Tensor:
    """Return every rank's row after a centralized operation, appended with these options (S3.1 to S3.3)."""

    def rank(bucket: BaguaBucket, number: int) -> Tensor:
        bucket.append_centralized_synchronous_op(**options)
        bucket.execute()
        return bucket.flattened_tensor()

    return canonical(torch.stack(_on_buckets(nodes, x, rank)))


def averaged_decentralized(nodes: tuple[int, ...], x: Tensor, updates: Tensor, *, hierarchical: bool, mode: str) -> Tensor:
    """Return the weights after each step: add the update, execute, copy back (S3.4)."""

    def rank(bucket: BaguaBucket, number: int) -> Tensor:
        peer_weight = bucket.flattened_tensor().ensure_bagua_tensor("peer_weight")  # type: ignore[attr-defined]
        op = bucket.append_decentralized_synchronous_op(peer_weight, hierarchical=hierarchical, peer_selection_mode=mode)
        after = []
        for update in updates[:, number]:
            _add(bucket, update)
            bucket.execute()
            op.copy_back_peer_weight(bucket)
            after.append(bucket.flattened_tensor())
        return torch.stack(after)

    return canonical(torch.stack(_on_buckets(nodes, x, rank), dim=1))


def combined_on_ring(nodes: tuple[int, ...], x: Tensor, updates: Tensor, *, hierarchical: bool) -> dict[str, Tensor]:
    """Return the weights after each step, and the replicas at the end: of every rank, hierarchical of leaders (S3.5)."""

    def rank(bucket: BaguaBucket, number: int) -> tuple[Tensor, ...]:
        names = ("weight", "left_peer_weight", "right_peer_weight")
        replicas = [bucket.flattened_tensor().ensure_bagua_tensor(name) for name in names]  # type: ignore[attr-defined]
        weight, left, right = replicas
        bucket.append_low_precision_decentralized_synchronous_op(weight, left, right, hierarchical=hierarchical)
        after = []
        for update in updates[:, number]:
            _add(bucket, update)
            bucket.execute()
            after.append(bucket.flattened_tensor())
        return (torch.stack(after), *replicas)

    results = _on_buckets(nodes, x, rank)
    members = [sum(nodes[:node]) for node in range(len(nodes))] if hierarchical else range(len(results))
    outputs = {"x": torch.stack([result[0] for result in results], dim=1)}
    for place, name in enumerate(("weight", "left", "right"), start=1):
        outputs[name] = torch.stack([results[member][place] for member in members])
    return {name: canonical(value) for name, value in outputs.items()}


def averaged_async(x: Tensor, updates: Tensor) -> Tensor:
    """Return x + update + (mean of all x - x), each rank's update having come between snapshot and average (S3.6)."""
    kernels = get_backend("reference")
    wide = x.double() if x.dtype is torch.float64 else x.float()
    total = wide.sum(0)  # exact: the caller sees to that
    result = x.clone()
    for row, update, snapshot in zip(result, updates, x, strict=True):
        kernels.add_(row, update)
        kernels.async_average_(row, total, snapshot, len(x))
    return canonical(result)


def _add(bucket: BaguaBucket, update: Tensor) -> None:
    flat = bucket.flattened_tensor()
    get_backend("reference").add_(flat, update.contiguous())
    bucket.copy_from_flat(flat)


def _on_buckets(nodes: tuple[int, ...], x: Tensor, rank: Callable[[BaguaBucket, int], Any]) -> list[Any]:
    """Call ``rank`` with a bucket of each rank's row and the rank's number; return what it returns, by rank."""

    def program(comm: Any) -> Any:
        init_process_group()
        tensor = x[comm.rank()].clone().ensure_bagua_tensor("x")  # type: ignore[attr-defined]
        return rank(BaguaBucket([tensor], "0", flatten=True, backend="reference"), comm.rank())

    return SimulatedWorld(sum(nodes), nodes=nodes).run(program)

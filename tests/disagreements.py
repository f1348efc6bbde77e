"""Calls in which ranks disagree, and what the error says of either side (S3.9)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bagua_ref import ReduceOp


def ones(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(count, dtype=dtype)


DIFFERENT_CALLS: dict[str, tuple[Any, Any, str, str]] = {
    "operations of a reduce_scatter": (
        lambda comm: comm.reduce_scatter_inplace(ones(2 * comm.nranks())),
        lambda comm: comm.reduce_scatter_inplace(ones(2 * comm.nranks()), ReduceOp.MAX),
        "reduce_scatter(op=SUM)",
        "reduce_scatter(op=MAX)",
    ),
    "operations of an allreduce": (
        lambda comm: comm.allreduce_inplace(ones(1)),
        lambda comm: comm.allreduce_inplace(ones(1), ReduceOp.AVG),
        "allreduce(op=SUM) of 1 float32 element",
        "allreduce(op=AVG)",
    ),
    "operations of a large allreduce": (
        lambda comm: comm.allreduce_inplace(ones(300_000)),
        lambda comm: comm.allreduce_inplace(ones(300_000), ReduceOp.AVG),
        "allreduce(op=SUM) of 300000 float32 elements",
        "allreduce(op=AVG)",
    ),
    "operations of a reduce": (
        lambda comm: comm.reduce_inplace(ones(2), 0),
        lambda comm: comm.reduce_inplace(ones(2), 0, ReduceOp.PRODUCT),
        "reduce(dst=0, op=SUM)",
        "reduce(dst=0, op=PRODUCT)",
    ),
    "dtypes of an allgather": (
        lambda comm: comm.allgather_inplace(ones(comm.nranks())),
        lambda comm: comm.allgather_inplace(ones(comm.nranks(), torch.int32)),
        "allgather() of 1 float32 element",
        "allgather() of 1 int32 element",
    ),
    "dtypes of an allreduce": (
        lambda comm: comm.allreduce_inplace(ones(4, torch.float16)),
        lambda comm: comm.allreduce_inplace(ones(4, torch.bfloat16)),
        "4 float16 elements",
        "4 bfloat16 elements",
    ),
    "sizes of an alltoall": (
        lambda comm: comm.alltoall_inplace(ones(comm.nranks())),
        lambda comm: comm.alltoall_inplace(ones(2 * comm.nranks())),
        "alltoall() of ",
        "alltoall() of ",
    ),
    "sizes of a scatter": (
        lambda comm: comm.scatter_inplace(
            ones(comm.nranks()) if comm.rank() == 0 else ones(1), 1, 0
        ),
        lambda comm: comm.scatter_inplace(ones(2), 2, 0),
        "scatter(src=0) of 1 float32 element",
        "scatter(src=0) of 2 float32 elements",
    ),
    "an empty tensor": (
        lambda comm: comm.allreduce_inplace(ones(0)),
        lambda comm: comm.allreduce_inplace(ones(300)),
        "of 0 float32 elements",
        "of 300 float32 elements",
    ),
    "roots of a broadcast": (
        lambda comm: comm.broadcast(ones(2), 0),
        lambda comm: comm.broadcast(ones(2), 1),
        "broadcast(src=0)",
        "broadcast(src=1)",
    ),
    "roots of a gather": (
        lambda comm: comm.gather(ones(2), ones(2 * comm.nranks()), 0),
        lambda comm: comm.gather(ones(2), ones(2 * comm.nranks()), 1),
        "gather(dst=0)",
        "gather(dst=1)",
    ),
    "collectives": (
        lambda comm: comm.broadcast(ones(2), 0),
        lambda comm: comm.allreduce_inplace(ones(2)),
        "broadcast(src=0)",
        "allreduce(op=SUM)",
    ),
    "a barrier": (
        lambda comm: comm.barrier(),
        lambda comm: comm.alltoall_inplace(ones(comm.nranks())),
        "barrier()",
        "alltoall()",
    ),
}
"""What the first ranks call, and what the last one calls instead; what the error says of either."""

DIFFERENT_MESSAGES: dict[str, tuple[Any, Any, str, str]] = {
    "dtypes": (
        lambda comm: comm.send(ones(2), 1),
        lambda comm: comm.recv(ones(2, torch.int32), 0),
        "2 float32 elements",
        "2 int32 elements",
    ),
    "sizes": (
        lambda comm: comm.send(ones(2), 1),
        lambda comm: comm.recv(ones(3), 0),
        "2 float32 elements",
        "3 float32 elements",
    ),
    "counts of an alltoall_v": (
        lambda comm: comm.alltoall_v(ones(4), [1, 2], [0, 1], ones(4), [1, 1], [0, 1]),
        lambda comm: comm.alltoall_v(ones(4), [1, 1], [0, 1], ones(4), [3, 1], [0, 3]),
        "2 float32 elements",
        "3 float32 elements",
    ),
}
"""What rank 0 sends, and what rank 1 receives; what the error says of either."""

"""The collectives of S3.9, computed for all ranks at once: ``x[r]`` is the flat tensor of rank r.

Floats are combined in float64 and rounded once, integers in int64 with wrap-around. Results have a
row for each rank, except for `combine` and `gather`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold

from torch import Tensor

_COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda x: x.sum(0),
    "AVG": lambda x: x.sum(0) / len(x),
    "PRODUCT": lambda x: x.prod(0),
    "MIN": lambda x: x.amin(0),
    "MAX": lambda x: x.amax(0),
    "BAND": lambda x: fold(lambda a, b: a & b, x.unbind()),
    "BOR": lambda x: fold(lambda a, b: a | b, x.unbind()),
    "BXOR": lambda x: fold(lambda a, b: a ^ b, x.unbind()),
}


def combine(x: Tensor, op: str) -> Tensor:
    """Return the reduction of all ranks' elements by an operation named as in MPI; MIN and MAX
    propagate NaN.

    >>> combine(torch.tensor([[200], [200], [200]], dtype=torch.uint8), "SUM")
    tensor([88], dtype=torch.uint8)
    """
    wide = x.double() if x.dtype.is_floating_point else x.long()
    return _COMBINE[op](wide).to(x.dtype)


def allreduce(x: Tensor, op: str) -> Tensor:
    """Return the reduction for every rank."""
    return combine(x, op).repeat(len(x), 1)


def reduce(x: Tensor, op: str, root: int) -> Tensor:
    """Return the reduction for the root; the other ranks keep their elements."""
    out = x.clone()
    out[root] = combine(x, op)
    return out


def reduce_scatter(x: Tensor, op: str) -> Tensor:
    """Return chunk r of the reduction for rank r."""
    return combine(x, op).view(len(x), -1) if x.numel() else x[:, :0]


def broadcast(x: Tensor, root: int) -> Tensor:
    """Return the root's elements for every rank."""
    return x[root].repeat(len(x), 1)


def gather(x: Tensor) -> Tensor:
    """Return all elements in rank order, the root's result."""
    return x.reshape(-1)


def allgather(x: Tensor) -> Tensor:
    """Return all elements in rank order for every rank."""
    return gather(x).repeat(len(x), 1)


def scatter(of_root: Tensor, nranks: int) -> Tensor:
    """Return chunk r of the root's elements for rank r."""
    return of_root.view(nranks, of_root.numel() // nranks)


def alltoall(x: Tensor) -> Tensor:
    """Return chunk r of every rank, in rank order, for rank r."""
    n = len(x)
    return x.view(n, n, x.shape[1] // n).transpose(0, 1).reshape(n, -1) if x.numel() else x


def alltoall_v(
    x: Sequence[Tensor],
    before: Sequence[Tensor],
    send_counts: Sequence[Sequence[int]],
    send_displs: Sequence[Sequence[int]],
    recv_displs: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Return for each rank d the blocks that ranks s send to it; gaps between blocks have the
    values of ``before``.

    Args:
        x: send tensor of each rank.
        before: receive tensor of each rank before the call.
        send_counts: elements from rank s to rank d in row s, column d.
        send_displs: where they begin in rank s's tensor, likewise.
        recv_displs: where the elements from rank s begin in rank d's tensor, in row d, column s.
    """
    out = [tensor.clone() for tensor in before]
    for source, counts in enumerate(send_counts):
        for destination, count in enumerate(counts):
            start, place = send_displs[source][destination], recv_displs[destination][source]
            out[destination][place : place + count] = x[source][start : start + count]
    return out

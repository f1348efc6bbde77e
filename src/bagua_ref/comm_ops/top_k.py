"""Mean over all ranks of each rank's largest elements, with error feedback (S11.2)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.comm_ops.base import CommOp
from bagua_ref.communicators.base import Communicator
from bagua_ref.observe.meter import codec_phase
from bagua_ref.types import ReduceOp

_STRIDE = 64
"""Sampling stride for estimating the smallest of the k largest; a full sort would dominate the run
time.
"""
_MOST = 2**31 - 1
"""Maximum number of elements of a bucket, as indices are int32."""


def count_of(m: int, ratio: float) -> int:
    """Return k, the number of elements to send out of m: ``min(m, max(1, ceil(ratio * m)))``, the
    product in float64 (S11.2).

    >>> count_of(1000, 0.01), count_of(1, 0.01), count_of(0, 0.01)
    (10, 1, 0)
    """
    return min(m, max(1, math.ceil(ratio * m)))


def largest(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k elements of largest magnitude, ascending (S11.2).

    Ties go to the lower index. NaN counts as larger than inf, and all NaNs as equal.

    Args:
        x: float32, contiguous.
        k: from 0 to the size of x.

    >>> largest(torch.tensor([1.0, -3.0, 2.0, 3.0]), 2)
    tensor([1, 3])
    """
    if k in (0, x.numel()):
        return torch.arange(k, device=x.device)
    # in the order of |x|; the largest is NaN
    size = (x.view(torch.int32) & 0x7FFFFFFF).clamp_(max=0x7F800001)
    sample = size[::_STRIDE]
    share = k / _STRIDE
    likely = math.ceil(share + 4 * math.sqrt(share) + 4)
    if likely < sample.numel() // 2:
        least = torch.topk(sample, likely, sorted=False).values.min()
        # where most are 0, as in an embedding's gradient, all others come before the first zeros
        candidates = (size >= least.clamp(min=1)).nonzero().view(-1)
        if candidates.numel() < k and least == 0:
            zeros = (size[: 2 * k] == 0).nonzero().view(-1)[: k - candidates.numel()]
            return torch.cat([candidates, zeros]).sort().values
        if candidates.numel() >= k:
            return candidates[_largest(size[candidates], k)]
    return _largest(size, k)


def _largest(size: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest elements, ascending; ties go to the lower index."""
    least = torch.topk(size, k, sorted=False).values.min()
    chosen = size > least
    tied = (size == least).nonzero().view(-1)
    chosen[tied[: k - int(chosen.sum())]] = True
    return chosen.nonzero().view(-1)


class TopK(CommOp):
    """``x <- (sum over ranks of their k largest elements) / n``, 0 where none was sent; in rank
    order, in float32 (S11.2).

    p = gradient + e -> all-gather k int32 indices -> all-gather their k values -> add up in rank
    order

    e is the residual: the part of p that was not sent. If an element of any rank's p is not finite,
    it is among the largest and is sent; then e does not change on any rank: a GradScaler skips the
    step, and overflowed values must not return in later steps.

    Each rank sends ``8 k (n-1)`` bytes. Scratch is a float32 copy of x for sort keys or the sum,
    one more for 16-bit dtypes, and n messages. While ``compresses()`` is False, it is an
    all-reduce.

    Args:
        comm: the communicator of all ranks.
        kernels: the kernel backend.
        numel: m, the number of elements of the bucket without padding, at most 2^31 - 1.
        ratio: fraction of m elements to send; k is rounded up.
        error: getter of the residual e, m float32 elements, changed in place; None: no error
            feedback.
        compresses: returns whether the next round is compressed.
        dtype: dtype of the bucket.

    Raises:
        TypeError: the bucket is float64.
        ValueError: the bucket is too large.

    Source: Aji & Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017
    (arXiv:1704.05021).
    """

    def __init__(
        self,
        comm: Communicator,
        kernels: KernelBackend,
        numel: int,
        ratio: float,
        error: Callable[[], Tensor] | None,
        compresses: Callable[[], bool],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(comm, kernels)
        if dtype is torch.float64:
            raise TypeError("topk takes float16, bfloat16 or float32, not torch.float64")
        if numel > _MOST:
            raise ValueError(
                f"topk takes buckets of at most {_MOST} elements, not {numel}; use smaller buckets"
            )
        self.k, self._numel = count_of(numel, ratio), numel
        self._error, self._compresses = error, compresses

    def work(self) -> tuple[str, int]:
        """Return the number of elements to search and add up."""
        return "topk", (self._numel + self.comm.nranks() * self.k) * self._compresses()

    @torch.no_grad()
    def __call__(self, x: Tensor) -> None:
        """Replace ``x`` with the mean over ranks of the sent elements."""
        if not self._compresses():
            self.comm.allreduce_inplace(x, ReduceOp.AVG)
            return
        n, x = self.comm.nranks(), x[: self._numel]
        error = None if self._error is None else self._error()
        with codec_phase("compress"):
            p = x.float()  # x itself, if it is float32
            if error is not None:
                p += error
            own = largest(p, self.k)
        indices, values = own.new_empty(n * self.k, dtype=torch.int32), p.new_empty(n * self.k)
        self.comm.allgather(own.int(), indices)
        self.comm.allgather(p[own], values)
        if error is not None and values.isfinite().all():
            error.copy_(p)
            error[own] = 0
        with codec_phase("decompress"):
            total = torch.zeros_like(p)
            for one_rank, its_values in zip(
                indices.view(n, self.k), values.view(n, self.k), strict=True
            ):
                # no index twice, so their order does not matter
                total.index_add_(0, one_rank, its_values)
            self.kernels.divide_(total, n)
            x.copy_(total)

"""Chunked sparse exchange: the mean over ranks of the largest elements of each chunk of each tensor,
or of its cosine transform, with error memory (S15.3, S15.4, S15.6).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.chunks import ChunkCoder, Chunks
from bagua_ref.backends.codec import Codec
from bagua_ref.base.memory import Layout
from bagua_ref.comm_ops.base import CommOp
from bagua_ref.communicators.base import Communicator
from bagua_ref.observe.meter import codec_phase
from bagua_ref.types import ReduceOp

MEANS = ("all", "contributors")
"""Divisors of the sum over ranks: the number of ranks, or the number of ranks whose value is not 0
(S15.4).
"""


def transformed(x: Tensor, sides: tuple[int, int], inverse: bool = False) -> Tensor:
    """Return the discrete cosine transform of each chunk, or its inverse, computed in float64 and
    rounded to float32 (S15.6).

    Args:
        x: float32, K x m.
        sides: h and w of the chunks.
        inverse: ``B_h^T Y B_w`` in place of ``B_h X B_w^T``.
    """
    rows, columns = (basis(side).to(x.device) for side in sides)
    if inverse:
        rows, columns = rows.T, columns.T
    return (rows @ x.double().view(len(x), *sides) @ columns.T).float().view_as(x)


@functools.cache
def basis(c: int) -> Tensor:
    """Return the c x c DCT matrix B_c: ``sqrt((1 if i = 0 else 2)/c) cos(pi i (2j+1)/(2c))``,
    exactly 0 at zeros of the cosine.
    """
    return torch.tensor(
        [
            [
                math.sqrt((2 if i else 1) / c) * math.cos(math.pi * i * (2 * j + 1) / (2 * c))
                if i * (2 * j + 1) % (2 * c) != c
                else 0.0
                for j in range(c)
            ]
            for i in range(c)
        ],
        dtype=torch.float64,
    )


class ChunkedSparse(CommOp):
    """``x <- mean over ranks of the k largest elements of each chunk``, 0 where none was sent; in
    rank order, in float32 (S15).

    p = decay*e + x -> Y = T(p) -> select k of each chunk of Y -> all-gather one message -> D = mean
    of the decoded Y -> e = p - T'(own decoded Y) -> x = T'(D)

    T is the identity, or the discrete cosine transform of each chunk. If a tensor's result is not
    finite, all of its elements become NaN, and its e does not change, on every rank: elements that
    are not finite are always selected.

    Each rank sends its message to n - 1 others: for N selected elements of a tensor, 12 bits for
    each index, unless chunks are sent whole, and 4 N bytes or a codec's payload. Scratch is a
    float32 copy of x, n messages, and two of the largest tensor with its sort keys. While
    ``compresses()`` is False, it is an all-reduce.

    Args:
        comm: the communicator of all ranks.
        kernels: the kernel backend.
        layouts: layouts of the tensors in the bucket, which has no padding.
        k: number of elements to send of each chunk.
        chunk: maximum side of a chunk.
        decay: factor of the error memory in each round.
        mean: "all": divide by the number of ranks; "contributors": by the number of those whose
            value is not 0.
        codec: codec of the values; None: values are not compressed.
        error: getter of the residual e, float32 and flat like x; e is changed in place.
        cosine: whether to select and send coefficients of the discrete cosine transform.
        sign: whether the result is the sign of T'(D).
        compresses: returns whether the next round is compressed.

    Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025
    (arXiv:2508.15706); Peng et al., "DeMo: Decoupled Momentum Optimization", 2024
    (arXiv:2411.19870).
    """

    def __init__(
        self,
        comm: Communicator,
        kernels: KernelBackend,
        layouts: Sequence[Layout],
        *,
        k: int,
        chunk: int,
        decay: float,
        mean: str,
        codec: Codec | None,
        error: Callable[[], Tensor],
        cosine: bool = False,
        sign: bool = False,
        compresses: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(comm, kernels)
        self._layouts = layouts
        chunks = [Chunks(layout.shape, chunk) for layout in layouts]
        self._coders = [kernels.chunk_coder(each, k, codec) for each in chunks]
        self._decay, self._mean, self._error = decay, mean, error
        self._cosine, self._sign, self._compresses = cosine, sign, compresses

    def work(self) -> tuple[str, int]:
        """Return the work of the selection and the averaging, in elements."""
        chosen = sum(layout.shape.numel() for layout in self._layouts)
        kept = sum(coder.count for coder in self._coders)
        return "topk", (chosen + self.comm.nranks() * kept) * self._compresses()

    @torch.no_grad()
    def __call__(self, x: Tensor) -> None:
        """Replace ``x`` with the mean of all ranks' messages."""
        if not self._compresses():
            self.comm.allreduce_inplace(x, ReduceOp.AVG)
            return
        n, error = self.comm.nranks(), self._error()
        with codec_phase("compress"):
            p = x.to(torch.float32, copy=True)
            self.kernels.add_scaled_(p, error, self._decay)
            parts = []
            for coder, part in zip(self._coders, self._tensors(p), strict=True):
                y = coder.chunks.cut(part)
                parts.append(coder.encode(self._transformed(y, coder.chunks)))
        message = torch.cat(parts)
        gathered = message.new_empty(n * message.numel())
        self.comm.allgather(message, gathered)
        with codec_phase("decompress"):
            sizes = [coder.nbytes for coder in self._coders]
            received = gathered.view(n, message.numel()).split(sizes, dim=1)
            tensors = zip(*map(self._tensors, (x, p, error)), strict=True)
            for coder, rows, tensor in zip(self._coders, received, tensors, strict=True):
                self._finish(coder, rows, *tensor)

    def _tensors(self, flat: Tensor) -> list[Tensor]:
        """Split ``flat`` into views with the shapes of the bucket's tensors."""
        parts = flat.split([layout.shape.numel() for layout in self._layouts])
        return [layout.view(part) for layout, part in zip(self._layouts, parts, strict=True)]

    def _transformed(self, y: Tensor, chunks: Chunks, inverse: bool = False) -> Tensor:
        return transformed(y, chunks.sides, inverse) if self._cosine else y

    def _finish(self, coder: ChunkCoder, rows: Tensor, x: Tensor, p: Tensor, error: Tensor) -> None:
        """Write the result and the residual of one tensor, given one received row per rank."""
        chunks = coder.chunks
        numel = chunks.count * chunks.numel
        mean, own = torch.zeros(2, numel, dtype=torch.float32, device=x.device)
        counts = None if self._mean == "all" else torch.zeros_like(mean)
        for row in rows:
            coder.add_decoded(row, mean, counts)
        coder.add_decoded(rows[self.comm.rank()], own)
        if counts is None:
            self.kernels.divide_(mean, len(rows))
        else:
            mean /= counts.clamp_(min=1)
        result, left = (
            self._transformed(y.view(chunks.count, chunks.numel), chunks, inverse=True)
            for y in (mean, own)
        )
        finite = mean.isfinite().all() & result.isfinite().all()
        result = torch.where(finite, result.sign() if self._sign else result, torch.nan)
        x.copy_(chunks.join(result))
        error.copy_(torch.where(finite, p - chunks.join(left), error))

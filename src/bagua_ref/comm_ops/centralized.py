"""Sum or mean over all ranks: in full precision, in compressed chunks, or in compressed chunks with
error feedback (S3.1, S3.2, S11.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.codec import Codec
from bagua_ref.comm_ops.base import CommOp
from bagua_ref.communicators.base import Communicator
from bagua_ref.communicators.pipelining import Overlap
from bagua_ref.types import ReduceOp


class _Centralized(CommOp):
    """Base of operations that compute the sum over all ranks, or the mean with ``average``."""

    def __init__(self, comm: Communicator, kernels: KernelBackend, average: bool) -> None:
        super().__init__(comm, kernels)
        self.average = average


class CentralizedFullPrecision(_Centralized):
    """``x <- sum over ranks``, or the mean, by one all-reduce (S3.1).

    Each rank sends 2 (n-1)/n of x. The transport chooses the order of the sum.

    Source: all-reduce as in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499), section 3.
    """

    def __call__(self, x: Tensor) -> None:
        """All-reduce ``x`` in place."""
        self.comm.allreduce_inplace(x, ReduceOp.AVG if self.average else ReduceOp.SUM)


class CentralizedScatterGather(_Centralized):
    """``x <- sum over ranks``, or the mean, summed in rank order (S3.1, S3.7).

    all-to-all of n chunks -> reduce my chunk -> all-gather

    Each rank sends 2 (n-1)/n of x, as all-reduce does, and every rank ends with identical bits.

    Source: the ScatterReduce primitive of Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    def __call__(self, x: Tensor) -> None:
        """Reduce ``x``, whose size is a multiple of n, in place."""
        n, rank = self.comm.nranks(), self.comm.rank()
        self.comm.alltoall_inplace(x)
        self.kernels.reduce_chunks_(x, n, target_chunk=rank, average=self.average)
        self.comm.allgather_inplace(x)


class CentralizedLowPrecision(_Centralized):
    """Sum or mean over all ranks, sent in compressed chunks (S3.2).

    compress n chunks -> all-to-all -> decompress -> reduce my chunk -> compress it -> all-gather ->
    decompress

    Every rank ends with identical bytes. Each rank sends 2 (n-1) times the codec's bytes for a
    chunk of m/n elements; for MinMaxUInt8 that is about a quarter of a float32 all-reduce. Scratch
    is one payload of n chunks and a copy of it.

    Args:
        comm: the communicator of the ranks that take part.
        kernels: the kernel backend.
        codec: codec of the chunks.
        average: compute the mean instead of the sum.

    Source: ByteGrad in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    def __init__(
        self, comm: Communicator, kernels: KernelBackend, codec: Codec, average: bool
    ) -> None:
        super().__init__(comm, kernels, average)
        self.codec = codec

    def __call__(self, x: Tensor) -> None:
        """Reduce ``x``, whose size is a multiple of n, in place."""
        n, rank, codec = self.comm.nranks(), self.comm.rank(), self.codec
        size = n * codec.payload_bytes(x.numel() // n, x.dtype)
        sent, payload = (torch.empty(size, dtype=torch.uint8, device=x.device) for _ in range(2))
        compress, decompress = (
            codec.compress_in_steps(x, n, out=sent),
            codec.decompress_in_steps(payload, n, out=x),
        )
        self.comm.alltoall(sent, payload, Overlap(compress, decompress))
        del sent  # as memory is scarce, and an all-gather may need a copy of a chunk
        self.kernels.reduce_chunks_(x, n, target_chunk=rank, average=self.average)
        compress = codec.compress_in_steps(x, n, target_chunk=rank, out=payload)
        self.comm.allgather_inplace(
            payload, Overlap(compress, codec.decompress_in_steps(payload, n, out=x))
        )


class ErrorMemory:
    """Residuals of error feedback of a bucket on this rank: e of the rank's whole contribution, and
    f of the result of its own chunk (S11.1).

    Attributes:
        worker: e: the errors of this rank's contributions, ``numel`` float32 elements.
        server: f: the errors of the results of this rank's chunk, ``numel / chunks`` float32
            elements.

    Args:
        filled: number of elements of the bucket, without padding.
        numel: number of elements, with padding.
        chunks: number of equal chunks.
        device: device of the bucket.

    >>> memory = ErrorMemory(filled=5, numel=6, chunks=2, device=torch.device("cpu"))
    >>> memory.worker.numel(), memory.server.numel()
    (6, 3)
    """

    def __init__(self, filled: int, numel: int, chunks: int, device: torch.device) -> None:
        self.filled, self.numel, self.chunks, self.device = filled, numel, chunks, device
        self.restore(None)

    def restore(
        self, kept: tuple[Tensor, Tensor] | None, device: torch.device | None = None
    ) -> None:
        """Set e and f to the tensors ``kept``, or to zeros if None; move them to ``device``, if
        given.

        Rounds replace e and f instead of changing them in place.
        """
        self.device = device or self.device
        if kept is None:
            sizes = self.numel, self.numel // self.chunks
            self.worker, self.server = (
                torch.zeros(size, dtype=torch.float32, device=self.device) for size in sizes
            )
        else:
            self.worker, self.server = (tensor.to(self.device) for tensor in kept)

    def put_back(self, before: tuple[Tensor, Tensor], start: int, end: int, place: int) -> None:
        """Restore the residuals of the bucket's elements from ``start`` to ``end``.

        Args:
            before: e and f from which to restore.
            start: index of the first element.
            end: index after the last element.
            place: index of this rank's chunk.
        """
        own = place * len(self.server)
        self.worker[start:end] = before[0][start:end]
        part = slice(max(start - own, 0), max(end - own, 0))
        self.server[part] = before[1][part]

    def update(self, worker: Tensor, server: Tensor, result: Tensor, place: int) -> None:
        """Store the new e and f, with 0 for padding; where a result is NaN, keep the old
        residuals.

        Args:
            worker: e of this round; changed in place.
            server: f of this round; changed in place.
            result: result of this round, in float32.
            place: index of this rank's chunk.
        """
        size = len(server)
        poisoned = result.isnan()
        if poisoned.any():
            worker = torch.where(poisoned, self.worker, worker)
            server = torch.where(poisoned[place * size : (place + 1) * size], self.server, server)
        worker[self.filled :] = 0
        server[max(self.filled - place * size, 0) :] = 0
        self.worker, self.server = worker, server


class CentralizedErrorFeedback(CentralizedLowPrecision):
    """Sum or mean over all ranks in compressed chunks, with error feedback (S11.1).

    With C the codec, D its decoder, e the residual of all chunks and f that of the rank's own
    chunk:

    p = x + e -> send C(p) -> e = p - D(C(p)) -> y = mean of the D(C(p)) + f -> send C(y) -> f = y -
    D(C(y))

    Everything is computed in float32, and only the result is rounded to the dtype of x; as usual in
    16-bit arithmetic, it becomes infinite if it is out of range. Elements whose result is NaN leave
    e and f as they were, on every rank. Every rank sends as many bytes as `CentralizedLowPrecision`
    does for float32, and ends with identical bits. Scratch is one float32 copy of x, one more for
    16-bit dtypes, a payload of n chunks and a copy of it, and one chunk.

    Args:
        comm: the communicator of the ranks that take part.
        kernels: the kernel backend.
        codec: codec of the chunks.
        average: compute the mean instead of the sum.
        memory: the residuals e and f; updated.

    Source: Tang et al., "DoubleSqueeze", ICML 2019 (arXiv:1905.05957); Karimireddy et al., ICML
    2019 (arXiv:1901.09847).
    """

    def __init__(
        self,
        comm: Communicator,
        kernels: KernelBackend,
        codec: Codec,
        average: bool,
        memory: ErrorMemory,
    ) -> None:
        super().__init__(comm, kernels, codec, average)
        self.memory = memory

    @torch.no_grad()
    def __call__(self, x: Tensor) -> None:
        """Reduce ``x``, whose size is a multiple of n, in place."""
        n, rank, codec = self.comm.nranks(), self.comm.rank(), self.codec
        decoded = x.float()  # x itself, if it is float32
        worker = decoded + self.memory.worker
        size = n * codec.payload_bytes(x.numel() // n, torch.float32)
        sent, payload = (torch.empty(size, dtype=torch.uint8, device=x.device) for _ in range(2))
        compress, decompress_own = (
            codec.compress_in_steps(worker, n, out=sent),
            codec.decompress_in_steps(sent, n, out=decoded),
        )
        self.comm.alltoall(sent, payload, Overlap(compress, decompress_own))
        del sent
        worker -= decoded
        codec.decompress(payload, n, out=decoded)
        self.kernels.reduce_chunks_(decoded, n, target_chunk=rank, average=self.average)
        own = decoded.view(n, -1)[rank] if decoded.numel() else decoded
        own += self.memory.server
        server = own.clone()
        compress = codec.compress_in_steps(decoded, n, target_chunk=rank, out=payload)
        self.comm.allgather_inplace(
            payload, Overlap(compress, codec.decompress_in_steps(payload, n, out=decoded))
        )
        server -= own
        self.memory.update(worker, server, decoded, rank)
        x.copy_(decoded)

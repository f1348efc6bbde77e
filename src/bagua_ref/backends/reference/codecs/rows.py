"""The base class of the reference backend's codecs, which encode matrices with a row for each chunk."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends.codec import Codec
from bagua_ref.backends.reference.blocks import Scratch, rows_of, scratch

__all__ = ["RowCodec"]


class RowCodec(Codec):
    """A codec in terms of matrices: row r of the payload belongs to row r of x. Payloads are on the CPU, x may be anywhere."""

    @abstractmethod
    def encode(self, x: Tensor, payload: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the blocks of x's rows to payload's rows; yield from time to time how many bytes of each row are final."""

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the values of payload's rows to out's rows; yield how many bytes of each row are needed before reading them."""

    def _compress(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> None:
        for _ in RowCodec._compress_in_steps(self, x, num_chunks, target_chunk, out):  # self's may call this
            pass

    def _decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        for _ in RowCodec._decompress_in_steps(self, payload, num_chunks, out):
            pass

    def _compress_in_steps(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> Iterator[int]:
        chunks, payload = rows_of(x, num_chunks), rows_of(out, num_chunks)
        if target_chunk is not None:
            chunks, payload = chunks[target_chunk : target_chunk + 1], payload[target_chunk : target_chunk + 1]
        on_cpu = payload if payload.device.type == "cpu" else torch.empty_like(payload, device="cpu")
        with scratch() as buffers:
            for final in _silent(self.encode(chunks, on_cpu, buffers)):
                if on_cpu is payload:
                    yield final
        if on_cpu is not payload:
            payload.copy_(on_cpu)
        yield payload.shape[1]

    def _decompress_in_steps(self, payload: Tensor, num_chunks: int, out: Tensor) -> Iterator[int]:
        rows = rows_of(payload, num_chunks)
        if rows.device.type != "cpu":
            yield rows.shape[1]
        with scratch() as buffers:
            yield from _silent(self.decode(rows.cpu(), rows_of(out, num_chunks), buffers))


def _silent(steps: Iterator[int]) -> Iterator[int]:
    """Suppress NumPy's warnings inside the steps, and not between them, where other code runs."""
    while True:
        with np.errstate(all="ignore"):
            reached = next(steps, None)
        if reached is None:
            return
        yield reached

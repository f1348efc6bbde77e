"""The contract of a codec: compression of a flat tensor in equal chunks to bytes, and decompression (S4, S12).

The public methods check arguments, so that all codecs raise the same errors. A codec implements the methods with a leading
underscore, and `payload_bytes`. `bagua_ref.backends.get_codec` returns a codec; the built-in formats are in
`bagua_ref.backends.formats`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from bagua_ref.backends.checks import check_beside, check_device, check_flat, check_target_chunk, chunk_size_of
from bagua_ref.observe.meter import codec_phase, codec_steps

__all__ = ["ALIGNMENT", "COMPRESSIBLE", "Codec", "Kernels"]

COMPRESSIBLE = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that codecs take (S4.5, S12)."""

ALIGNMENT = 32
"""The size of each chunk's payload is a multiple of this many bytes (S4.1, S12)."""


class Kernels(Protocol):
    """The part of a `bagua_ref.backends.KernelBackend` that the checks need."""

    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...] | None]


class Codec(ABC):
    """A format of payloads, and one backend's implementation of it.

    Tensors are 1-D and contiguous, on one device; they may be empty. Payloads are uint8, ``num_chunks`` blocks of equal size. A
    chunk of c elements has the same block whatever the other chunks are, and whatever the payload held before.

    Args:
        kernels: the backend for which it works.

    Raises, from compress and decompress:
        TypeError: a dtype other than those of `COMPRESSIBLE`, or a payload that is not uint8; the message names them.
        ValueError: device, shape, overlap, contiguity, num_chunks or target_chunk are invalid; the message names argument,
            value and what is allowed. Nothing has been written.

    Attributes:
        name: the name by which `bagua_ref.backends.get_codec` finds it.
        biased: whether it is useful only with error memory (S11.1); `compression=` warns without one.
    """

    name: ClassVar[str]
    biased: ClassVar[bool] = False

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for whole, in_steps, at_once in (
            ("compress", "compress_in_steps", Codec._compress_at_once),
            ("decompress", "decompress_in_steps", Codec._decompress_at_once),
            ("_compress", "_compress_in_steps", Codec._compress_in_steps),
            ("_decompress", "_decompress_in_steps", Codec._decompress_in_steps),
        ):
            if whole in vars(cls) and in_steps not in vars(cls):  # inherited steps would not match this class's methods
                setattr(cls, in_steps, at_once)

    @abstractmethod
    def payload_bytes(self, c: int, dtype: torch.dtype) -> int:
        """Return the size in bytes of the payload of one chunk, a multiple of `ALIGNMENT`.

        Args:
            c: the number of elements in the chunk, at least 0.
            dtype: their dtype, one of `COMPRESSIBLE`.
        """

    def compress(self, x: Tensor, num_chunks: int, target_chunk: int | None = None, out: Tensor | None = None) -> Tensor:
        """Return the payload of x: one block of `payload_bytes` bytes for each chunk.

        Args:
            x: num_chunks equal chunks, float16, bfloat16 or float32; unchanged.
            num_chunks: the number of chunks, at least 1.
            target_chunk: write only the block of this chunk and leave the others unchanged (S4.5).
            out: the payload to write; None: a new one, with zeros in the blocks that target_chunk excludes.

        >>> from bagua_ref.backends import get_codec
        >>> get_codec("MinMaxUInt8").compress(torch.tensor([0.0, 1.0, 2.0]), num_chunks=1)[32:35].tolist()
        [0, 128, 255]
        """
        out = self._payload_for(x, num_chunks, target_chunk, out)
        with codec_phase("compress"):
            self._compress(x, num_chunks, target_chunk, out)
        return out

    def compress_in_steps(self, x: Tensor, num_chunks: int, target_chunk: int | None = None, *, out: Tensor) -> Iterator[int]:
        """Run `compress` step by step, so that the first bytes of each block can be sent while later ones are computed.

        Yields:
            The number of leading bytes of each block that are final, never fewer than before; at last, all. The elements that
            `decompress_in_steps` makes of these bytes are not read again.

        >>> from bagua_ref.backends import get_codec
        >>> payload = torch.empty(64, dtype=torch.uint8)
        >>> list(get_codec("MinMaxUInt8").compress_in_steps(torch.tensor([0.0, 1.0, 2.0]), num_chunks=1, out=payload))
        [35, 64]
        """
        out = self._payload_for(x, num_chunks, target_chunk, out)
        return codec_steps("compress", self._compress_in_steps(x, num_chunks, target_chunk, out))

    def decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        """out <- the numbers of a payload; those beyond the range of out's dtype become its largest, with their sign (S4.3).

        Args:
            payload: of `compress`, for the same number of elements, dtype and chunks, or of any bytes; unchanged.
            num_chunks: the number of chunks, at least 1.
            out: the elements, float16, bfloat16 or float32; written.
        """
        self._check_payload(payload, num_chunks, out)
        with codec_phase("decompress"):
            self._decompress(payload, num_chunks, out)

    def decompress_in_steps(self, payload: Tensor, num_chunks: int, out: Tensor) -> Iterator[int]:
        """Run `decompress` step by step, so that the first bytes of each block can be decompressed while later ones arrive.

        Yields:
            The number of leading bytes of each block that the next step reads, never fewer than before.

        >>> from bagua_ref.backends import get_codec
        >>> list(get_codec("MinMaxUInt8").decompress_in_steps(torch.zeros(64, dtype=torch.uint8), 1, out=torch.zeros(3)))
        [32, 35]
        """
        self._check_payload(payload, num_chunks, out)
        return codec_steps("decompress", self._decompress_in_steps(payload, num_chunks, out))

    @abstractmethod
    def _compress(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> None:
        """Write one block of out, or all; the arguments are valid."""

    @abstractmethod
    def _decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        """Write out; the arguments are valid."""

    def _compress_in_steps(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> Iterator[int]:
        """As `compress_in_steps`, whose arguments are valid; a codec that cannot compress in part takes one step."""
        self._compress(x, num_chunks, target_chunk, out)
        yield out.numel() // num_chunks

    def _decompress_in_steps(self, payload: Tensor, num_chunks: int, out: Tensor) -> Iterator[int]:
        """As `decompress_in_steps`, whose arguments are valid; a codec that cannot decompress in part takes one step."""
        yield payload.numel() // num_chunks
        self._decompress(payload, num_chunks, out)

    def _compress_at_once(self, x: Tensor, num_chunks: int, target_chunk: int | None = None, *, out: Tensor) -> Iterator[int]:
        self.compress(x, num_chunks, target_chunk, out=out)
        yield out.numel() // num_chunks

    def _decompress_at_once(self, payload: Tensor, num_chunks: int, out: Tensor) -> Iterator[int]:
        yield payload.numel() // num_chunks
        self.decompress(payload, num_chunks, out)

    def _payload_for(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor | None) -> Tensor:
        """Check the arguments of `compress`; return its result, not yet written."""
        self._check("x", x)
        size = num_chunks * self.payload_bytes(chunk_size_of(x.numel(), num_chunks), x.dtype)
        if target_chunk is not None:
            check_target_chunk(target_chunk, num_chunks)
        if out is None:
            make = torch.empty if target_chunk is None else torch.zeros
            return make(size, dtype=torch.uint8, device=x.device)
        check_beside("x", x, "out", out, torch.uint8, size)
        return out

    def _check_payload(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        self._check("out", out)
        size = num_chunks * self.payload_bytes(chunk_size_of(out.numel(), num_chunks), out.dtype)
        check_beside("out", out, "payload", payload, torch.uint8, size)

    def _check(self, name: str, x: Tensor) -> None:
        check_flat(name, x, COMPRESSIBLE)
        check_device(name, x, self.kernels.name, self.kernels.device_types)

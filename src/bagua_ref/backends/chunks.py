"""Chunks of tensors, and the encoding of their largest elements for a chunked sparse exchange
(S15.1 to S15.3).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from bagua_ref.backends.codec import Codec

MAX_CHUNK = 64
"""The longest side of a chunk, so that indices in it have 12 bits."""
_POISON = 0x7FC00000
"""The bits of the NaN that marks a Stat2 payload of values that are not finite."""


def chunk_side(size: int, chunk: int) -> int:
    """Return c(size), the largest divisor of ``size`` that is at most ``chunk``; 1 of 0 (S15.1).

    >>> chunk_side(768, 64), chunk_side(100, 64), chunk_side(67, 64)
    (64, 50, 1)
    """
    return next(side for side in range(min(size, chunk) or 1, 0, -1) if size % side == 0)


class Chunks:
    """The chunks of tensors of one shape: blocks of h rows and w columns of their last two
    dimensions (S15.1).

    Args:
        shape: shape of the tensors; one dimension counts as a row, none as a single element.
        chunk: maximum side, from 1 to 64.

    Attributes:
        count: K, the number of chunks.
        sides: h and w.
        numel: m, the number of elements of a chunk.

    >>> chunks = Chunks((2, 4), 2)
    >>> chunks.cut(torch.arange(8).view(2, 4))
    tensor([[0, 1, 4, 5],
            [2, 3, 6, 7]])
    """

    def __init__(self, shape: Sequence[int], chunk: int) -> None:
        *leading, rows, columns = (1, 1, *shape)
        self._shape = torch.Size(shape)
        self.sides = h, w = chunk_side(rows, chunk), chunk_side(columns, chunk)
        self._blocks = math.prod(leading), rows // h, columns // w
        self.count, self.numel = math.prod(self._blocks), h * w

    def cut(self, x: Tensor) -> Tensor:
        """Split ``x``, of any strides, into a K x m tensor of chunks."""
        leading, down, across = self._blocks
        h, w = self.sides
        blocks = x.reshape(leading, down, h, across, w).transpose(2, 3)
        return blocks.reshape(self.count, self.numel)

    def join(self, chunks: Tensor) -> Tensor:
        """Merge chunks, K x m, into the row-major tensor."""
        leading, down, across = self._blocks
        blocks = chunks.view(leading, down, across, *self.sides).transpose(2, 3)
        return blocks.reshape(self._shape)


def largest_of_rows(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k elements of largest magnitude of each row, ascending, K x k
    (S15.2).

    Ties go to the lower index. NaN counts as larger than inf, and all NaNs as equal.

    Args:
        x: float32, K x m, contiguous, m at most 2^21.
        k: from 1 to m.

    >>> largest_of_rows(torch.tensor([[1.0, -3.0, 2.0, 3.0], [0.0, 0.0, math.inf, math.nan]]), 2)
    tensor([[1, 3],
            [2, 3]])
    """
    m = x.shape[1]
    # |x| in its order as an integer of 31 bits; the largest is NaN
    size = (x.view(torch.int32) & 0x7FFFFFFF).clamp_(max=0x7F800001)
    # with the index no two keys are equal, so the choice is the same on every device; a float64 has
    # the bits, and unlike int64 is skipped where a plan of large models is counted
    keys = size.double().mul_(m).sub_(torch.arange(m, device=x.device))
    return torch.topk(keys, k, dim=1, sorted=False).indices.sort(dim=1).values


def packed_bytes(count: int) -> int:
    """Return the size in bytes of this many packed indices."""
    return -(-3 * -(-count // 2) // 4) * 4


def pack_indices(indices: Tensor) -> Tensor:
    """Pack indices below 4096 into 12 bits each, zero-padded to a multiple of 4 bytes (S15.3).

    >>> pack_indices(torch.tensor([0x123, 0xABC, 0x456])).tolist()
    [35, 193, 171, 86, 4, 0, 0, 0]
    """
    i, j = pad(indices, (0, indices.numel() % 2)).view(-1, 2).unbind(1)
    packed = torch.stack([i & 255, i >> 8 | (j & 15) << 4, j >> 4], dim=1).view(-1)
    return pad(packed.to(torch.uint8), (0, packed_bytes(indices.numel()) - packed.numel()))


def unpack_indices(packed: Tensor, count: int) -> Tensor:
    """Return the first ``count`` indices packed by `pack_indices`."""
    a, b, c = packed[: 3 * -(-count // 2)].long().view(-1, 3).unbind(1)
    return torch.stack([a | (b & 15) << 8, b >> 4 | c << 4], dim=1).view(-1)[:count]


class Stat2(Codec):
    """Two bits per value: three levels around the mean, derived from the standard deviation, and a
    code for zero (S15.3).

    The payload of a chunk of c values::

        byte 0            shift, l_1, l_2, l_3: float32, little-endian
        byte 16           codes, four a byte, the first in the lowest bits
        up to the next    zeros
        multiple of 4

    Of the N' values v that are not 0: ``shift = mean v``, ``c = v - shift``, ``scale = 1.5 *
    sqrt(sum of c^2 / (N' - 1))``, ``code = clamp(rint(c/scale + 2), 1, 3)``, and l_b is the mean of
    the c with code b. Sums are exact and rounded to float64 once, so payloads are the same on every
    device. A value decodes to ``l_code + shift``, and one of 0 to 0. Values that are not finite, or
    overflow, poison the chunk: shift is NaN, all else 0; it decodes to NaN.

    Source: the quantiser of SparseLoCo, Sarfi et al., 2025 (arXiv:2508.15706).
    """

    name = "Stat2"
    biased = True

    def payload_bytes(self, c: int, dtype: torch.dtype) -> int:
        """Return ``16 + ceil(ceil(c/4)/4)*4``, 0 for an empty chunk."""
        return 16 + -(-c // 16) * 4 if c else 0

    def _compress(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> None:
        if x.numel():
            blocks, values = out.view(num_chunks, -1), x.float().view(num_chunks, -1)
            for place in range(num_chunks) if target_chunk is None else [target_chunk]:
                levels, codes = _quantised(values[place])
                blocks[place, :16] = levels.view(torch.uint8)
                codes = pad(codes, (0, -codes.numel() % 16)).view(-1, 4)
                blocks[place, 16:] = (
                    codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6
                )

    def _decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        if out.numel():
            blocks, values = payload.view(num_chunks, -1), out.view(num_chunks, -1)
            shift, *levels = blocks[:, :16].contiguous().view(torch.float32).split(1, dim=1)
            shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=out.device)
            codes = (blocks[:, 16:, None] >> shifts & 3).view(num_chunks, -1)
            codes = codes[:, : values.shape[1]]
            found = torch.where(shift.isnan(), shift, 0)
            for code, level in enumerate(levels, start=1):
                found = torch.where((codes == code) & shift.isfinite(), level + shift, found)
            largest = torch.finfo(out.dtype).max
            values.copy_(found.clamp(-largest, largest))


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a chunk: return the shift and three levels as four float32, and the uint8 code of
    each value.
    """
    levels, codes = x.new_zeros(4), torch.zeros_like(x, dtype=torch.uint8)
    filled = x != 0
    v = x[filled]
    count = v.numel()
    if not count:
        return levels, codes
    poisoned = torch.tensor([_POISON, 0, 0, 0], dtype=torch.int32, device=x.device)
    poison = poisoned.view(torch.float32), torch.zeros_like(codes)
    if not v.isfinite().all():
        return poison
    one_group = torch.zeros_like(v, dtype=torch.int64)
    levels[0] = _sums(v, one_group, 1)[0] / count
    c = v - levels[0]
    if not c.isfinite().all():
        return poison
    sd = math.sqrt(_sums(c, one_group, 1, squared=True)[0] / (count - 1)) if count > 1 else 0.0
    scale = ctypes.c_float(1.5 * sd).value or 1.0
    # a tensor: torch multiplies by the reciprocal of a number on CUDA devices
    code = (c / torch.full_like(c, scale) + 2).round_().clamp_(1, 3).to(torch.uint8)
    sums, counts = _sums(c, code.long(), 4), code.long().bincount(minlength=4).tolist()
    for place in range(1, 4):
        levels[place] = sums[place] / max(counts[place], 1)
    if scale == math.inf or not (levels[1:] + levels[0]).isfinite().all():
        return poison
    codes[filled] = code
    return levels, codes


def _sums(x: Tensor, groups: Tensor, count: int, squared: bool = False) -> list[float]:
    """Return the exact sum per group of x, or of its squares, rounded once to float64.

    Args:
        x: float32 and finite, fewer than 2^39 elements.
        groups: index of each element's group.
        count: the number of groups.
        squared: sum the squares.
    """
    bits = x.view(torch.int32).long()
    exponent = (bits >> 23 & 255).clamp_(min=1)
    mantissa = torch.where(bits >> 23 & 255 > 0, bits & 0x7FFFFF | 0x800000, bits & 0x7FFFFF)
    # |x| = mantissa * 2^(exponent - 150); a sum of 24 bits each, per exponent, fits an int64
    if squared:
        parts, unit = [(mantissa**2 & 0xFFFFFF, 0), (mantissa**2 >> 24, 24)], 2
    else:
        parts, unit = [(torch.where(bits < 0, -mantissa, mantissa), 0)], 1
    totals = [0] * count
    for amounts, scale in parts:
        bins = bits.new_zeros(count * 256).index_add_(0, groups * 256 + exponent, amounts)
        for place, total in enumerate(bins.tolist()):
            totals[place // 256] += total << (place % 256 * unit + scale)
    return [total / 2 ** (150 * unit) for total in totals]  # of integers, correctly rounded


class ChunkCoder:
    """Encoder and decoder of one tensor's part of a message: the largest elements of its chunks
    (S15.2, S15.3).

    A kernel backend may have a faster one; see `bagua_ref.backends.KernelBackend.chunk_coder`.

    Args:
        chunks: the chunks of the tensor.
        k: number of elements to send of each chunk, or all if it has fewer.
        codec: codec of the values; None: values are not compressed.

    Attributes:
        count: N, the number of values sent of the tensor.
        nbytes: size of the tensor's part in bytes: indices, unless chunks are sent whole, and
            values.
    """

    def __init__(self, chunks: Chunks, k: int, codec: Codec | None) -> None:
        self.chunks, self.k, self.codec = chunks, min(k, chunks.numel), codec
        self.count = chunks.count * self.k
        self._head = packed_bytes(self.count) if self.k < chunks.numel else 0
        values = codec.payload_bytes(self.count, torch.float32) if codec else 4 * self.count
        self.nbytes = self._head + values if self.count else 0  # no header of a codec

    def encode(self, y: Tensor) -> Tensor:
        """Encode a tensor's chunks, float32 of shape (K, m), as its part of the message."""
        if not self.count:
            return y.new_empty(0, dtype=torch.uint8)
        indices = y.new_empty(0, dtype=torch.uint8)
        if self._head:
            found = largest_of_rows(y, self.k)
            indices, y = pack_indices(found.view(-1)), y.gather(1, found)
        values = y.reshape(-1)
        coded = values.view(torch.uint8) if self.codec is None else self.codec.compress(values, 1)
        return torch.cat([indices, coded])

    def add_decoded(self, sent: Tensor, total: Tensor, counts: Tensor | None = None) -> None:
        """Decode a part of a message and add its values to ``total``, K*m elements; add 1 to
        ``counts`` for each value that is not 0.
        """
        if not self.count:
            return
        if self.codec is None:
            values = sent[self._head :].view(torch.float32)
        else:
            values = total.new_empty(self.count)
            self.codec.decompress(sent[self._head :], 1, values)
        found = [(total, values)]
        if counts is not None:
            found.append((counts, (values != 0).float()))
        if self._head:
            starts = torch.arange(self.chunks.count, device=sent.device) * self.chunks.numel
            places = unpack_indices(sent, self.count) + starts.repeat_interleave(self.k)
        for sums, added in found:
            if self._head:
                sums.index_add_(0, places, added)  # no place twice, so their order does not matter
            else:
                sums += added

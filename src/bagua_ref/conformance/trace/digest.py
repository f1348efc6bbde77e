"""Digests of tensors: 64 bits that tell whether two tensors have the same bits, dtype and shape."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from bagua_ref.conformance.formats.safetensors_file import bytes_of

__all__ = ["digest", "digest_of_text"]

_SMALL = 2**16  # bytes; up to here, BLAKE2b is faster
_ROWS = 16
_LANES = 2**15  # at a time, so that they stay in the cache; the result does not depend on it
_ODD = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # fixed, odd, without a pattern


def digest(x: Tensor) -> int:
    """Return 64 bits of a tensor's elements in order, its dtype and its shape; equal on every little-endian machine and device.

    Up to 65,536 bytes, it is BLAKE2b of dtype, shape and bytes. Of more, the bytes are words of 8 bytes in 16 rows of lanes. In
    each lane, a <- fold(a xor word) * odd for each row, where fold(a) = a xor (a >> 32); every step is one to one, so a change of
    one word always shows. The lanes are then mixed with their numbers and added modulo 2^64. BLAKE2b of dtype, shape and the bytes
    after the last word is added by xor. It is no cryptographic hash: it finds accidents, not forgeries.

    Args:
        x: dense, of any strides, dtype and device; unchanged. Strides do not count.

    Returns:
        From 0 to 2^64 - 1.

    >>> a = torch.arange(6.0)
    >>> digest(a) == digest(torch.arange(12.0)[::2] / 2), digest(a) == digest(a.flip(0)), digest(a) == digest(a.reshape(2, 3))
    (True, False, False)
    """
    x = x.detach().resolve_conj().resolve_neg()
    header = f"{x.dtype} {list(x.shape)} ".encode()
    if x.numel() * x.element_size() <= _SMALL:
        return digest_of_text(header + bytes_of(x))
    data = x.contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    header += bytes(data[whole:].tolist())
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()  # a view of words needs it
    return (_mixed_words(data[:whole].view(torch.int64)) ^ digest_of_text(header)) & (2**64 - 1)


def digest_of_text(text: bytes) -> int:
    """Return 64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _mixed_words(words: Tensor) -> int:
    """Return the sum of all lanes, of which threads take blocks; kernels with threads of their own would wait for each other."""
    lanes = math.ceil(words.numel() / _ROWS)
    starts = range(0, lanes, lanes if words.is_cuda else _LANES)
    if len(starts) == 1:
        return _mixed_lanes(words, lanes, 0, lanes)
    with ThreadPoolExecutor(min(len(starts), torch.get_num_threads())) as pool:
        return sum(pool.map(lambda start: _mixed_lanes(words, lanes, start, min(start + _LANES, lanes)), starts))


def _mixed_lanes(words: Tensor, lanes: int, start: int, stop: int) -> int:
    state = words[start:stop].clone()
    halves = state.view(torch.int32).view(-1, 2)
    low, high = halves[:, 0], halves[:, 1]
    for row in range(1, _ROWS + 1):
        low.bitwise_xor_(high)
        state.mul_(_ODD[0])
        if row < _ROWS:
            more = words[row * lanes + start : min(row * lanes + stop, words.numel())]
            state[: more.numel()].bitwise_xor_(more)
    state.add_(torch.arange(start + 1, stop + 1, device=words.device).mul_(_ODD[1]))
    for odd in _ODD[1:]:
        low.bitwise_xor_(high)
        state.mul_(odd)
    low.bitwise_xor_(high)
    return int(state.sum())

"""Digests of tensors: 64 bits that tell whether two tensors have the same bits, dtype and shape."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from bagua_ref.record.tensor_files import bytes_of

_WORDS = 512  # of 8 bytes in a row; the keys stay in the cache
_KEYS = np.frombuffer(hashlib.shake_128(b"digest").digest(2 * 8 * _WORDS), "<u8").reshape(
    2, -1
) | np.uint64(1)
_BLOCK = 256  # rows at a time, which are read from memory once and from the cache again
_BLOCK_ON_DEVICE = 2**14  # likewise: it bounds temporary memory


def digest(x: Tensor) -> int:
    """Return 64 bits of a tensor's elements in order, its dtype and its shape; equal on every
    little-endian machine and device.

    The bytes are rows of 512 words w of 8 bytes. A row's sums modulo 2^64 are sum_j k_j w_j, and
    sum_j l_j v_j, where v_j is w_j with its bytes reversed; the 1,024 keys, which are odd, are
    SHAKE128 of "digest", each with its lowest bit set. The digest is BLAKE2b of dtype, shape, the
    two sums of each row and the bytes after the last row. As keys are odd, a change of one word of
    a row always changes its sums; other changes leave them with a probability of at most 2^-58:
    what is high in w, and hence weak in its sum, is low in v. It finds accidents, not forgeries.

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
    data = x.contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // (8 * _WORDS) * 8 * _WORDS
    sums = b""
    if whole:
        sums = (
            _sums(data[:whole].numpy())
            if data.device.type == "cpu"
            else _sums_on_device(data[:whole])
        )
    return digest_of_text(header + sums + bytes_of(data[whole:]))


def digest_of_text(text: bytes) -> int:
    """Return 64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _sums(data: np.ndarray) -> bytes:
    """Return both sums of each row."""
    rows = data.view("<u8").reshape(-1, _WORDS)
    sums = np.empty((len(rows), 2), "<u8")
    for first in range(0, len(rows), _BLOCK):
        part = slice(first, first + _BLOCK)
        np.einsum("ij,j->i", rows[part], _KEYS[0], out=sums[part, 0])
        np.einsum("ij,j->i", rows[part].view(">u8"), _KEYS[1], out=sums[part, 1])
    return sums.tobytes()


def _sums_on_device(data: Tensor) -> bytes:
    """Return both sums of each row, computed by torch where the data is."""
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()  # a view of words needs it
    keys = torch.from_numpy(_KEYS.view(np.int64)).to(data.device)
    sums = []
    for part in data.split(_BLOCK_ON_DEVICE * 8 * _WORDS):
        words, reversed_words = (
            x.reshape(-1).view(torch.int64).view(-1, _WORDS)
            for x in (part, part.view(-1, 8).flip(1))
        )
        sums.append(torch.stack([(words * keys[0]).sum(1), (reversed_words * keys[1]).sum(1)], 1))
    return bytes_of(torch.cat(sums))

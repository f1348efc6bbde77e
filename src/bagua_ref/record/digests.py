"""Digests of tensors: 64 bits that tell whether two tensors have the same bits, dtype and shape."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor


def digest(x: Tensor) -> int:
    """Return 64 bits of a tensor's elements in order, its dtype and its shape; equal on every
    little-endian machine and device.

    The digest is XXH3 of dtype and shape as a text, and of the elements, row-major. It detects
    accidents, not forgeries.

    Args:
        x: dense, of any strides, dtype and device; unchanged. Strides do not count.

    Returns:
        From 0 to 2^64 - 1.

    >>> a = torch.arange(6.0)
    >>> digest(a) == digest(torch.arange(12.0)[::2] / 2), digest(a) == digest(a.flip(0)), digest(a) == digest(a.reshape(2, 3))
    (True, False, False)
    """
    hashed = xxhash.xxh3_64(f"{x.dtype} {list(x.shape)} ".encode())
    if x.numel():
        x = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # a single element may have any stride
        hashed.update(x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data)
    return int(hashed.intdigest())


def digest_of_text(text: str) -> int:
    """Return 64 bits of a text."""
    return int(xxhash.xxh3_64_intdigest(text.encode()))

"""Assignment of tensors to buckets (S2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["split_into_buckets"]

_ORDER = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def split_into_buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Return ``tensors`` by dtype (bf16, f16, f32, f64), then device by first appearance, cut into buckets (S2.1).

    A bucket is closed as soon as it holds ``bucket_bytes`` or more, and at every change of dtype or device.

    Raises:
        TypeError: a dtype that cannot be trained.

    >>> [len(bucket) for bucket in split_into_buckets([torch.ones(4)] * 5, bucket_bytes=32)]
    [2, 2, 1]
    """
    for tensor in tensors:
        if tensor.dtype not in _ORDER:
            raise TypeError(f"tensors of {tensor.dtype} cannot be trained; allowed are {', '.join(map(str, _ORDER))}")
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    buckets: list[list[Tensor]] = []
    for dtype in _ORDER:
        for device in devices:
            filled = bucket_bytes  # nothing is open at a change of dtype or device
            for tensor in tensors:
                if (tensor.dtype, tensor.device) == (dtype, device):
                    if filled >= bucket_bytes:
                        buckets.append([])
                        filled = 0
                    buckets[-1].append(tensor)
                    filled += tensor.numel() * tensor.element_size()
    return buckets

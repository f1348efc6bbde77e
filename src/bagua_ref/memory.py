"""Grouping of tensors by dtype and device, and overlaps of their memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor

__all__ = ["by_dtype_and_device", "memory_span", "overlapping"]

AnyTensor = TypeVar("AnyTensor", bound="Tensor")


def by_dtype_and_device(tensors: Iterable[AnyTensor]) -> list[list[AnyTensor]]:
    """Return lists of tensors that share a dtype and a device, in the order in which they first appear."""
    kinds: dict[tuple[torch.dtype, torch.device], list[AnyTensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def memory_span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a strided, non-empty tensor, and the address after its last byte."""
    if tensor.is_contiguous():
        reach = tensor.numel()
    else:
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + reach * tensor.element_size()


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the places of two non-empty tensors that share memory, None if there are none."""
    spans = sorted((*memory_span(t), place) for place, t in enumerate(tensors) if t.numel())
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            return min(first, second), max(first, second)
    return None

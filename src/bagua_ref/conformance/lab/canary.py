"""Tensors inside larger storage, which show writes beside them and writes to read-only arguments."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Canary"]

_PATTERN = 0x7F  # huge or NaN as a float, so that reads beyond the end tend to show, too
_MARGIN = 64


class Canary:
    """A copy of a tensor, with the same shape and strides, between two margins in one storage.

    Args:
        values: values of the copy.
        shift: offset of the copy in elements, so that addresses are not always aligned.
        device: device of the copy.

    Attributes:
        tensor: the copy.

    >>> canary = Canary(torch.zeros(3)); canary.tensor[0] = 1; canary.changed_inside(), canary.changed_outside()
    ([0], [])
    """

    def __init__(self, values: Tensor, shift: int = 0, device: torch.device | str = "cpu") -> None:
        before = _MARGIN + shift % 8
        extent = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
        total = before + (extent if values.numel() else 0) + _MARGIN
        item = values.element_size()
        storage = torch.full((total * item,), _PATTERN, dtype=torch.uint8).view(values.dtype)
        inside = torch.zeros(total, dtype=torch.bool)
        inside.as_strided(values.shape, values.stride(), before).fill_(True)
        storage.as_strided(values.shape, values.stride(), before).copy_(values.detach())
        self._item, self._inside, self._start = item, inside, before
        self._was = storage.view(torch.uint8).clone()
        self._storage = storage.to(device)
        self.tensor: Tensor = self._storage.as_strided(values.shape, values.stride(), before)

    def changed_inside(self) -> list[int]:
        """Return the places in the tensor's memory whose bits have changed."""
        return self._changed(self._inside)

    def changed_outside(self) -> list[int]:
        """Return the places outside the tensor that were written, relative to its first element."""
        return self._changed(~self._inside)

    def _changed(self, where: Tensor) -> list[int]:
        now = self._storage.cpu().view(torch.uint8)
        if torch.equal(now, self._was):
            return []
        changed = (now != self._was).view(-1, self._item).any(dim=1) & where
        return (changed.nonzero().view(-1) - self._start).tolist()

    def assert_unchanged(self, name: str = "tensor") -> None:
        """Raise AssertionError if anything was written, in the tensor or beside it."""
        self.assert_only_inside_changed(name)
        if places := self.changed_inside():
            raise AssertionError(f"{name} is only read, but element {places[0]} was changed ({len(places)} in all)")

    def assert_only_inside_changed(self, name: str = "tensor") -> None:
        """Raise AssertionError if anything outside the tensor was written."""
        if places := self.changed_outside():
            first = f"first {places[0]:+} elements from its start"
            raise AssertionError(f"memory beside {name} was written, {first} ({len(places)} in all)")

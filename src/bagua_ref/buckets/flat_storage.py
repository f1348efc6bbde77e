"""Flat storage of a bucket: one storage of its tensors' own, or a buffer that they are gathered into (S2.2, S2.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter, eq
from typing import cast

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.base import streams
from bagua_ref.base.memory import Layout
from bagua_ref.base.utils import check_contiguous
from bagua_ref.buckets.tensor import BaguaTensor, registration

__all__ = ["FlatStorage"]


class FlatStorage:
    """The flat tensor that a bucket's operations work on, and the copies between it and the bucket's tensors.

    Args:
        name: the bucket's.
        tensors: its bagua tensors.
        effective: their effective tensors, which share a dtype and a device and do not overlap.
        flatten: move the effective tensors into one contiguous storage, unless they already are; otherwise `load` gathers them
            into a buffer and `store` copies that into them. The order of elements is the same in both.
        alignment: the number of elements, padding included, is a multiple of it.

    Attributes:
        layouts: the strides of each effective tensor in flat storage: those that it has now, row-major ones if it is not dense.
        filled: the number of elements, without padding.
        numel: the number of elements, padding included.
        padding_tensor: the padding, None if none is needed.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor], effective: Sequence[Tensor], flatten: bool, alignment: int) -> None:
        self._tensors, self._flatten = tensors, flatten
        self._registered = [registration(tensor) for tensor in tensors]
        self._dtype, self._device = effective[0].dtype, effective[0].device
        self.layouts = [Layout.of(t) for t in effective]
        self._shapes = [layout.shape for layout in self.layouts]
        self._one_dimensional = all(len(shape) == 1 for shape in self._shapes)
        self.filled = sum(t.numel() for t in effective)
        self.numel = self.filled + -self.filled % alignment
        self.padding_tensor: Tensor | None = None
        if self.numel > self.filled:
            zeros = cast("BaguaTensor", torch.zeros(self.numel - self.filled, dtype=self._dtype, device=self._device))
            self.padding_tensor = BaguaTensor.ensure_bagua_tensor(zeros, f"bagua_padding_tensor_bucket_{name}")
        self._flat: Tensor | None = None
        """The effective tensors' own storage if flat, else a buffer made when it is first needed."""
        self._views: list[Tensor] = []
        """If flat, each tensor's part of ``_flat``, in its shape and strides."""
        if flatten:
            self._move_together(effective)
        self._positions = list(_positions(self._views))
        self._memory = range(0)
        """If flat, the addresses of its storage."""
        if self._flat is not None:
            storage = self._flat.untyped_storage()
            self._memory = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())

    def is_contiguous(self, effective: Sequence[Tensor | None]) -> bool:
        """Return whether the effective tensors and the padding are contiguous in memory (S2.3); None counts as in its place."""
        if not self._flatten and None in effective:
            return False
        present = [self._views[place] if tensor is None else tensor for place, tensor in enumerate(effective)]
        return check_contiguous([*self._in_order(present), *([self.padding_tensor] if self.padding_tensor is not None else [])])

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Return each tensor's part of ``flat``, in its shape and strides."""
        parts = flat[: self.filled].split([shape.numel() for shape in self._shapes])
        return [layout.view(part) for layout, part in zip(self.layouts, parts, strict=True)]

    def _move_together(self, effective: Sequence[Tensor]) -> None:
        """Move the effective tensors into one contiguous storage, if they do not lie in one already (S2.3)."""
        adjacent = self.is_contiguous(effective)
        if adjacent and self.numel:
            first = next(t for t in effective if t.numel()).detach()
            self._flat = first.as_strided((self.numel,), (1,))
        else:
            self._flat = torch.empty(self.numel, dtype=self._dtype, device=self._device)
        self._views = self.views_of(self._flat)
        if adjacent:
            return
        torch._foreach_copy_(self._views, [t.detach() for t in effective])
        for tensor, view in zip(effective, self._views, strict=True):
            tensor.data = view
        if self.padding_tensor is not None:
            self._flat[self.filled :] = 0
            self.padding_tensor.data = self._flat[self.filled :]

    @torch.no_grad()  # gradients of backward(create_graph=True) require gradients
    def load(self, kernels: KernelBackend | None) -> Tensor:
        """Return the flat tensor with the effective tensors' values, wherever they are, and zero padding.

        If flat, the effective tensors lie in it from now on; else ``kernels`` gather them.

        Raises:
            ValueError: a tensor has another shape or dtype than when the bucket was made.
            NotImplementedError: a tensor is sparse.
        """
        if self._flat is None:
            self._flat = torch.empty(self.numel, dtype=self._dtype, device=self._device)
        if self.padding_tensor is not None:
            self._flat[self.filled :] = 0
        effective = [known.getter(proxy) for known, proxy in zip(self._registered, self._tensors, strict=True)]
        if not self._all_fit(effective):
            for place, tensor in enumerate(effective):
                if tensor is None or not self._fits(tensor, place):
                    effective[place] = self._zero_or_raise(place, tensor)
        dense = cast("list[Tensor]", effective)
        if self._flatten:
            self._move_in(dense)
        else:
            assert kernels is not None, "it is not flat"
            self._gather(dense, kernels)
        return self._flat

    def _gather(self, effective: list[Tensor], kernels: KernelBackend) -> None:
        for place, tensor in enumerate(effective):
            if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                effective[place] = self.layouts[place].copy_of(tensor)  # the result needs room for each element
                self._replace(place, effective[place])
        streams.hold(effective, self._device)
        kernels.gather_flat(self._in_order(effective), cast("Tensor", self._flat)[: self.filled])

    def _move_in(self, effective: list[Tensor]) -> None:
        """Move the effective tensors that lie elsewhere into flat storage."""
        places: Sequence[int] = range(len(effective))
        outside, pointers = effective, list(map(torch.Tensor.data_ptr, effective))
        if max(pointers) >= self._memory.start and min(pointers) < self._memory.stop:  # else all lie elsewhere
            places = [place for place, position in enumerate(_positions(effective)) if position != self._positions[place]]
            # Those that lie in other tensors' places are copied first: they could be overwritten before they are read.
            outside = [effective[place].clone() if pointers[place] in self._memory else effective[place] for place in places]
        if outside:
            views = self._own_views(places)
            streams.hold(outside, self._device)
            if outside is effective and self._one_dimensional:
                torch.cat(outside, out=cast("Tensor", self._flat)[: self.filled])  # takes half the time of the call below
            else:
                torch._foreach_copy_(views, outside)
            for place, view in zip(places, views, strict=True):
                self._registered[place].replace(self._tensors[place], view)

    def _all_fit(self, effective: Sequence[Tensor | None]) -> bool:
        """Return whether no tensor is missing and each `_fits`; this is much faster than one call for each."""
        kinds = {None if tensor is None else (tensor.layout, tensor.dtype) for tensor in effective}
        return kinds == {(torch.strided, self._dtype)} and all(map(eq, map(_shape, effective), self._shapes))

    def _fits(self, tensor: Tensor, place: int) -> bool:
        """Return whether ``tensor`` is dense and has the shape and dtype that its bucket was made for."""
        return tensor.layout is torch.strided and tensor.shape == self._shapes[place] and tensor.dtype is self._dtype

    def _zero_or_raise(self, place: int, tensor: Tensor | None) -> Tensor:
        """Return a new zero tensor in place of a missing gradient; raise for any other tensor that does not fit."""
        shape, name = self._shapes[place], self._registered[place].name
        if tensor is None:
            tensor = self.layouts[place].zeros(self._dtype, self._device)
            self._replace(place, tensor)
            return tensor
        if tensor.layout is not torch.strided:
            raise NotImplementedError(f"tensor {name!r} is {tensor.layout}; only dense ones can be communicated: use sparse=False")
        raise ValueError(
            f"tensor {name!r} has shape {tuple(tensor.shape)} and {tensor.dtype}, but its bucket was made for shape "
            f"{tuple(shape)} and {self._dtype}; make the bucket, or wrap the module, after changing them"
        )

    def _replace(self, place: int, tensor: Tensor) -> None:
        self._registered[place].replace(self._tensors[place], tensor)

    def _own_views(self, places: Sequence[int]) -> list[Tensor]:
        """Return views of the tensors' places in flat storage."""
        if not all(map(eq, _positions(self._views), self._positions)):  # a view was the gradient, and its ``data`` was replaced
            self._views = self.views_of(cast("Tensor", self._flat))
        return [self._views[place] for place in places]

    def store(self, flat: Tensor, effective: Sequence[Tensor], kernels: KernelBackend) -> None:
        """Copy ``flat`` into the effective tensors, wherever they are; padding is left out."""
        streams.hold(effective, self._device)
        kernels.scatter_flat(flat[: self.filled], self._in_order(effective))

    def _in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return views of the tensors, whatever their strides are, whose row-major order is that of flat storage."""
        return [layout.in_order(tensor.detach()) for layout, tensor in zip(self.layouts, tensors, strict=True)]


_shape = attrgetter("shape")


def _positions(tensors: Sequence[Tensor]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each tensor's address and strides: a list of thousands of tuples would trigger the garbage collector."""
    return zip(map(torch.Tensor.data_ptr, tensors), map(torch.Tensor.stride, tensors), strict=True)

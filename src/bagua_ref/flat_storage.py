"""Where a bucket's tensors lie flat: in one storage of their own, or in a buffer that they are gathered into (S2.2, S2.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from bagua_ref.tensor import BaguaTensor, registration
from bagua_ref.utils import check_contiguous

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from bagua_ref.backends.base import KernelBackend

__all__ = ["FlatStorage"]


class FlatStorage:
    """The flat tensor that a bucket's operations work on, and the way from its tensors to it and back.

    Args:
        name: the bucket's.
        tensors: its bagua tensors.
        effective: their effective tensors, which share a dtype and a device and do not overlap.
        flatten: move the effective tensors into one contiguous storage, unless they already are; otherwise `load` gathers them
            into a buffer and `store` copies that into them.
        alignment: the number of elements, padding included, divides by it.

    Attributes:
        filled: the number of elements, without padding.
        numel: the number of elements, padding included.
        padding_tensor: the padding, None if none is needed.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor], effective: Sequence[Tensor], flatten: bool, alignment: int) -> None:
        self._tensors, self._flatten = tensors, flatten
        self._dtype, self._device = effective[0].dtype, effective[0].device
        self._shapes = [t.shape for t in effective]
        self.filled = sum(t.numel() for t in effective)
        self.numel = self.filled + -self.filled % alignment
        self.padding_tensor: Tensor | None = None
        if self.numel > self.filled:
            zeros = cast("BaguaTensor", torch.zeros(self.numel - self.filled, dtype=self._dtype, device=self._device))
            self.padding_tensor = BaguaTensor.ensure_bagua_tensor(zeros, f"bagua_padding_tensor_bucket_{name}")
        self._flat: Tensor | None = None
        """The effective tensors' own storage if flat, else a buffer made when it is first needed."""
        self._views: list[Tensor] = []
        """If flat, the part of ``_flat`` that is each tensor's, in its shape."""
        self._divided: dict[int, tuple[Tensor, int]] = {}
        """What has been divided into its view but is still outside ``_flat``: the tensor, as it was in this version."""
        self._settled: set[int] = set()
        """What has been divided and lies in ``_flat``."""
        if flatten:
            self._move_together(effective)

    def is_contiguous(self, effective: Sequence[Tensor | None]) -> bool:
        """Return whether the effective tensors and the padding are contiguous in memory (S2.3); None is where it belongs."""
        if not self._flatten and None in effective:
            return False
        present = [self._views[place] if tensor is None else tensor for place, tensor in enumerate(effective)]
        return check_contiguous([*present, *([self.padding_tensor] if self.padding_tensor is not None else [])])

    def _move_together(self, effective: Sequence[Tensor]) -> None:
        """Move the effective tensors into one contiguous storage, if they do not lie in one already (S2.3)."""
        adjacent = self.is_contiguous(effective)
        if adjacent and self.numel:
            first = next(t for t in effective if t.numel()).detach()
            self._flat = first.as_strided((self.numel,), (1,))
        else:
            self._flat = torch.empty(self.numel, dtype=self._dtype, device=self._device)
        offset = 0
        for tensor in effective:
            self._views.append(self._flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()
        if adjacent:
            return
        torch._foreach_copy_(self._views, [t.detach() for t in effective])
        for tensor, view in zip(effective, self._views, strict=True):
            tensor.data = view
        if self.padding_tensor is not None:
            self._flat[offset:] = 0
            self.padding_tensor.data = self._flat[offset:]

    def take_in(self, place: int, divisor: int) -> None:
        """Bring tensor ``place`` back into flat storage: a gradient just marked is in the cache still, a weight not yet read.

        To be divided, the tensor stays where it is until `settle`: should it be added to and marked again, it is divided anew.
        """
        proxy, view = self._tensors[place], self._views[place] if self._flatten else None
        tensor = registration(proxy).effective(proxy)
        if view is None or tensor is None or not self._fits(tensor, place) or tensor.data_ptr() == view.data_ptr():
            return  # `load` does what is left to do, and refuses what does not fit
        if divisor == 1:
            registration(proxy).replace(proxy, view.copy_(self._outside(tensor)))
        else:
            torch.div(self._outside(tensor), divisor, out=view)
            self._divided[place] = tensor, tensor._version

    def settle(self) -> None:
        """Make what has been divided part of flat storage: all tensors are marked, and no other mark comes before `load`."""
        for place, (tensor, version) in self._divided.items():
            proxy = self._tensors[place]
            if registration(proxy).effective(proxy) is tensor and version == tensor._version:
                registration(proxy).replace(proxy, self._views[place])
                self._settled.add(place)
        self._divided.clear()

    def load(self, kernels: KernelBackend, divisor: int = 1) -> Tensor:
        """Return the flat tensor: the effective tensors' values over ``divisor``, wherever they are, and zero padding."""
        effective = [self._effective_or_zero(place) for place in range(len(self._tensors))]
        if self._device.type == "cuda":
            for tensor in effective:  # once it is gone, its memory must not serve another stream before this one is through
                tensor.record_stream(torch.cuda.current_stream(self._device))
        if self._flat is None:
            self._flat = torch.empty(self.numel, dtype=self._dtype, device=self._device)
        if self.padding_tensor is not None:
            self._flat[self.filled :] = 0
        if not self._flatten:
            kernels.gather_flat([t.detach() for t in effective], self._flat[: self.filled])
            return self._flat.div_(divisor) if divisor > 1 else self._flat
        strayed, undivided = [], []
        for place, (proxy, tensor, view) in enumerate(zip(self._tensors, effective, self._views, strict=True)):
            inside = tensor.data_ptr() == view.data_ptr() and tensor.stride() == view.stride()
            if not inside:
                strayed.append((self._outside(tensor), view))
                registration(proxy).replace(proxy, view)
            if not inside or place not in self._settled:
                undivided.append(view)
        self._settled.clear()
        if strayed:
            torch._foreach_copy_([view for _, view in strayed], [tensor for tensor, _ in strayed])
        if divisor > 1 and undivided:
            torch._foreach_div_(undivided, divisor)
        return self._flat

    def _effective_or_zero(self, place: int) -> Tensor:
        """Return effective tensor ``place``; where zero_grad() removed a gradient and none came, a new zero one."""
        proxy = self._tensors[place]
        known = registration(proxy)
        tensor = known.effective(proxy)
        if tensor is None:
            tensor = torch.zeros(proxy.shape, dtype=self._dtype, device=self._device)
            known.replace(proxy, tensor)
        if tensor.layout != torch.strided:
            raise NotImplementedError(f"tensor {known.name!r} is {tensor.layout}; only dense tensors can be communicated")
        if not self._fits(tensor, place):
            raise ValueError(
                f"tensor {known.name!r} has shape {tuple(tensor.shape)} and {tensor.dtype}, but its bucket was made for shape "
                f"{tuple(self._shapes[place])} and {self._dtype}; make the bucket, or wrap the module, after changing them"
            )
        if not self._flatten and any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor = tensor.detach().clone(
                memory_format=torch.contiguous_format
            )  # expanded: the result needs room for each element
            known.replace(proxy, tensor)
        return tensor

    def _fits(self, tensor: Tensor, place: int) -> bool:
        """Return whether ``tensor`` is dense and has the shape and dtype of the one that was there at the beginning."""
        return tensor.layout is torch.strided and tensor.shape == self._shapes[place] and tensor.dtype is self._dtype

    def _outside(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or a copy if it lies in flat storage, as a transposed view of its own part does.

        To write there while reading from there would mix old values with new ones.
        """
        assert self._flat is not None
        inside = tensor.untyped_storage().data_ptr() == self._flat.untyped_storage().data_ptr()
        return tensor.detach().clone() if inside else tensor.detach()

    def store(self, flat: Tensor, effective: Sequence[Tensor], kernels: KernelBackend) -> None:
        """Copy ``flat`` into the effective tensors, wherever they are; padding is left out."""
        kernels.scatter_flat(flat[: self.filled], [t.detach() for t in effective])

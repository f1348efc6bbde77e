"""The CUDA backend for CPU tensors, through copies, so that properties, which draw CPU tensors, can
run on a card.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bagua_ref.backends import Codec, codec, get_backend, get_codec
from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.cuda.backend import PlannedBackend


class CodecOnCopies(Codec):
    """Mixin for a format: the inner backend's codec on copies."""

    def _compress(self, x, num_chunks, target_chunk, out):
        with self.kernels._moved(out, read=[x]) as (kernels, payload, copy):
            get_codec(self.name, kernels).compress(copy, num_chunks, target_chunk, payload)

    def _decompress(self, payload, num_chunks, out):
        with self.kernels._moved(out, read=[payload]) as (kernels, copy, there):
            get_codec(self.name, kernels).decompress(there, num_chunks, copy)


class CudaOnCopies(KernelBackend):
    """Backend that copies tensors with their strides and alignment to 16 bytes, as heads and tails
    depend on them.
    """

    name = "cuda-on-copies"
    device_types = ("cpu",)
    codecs = {
        name: type(
            f"{name}OnCopies",
            (CodecOnCopies, getattr(codec, name.partition("-")[0])),
            {"name": name},
        )
        for name in PlannedBackend.codecs
    }
    inner = "cuda"
    device = "cuda"

    def __init__(self) -> None:
        if self.device == "cuda" and torch.cuda.device_count():
            # so that checks run on threads: a process that is forked after a look at the devices
            # cannot use them
            torch.cuda.init()

    @contextmanager
    def _moved(self, *changed: Tensor, read: Sequence[Tensor] = ()):
        """Yield the inner backend and copies of all tensors; copy the changed copies back at the
        end.
        """
        copies = [_copy(tensor.detach(), self.device) for tensor in (*changed, *read)]
        yield get_backend(self.inner), *copies
        for tensor, copy in zip(changed, copies, strict=False):
            tensor.detach().copy_(copy)

    def _add_(self, x, y):
        with self._moved(x, read=[y]) as (kernels, *tensors):
            kernels.add_(*tensors)

    def _subtract_(self, x, y):
        with self._moved(x, read=[y]) as (kernels, *tensors):
            kernels.subtract_(*tensors)

    def _add_scaled_(self, x, y, factor):
        with self._moved(x, read=[y]) as (kernels, *tensors):
            kernels.add_scaled_(*tensors, factor)

    def _average_(self, x, y):
        with self._moved(x, read=[y]) as (kernels, *tensors):
            kernels.average_(*tensors)

    def _divide_(self, x, divisor):
        with self._moved(x) as (kernels, copy):
            kernels.divide_(copy, divisor)

    def _combine_ring_(self, x, left, right, weight):
        with self._moved(x, read=[left, right, weight]) as (kernels, *tensors):
            kernels.combine_ring_(*tensors)

    def _async_average_(self, x, reduced, snapshot, nranks):
        with self._moved(x, read=[reduced, snapshot]) as (kernels, *tensors):
            kernels.async_average_(*tensors, nranks)

    def _update_momentum_(self, m, grad, beta1, one_minus_beta1):
        with self._moved(m, read=[grad]) as (kernels, *tensors):
            kernels._update_momentum_(*tensors, beta1, one_minus_beta1)

    def _reduce_chunks_(self, x, num_chunks, target_chunk, average):
        with self._moved(x) as (kernels, copy):
            kernels.reduce_chunks_(copy, num_chunks, target_chunk, average)

    def _gather_flat(self, tensors, out):
        with self._moved(out, read=tensors) as (kernels, flat, *copies):
            kernels.gather_flat(copies, flat)

    def _scatter_flat(self, flat, tensors):
        with self._moved(*tensors, read=[flat]) as (kernels, *copies):
            kernels.scatter_flat(copies[-1], copies[:-1])

    def _order_by_complexity(self, keys):
        with self._moved(read=[keys]) as (kernels, copy):
            return kernels.order_by_complexity(copy).cpu()


def _copy(tensor: Tensor, device: str) -> Tensor:
    item = tensor.element_size()
    span = (
        1
        + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if tensor.numel()
        else 0
    )
    room = torch.empty(span * item + 32, dtype=torch.uint8, device=device)
    skip = (tensor.data_ptr() - room.data_ptr()) % 16
    copy = (
        room[skip : skip + span * item].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    )
    once, there = tensor, copy
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0:  # several elements at one address
            once, there = (
                once[(slice(None),) * axis + (slice(1),)],
                there[(slice(None),) * axis + (slice(1),)],
            )
    there.copy_(once)
    return copy

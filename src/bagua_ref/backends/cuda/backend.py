"""KernelBackend as launch plans: each method of the contract builds a plan of kernel launches,
which a subclass submits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from bagua_ref.backends import codec
from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.codec import Codec
from bagua_ref.backends.cuda import codec_plans, launch, movement
from bagua_ref.backends.cuda.launch import DeviceProperties, Plan

__all__ = ["PlannedBackend", "PlannedCodec"]

_KEYS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


class PlannedCodec(Codec):
    """Base of codecs that build launch plans."""

    kernels: PlannedBackend
    plan_compress: Callable[..., Plan]
    decompressing: tuple[str, str]
    """Source and name of the kernel that decompresses."""

    def _compress(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> None:
        self.kernels._launch(self.plan_compress, x, num_chunks, target_chunk, out)

    def _decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        self.kernels._launch(codec_plans.decompress, out, payload, num_chunks, *self.decompressing)


class MinMaxUInt8(PlannedCodec, codec.MinMaxUInt8):
    """MinMaxUInt8 (S4), with the kernels in ``codec.cu``."""

    plan_compress = staticmethod(codec_plans.compress_minmax)
    decompressing = "codec", "decompress"


class PlannedBlocks(PlannedCodec, codec.Microscaling):
    """Base of the MX formats (S12.1, S12.6), with the kernels in ``microscaling.cu``, which take
    the index of a scale rule.
    """

    def __init__(self, kernels: PlannedBackend) -> None:
        super().__init__(kernels)
        elements = self.name.partition("-")[0]
        self.plan_compress = partial(codec_plans.compress_blocks, elements, self.rounding)
        self.decompressing = "microscaling", f"decompress_{elements}"


class MXFP8(PlannedBlocks, codec.MXFP8):
    """MXFP8: E4M3 elements."""


class MXFP4(PlannedBlocks, codec.MXFP4):
    """MXFP4: E2M1 elements."""


class MXINT8(PlannedBlocks, codec.MXINT8):
    """MXINT8: integer elements."""


class NVFP4(PlannedCodec, codec.NVFP4):
    """NVFP4 (S12.7), with the kernels in ``microscaling.cu``."""

    plan_compress = staticmethod(codec_plans.compress_products)
    decompressing = "microscaling", "decompress_NVFP4"


class OneBit(PlannedCodec, codec.OneBit):
    """OneBit (S12.2), with the kernels in ``one_bit.cu``."""

    plan_compress = staticmethod(codec_plans.compress_signs)
    decompressing = "one_bit", "restore_signs"


class PlannedBackend(KernelBackend):
    """Launch plans of all CUDA kernels, with grids and arguments; a subclass provides the device
    and runs the launches.
    """

    codecs: ClassVar[dict[str, type[Codec]]] = {
        **{each.name: each for each in (MinMaxUInt8, MXINT8, NVFP4, OneBit)},
        **codec.with_rules(MXFP8),
        **codec.with_rules(MXFP4),
    }

    @abstractmethod
    def _properties(self, device: torch.device) -> DeviceProperties:
        """Return the device properties needed for planning."""

    @abstractmethod
    def _submit(self, plan: Plan, device: torch.device) -> None:
        """Queue the launches, in order, on the current stream."""

    def _launch(self, plan: Callable[..., Plan], x: Tensor, *args: Any, **options: Any) -> None:
        """Build the plan ``plan(properties of x's device, x, *args, **options)`` and submit it."""
        self._submit(plan(self._properties(x.device), x, *args, **options), x.device)

    def _element_wise(self, name: str, x: Tensor, *operands: Tensor, numbers: Any = ()) -> None:
        self._launch(launch.element_wise, x, *operands, name=name, numbers=numbers)

    def _add_(self, x: Tensor, y: Tensor) -> None:
        self._element_wise("add", x, y)

    def _subtract_(self, x: Tensor, y: Tensor) -> None:
        self._element_wise("subtract", x, y)

    def _add_scaled_(self, x: Tensor, y: Tensor, factor: float) -> None:
        self._element_wise("add_scaled", x, y, numbers=(factor,))

    def _average_(self, x: Tensor, y: Tensor) -> None:
        self._element_wise("average", x, y)

    def _divide_(self, x: Tensor, divisor: float) -> None:
        self._element_wise("divide", x, numbers=(divisor,))

    def _combine_ring_(self, x: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> None:
        self._element_wise("combine_ring", x, left, right, weight)

    def _async_average_(self, x: Tensor, reduced: Tensor, snapshot: Tensor, nranks: int) -> None:
        self._element_wise("async_average", x, reduced, snapshot, numbers=(nranks,))

    def _update_momentum_(
        self, m: Tensor, grad: Tensor, beta1: float, one_minus_beta1: float
    ) -> None:
        self._element_wise("update_momentum", m, grad, numbers=(beta1, one_minus_beta1))

    def _reduce_chunks_(self, x: Tensor, num_chunks: int, target_chunk: int, average: bool) -> None:
        self._launch(launch.reduce_chunks, x, num_chunks, target_chunk, average)

    def _gather_flat(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        self._copy(out, tensors, gather=True)

    def _scatter_flat(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        self._copy(flat, tensors, gather=False)

    def _order_by_complexity(self, keys: Tensor) -> Tensor:
        # torch sorts: an efficient radix sort is a library in itself, and no training step waits
        # for this. It sorts integers, because the order of -0 and NaN in a sort of floats is not
        # documented.
        if keys.dtype in _KEYS:
            floats, keys = keys.detach(), torch.empty_like(keys, dtype=_KEYS[keys.dtype])
            self._launch(launch.order_keys, floats, keys)
        return torch.sort(keys, stable=True).indices

    def _copy(self, flat: Tensor, tensors: Sequence[Tensor], *, gather: bool) -> None:
        flat, start, plain = flat.detach(), 0, []
        flat_is_plain = movement.is_plain(flat, written=gather)
        for tensor in tensors:
            if flat_is_plain and movement.is_plain(tensor, written=not gather):
                plain.append((tensor, start))
            else:
                here = flat[start : start + tensor.numel()].view(tensor.shape)
                target, source = (here, tensor) if gather else (tensor, here)
                target.detach().copy_(source.detach())
            start += tensor.numel()
        self._launch(movement.copy, flat, plain, gather=gather)

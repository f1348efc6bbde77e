"""The class ReferenceBackend: each kernel as a few lines of NumPy that resemble its clause, for tensors on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.reference.blocks import BLOCK, Array, blocks, reader, rows_of, scratch
from bagua_ref.backends.reference.codecs import CODECS

__all__ = ["ReferenceBackend"]


class ReferenceBackend(KernelBackend):
    """SPEC's kernels in executable form. NumPy has no fused multiply-add, so each operation below rounds (S1)."""

    name = "reference"
    codecs = CODECS

    def _add_(self, x: Tensor, y: Tensor) -> None:
        for a, b in blocks(x, y):
            np.add(a, b, out=a)

    def _subtract_(self, x: Tensor, y: Tensor) -> None:
        for a, b in blocks(x, y):
            np.subtract(a, b, out=a)

    def _add_scaled_(self, x: Tensor, y: Tensor, factor: float) -> None:
        for a, b, spare in blocks(x, y, spare=True):
            product = np.multiply(b, a.dtype.type(factor), out=spare)
            np.add(a, product, out=a)

    def _average_(self, x: Tensor, y: Tensor) -> None:
        for a, b in blocks(x, y):
            np.add(a, b, out=a)
            np.divide(a, 2, out=a)

    def _divide_(self, x: Tensor, divisor: float) -> None:
        for (a,) in blocks(x):
            np.divide(a, a.dtype.type(divisor), out=a)

    def _combine_ring_(self, x: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> None:
        terms = ((left, 1 / 3), (right, 1 / 3), (weight, -5 / 3))
        if x.element_size() == 2:  # then each sum is rounded to 16 bits
            for y, factor in terms:
                self.add_scaled_(x, y, factor)
            return
        for a, *others, spare in blocks(x, *(y for y, _ in terms), spare=True):
            for b, (_, factor) in zip(others, terms, strict=True):
                product = np.multiply(b, a.dtype.type(factor), out=spare)
                np.add(a, product, out=a)

    def _async_average_(self, x: Tensor, reduced: Tensor, snapshot: Tensor, nranks: int) -> None:
        for a, total, old, spare in blocks(x, reduced, snapshot, spare=True):
            change = np.divide(total, a.dtype.type(nranks), out=spare)
            np.subtract(change, old, out=change)
            np.add(a, change, out=a)

    def _update_momentum_(self, m: Tensor, grad: Tensor, beta1: float, one_minus_beta1: float) -> None:
        for a, g, spare in blocks(m, grad, spare=True):
            np.multiply(a, a.dtype.type(beta1), out=a)
            gain = np.multiply(g, a.dtype.type(one_minus_beta1), out=spare)
            np.add(a, gain, out=a)

    def _reduce_chunks_(self, x: Tensor, num_chunks: int, target_chunk: int, average: bool) -> None:
        chunks = rows_of(x, num_chunks)
        width = max(1, BLOCK // num_chunks)
        with np.errstate(all="ignore"), scratch() as buffers:
            read = reader(chunks, buffers, 0)
            for start in range(0, chunks.shape[1], width):
                columns = slice(start, start + width)
                total = _sum_in_order(read((slice(None), columns)))
                if average:
                    total /= total.dtype.type(num_chunks)
                chunks[target_chunk, columns].copy_(torch.from_numpy(total))

    def _gather_flat(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        start = 0
        for tensor in tensors:
            out.detach()[start : start + tensor.numel()].view(tensor.shape).copy_(tensor.detach())
            start += tensor.numel()

    def _scatter_flat(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        start = 0
        for tensor in tensors:
            tensor.detach().copy_(flat.detach()[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()

    def _order_by_complexity(self, keys: Tensor) -> Tensor:
        values = keys.detach().cpu()
        if values.dtype is torch.bfloat16:
            values = values.float()
        return torch.from_numpy(np.argsort(values.numpy(), kind="stable")).to(keys.device)


def _sum_in_order(rows: Array) -> Array:
    """Return ((+0 + row 0) + row 1) + ... in this order (S3.7)."""
    zero = rows.dtype.type(0)
    if rows.shape[1] == 1:
        # NumPy adds whole rows one after another, but sums pairwise what it can treat as one dimension.
        total: Array = np.add.accumulate(rows, axis=0)[-1] + zero
    else:
        total = np.add.reduce(rows, axis=0, initial=zero)
    return total

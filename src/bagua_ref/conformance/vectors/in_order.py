"""Matrix products whose bits are the same on every machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["InOrder"]


class InOrder(TorchFunctionMode):
    """A context of one thread, in which torch adds the terms of products and norms one after another.

    Libraries add them in an order that depends on the processor, which may also add a product before it is rounded; on both depend
    the last bits of the sum.

    >>> with InOrder():
    ...     torch.tensor([[1.0, 2.0]]) @ torch.tensor([[3.0], [4.0]])
    tensor([[11.]])
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func``, or what stands in for it."""
        kwargs = kwargs or {}
        if func in (torch.mm, Tensor.matmul, Tensor.__matmul__):
            found = _product(*args)
            return kwargs["out"].copy_(found) if "out" in kwargs else found
        if func is Tensor.addmm_:
            return args[0].add_(_product(*args[1:]), alpha=kwargs["alpha"])
        if func is torch.addcmul:
            return kwargs["out"].copy_(args[0] + _product(*args[1:]) * kwargs["value"])
        if func is torch.linalg.vector_norm:
            squares = args[0] * args[0]
            return _product(squares, torch.ones_like(squares[..., :1, :]).mT).sqrt()
        return func(*args, **kwargs)


def _product(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=a.dtype)
    for k in range(a.shape[-1]):
        total += a[..., :, k : k + 1] * b[..., k : k + 1, :]
    return total

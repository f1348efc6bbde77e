"""The arguments of torch's collectives: their checks, and their description in messages."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from bagua_ref.types import ReduceOp

__all__ = ["check_alike", "check_count", "check_sizes", "describe", "listed", "reduction", "split"]

_OPERATIONS = {
    int(getattr(dist.ReduceOp, name)): ReduceOp[name] for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def listed(tensors: Any) -> list[Tensor]:
    """Return one tensor, or a sequence of them, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def reduction(opts: Any) -> ReduceOp:
    """Return the reduction of a call's options, or the one given in their place; SUM if there is none."""
    op: Any = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    try:
        return _OPERATIONS[int(getattr(op, "op", op))]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"op={op} is not simulated; allowed are {', '.join(o.name for o in _OPERATIONS.values())}") from None


def describe(tensor: Tensor) -> str:
    """Return dtype and shape of a tensor, for messages."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def check_count(name: str, tensors: Any, count: int) -> None:
    """Raise ValueError unless there are ``count`` tensors."""
    if len(tensors) != count:
        raise ValueError(f"{name} needs {count} tensors in its lists, one per rank and tensor, not {len(tensors)}")


def check_alike(name: str, tensor: Tensor, like: Tensor) -> None:
    """Raise ValueError unless dtype and shape of a tensor are those of another."""
    if tensor.dtype != like.dtype or tensor.shape != like.shape:
        raise ValueError(f"{name}: a tensor of {describe(tensor)} goes with one of {describe(like)}; they must be equal")


def check_sizes(name: str, large: Tensor, small: Tensor, n: int) -> None:
    """Raise ValueError unless a tensor has n times the elements of another, and its dtype."""
    if large.dtype != small.dtype or large.numel() != n * small.numel():
        raise ValueError(f"{name}: {describe(large)} must have {n} times the elements of {describe(small)}, and its dtype")


def split(name: str, tensor: Tensor, sizes: Any, n: int) -> list[Tensor]:
    """Return the parts of a tensor along its first dimension, one per rank: equal ones if ``sizes`` is empty."""
    sizes = list(sizes or ())
    if not sizes:
        if tensor.dim() == 0 or tensor.shape[0] % n:
            raise ValueError(
                f"all_to_all_single: {name} {describe(tensor)} does not divide into {n} parts along its first dimension"
            )
        sizes = [tensor.shape[0] // n] * n
    if len(sizes) != n or sum(sizes) != tensor.shape[0]:
        raise ValueError(f"all_to_all_single: {name}_split_sizes={sizes} must be {n} numbers that sum to {tensor.shape[0]}")
    return list(tensor.split(sizes))

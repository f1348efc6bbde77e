"""Grouping of tensors by dtype and device, their overlaps, the order of elements in memory, and
checks of flat tensors.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

AnyTensor = TypeVar("AnyTensor", bound="Tensor")


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a uint8 view of a contiguous tensor, flat.

    A single element may have any stride, and torch views only elements of stride 1 as bytes.

    >>> bytes_of(torch.ones(4)[::2][:1]).tolist()
    [0, 0, 128, 63]
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def by_dtype_and_device(tensors: Iterable[AnyTensor]) -> list[list[AnyTensor]]:
    """Group tensors by dtype and device, in the order of first appearance."""
    kinds: dict[tuple[torch.dtype, torch.device], list[AnyTensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def memory_span(tensor: Tensor) -> tuple[int, int]:
    """Return the address range of a strided, non-empty tensor: its first byte, and the byte after
    its last one.
    """
    if tensor.is_contiguous():
        reach = tensor.numel()
    else:
        reach = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    start = tensor.data_ptr()
    return start, start + reach * tensor.element_size()


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the indices of two non-empty tensors that share memory, None if there are none."""
    spans = sorted((*memory_span(t), place) for place, t in enumerate(tensors) if t.numel())
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            return min(first, second), max(first, second)
    return None


class Layout:
    """Shape and strides of a tensor without gaps, which give the order of its elements in flat
    storage (S2.3).

    Args:
        shape: shape of the tensor.
        strides: strides of a dense tensor of this shape; None: row-major.

    Attributes:
        shape: the shape.
        strides: the strides, never None.

    >>> layout = Layout.of(torch.arange(6).reshape(2, 3).t())
    >>> layout
    Layout((3, 2), strides (1, 3))
    >>> layout.view(torch.tensor([0, 10, 20, 1, 11, 21]))
    tensor([[ 0,  1],
            [10, 11],
            [20, 21]])
    """

    __slots__ = ("_axes", "_effective", "shape", "strides")

    def __init__(self, shape: Sequence[int], strides: Sequence[int] | None = None) -> None:
        inner_first = itertools.accumulate(
            reversed(shape[1:]), lambda stride, size: stride * max(size, 1), initial=1
        )
        row_major = tuple(reversed([*inner_first]))[: len(shape)]
        self.shape = torch.Size(shape)
        self.strides = row_major if strides is None else tuple(strides)
        self._effective = effective_strides(self.shape, self.strides)
        self._axes: list[int] | None = None
        """Axes by descending stride; None for row-major layouts."""
        if self._effective != effective_strides(self.shape, row_major):
            self._axes = sorted(range(len(shape)), key=self._effective.__getitem__, reverse=True)

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Return the layout of ``tensor`` in flat storage: its own strides if it is dense
        (`is_dense`), else row-major order.
        """
        return _layout(tensor.shape, tensor.stride() if is_dense(tensor) else None)

    def __repr__(self) -> str:
        return f"Layout({tuple(self.shape)}, strides {self.strides})"

    def __str__(self) -> str:
        return f"{tuple(self.shape)}" + (
            "" if self.is_row_major else f" with strides {self._effective}"
        )

    @property
    def is_row_major(self) -> bool:
        """Whether elements are in row-major order: the last axis varies fastest."""
        return self._axes is None

    def describes(self, tensor: Tensor) -> bool:
        """Return whether ``tensor``, strided and of this shape, has these strides; strides of axes
        of length 1 are ignored.
        """
        return (
            tensor.stride() == self.strides
            or effective_strides(tensor.shape, tensor.stride()) == self._effective
        )

    def view(self, flat: Tensor) -> Tensor:
        """Return a view of ``flat``, 1-D and contiguous, with this shape and these strides."""
        return flat.as_strided(self.shape, self.strides)

    def in_order(self, tensor: Tensor) -> Tensor:
        """Return a view of ``tensor``, of this shape and any strides, with its elements in the
        row-major order of flat storage.
        """
        return tensor if self._axes is None else tensor.permute(self._axes)

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the elements of ``tensor``, of this shape and any strides, in the order of flat
        storage; a view if possible.
        """
        return self.in_order(tensor).reshape(-1)

    def zeros(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor of zeros."""
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device).zero_()

    def copy_of(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of ``tensor``, of this shape and any strides, in these strides."""
        made = torch.empty_strided(
            self.shape, self.strides, dtype=dtype or tensor.dtype, device=tensor.device
        )
        return made.copy_(tensor.detach())


@functools.lru_cache(4096)
def _layout(shape: torch.Size, strides: tuple[int, ...] | None) -> Layout:
    return Layout(shape, strides)


def effective_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return ``strides`` with 1 for axes of length 0 or 1: strides have no effect there.

    >>> effective_strides((4, 1), (1, 7))
    (1, 1)
    """
    return tuple(stride if size > 1 else 1 for size, stride in zip(shape, strides, strict=True))


def is_dense(tensor: Tensor) -> bool:
    """Return whether a strided tensor is dense: its elements fill a range of memory without gaps or
    shared addresses.

    >>> is_dense(torch.zeros(2, 3).t()), is_dense(torch.zeros(2, 3)[:, :2]), is_dense(torch.zeros(1).expand(2))
    (True, False, False)
    """
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def check_flat(
    name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] | None = None, kernels: Any = None
) -> None:
    """Raise unless x is 1-D and contiguous, has one of ``dtypes``, and is on a device that
    ``kernels`` supports (None: any).
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    if dtypes is not None and x.dtype not in dtypes:
        raise TypeError(f"{name} is {x.dtype}; it must be one of {', '.join(map(str, dtypes))}")
    if x.layout is not torch.strided or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} and strides"
            f" {x.stride() if x.layout is torch.strided else x.layout} must be 1-D and contiguous;"
            f" pass {name}.view(-1) where its elements are contiguous"
        )
    if (
        kernels is not None
        and kernels.device_types is not None
        and x.device.type not in kernels.device_types
    ):
        raise ValueError(
            f"{name} is on {x.device}; backend {kernels.name!r} works on"
            f" {', '.join(kernels.device_types)} tensors"
        )


def check_beside(
    target_name: str,
    target: Tensor,
    name: str,
    y: Tensor,
    dtype: torch.dtype | None = None,
    size: int | None = None,
) -> None:
    """Raise unless y is flat, has target's size, device and dtype (or ``dtype``), and does not
    share memory with target.
    """
    check_flat(name, y)
    dtype, size = dtype or target.dtype, target.numel() if size is None else size
    if y.dtype is not dtype:
        raise TypeError(
            f"{name} is {y.dtype}; with {target_name} of {target.dtype} it must be {dtype}"
        )
    if y.numel() != size:
        raise ValueError(
            f"{name} has {y.numel()} elements; with {target_name} of {target.numel()} it must have"
            f" {size}"
        )
    if y.device != target.device:
        raise ValueError(
            f"{name} is on {y.device}; it must be on {target_name}'s device {target.device}"
        )
    begin, other = target.data_ptr(), y.data_ptr()  # 0 if empty
    if begin < other + y.nbytes and other < begin + target.nbytes:
        raise ValueError(f"{name} overlaps {target_name} in memory; they must not overlap")


def check_parts(name: str, flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Raise unless the tensors have flat's dtype, device and total size, and do not overlap
    flat.
    """
    total, (begin, end) = 0, memory_span(flat) if flat.numel() else (0, 0)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"tensors[{index}] is a {type(tensor).__name__}; it must be a torch.Tensor"
            )
        if tensor.dtype is not flat.dtype:
            raise TypeError(
                f"tensors[{index}] is {tensor.dtype}; it must be {name}'s dtype {flat.dtype}"
            )
        if tensor.device != flat.device:
            raise ValueError(
                f"tensors[{index}] is on {tensor.device}; it must be on {name}'s device"
                f" {flat.device}"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"tensors[{index}] has layout {tensor.layout}; it must be a dense (strided) tensor"
            )
        first, last = memory_span(tensor) if tensor.numel() else (0, 0)
        if first < end and begin < last:
            raise ValueError(f"tensors[{index}] overlaps {name} in memory; they must not overlap")
        total += tensor.numel()
    if total != flat.numel():
        raise ValueError(
            f"tensors have {total} elements in total; they must have as many as {name}, which has"
            f" {flat.numel()}"
        )


def chunk_size_of(num_elements: int, num_chunks: int, target_chunk: int | None = None) -> int:
    """Return the number of elements per chunk; raise unless chunks are equal and target_chunk is a
    valid index or None.
    """
    if num_elements % integer_in("num_chunks", num_chunks):
        raise ValueError(
            f"num_chunks={num_chunks} must divide the number of elements, which is {num_elements}"
        )
    if target_chunk is not None:
        integer_in(
            "target_chunk",
            target_chunk,
            range(num_chunks),
            f"from 0 to num_chunks - 1 = {num_chunks - 1}",
        )
    return num_elements // num_chunks


def integer_in(
    name: str, value: int, allowed: range = range(1, sys.maxsize), described: str = "at least 1"
) -> int:
    """Return value as an int; raise unless it is an integer in the allowed range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer") from None
    if number not in allowed:
        raise ValueError(f"{name}={value!r} must be {described}")
    return number


def rounded(name: str, value: float, x: Tensor) -> float:
    """Return value rounded to the type of x's arithmetic (S1)."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r} must be a number") from None
    return number if x.dtype is torch.float64 else ctypes.c_float(number).value

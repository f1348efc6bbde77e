"""Complexities of samples as exact numbers, and the order of samples by complexity (S7.2)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends import KernelBackend, get_backend
from bagua_ref.base.utils import tracked

__all__ = [
    "Numbers",
    "Ordering",
    "ends",
    "noise_bound",
    "numbers_of",
    "read_complexities",
    "shown",
    "to_number",
]

Numbers: TypeAlias = "Tensor | list[int | float]"
"""int64 or float64 elements, or Python numbers if neither dtype represents all of them exactly."""

_LARGEST = 2**63 - 1  # of int64
_EXACT_FLOAT = 2**53  # integers up to this one are exact in float64


def to_number(name: str, value: Any) -> int | float:
    """Convert ``value`` to a Python number: an int, a float, a NumPy scalar, or a tensor or array
    of one element (S7).

    Raises:
        TypeError: value has another type.
        ValueError: value is NaN, or a tensor or array of several elements.

    >>> to_number("complexity", torch.tensor(3))
    3
    """
    number = value
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        if math.prod(value.shape) != 1:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be one number")
        number = value.item()
    if isinstance(number, float):
        if math.isnan(number):
            raise ValueError(f"{name} is NaN, which cannot be ordered")
        return float(number)
    try:
        return int(operator.index(cast("Any", number)))  # int(): True is 1
    except TypeError:
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}; it must be an int or a float"
        ) from None


def read_complexities(
    dataset: Any, complexity_fn: Callable[[Any], Any], *, progress: bool
) -> Numbers:
    """Read the dataset once and return each sample's complexity; values of ``complexity_fn`` are
    not modified (S7).

    Args:
        dataset: a dataset with a length.
        complexity_fn: function that returns a sample's complexity.
        progress: whether to show progress on standard error.
    """
    places = tracked(range(len(dataset)), "complexities", progress)
    return _packed(
        [to_number(f"the complexity of sample {i}", complexity_fn(dataset[i])) for i in places]
    )


def numbers_of(complexities: Any, length: int | None, name: str = "complexities") -> Numbers:
    """Return a copy of ``complexities``, a 1-D tensor or array or any iterable of numbers, as exact
    numbers.

    ``name`` is the argument's name, for messages.

    Raises:
        ValueError: their number is not ``length`` (None: any number but 0), or one is NaN.
        TypeError: one of them is not a number.
    """
    iterable = hasattr(complexities, "__iter__") or hasattr(complexities, "__getitem__")
    if isinstance(complexities, (Mapping, AbstractSet)) or not iterable:
        raise TypeError(
            f"{name} is a {type(complexities).__name__}; it must be a list, array or tensor in the"
            " samples' order"
        )
    if isinstance(complexities, Tensor):
        complexities = complexities.detach().cpu()
        complexities = (
            complexities.double().numpy()
            if complexities.dtype.is_floating_point
            else complexities.numpy()
        )
    if not isinstance(complexities, np.ndarray):
        complexities = list(complexities)
    shape = complexities.shape if isinstance(complexities, np.ndarray) else (len(complexities),)
    if len(shape) != 1 or length not in (None, shape[0]):
        which = "sample" if length is None else f"of the {length} samples"
        raise ValueError(f"{name} has shape {shape}; it must have one number for each {which}")
    if not shape[0]:
        raise ValueError(f"{name} is empty; it must have one number for each sample")
    if isinstance(complexities, np.ndarray):
        kind, size = complexities.dtype.kind, complexities.dtype.itemsize
        if kind in "bi" or (kind == "u" and (size < 8 or complexities.max() <= _LARGEST)):
            return torch.from_numpy(complexities.astype(np.int64))
        if kind == "f" and size <= 8:
            return _float64(torch.from_numpy(complexities.astype(np.float64)), name)
    return _packed([to_number(f"{name}[{i}]", value) for i, value in enumerate(complexities)])


def noise_bound(numbers: Numbers, random_level: float) -> int:
    """Return the exclusive upper bound of the noise: int((max - min) * random_level + 1) in
    Python's arithmetic (S7.2).

    Raises:
        ValueError: max - min is not finite (if a complexity is infinite, for example), or the noise
            does not fit into int64.
    """
    low, high = ends(numbers)
    try:
        # an integer 0 works with integers of any size
        bound = int((high - low) * (random_level or 0) + 1)
    except (OverflowError, ValueError):
        raise ValueError(
            f"complexities from {shown(low)} to {shown(high)} are too far apart for the noise of"
            " shuffle=True, which is drawn below int((max - min) * random_level + 1); limit them,"
            " or use shuffle=False"
        ) from None
    if bound > _LARGEST:
        raise ValueError(
            f"random_level={random_level!r} of complexities from {shown(low)} to {shown(high)} is"
            " noise that does not fit into 64 bits; take a smaller random_level, or divide the"
            " complexities by a constant"
        )
    return bound


def shown(number: float) -> str:
    """Format ``number`` as text of limited length."""
    if isinstance(number, int) and number.bit_length() > 256:
        return f"an integer of {number.bit_length()} bits"
    return repr(number)


class Ordering:
    """Order of samples by ascending complexity + noise; ties keep the samples' order (S7.2).

    It stores 8 bytes per sample: the order itself if noise is always zero, else the complexities.
    Python numbers are stored and sorted only if complexities plus noise are exact in neither int64
    nor float64.

    Args:
        numbers: the complexities.
        bound: the exclusive upper bound of the noise; 1: no noise.
        backend: the kernel backend whose `KernelBackend.order_by_complexity` sorts.
    """

    def __init__(self, numbers: Numbers, bound: int, backend: str | KernelBackend | None) -> None:
        self.bound = bound
        self._backend = backend
        self._order: Tensor | None = None
        self._numbers = _fit_for_noise(numbers, bound)
        if bound == 1:
            self._order = self._sorted(self._numbers)
            self._numbers = self._order

    def order(self, noise: Tensor | None = None) -> Tensor:
        """Return the order by complexity + noise, int64; ``noise`` may be omitted only if it is
        always zero.
        """
        if self._order is not None:
            return self._order
        assert noise is not None
        if isinstance(self._numbers, Tensor):
            return self._sorted(self._numbers + noise)
        return self._sorted(
            [number + extra for number, extra in zip(self._numbers, noise.tolist(), strict=True)]
        )

    def stored(self) -> bytes:
        """Return the stored numbers as bytes, for checksums: equal for equal complexities."""
        if isinstance(self._numbers, Tensor):
            return self._numbers.numpy().tobytes()
        return " ".join(
            number.hex() if isinstance(number, float) else hex(number) for number in self._numbers
        ).encode()

    def _sorted(self, keys: Numbers) -> Tensor:
        if not isinstance(keys, Tensor):
            return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))
        return _order(keys, get_backend(self._backend))


def _packed(numbers: list[int | float]) -> Numbers:
    """Convert numbers to a tensor if that is exact."""
    kinds = set(map(type, numbers))
    if kinds == {float}:
        return _float64(torch.tensor(numbers, dtype=torch.float64))
    if kinds == {int} and min(numbers) >= -_LARGEST - 1 and max(numbers) <= _LARGEST:
        return torch.tensor(numbers, dtype=torch.int64)
    return numbers


def _float64(numbers: Tensor, name: str = "complexities") -> Tensor:
    """Replace -0 with +0, since a kernel may compare bits; raise ValueError for NaN."""
    if numbers.isnan().any():
        raise ValueError(
            f"{name}[{int(numbers.isnan().nonzero()[0])}] is NaN, which cannot be ordered"
        )
    return numbers + 0.0


def _fit_for_noise(numbers: Numbers, bound: int) -> Numbers:
    """Convert numbers to a type in which sums with noise below ``bound`` are ordered like Python's
    exact sums.
    """
    if isinstance(numbers, Tensor):
        if numbers.dtype is torch.int64:
            return (
                numbers
                if int(numbers.max()) + bound - 1 <= _LARGEST
                else _fit_for_noise(numbers.tolist(), bound)
            )
        whole = numbers.abs().max() + bound <= _EXACT_FLOAT and torch.equal(
            numbers.trunc(), numbers
        )
        return numbers.long() if whole else numbers  # integers sort faster
    return numbers


def _order(keys: Tensor, kernels: KernelBackend) -> Tensor:
    """Return the stable ascending order of int64 or float64 keys, by a radix sort with 16-bit
    digits.

    Lengths usually need one pass, and NumPy sorts 16-bit integers ten times as fast as 64-bit ones.
    """
    device = (
        "cpu"
        if kernels.device_types is None or "cpu" in kernels.device_types
        else kernels.device_types[0]
    )
    keys = keys.to(device)
    if keys.is_floating_point():
        bits = keys.view(torch.int64)
        # integers in the same order: of negative floats, a larger magnitude comes first
        keys = bits ^ ((bits >> 63) & _LARGEST)
    low, high = (int(end) for end in ends(keys))
    above = keys - low  # may wrap around; its bits are still right
    order = None
    for shift in range(0, max(1, (high - low).bit_length()), 16):
        digit = (above >> shift).short() ^ -(2**15)  # 0 to 65535 become -32768 to 32767
        if order is None:
            order = kernels.order_by_complexity(digit)
        else:  # index_select: several times as fast as brackets
            order = order.index_select(0, kernels.order_by_complexity(digit.index_select(0, order)))
    return cast("Tensor", order).cpu()


def ends(numbers: Numbers) -> tuple[int | float, int | float]:
    """Return the minimum and the maximum."""
    if isinstance(numbers, Tensor):
        low, high = torch.aminmax(numbers)
        return low.item(), high.item()
    return min(numbers), max(numbers)

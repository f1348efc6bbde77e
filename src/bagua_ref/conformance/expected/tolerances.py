"""Tolerances of all checks, with the reason for each.

========== ====================================================================================================================
EXACT      Not one bit, the sign of a zero included. S1 fixes the rounding of every operation, so
two right implementations
           agree; only the bits of a NaN are free.
ULP(n)     n steps between neighbouring numbers of the dtype. For functions whose last bit their
library does not promise, and
           for the vector body of a library's loop against its scalar tail (S6).
SUM(world) world * eps * magnitude, where magnitude is the sum (for a mean: the mean) of the
absolute values that were added.
           For a library's all-reduce, which adds in an order of its own (S3.7): either order rounds
           world - 1 times by at most eps/2 of a partial sum, and a mean once more.
========== ====================================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Tolerance:
    """A row of the tolerance table; made by `EXACT`, `ULP` and `SUM`.

    Attributes:
        name: name in messages.
        ulps: allowed distance in units in the last place.
        epsilons: allowed distance in multiples of eps * magnitude, as an alternative.
    """

    name: str
    ulps: int = 0
    epsilons: int = 0


EXACT = Tolerance("EXACT")


def ULP(n: int) -> Tolerance:  # noqa: N802 - the table's name
    """Return the tolerance of n units in the last place."""
    return Tolerance(f"ULP({n})", ulps=n)


def SUM(world: int) -> Tolerance:  # noqa: N802 - the table's name
    """Return the tolerance between two orders of summing ``world`` numbers."""
    return Tolerance(f"SUM({world})", epsilons=world)


def assert_equal(
    actual: Tensor,
    expected: Tensor,
    tolerance: Tolerance,
    *,
    magnitude: Tensor | float | None = None,
) -> None:
    """Raise AssertionError unless actual equals expected within tolerance; NaN equals NaN,
    infinities only themselves.

    Args:
        actual: the implementation's result.
        expected: the expected result, of the same shape and dtype; the devices may differ.
        tolerance: a row of the table.
        magnitude: for `SUM`: the sum (for a mean: the mean) of the absolute values that were added,
            per element or the largest;
            None: the absolute value of expected, which is right only if all added values have the
                same sign.

    >>> assert_equal(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), EXACT)
    >>> assert_equal(torch.tensor([0.0]), torch.tensor([-0.0]), EXACT)
    Traceback (most recent call last):
    ...
    AssertionError: 1 of 1 elements differ (tolerance EXACT); first at (0,): 0.0 instead of -0.0
    """
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    if actual.dtype is not expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{actual.dtype} of shape {tuple(actual.shape)} instead of {expected.dtype} of shape"
            f" {tuple(expected.shape)}"
        )
    same = where_equal(actual, expected, tolerance, magnitude=magnitude)
    if not same.all():
        wrong = (~same).nonzero()
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{len(wrong)} of {expected.numel()} elements differ (tolerance {tolerance.name}); "
            f"first at {first}: {actual[first].item()!r} instead of {expected[first].item()!r}"
        )


def where_equal(
    actual: Tensor,
    expected: Tensor,
    tolerance: Tolerance,
    *,
    magnitude: Tensor | float | None = None,
) -> Tensor:
    """Return for each element whether `assert_equal` would accept it; both tensors are on the CPU,
    of one dtype and shape.
    """
    if not expected.dtype.is_floating_point:
        return actual == expected
    integer = _INTEGER_OF_SIZE[expected.element_size()]
    same = actual.contiguous().view(integer) == expected.contiguous().view(integer)
    if same.all():
        return same
    same |= actual.isnan() & expected.isnan()
    return (
        same | _close(actual, expected, tolerance, magnitude)
        if tolerance.ulps or tolerance.epsilons
        else same
    )


def _close(
    actual: Tensor, expected: Tensor, tolerance: Tolerance, magnitude: Tensor | float | None
) -> Tensor:
    """Return a mask of the elements of two float tensors that are finite and within tolerance."""
    finite = actual.isfinite() & expected.isfinite()
    near = torch.zeros_like(finite)
    if tolerance.ulps:
        near |= (places(actual) - places(expected)).abs() <= tolerance.ulps
    if tolerance.epsilons:
        scale = (
            expected.double().abs()
            if magnitude is None
            else torch.as_tensor(magnitude, dtype=torch.float64).cpu()
        )
        info = torch.finfo(expected.dtype)
        # Subnormal numbers are rounded by up to half of the smallest step, however small they are.
        allowed = tolerance.epsilons * (info.eps * scale + info.smallest_normal * info.eps)
        near |= (actual.double() - expected.double()).abs() <= allowed
    return finite & near


def places(x: Tensor) -> Tensor:
    """Return each float's position among all floats of its dtype: neighbours differ by 1, and so do
    -0 and +0.
    """
    bits = x.contiguous().view(_INTEGER_OF_SIZE[x.element_size()]).long()
    lowest = -(2 ** (8 * x.element_size() - 1))
    return torch.where(bits < 0, lowest - bits - 1, bits)

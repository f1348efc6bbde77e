"""Expected outputs of an exchange whose values are rounded to a 16-bit format on their way."""

from __future__ import annotations

from dataclasses import replace

import torch

from bagua_ref.conformance.expected.tolerances import Tolerance
from bagua_ref.conformance.trace.expectation import Expected, NotReplayable
from bagua_ref.conformance.trace.files import Record

__all__ = ["WIRES", "expected_on_wire"]

WIRES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Formats by name."""


def expected_on_wire(expected: Expected, records: list[Record], wire: str) -> Expected:
    """Return the mean or sum of S3.1 with the bound of a wire format.

    A value is rounded n + 1 times: when it is cast, divided, and in n - 1 sums; each time by at most eps/2 of what is rounded, or
    of the smallest normal number. The bound, (n + 2)/2 * eps, has room for products of these. Where the sum of absolute values may
    exceed the format's range, a result that is not finite is accepted.

    Args:
        expected: in full precision, with the mean (for a sum: the sum) of the absolute values as magnitude.
        records: of all ranks.
        wire: a name of `WIRES`.

    Raises:
        NotReplayable: the recorded values have no more digits than the format.
    """
    dtype, n, format_ = expected.values[0].dtype, len(records), torch.finfo(WIRES[wire])
    if dtype not in (torch.float32, torch.float64):
        raise NotReplayable(f"wire={wire} is for values of float32 and float64, and these are {dtype}")
    assert expected.magnitude is not None
    epsilons = round((n + 2) / 2 * format_.eps / torch.finfo(dtype).eps)
    overflows = ~(expected.magnitude * n <= format_.max)
    values = []
    for record, value in zip(records, expected.values, strict=True):
        got = record.outputs.get(expected.name)
        fits = got is not None and got.shape == value.shape and got.dtype == value.dtype
        values.append(torch.where(overflows & ~got.isfinite(), got, value) if got is not None and fits else value)
    tolerance = Tolerance(f"SUM({n}) in {wire}", epsilons=epsilons)
    return replace(expected, values=values, tolerance=tolerance, magnitude=expected.magnitude + format_.smallest_normal)

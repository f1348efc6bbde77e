"""A golden vector."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bagua_ref.conformance.cases.answers import answer


@dataclass(frozen=True)
class Case:
    """One golden vector.

    Attributes:
        operation: suite, which names the files, and computation; listed in ``docs/vectors.md``.
        clause: clause of the specification.
        dtype: name of the numbers' dtype.
        name: distinguishes the operation's cases of this dtype.
        inputs: tensors by name.
        parameters: JSON values by name.
        flag: ``"valid"``: ordinary numbers; ``"edge"``: at the edge of a format or a rule.
        tolerance: a row of `bagua_ref.conformance.expected.tolerances`.
        magnitudes: for ``SUM(n)``: per output, a bound of the sum or mean of the absolute values
            that were added.
    """

    operation: str
    clause: str
    dtype: str
    name: str
    inputs: dict[str, Tensor]
    parameters: dict[str, Any] = field(default_factory=dict)
    flag: str = "valid"
    tolerance: str = "EXACT"
    magnitudes: dict[str, float] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The case's unique name: suite, operation, dtype and name."""
        return f"{self.operation}/{self.dtype}/{self.name}"

    @cached_property
    def outputs(self) -> dict[str, Tensor]:
        """The expected outputs, by name."""
        found = answer(self.operation, self.dtype, self.inputs, self.parameters)
        return {name: canonical(x) for name, x in found.items()}


_NAN_BITS = {
    torch.float16: (torch.int16, 0x7E00),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float32: (torch.int32, 0x7FC00000),
    torch.float64: (torch.int64, 0x7FF8000000000000),
}


def canonical(x: Tensor) -> Tensor:
    """Return a contiguous copy with all NaNs replaced by that of S4.4; processors differ in the
    bits of NaNs.

    >>> canonical(-torch.tensor([float("nan")])).view(torch.int32).item() == 0x7FC00000
    True
    """
    x = x.clone(memory_format=torch.contiguous_format)
    if x.dtype in _NAN_BITS:
        integer, bits = _NAN_BITS[x.dtype]
        x = torch.where(x.isnan(), torch.tensor(bits, dtype=integer).view(x.dtype), x)
    return x


KINDS = {
    "plain": "valid",
    "wide": "valid",  # of many magnitudes
    "denormal": "edge",  # half of the numbers are denormal
    "huge": "edge",  # sums soon exceed the largest number
    "special": "edge",  # infinities, NaN, zeros of both signs and the ends of the range
    "zeros": "edge",  # of both signs
}
"""Kinds of numbers -> flag of their cases."""

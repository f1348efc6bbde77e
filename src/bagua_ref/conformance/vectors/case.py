"""A golden vector: an operation, its inputs and parameters, and the expected outputs."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bagua_ref.conformance.formats.safetensors_file import dtype_named, name_of

__all__ = ["FLAGS", "Case", "canonical", "case_id", "dtype_named", "name_of", "seed_of"]

FLAGS = ("valid", "edge", "poison")
"""Ordinary numbers; numbers at the edge of a format or a rule; a chunk that S4.4 poisons."""

_NAN_BITS = {
    torch.float16: (torch.int16, 0x7E00),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float32: (torch.int32, 0x7FC00000),
    torch.float64: (torch.int64, 0x7FF8000000000000),
}


@dataclass(frozen=True)
class Case:
    """One golden vector.

    Attributes:
        suite: the group of operations, and the name of its files.
        operation: what to compute; ``docs/vectors.md`` lists them.
        clause: of the specification.
        dtype: of the numbers, such as ``"float32"``.
        name: tells it from the operation's other cases of this dtype.
        inputs: tensors by name.
        outputs: what must come out, by name.
        parameters: JSON values.
        flags: some of `FLAGS`.
        tolerance: the name of a row of `bagua_ref.conformance.expected.tolerances`.
        magnitudes: for ``SUM(n)``: per output, the sum or mean of the absolute values that were added.
        since: the first version of the vectors that has it.
    """

    suite: str
    operation: str
    clause: str
    dtype: str
    name: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    parameters: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ("valid",)
    tolerance: str = "EXACT"
    magnitudes: dict[str, Tensor] = field(default_factory=dict)
    since: str = "1"

    @property
    def id(self) -> str:
        """The case's name among all: suite, operation, dtype and name."""
        return case_id(self.suite, self.operation, self.dtype, self.name)

    @property
    def seed(self) -> int:
        """What its numbers are drawn from."""
        return seed_of(self.id)


def case_id(suite: str, operation: str, dtype: str, name: str) -> str:
    """Return the id of a case.

    >>> case_id("codec", "compress_minmax_uint8", "float32", "empty")
    'codec/compress_minmax_uint8/float32/empty'
    """
    return f"{suite}/{operation}/{dtype}/{name}"


def seed_of(text: str) -> int:
    """Return the seed that belongs to a case's id (or any text): its CRC-32."""
    return zlib.crc32(text.encode())


def canonical(x: Tensor) -> Tensor:
    """Return a contiguous copy whose NaNs have the bits of S4.4, which processors choose otherwise.

    >>> canonical(-torch.tensor([float("nan")])).view(torch.int32).item() == 0x7FC00000
    True
    """
    x = x.detach().cpu().clone(memory_format=torch.contiguous_format)
    if x.dtype in _NAN_BITS:
        integer, bits = _NAN_BITS[x.dtype]
        nan = torch.tensor(bits, dtype=integer).view(x.dtype)
        x = torch.where(x.isnan(), nan, x)
    return x

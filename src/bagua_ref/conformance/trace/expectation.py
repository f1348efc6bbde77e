"""Expected outputs of a recorded operation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bagua_ref.conformance.expected.tolerances import EXACT, Tolerance

__all__ = ["Expected", "NotReplayable"]


class NotReplayable(Exception):  # noqa: N818 - not a failure: this execution cannot be checked
    """An execution cannot be replayed from its records; the message says why."""


@dataclass(frozen=True)
class Expected:
    """An expected output.

    Attributes:
        name: name of the output.
        values: expected values, by rank.
        tolerance: the tolerance of the comparison.
        magnitude: for sums, the sum (or mean) of the absolute values.
    """

    name: str
    values: list[Tensor]
    tolerance: Tolerance = EXACT
    magnitude: Tensor | None = None

"""Violations of a clause, and inputs as Python source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

__all__ = ["Draws", "NotProvided", "Skipped", "Violation", "literal"]


class Skipped(Exception):  # noqa: N818 - no fault
    """The target is not judged on an input."""


class NotProvided(NotImplementedError, AttributeError):  # noqa: N818 - no fault
    """A target's part lacks an attribute."""


class Violation(AssertionError):  # noqa: N818 - a finding, not an error
    """An implementation violates a clause.

    Attributes:
        snippet: a script that shows the violation.
    """

    def __init__(self, message: str, snippet: str = "") -> None:
        super().__init__(message)
        self.snippet = snippet

    def not_provided(self) -> bool:
        """Return whether a NotImplementedError caused it, directly or by an error raised from it,
        or by a failed assertion.
        """
        error: BaseException | None = self
        while error is not None and not isinstance(error, NotImplementedError):
            error = error.__cause__ or (
                error.__context__ if isinstance(error, AssertionError) else None
            )
        return error is not None


def literal(value: Any) -> str:
    """Return Python source of a value: numbers, strings, None, tensors, and lists, tuples and dicts
    of them.

    >>> literal(torch.tensor([1.0, -0.0], dtype=torch.float16))
    'torch.tensor([1.0, -0.0], dtype=torch.float16)'
    >>> literal([torch.zeros(2, 1, dtype=torch.uint8), None])
    '[torch.tensor([0, 0], dtype=torch.uint8).view(2, 1), None]'
    """
    if isinstance(value, Tensor):
        flat = value.detach().cpu().reshape(-1)
        source = f"torch.tensor({flat.tolist()!r}, dtype={value.dtype})"
        if value.is_floating_point() and (flat.isnan() & flat.signbit()).any():
            bits = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
            source = f"{literal(bits)}.view({value.dtype})"
        if value.dim() != 1:
            source = f"{source}.view({', '.join(map(str, value.shape)) or '()'})"
        if not value.is_contiguous():
            return (
                f"torch.empty_strided({tuple(value.shape)}, {value.stride()},"
                f" dtype={value.dtype}).copy_({source})"
            )
        return source
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        inner = ", ".join(map(literal, value))
        return (
            f"[{inner}]"
            if isinstance(value, list)
            else f"({inner},)"
            if len(value) == 1
            else f"({inner})"
        )
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
        )
    return str(int(value)) if isinstance(value, IntEnum) else repr(value)


@dataclass(frozen=True)
class Draws:
    """What a check has drawn for a call; its source, which may be long, is made where it is shown.

    Attributes:
        what: what is called, for messages.
        drawn: values by name.
        call: source of the call.
    """

    what: str
    drawn: dict[str, Any]
    call: str = ""

    def __str__(self) -> str:
        lines = [f"{name} = {literal(value)}" for name, value in self.drawn.items()]
        return "\n".join([*lines, self.call or f"# {self.what}", ""])

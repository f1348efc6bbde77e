"""Violations of a clause, and inputs as Python source."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

__all__ = ["NotProvided", "Skipped", "Violation", "assignments", "literal"]

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Skipped(Exception):  # noqa: N818 - no fault
    """An input cannot be used to judge the target."""


class NotProvided(NotImplementedError, AttributeError):  # noqa: N818 - no fault
    """A target's part lacks an attribute."""


class Violation(AssertionError):  # noqa: N818 - a finding, not an error
    """An implementation violates a clause.

    Attributes:
        snippet: the input as Python source; for kernels and codecs a script that shows the
            violation.
    """

    def __init__(self, message: str, snippet: str = "") -> None:
        super().__init__(message)
        self.snippet = snippet

    def not_provided(self) -> bool:
        """Return whether the cause is a NotImplementedError: directly, through chained errors, or
        through a failed assertion.
        """
        error: BaseException | None = self
        while error is not None and not isinstance(error, NotImplementedError):
            error = error.__cause__ or (
                error.__context__ if isinstance(error, AssertionError) else None
            )
        return error is not None


def assignments(values: Mapping[str, Any]) -> str:
    """Return a line of Python source for each value: ``name = literal``."""
    return "".join(f"{name} = {literal(value)}\n" for name, value in values.items())


def literal(value: Any) -> str:
    """Return Python source of a value: numbers, strings, None, tensors, and lists, tuples and dicts
    of them.

    >>> literal(torch.tensor([1.0, -0.0], dtype=torch.float16))
    'torch.tensor([1.0, -0.0], dtype=torch.float16)'
    >>> literal([torch.zeros(2, 1, dtype=torch.uint8), None])
    '[torch.tensor([[0], [0]], dtype=torch.uint8), None]'
    """
    if isinstance(value, Tensor):
        x = value.detach().cpu()
        if x.is_floating_point() and (x.isnan() & x.signbit()).any():
            source = f"{literal(x.contiguous().view(_BITS[x.element_size()]))}.view({x.dtype})"
        else:
            source = f"torch.tensor({x.tolist()!r}, dtype={x.dtype})"
        shape = tuple(x.shape)
        if not x.numel() and x.dim() > 1:
            return f"torch.empty({shape}, dtype={x.dtype})"
        if x.is_contiguous():
            return source
        return f"torch.empty_strided({shape}, {x.stride()}, dtype={x.dtype}).copy_({source})"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{literal(item)}, ' for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {literal(item)}' for key, item in value.items())}}}"
    return str(int(value)) if isinstance(value, IntEnum) else repr(value)

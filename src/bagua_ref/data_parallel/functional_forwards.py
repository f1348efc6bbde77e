"""Forward passes with other tensors in place of parameters, as of `torch.func.functional_call`, and in transforms of torch.func."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.utils.stateless import _functional_call

__all__ = ["FunctionalForwards", "are_for_a_call", "inside_transform", "outside_transforms"]


class FunctionalForwards:
    """The forward passes of a module since its last step that had other tensors in place of parameters.

    Only a backward pass shows whether they are part of training: if it reaches parameters, as that of MAML's outer loss.
    """

    def __init__(self) -> None:
        self._synchronizes: bool | None = None
        self.under_way = False
        """Whether the forward pass that began last is one of them."""

    def note(self, synchronized: bool) -> None:
        """Note one that begins outside (``synchronized``) or inside `no_sync`."""
        self._synchronizes = bool(self._synchronizes) or synchronized

    def take(self) -> bool | None:
        """Return whether one of them began outside `no_sync`, None if there were none, and forget them."""
        synchronizes, self._synchronizes = self._synchronizes, None
        return synchronizes


def are_for_a_call(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether ``tensors``, what a module has as parameters in the forward pass under way, are there for this call only."""
    if not all(isinstance(tensor, torch.nn.Parameter) for tensor in tensors):
        return True  # modules take nothing but parameters for good
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _functional_call.__code__:
        frame = frame.f_back
    return frame is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context outside of the transforms that the caller is in: tensors made in a transform end with it."""
    return temporarily_clear_interpreter_stack() if inside_transform() else nullcontext()


def inside_transform() -> bool:
    """Return whether the caller is inside a transform."""
    return peek_interpreter_stack() is not None

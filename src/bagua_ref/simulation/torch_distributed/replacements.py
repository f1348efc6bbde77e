"""Attributes that are replaced for the time of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

from bagua_ref.communicators.call_sites import is_user_code

__all__ = ["Replacements", "calling_frame", "is_called_by_user"]


class Replacements(ExitStack):
    """Attributes of modules and classes that are replaced while this context lasts.

    Args:
        is_simulated: whether the calling thread is a simulated rank's; others use what was there before.
    """

    def __init__(self, is_simulated: Callable[[], bool]) -> None:
        super().__init__()
        self.is_simulated = is_simulated

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute for all threads."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def function(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a function for simulated threads by ``function(original, ...)``."""
        original, is_simulated = getattr(owner, name), self.is_simulated

        def call(*args: Any, **options: Any) -> Any:
            return function(original, *args, **options) if is_simulated() else original(*args, **options)

        call.__name__, call.__doc__ = getattr(original, "__name__", name), original.__doc__
        self.put(owner, name, call)


def calling_frame(*modules: str) -> FrameType:
    """Return the innermost frame of a module that is neither here nor, by the ends of their files' names, in ``modules``."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.endswith((__file__, *modules)) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def is_called_by_user(*modules: str) -> bool:
    """Return whether that frame is one of the user's code."""
    return is_user_code(calling_frame(*modules).f_code.co_filename)

"""Lines of the user's code, as opposed to those of libraries, on a thread's stack."""

from __future__ import annotations

import functools
import os
import traceback
from pathlib import Path
from types import FrameType

import torch

__all__ = ["call_site", "is_user_code", "place", "raise_site"]

_LIBRARIES = tuple(str(Path(file).resolve().parent) + os.sep for file in (os.__file__, torch.__file__, Path(__file__).parent))


@functools.cache
def is_user_code(file: str) -> bool:
    """Return whether a file belongs neither to Python, nor to an installed package, nor to this one."""
    if file.startswith("<"):
        return not file.startswith("<frozen ")
    path = Path(file).resolve()
    return not str(path).startswith(_LIBRARIES) and not any(map(_has_packages, path.parents))


@functools.cache
def _has_packages(folder: Path) -> bool:
    """Return whether packages have been installed into a folder."""
    return folder.name in ("site-packages", "dist-packages") or any(folder.glob("*.dist-info"))


def call_site(frame: FrameType | None) -> tuple[str, int]:
    """Return file and line of the innermost frame of the user's code, from ``frame`` outwards; ("", 0) if there is none."""
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def place(file: str, line: int) -> str:
    """Return a line of a file as text."""
    return f"{file}:{line}" if file else "an unknown line"


def raise_site(error: BaseException) -> tuple[str, int]:
    """Return file and line of the innermost frame of the user's code in an exception's traceback, or of any frame."""
    sites = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return ([site for site in sites if is_user_code(site[0])] or sites or [("", 0)])[-1]

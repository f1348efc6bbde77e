"""A progress bar on standard error, drawn by rich if it is installed, else as plain lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

__all__ = ["tracked"]

_T = TypeVar("_T")


def tracked(items: Sequence[_T], title: str, visible: bool) -> Iterator[_T]:
    """Yield ``items``, and show the progress if ``visible``."""
    if not visible:
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        yield from _lines(items, title)
    else:
        yield from track(items, description=title, console=Console(stderr=True))


def _lines(items: Sequence[_T], title: str) -> Iterator[_T]:
    tenth = 0
    for done, item in enumerate(items, start=1):
        yield item
        if 10 * done // len(items) > tenth:
            tenth = 10 * done // len(items)
            print(f"{title}: {10 * tenth} %", file=sys.stderr, flush=True)  # noqa: T201

"""Lists of known failures: one id per line, ``#`` begins a comment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["read_xfails"]


def read_xfails(path: Path, known: Sequence[str]) -> tuple[str, ...]:
    """Return the ids in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not text in UTF-8, or an id is unknown; the message names the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if entry and entry not in known:
            raise ValueError(f"{path} line {number}: no check is called {entry!r}")
        if entry:
            found.append(entry)
    return tuple(found)

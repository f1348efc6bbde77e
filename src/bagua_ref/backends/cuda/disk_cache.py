"""A cache of compiled kernels on disk, under a hash of everything that determines them; damaged files count as absent."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["cached", "folder"]

_DIGEST = 32


def folder() -> Path:
    """Return the folder: BAGUA_REF_CACHE_DIR, else ``bagua_ref`` in the user's cache folder."""
    chosen = os.environ.get("BAGUA_REF_CACHE_DIR")
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "bagua_ref"


def cached(name: str, made_of: object, make: Callable[[], bytes]) -> bytes:
    """Return the result of ``make``, from disk if it was made from the same inputs before.

    A folder that cannot be read or written only costs time.

    Args:
        name: the beginning of the file's name.
        made_of: everything that determines the result; its repr is hashed.
        make: computes the result.
    """
    path = folder() / f"{name}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:_DIGEST]}"
    with contextlib.suppress(OSError):
        stored = path.read_bytes()
        if hashlib.sha256(stored[_DIGEST:]).digest() == stored[:_DIGEST]:
            return stored[_DIGEST:]
    result = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes may read or write the same file: they must see either all of the old or all of the new one.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(result).digest() + result)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    return result

"""Input from outside of this program: regular files, strict JSON, checks of form and keys, and text
that is safe to print.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "NATURAL",
    "SCALAR",
    "NotRegularError",
    "check_form",
    "check_hash_collisions",
    "load_json",
    "one_line",
    "open_file",
    "read_file",
]

_DEEPEST = 50
_MOST_EQUAL = 100
_MOST_TAKEN = 32  # multiples of a large power of two find up to 18 each

SCALAR = (str, int, float, bool, type(None))
"""The form of a value that is neither a list nor an object."""

NATURAL = range(2**63)
"""The form of a count."""

_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
}


class NotRegularError(OSError):
    """A file is a pipe, a device, a socket or a folder."""


def open_file(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: it cannot be opened.
        NotRegularError: it is not a regular file: pipes and devices may have no end, and opening
            them can wait or have effects.
    """
    _check_regular(path, path.stat())
    # If it has become a pipe meanwhile, opening it does not block.
    file = open(  # noqa: SIM115
        path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
    )
    try:
        _check_regular(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def read_file(path: Path, most: int | None = None) -> bytes:
    """Return a file's bytes.

    Args:
        path: the file.
        most: the largest size that it may have.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        ValueError: it is larger than ``most``.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise ValueError(f"it is larger than {most} bytes")
        return file.read() if most is None else file.read(size)


def _check_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NotRegularError(errno.EINVAL, "not a regular file", str(path))


def load_json(data: bytes) -> Any:
    """Return the value of JSON in UTF-8.

    Raises:
        ValueError: it is invalid, has a key twice, a NaN or an infinity, or is nested more than 50
            levels deep.

    >>> load_json(b'{"rank": 0, "rank": 1}')
    Traceback (most recent call last):
    ...
    ValueError: it is not valid JSON: duplicate key 'rank'
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_refuse)
    except RecursionError:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep") from None
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    level = [value]
    for _ in range(_DEEPEST):
        nested = [item for item in level if isinstance(item, list | dict)]
        level = [
            inner
            for item in nested
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    if any(isinstance(item, list | dict) for item in level):
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
    return value


def check_form(value: Any, form: Any, what: str) -> None:
    """Raise unless a JSON value has a form.

    Args:
        value: as `load_json` returns it.
        form: a type or a tuple of types (``object``: anything), of which ``float`` keeps integers
            within its range; a range of integers; ``[form]``, a list of such values; ``[form, form,
            ...]``, a list of exactly these; ``{"key": form, "other?": form}``, an object with at least these keys, where those with a question mark may be missing
            or null; ``{str: form}``, an object whose values all have one form.
        what: the value's name in messages, which do not show the value: it may be a secret.

    Raises:
        ValueError: its form is another; the message names the wrong part.

    >>> check_form({"rank": 0, "nodes": [2, "x"]}, {"rank": NATURAL, "nodes": [int]}, "manifest")
    Traceback (most recent call last):
    ...
    ValueError: manifest['nodes'][1] must be an integer, not a string
    """
    if isinstance(form, dict):
        _check_type(value, (dict,), what)
        for key, inner in form.items():
            optional = key is not str and key.endswith("?")
            if not optional and key is not str and key not in value:
                raise ValueError(f"{what} must have the key {key!r}")
            for name in value if key is str else [key.rstrip("?")]:
                if not optional or value.get(name) is not None:
                    check_form(value[name], inner, f"{what}[{name!r}]")
    elif isinstance(form, list):
        _check_type(value, (list,), what)
        if len(form) > 1 and len(value) != len(form):
            raise ValueError(f"{what} must have {len(form)} items, not {len(value)}")
        for place, item in enumerate(value):
            check_form(item, form[place if len(form) > 1 else 0], f"{what}[{place}]")
    elif isinstance(form, range):
        _check_type(value, (int,), what)
        if value not in form:
            raise ValueError(f"{what} must be from {form[0]} to {form[-1]}")
    elif form is not object:
        kinds = form if isinstance(form, tuple) else (form,)
        _check_type(value, kinds, what)
        if float in kinds and isinstance(value, int) and abs(value) > sys.float_info.max:
            raise ValueError(
                f"{what} must be from {-sys.float_info.max:g} to {sys.float_info.max:g}"
            )


def check_hash_collisions(keys: Iterable[Hashable]) -> None:
    """Raise ValueError if a dict of these keys would take quadratic time, as their hashes are equal
    or lead to the same slots.

    Hashes of numbers, and of tuples of them, are no secret: all multiples of 2**61 - 1 have the
    hash 0.

    Args:
        keys: the keys in the dict's order, before they are in it.

    Raises:
        ValueError: more than 100 have the same hash, or on average a key would probe more than 32
            occupied slots.

    >>> check_hash_collisions(range(1000))
    >>> check_hash_collisions(number * (2**61 - 1) for number in range(1000))
    Traceback (most recent call last):
    ...
    ValueError: more than 100 of its keys have the hash 0, so that it would take too long to read
    """
    hashes = [hash(key) for key in keys]
    ordered = sorted(hashes)
    for one, other in zip(ordered, ordered[_MOST_EQUAL:], strict=False):
        if one == other:
            raise ValueError(
                f"more than {_MOST_EQUAL} of its keys have the hash {one}, so that it would take"
                " too long to read"
            )
    # CPython's dicts double their slots, insert all keys again, and probe for a free slot like
    # this.
    size, filled, found_taken = 8, 0, 0
    while len(hashes) > size * 2 // 3:
        size *= 2
        taken, last = bytearray(size), size - 1
        for number in hashes[: size * 2 // 3]:
            place, rest = number & last, number & (2**64 - 1)
            while taken[place]:
                rest >>= 5
                place = (5 * place + rest + 1) & last
                found_taken += 1
            taken[place] = 1
            filled += 1
            if found_taken > _MOST_TAKEN * (filled + _MOST_EQUAL):
                raise ValueError(
                    "the hashes of its keys collide so often that it would take too long to read"
                )


def one_line(text: str) -> str:
    r"""Return text with escapes for characters that move a terminal's cursor, change its colours or
    cannot be encoded.

    >>> print(one_line("\x1b[2J a\nb"))
    \x1b[2J a\nb
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {twice!r}")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _check_type(value: Any, types: tuple[type, ...], what: str) -> None:
    """Raise unless the value's type is one of these; true is not an integer."""
    if type(value) not in types:
        allowed = " or ".join(_NAMES.get(kind, "null") for kind in types)
        raise ValueError(f"{what} must be {allowed}, not {_NAMES.get(type(value), 'null')}")

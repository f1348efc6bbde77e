"""Untrusted input: JSON, checks of its form, and text that is safe to print.

Errors name the damaged part. There is no defence against files made to waste memory or time.
"""

from __future__ import annotations

import json
import sys
from typing import Any

SCALAR = (str, int, float, bool, type(None))
"""Form of a value that is neither a list nor an object."""

NATURAL = range(2**63)
"""Form of a count."""

_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
}


def load_json(data: bytes) -> Any:
    """Parse JSON in UTF-8.

    Raises:
        ValueError: the input is not valid JSON.

    >>> load_json(b"[1, 2")
    Traceback (most recent call last):
    ...
    ValueError: it is not valid JSON: Expecting ',' delimiter: line 1 column 6 (char 5)
    """
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None


def check_form(value: Any, form: Any, what: str) -> None:
    """Raise unless a JSON value has the expected form.

    Args:
        value: a result of `load_json`.
        form: a type or a tuple of types (``object``: anything), of which ``float`` keeps integers
            within its range; a range of integers; ``[form]``, a list of such values; ``[form, form,
            ...]``, a list of exactly these; ``{"key": form, "other?": form}``, an object with at least these keys, where those with a question mark may be missing
            or null; ``{str: form}``, an object whose values all have one form.
        what: the value's name in messages, which do not show the value: it may be a secret.

    Raises:
        ValueError: the value has another form; the message names the wrong part.

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


def one_line(text: str) -> str:
    r"""Escape the characters of a text that move a terminal's cursor, change its colours or cannot
    be encoded.

    >>> print(one_line("\x1b[2J a\nb"))
    \x1b[2J a\nb
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _check_type(value: Any, types: tuple[type, ...], what: str) -> None:
    """Raise unless the value has one of these types; a bool is not an integer."""
    if type(value) not in types:
        allowed = " or ".join(_NAMES.get(kind, "null") for kind in types)
        raise ValueError(f"{what} must be {allowed}, not {_NAMES.get(type(value), 'null')}")

"""Lengths of samples from a file or an importable dataset, for ``bagua-ref balance``."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["LARGEST", "read_lengths"]

LARGEST = 1e18
"""Sums of lengths below it still fit into floats."""


def read_lengths(source: str | Path, column: str | None = None) -> list[int | float]:
    """Read positive numbers from a file, or from an importable list or dataset.

    A ``.npy`` file holds an array, a ``.csv`` file a ``column``, another file a number per line; empty lines and comments after #
    are skipped. ``package:name`` is a list of numbers, a dataset whose samples have a length, or a function that returns either.

    Raises:
        ValueError: one of them is not a positive number, or there are none; the message names the source and the line.
        OSError: the file cannot be read.
    """
    path = Path(source)
    if (column is not None) != (path.suffix == ".csv"):
        raise ValueError(f"column={column!r} goes with a .csv file, and only with one; lengths={str(source)!r}")
    found: list[int | float] = []
    if ":" in str(source) and not path.exists():
        found = _imported(str(source))
    elif path.suffix == ".npy":
        array = _load_array(path)
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise ValueError(f"{path} has shape {array.shape} of {array.dtype}; it must be a one-dimensional array of numbers")
        found = array.tolist()
    else:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is neither text in UTF-8 nor named .npy: {error}") from None
        if column is not None:
            lines = _column(path, lines, column)
        for place, line in enumerate(lines, start=1):
            if text := line.partition("#")[0].strip():
                found.append(_number(text, f"{path}, line {place}"))
    if not found:
        raise ValueError(f"{source} contains no lengths")
    for place, number in enumerate(found, start=1):
        if not 0 < number < LARGEST:
            raise ValueError(f"{source}: length {place} of {len(found)} is {number}; it must be above 0 and below {LARGEST}")
    return found


def _imported(source: str) -> list[int | float]:
    """Return the lengths of ``package:name``."""
    package, _, name = source.partition(":")
    try:
        found = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"lengths={source!r} must be a file or package:name: {error}") from None
    found = found() if callable(found) else found
    items = (found[place] for place in range(len(found)))
    return [len(item) if hasattr(item, "__len__") else _number(str(item), source) for item in items]


def _column(path: Path, lines: list[str], column: str) -> list[str]:
    """Return the texts of a column of a CSV file, preceded by an empty one for its header."""
    rows = csv.DictReader(lines)
    if column not in (rows.fieldnames or ()):
        raise ValueError(f"{path} has no column {column!r}; it has {', '.join(rows.fieldnames or ())}")
    return ["", *(row[column] or "" for row in rows)]


def _load_array(path: Path) -> np.ndarray[Any, Any]:
    """Return the array in a ``.npy`` file, without making room for elements that the file does not have."""
    with path.open("rb") as file:
        magic = file.read(len(np.lib.format.MAGIC_PREFIX))
    if not magic:
        raise ValueError(f"{path} is empty")
    if magic != np.lib.format.MAGIC_PREFIX:
        raise ValueError(f"{path} is not a .npy file")
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a forged header makes NumPy raise many kinds
        raise ValueError(f"{path} is not a valid .npy file: {type(error).__name__}: {error}") from None


def _number(text: str, where: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ValueError(f"{where}: {text!r} is not a number")

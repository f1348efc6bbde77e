"""Lengths of samples from a file or an importable dataset, for ``bagua-ref balance``."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bagua_ref.contrib.complexities import to_number

__all__ = ["LARGEST", "read_lengths"]

LARGEST = 1e18
"""Sums of lengths below it still fit into floats."""


def read_lengths(source: str | Path, column: str | None = None) -> list[int | float]:
    """Read positive numbers from a file, or from an importable list or dataset.

    A ``.npy`` file holds an array, a ``.csv`` file a ``column``, another file a number per line;
    empty lines and comments after # are skipped. ``package:name`` is a list of numbers, a dataset
    whose samples have a length, or a function that returns either.

    Raises:
        ValueError: one of them is not a positive number, or there are none; the message names the
            source and the line.
        OSError: the file cannot be read.
    """
    path = Path(source)
    if (column is not None) != (path.suffix == ".csv"):
        raise ValueError(
            f"column={column!r} goes with a .csv file, and only with one; lengths={str(source)!r}"
        )
    found: list[int | float] = []
    if ":" in str(source) and not path.exists():
        found = _imported(str(source))
    elif path.suffix == ".npy":
        array = _load_array(path)
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise ValueError(
                f"{path} has shape {array.shape} of {array.dtype}; it must be a one-dimensional"
                " array of numbers"
            )
        found = array.tolist()
    else:
        try:
            # spreadsheets write a mark of the byte order
            content = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is neither text in UTF-8 nor named .npy: {error}") from None
        if column is not None:
            found = _column(path, content, column)
        else:
            for place, line in enumerate(content.splitlines(), start=1):
                if text := line.partition("#")[0].strip():
                    found.append(_number(text, f"{path}, line {place}"))
    if not found:
        raise ValueError(f"{source} contains no lengths")
    for place, number in enumerate(found, start=1):
        if not 0 < number < LARGEST:
            raise ValueError(
                f"{source}: length {place} of {len(found)} is {number}; it must be above 0 and"
                f" below {LARGEST}"
            )
    return found


def _imported(source: str) -> list[int | float]:
    """Return the lengths of ``package:name``."""
    package, _, name = source.partition(":")
    try:
        found = getattr(importlib.import_module(package), name)
        found = found() if callable(found) else found
        items = [found[place] for place in range(len(found))]
    except Exception as error:  # whatever the user's code raises
        raise ValueError(
            f"lengths={source!r} must be a file or package:name: {type(error).__name__}: {error}"
        ) from error
    return [_length(item, f"{source}, sample {place}") for place, item in enumerate(items)]


def _length(sample: Any, where: str) -> int | float:
    """Return a sample's length, or the number that it is."""
    parts = isinstance(sample, Mapping) or (
        isinstance(sample, tuple) and any(hasattr(part, "__len__") for part in sample)
    )
    if parts:  # the number of its parts would be no length
        raise ValueError(
            f"{where}, is a {type(sample).__name__} of several parts; write a function that returns"
            " the lengths"
        )
    try:
        return len(sample)
    except TypeError:  # a number, which an array or a tensor may be, too
        try:
            return to_number("it", sample)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}, must have a length or be a number: {error}") from None


def _column(path: Path, content: str, column: str) -> list[int | float]:
    """Return the numbers in a column of a CSV file."""
    reader = csv.DictReader(io.StringIO(content, newline=""), strict=True)
    try:
        if column not in (reader.fieldnames or ()):
            raise ValueError(
                f"{path} has no column {column!r}; it has {', '.join(reader.fieldnames or ())}"
            )
        numbers = []
        for row in reader:
            if None in row:
                raise ValueError(
                    f"{path}, line {reader.line_num}: there are more fields than columns"
                )
            numbers.append(_number((row[column] or "").strip(), f"{path}, line {reader.line_num}"))
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    return numbers


def _load_array(path: Path) -> np.ndarray[Any, Any]:
    """Return the array in a ``.npy`` file, without making room for elements that the file does not
    have.
    """
    with path.open("rb") as file:
        magic = file.read(len(np.lib.format.MAGIC_PREFIX))
    if not magic:
        raise ValueError(f"{path} is empty")
    if magic != np.lib.format.MAGIC_PREFIX:
        raise ValueError(f"{path} is not a .npy file")
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a forged header makes NumPy raise many kinds
        raise ValueError(
            f"{path} is not a valid .npy file: {type(error).__name__}: {error}"
        ) from None


def _number(text: str, where: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ValueError(f"{where}: {text!r} is not a number")

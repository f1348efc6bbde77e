# ruff: noqa: E501 - a line of the table is a mutant
"""Planted faults of the cache: name, clause, file, what it says, what the mutant says."""

from __future__ import annotations

CACHES: list[tuple[str, str, str, str, str]] = []  # fmt: skip

# ruff: noqa: E501 - a line of the table is a mutant
"""Planted faults of the fused optimizer: name, clause, file, what it says, what the mutant says."""

from __future__ import annotations

FUSED_OPTIMIZERS: list[tuple[str, str, str, str, str]] = []  # fmt: skip

"""The table of checks: one row for each property, with the clause, what it needs of a target and the dtypes it is run for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bagua_ref.conformance.clauses import CLAUSES, SUITES
from bagua_ref.extras import install_command

if TYPE_CHECKING:
    from bagua_ref.conformance.lab import Lab

__all__ = ["Check", "Draw", "all_checks", "check", "prepare", "require_hypothesis", "variants"]

Draw = Callable[[Any], Any]
"""Takes a Hypothesis strategy, returns a value."""

_MODULES = {
    suite: f"properties_{suite}"
    for suite in ("kernels", "codec", "collectives", "comm_ops", "algorithms", "samplers", "cache", "fused_optimizer")
}
"""Where the checks of each suite are; a suite that is not here is not built."""

_table: dict[str, Check] = {}


@dataclass(frozen=True)
class Check:
    """A property of an implementation.

    Attributes:
        id: ``suite.clause.name``; stable.
        suite: which part of a target it is about.
        clause: of the specification.
        sentence: what is true of every right implementation, whatever the input.
        function: draws an input and raises `Violation` if the sentence is false of it.
        dtypes: names; the check is run for each of them by itself. Empty: once.
        needs: what the target's part must have for it.
        effort: multiplies the number of examples.
    """

    id: str
    suite: str
    clause: str
    sentence: str
    function: Callable[[Lab, Draw], None] = field(compare=False)
    dtypes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    effort: float = 1.0


def check(
    suite: str,
    clause: str,
    name: str,
    *,
    dtypes: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    effort: float = 1.0,
) -> Callable[[Callable[[Lab, Draw], None]], Callable[[Lab, Draw], None]]:
    """Return a decorator that enters a property into the table; its sentence is the first line of the function's docstring."""
    assert suite in SUITES
    assert clause in CLAUSES

    def enter(function: Callable[[Lab, Draw], None]) -> Callable[[Lab, Draw], None]:
        sentence = (function.__doc__ or "").splitlines()[0]
        row = Check(f"{suite}.{clause}.{name}", suite, clause, sentence, function, dtypes, needs, effort)
        assert row.id not in _table, row.id
        _table[row.id] = row
        return function

    return enter


def require_hypothesis() -> None:
    """Raise ImportError, with what to install, unless Hypothesis is there."""
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise ImportError(f"conformance checks need Hypothesis; install with: {install_command('conformance')}") from error


def all_checks() -> dict[str, Check]:
    """Return every check by id, in the order of suites.

    Raises:
        ImportError: Hypothesis is not installed.
    """
    require_hypothesis()
    for module in _MODULES.values():
        importlib.import_module(f"bagua_ref.conformance.{module}")
    return dict(sorted(_table.items(), key=lambda item: SUITES.index(item[1].suite)))


def prepare(suite: str) -> None:
    """Let a suite import what takes long, once, before its checks run in processes of their own."""
    ready = getattr(importlib.import_module(f"bagua_ref.conformance.{_MODULES[suite]}"), "prepare", None)
    if ready is not None:
        ready()


def variants(row: Check) -> list[str | None]:
    """Return the dtypes for which a check is run; ``[None]`` if it has none."""
    return list(row.dtypes) or [None]

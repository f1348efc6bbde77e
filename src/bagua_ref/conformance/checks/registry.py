"""The table of checks: one row per property, with its clause, needs and dtypes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bagua_ref.base.not_provided import install_command
from bagua_ref.conformance.clauses import CLAUSES, SUITES
from bagua_ref.conformance.lab.lab import Lab

if TYPE_CHECKING:  # hypothesis is not needed to list checks
    from bagua_ref.conformance.cases.strategies import Draw
    from bagua_ref.conformance.lab.training import TrainedAlgorithm

__all__ = [
    "Check",
    "all_checks",
    "check",
    "check_trainings",
    "checks_of",
    "nothing",
    "prepare",
    "variants",
]

_ALGORITHMS = ("_async", "_local", "_powersgd", "", "_compressed", "_sparse", "_properties")
_MODULES = {suite: (suite,) for suite in SUITES} | {
    "algorithms": tuple(f"algorithms{part}" for part in _ALGORITHMS),
}
"""The modules of each suite, in the order in which their checks are listed."""

_rows: dict[str, dict[str, Check]] = {}
"""The checks of each module that has been imported, by id."""


@dataclass(frozen=True)
class Check:
    """A property of an implementation.

    Attributes:
        id: ``suite.clause.name``; stable.
        suite: name of the suite.
        clause: clause of the specification.
        sentence: the property, which every correct implementation has for all inputs.
        function: draws an input and raises `Violation` if the property does not hold for it.
        dtypes: names of dtypes; the check runs separately for each of them. Empty: once.
        needs: attributes that the target's part must have, or codecs of the target's kernels.
        effort: factor of the number of inputs.
        walk: judges the rows of the case table that every run walks, after the drawn inputs.
    """

    id: str
    suite: str
    clause: str
    sentence: str
    function: Callable[[Lab, Draw], None] = field(compare=False)
    dtypes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    effort: float = 1.0
    walk: Callable[[Lab], None] | None = field(default=None, compare=False)


def check(
    clause: str,
    name: str,
    *,
    dtypes: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    effort: float = 1.0,
    sentence: str = "",
    module: str = "",
    walk: Callable[[Lab], None] | None = None,
) -> Callable[[Callable[[Lab, Draw], None]], Callable[[Lab, Draw], None]]:
    """Return a decorator that enters a property into the table.

    Args:
        clause: its clause.
        name: its name in the clause.
        dtypes: names of dtypes, for each of which the check runs.
        needs: what the target's part must have.
        effort: factor of the number of inputs.
        sentence: the property; by default the first paragraph of the function's docstring.
        module: the module of the suite that has the check; by default the caller's.
        walk: judges its rows of the case table.
    """
    module = (module or sys._getframe(1).f_globals["__name__"]).rpartition(".")[2]
    suite = next(suite for suite in SUITES if module.startswith(suite))
    assert clause in CLAUSES

    def enter(function: Callable[[Lab, Draw], None]) -> Callable[[Lab, Draw], None]:
        def judge(lab: Lab, draw: Draw) -> None:
            function(lab, draw)
            lab.end()

        paragraph = sentence or (function.__doc__ or "").partition("\n\n")[0]
        said = " ".join(paragraph.split())
        row = Check(
            f"{suite}.{clause}.{name}", suite, clause, said, judge, dtypes, needs, effort, walk
        )
        rows = _rows.setdefault(module, {})
        assert row.id not in rows, row.id
        rows[row.id] = row
        return function

    return enter


def check_trainings(
    *rows: tuple[
        Callable[..., object],
        TrainedAlgorithm,
        float,
        str,
        tuple[str, ...],
        Callable[[Lab, Draw], dict[str, Any]],
        str,
    ],
) -> None:
    """Enter checks that train one algorithm each into the table.

    A row has a function of the algorithm, the lab and ``draw`` (`TrainedAlgorithm.train` or a
    property); the algorithm; effort, clause and name, and dtypes of the check; what draws the
    function's other arguments; and the sentence.
    """
    for has, algorithm, effort, name, dtypes, given, sentence in rows:

        def function(
            lab: Lab, draw: Draw, has: Any = has, algorithm: Any = algorithm, given: Any = given
        ) -> None:
            has(algorithm, lab, draw, **given(lab, draw))

        clause, _, last = name.rpartition(".")
        check(
            clause,
            last,
            dtypes=dtypes,
            needs=(algorithm.method,),
            effort=effort,
            sentence=sentence,
            module=sys._getframe(1).f_globals["__name__"],
        )(function)


def nothing(lab: Lab, draw: Draw) -> dict[str, Any]:
    """Draw no arguments."""
    return {}


def checks_of(suites: Collection[str]) -> dict[str, Check]:
    """Return the checks of the given suites by id, in the order of `SUITES`; only these suites are
    imported.

    Raises:
        ImportError: Hypothesis is not installed.
    """
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"conformance checks need Hypothesis; install with: {install_command('conformance')}"
        ) from error
    found: dict[str, Check] = {}
    for suite in SUITES:
        if suite in suites:
            _import_suite(suite)
            for module in _MODULES[suite]:
                found |= _rows.get(module, {})
    return found


def all_checks() -> dict[str, Check]:
    """Return every check by id, in the order of `SUITES`.

    Raises:
        ImportError: Hypothesis is not installed.
    """
    return checks_of(SUITES)


def prepare(suite: str) -> None:
    """Let a suite import slow modules once, before its checks run in processes of their own."""
    getattr(_import_suite(suite), "prepare", lambda: None)()


def _import_suite(suite: str) -> ModuleType:
    """Import the modules of a suite, which enters its checks into the table; return the one named
    like the suite.
    """
    found = {
        module: importlib.import_module(f"bagua_ref.conformance.checks.{module}")
        for module in _MODULES[suite]
    }
    return found[suite]


def variants(row: Check) -> list[str | None]:
    """Return the dtypes of a check; ``[None]`` if it has none."""
    return list(row.dtypes) or [None]

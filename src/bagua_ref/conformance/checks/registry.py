"""The registry of checks: one row per property, with its clause, needs and dtypes."""

from __future__ import annotations

import importlib
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
    "checks_of",
    "prepare",
    "trains",
    "variants",
]

_ALGORITHMS = ("_async", "_local", "_powersgd", "", "_compressed", "_sparse", "_properties")
_MODULES = {suite: (suite,) for suite in SUITES} | {
    "algorithms": tuple(f"algorithms{part}" for part in _ALGORITHMS),
}
"""The modules of each suite."""

Property = Callable[["Lab"], None]
"""A check's function, which draws an input and raises `Violation` if the property does not hold for
it.
"""

_rows: dict[str, Check] = {}
"""The checks of the modules that have been imported, by id."""


@dataclass(frozen=True)
class Check:
    """A check: a property that an implementation must have.

    Attributes:
        id: ``suite.clause.name``; stable.
        suite: name of the suite.
        clause: clause of the specification.
        sentence: the property, which every correct implementation has for all inputs.
        function: draws an input and raises `Violation` if the property does not hold for it.
        dtypes: names of dtypes; the check runs separately for each of them. Empty: once.
        needs: attributes that the target's part must have, or codecs of the target's kernels.
        effort: factor of the number of inputs.
        walk: checks the fixed rows of the case table, after the drawn inputs.
    """

    id: str
    suite: str
    clause: str
    sentence: str
    function: Callable[[Lab, Draw], None] = field(compare=False)
    dtypes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    effort: float = 0.55
    walk: Callable[[Lab], None] | None = field(default=None, compare=False)


def check(
    name: str,
    *,
    dtypes: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    effort: float = 0.55,
    sentence: str = "",
    walk: Callable[[Lab], None] | None = None,
) -> Callable[[Property], Property]:
    """Return a decorator that registers a property as a check.

    Args:
        name: the check's id.
        dtypes: names of dtypes, for each of which the check runs.
        needs: attributes that the target's part must have.
        effort: factor of the number of inputs.
        sentence: the property; by default the first paragraph of the function's docstring.
        walk: checks the fixed rows of the case table.
    """
    suite, _, rest = name.partition(".")
    clause = rest.rpartition(".")[0]
    assert suite in SUITES, name
    assert clause in CLAUSES, name
    assert name not in _rows, name

    def enter(function: Property) -> Property:
        def judge(lab: Lab, draw: Draw) -> None:
            lab.draw = draw
            function(lab)
            lab.end()

        paragraph = sentence or (function.__doc__ or "").partition("\n\n")[0]
        said = " ".join(paragraph.split())
        _rows[name] = Check(name, suite, clause, said, judge, dtypes, needs, effort, walk)
        return function

    return enter


def trains(
    algorithm: TrainedAlgorithm,
    name: str,
    effort: float,
    dtypes: tuple[str, ...] = (),
    of: Callable[..., object] | None = None,
) -> Callable[..., Any]:
    """Return a decorator that registers a check which trains an algorithm. It decorates a function
    of the lab that returns the arguments of `TrainedAlgorithm.train`; or it is called with the
    arguments and the property.

    Args:
        algorithm: the algorithm.
        name: the check's id, without the suite.
        effort: factor of the number of inputs.
        dtypes: names of dtypes, for each of which the check runs.
        of: the training function, called with the algorithm, the lab and the arguments.
    """

    def enter(given: Any, sentence: str = "") -> Any:
        def function(lab: Lab) -> None:
            (of or type(algorithm).train)(
                algorithm, lab, **(given(lab) if callable(given) else given)
            )

        check(
            f"algorithms.{name}",
            dtypes=dtypes,
            needs=(algorithm.method,),
            effort=effort,
            sentence=sentence or given.__doc__,
        )(function)
        return given

    return enter


def checks_of(suites: Collection[str]) -> dict[str, Check]:
    """Return the checks of these suites by id, in the order of `SUITES` and clauses; no other suite
    is imported.

    Raises:
        ImportError: Hypothesis is not installed.
    """
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"conformance checks need Hypothesis; install with: {install_command('conformance')}"
        ) from error
    for suite in suites:
        _import_suite(suite)
    rows = [row for row in _rows.values() if row.suite in suites]
    clauses = [*CLAUSES]
    rows.sort(key=lambda row: (SUITES.index(row.suite), clauses.index(row.clause)))
    return {row.id: row for row in rows}


def all_checks() -> dict[str, Check]:
    """Return every check by id, in the order of `SUITES`.

    Raises:
        ImportError: Hypothesis is not installed.
    """
    return checks_of(SUITES)


def prepare(suite: str) -> None:
    """Import a suite's slow modules once, before its checks run in processes of their own."""
    getattr(_import_suite(suite), "prepare", lambda: None)()


def _import_suite(suite: str) -> ModuleType:
    """Import the modules of a suite, which registers its checks; return the module named like the
    suite.
    """
    found = {
        module: importlib.import_module(f"bagua_ref.conformance.checks.{module}")
        for module in _MODULES[suite]
    }
    return found[suite]


def variants(row: Check) -> list[str | None]:
    """Return a check's dtypes, ``[None]`` if it has none."""
    return list(row.dtypes) or [None]

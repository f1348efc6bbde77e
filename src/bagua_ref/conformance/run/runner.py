"""`run_conformance`: selection of checks, parallel runs and known failures."""

from __future__ import annotations

import contextlib
import difflib
import platform
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from bagua_ref import __version__
from bagua_ref.backends.base import KernelBackend
from bagua_ref.conformance.checks.registry import (
    Check,
    all_checks,
    checks_of,
    reason_to_skip_suite,
    variants,
)
from bagua_ref.conformance.clauses import (
    CLAUSES,
    NOT_COVERED,
    SPEC_VERSION,
    SUITES,
    VECTORS_VERSION,
)
from bagua_ref.conformance.lab.lab import KERNELS
from bagua_ref.conformance.run.isolation import CheckTask, Isolation, can_fork, wait_for
from bagua_ref.conformance.run.report import Report, Result
from bagua_ref.conformance.run.search import PROFILES, Outcome, Search
from bagua_ref.conformance.targets.target import Target, resolve

__all__ = [
    "MOST_JOBS",
    "OneByOne",
    "check_ids",
    "read_xfails",
    "reason_to_skip",
    "row_id",
    "run_conformance",
    "verdict",
]

MOST_JOBS = 4
"""The most processes that run without being asked for."""

_NEEDS = {
    "kernels": "kernels",
    "codec": "kernels",
    "collectives": "communicator",
}
"""Suite -> the part of a target that it checks; other suites have the name of their part."""

Progress = Callable[[int, int, Result], None]
_Row = tuple[Check, str | None]


def run_conformance(
    target: Any,
    suites: Sequence[str] | None = None,
    profile: str = "quick",
    xfail: Iterable[str] = (),
    fail_fast: bool = False,
    *,
    checks: Sequence[str] | None = None,
    seed: int = 0,
    jobs: int | None = None,
    shrink: bool = True,
    time_limit: float = 10.0,
    progress: Progress | None = None,
) -> Report:
    """Check an implementation clause by clause; there is a verdict even if it hangs or crashes.

    Args:
        target: a backend's name, ``"pkg.mod:Class"``, a KernelBackend, or an object with any of
            ``kernels``, ``communicator(world)``, ``comm_ops``, ``algorithms``, ``samplers``,
            and optionally ``capabilities``, a mapping whose
            ``"dtypes"`` and ``"max_ranks"`` limit what is tried, and whose ``"external"`` is True
            if the target uses something outside of the process, such as a server.
        suites: names in `SUITES`; None: all. Suites of parts that the target lacks are skipped.
        profile: "quick", "full" or "large": the number of inputs, and how long long ones are.
        xfail: ids of checks, with or without ``[dtype]``, that are known to fail. One that passes
            counts as a failure.
        fail_fast: stop at the first failure; the remaining checks are skipped.
        checks: ids of checks, with or without ``[dtype]``, or clauses, S4 with S4.1, S4.2, ...;
            None: all checks of the suites.
        seed: seed of all inputs; the same seed and versions give the same inputs.
        jobs: number of processes; None: the number of cores, up to 4, or 1 if the target is
            external; 0: one check at a time on a thread of this process, which is also used where
            processes cannot be forked (CUDA).
        shrink: make counterexamples small.
        time_limit: time limit of a single call in seconds.
        progress: called with the number of results so far, the total number, and the latest result.

    Raises:
        ValueError: an unknown backend, suite, profile or xfail id.
        TypeError: a target without any part to check.
        ImportError: Hypothesis is not installed.
        BackendUnavailableError: the backend cannot run here.

    >>> report = run_conformance("reference", suites=["codec"], checks=["S4.5"], seed=1)
    >>> report.passed
    True
    """
    wanted = _known("suites", SUITES if suites is None else suites, SUITES)
    _known("profile", [profile], tuple(PROFILES))
    table = checks_of(wanted)
    expected, chosen = set(_known_checks("xfail", xfail, table)), None
    if checks is not None:
        chosen = set(_known_checks("checks", checks, table, {*CLAUSES, *map(_whole, CLAUSES)}))
    judged = target if isinstance(target, Target) else resolve(target)
    plan = [(check, dtype) for check in table.values() for dtype in variants(check)]
    if chosen is not None:
        plan = [
            row
            for row in plan
            if chosen & {row_id(*row), row[0].id, row[0].clause, _whole(row[0].clause)}
        ]
    begun = time.perf_counter()
    results: dict[str, Result] = {}

    def add(check: Check, dtype: str | None, status: str, message: str, *found: Any) -> None:
        name = row_id(check, dtype)
        results[name] = Result(
            name, check.suite, check.clause, status, check.sentence, message, *found
        )
        if progress is not None:
            progress(len(results), len(plan), results[name])

    for row in plan:
        if reason := reason_to_skip(judged, *row):
            add(*row, "skipped", reason)
    waiting = [row for row in plan if row_id(*row) not in results]
    with contextlib.closing(
        _run(waiting, judged, Search(profile, seed, shrink), time_limit, _jobs(jobs, judged))
    ) as outcomes:
        for found in outcomes:
            for row, outcome in found:
                judgement = verdict(outcome, row_id(*row) in expected or row[0].id in expected)
                add(*row, *judgement, outcome.snippet, outcome.examples, outcome.seconds)
            if fail_fast and any(
                result.status in ("failed", "xpassed") for result in results.values()
            ):
                break
    for row in waiting:
        if row_id(*row) not in results:
            add(*row, "skipped", "not tried after a failure (fail_fast)")
    ordered = [results[row_id(*row)] for row in plan]
    missing = [
        clause for clause in NOT_COVERED if chosen is None or chosen & {clause, _whole(clause)}
    ]
    ordered += [Result(clause, "", clause, "not covered", CLAUSES[clause]) for clause in missing]
    return Report(
        judged.name,
        ordered,
        profile,
        seed,
        _versions(),
        time.perf_counter() - begun,
        judged.max_ranks,
    )


class OneByOne:
    """Runs checks one at a time, each in a forked process if possible; it is kept for the next
    check of its suite if all pass.

    At most `MOST_JOBS` targets and idle processes are kept, those used last, as there may be a new
    target for each check.
    """

    def __init__(self) -> None:
        self._targets: dict[int, tuple[Any, Target]] = {}
        """What was given and its target, by the identity of the former."""
        self._isolations: dict[tuple[int, str, Search, float], Isolation] = {}
        """Isolations by their targets' identity, suite and settings."""

    def resolve(self, given: Any) -> Target:
        """Return what `resolve` returns, the same for the same object."""
        known = self._targets.pop(id(given), None) or (given, resolve(given))
        self._targets[id(given)] = known
        if len(self._targets) > MOST_JOBS:
            del self._targets[next(iter(self._targets))]
        return known[1]

    def run(
        self, target: Target, check: Check, dtype: str | None, how: Search, time_limit: float = 10.0
    ) -> Outcome:
        """Run a check for one dtype."""
        kind = (id(target), check.suite, how, time_limit)
        isolation = self._isolations.pop(kind, None)
        if isolation is None:
            isolation = Isolation(
                checks_of([check.suite]).values(), target, how, time_limit, can_fork(target)
            )
        self._isolations[kind] = isolation
        if len(self._isolations) > MOST_JOBS:
            self._isolations.pop(next(iter(self._isolations))).stop()
        task = isolation.start(check, [dtype])
        try:
            while not (found := task.poll()):
                wait_for([task])
            return found[0][1]
        finally:
            isolation.end(task, keep=not target.external)

    def stop(self) -> None:
        """Stop all processes."""
        while self._isolations:
            self._isolations.popitem()[1].stop()


def check_ids(checks: Iterable[Check] | None = None) -> list[str]:
    """Return the ids of all results of ``checks`` (None: all checks): each check with each of its
    dtypes.
    """
    return [
        row_id(check, dtype)
        for check in checks or all_checks().values()
        for dtype in variants(check)
    ]


def _whole(clause: str) -> str:
    """Return the clause of which this one is a part: S4 of S4.1."""
    return clause.partition(".")[0]


def row_id(check: Check, dtype: str | None) -> str:
    """Return the id of a check for one dtype."""
    return check.id if dtype is None else f"{check.id}[{dtype}]"


def reason_to_skip(target: Target, check: Check, dtype: str | None) -> str:
    """Return why a check is skipped for a target; empty if it is not."""
    part = _NEEDS.get(check.suite, check.suite)
    is_ours = part in ("comm_ops", "algorithms") and part not in target.parts
    if is_ours:
        part = "kernels"  # the package's own operations and algorithms are run with them
    if part not in target.parts:
        return f"the target has no {part}"
    if is_ours and (lacking := _lacking(target, dtype)):
        return f"the target's kernels have no {lacking}, which the package's own operations need"
    if reason := reason_to_skip_suite(check.suite):
        return reason
    codecs = getattr(target.kernels, "codecs", {})
    missing = [
        name
        for name in check.needs
        if not (is_ours or name in codecs or _has(target.parts[part], name))
    ]
    if missing:
        return f"the target's {part} has no {', '.join(missing)}"
    if dtype is not None and target.dtypes is not None and dtype not in target.dtypes:
        return f"the target's capabilities exclude {dtype}"
    return ""


def _lacking(target: Target, dtype: str | None) -> str:
    """Return what the target's kernels lack of what the package's own operations need; empty if
    nothing.
    """
    codecs, dtypes = getattr(target.kernels, "codecs", {}), target.dtypes
    names = [name for name in KERNELS if not hasattr(target.kernels, name)] + ["MinMaxUInt8"] * (
        "MinMaxUInt8" not in codecs
    )
    if not names and not isinstance(target.kernels, KernelBackend):
        names = ["base class KernelBackend"]
    if (
        not names
        and dtypes is not None
        and "float32" not in dtypes
        and (dtype != "float64" or dtype not in dtypes)
    ):
        names = ["float32"]  # in which they compute 16-bit dtypes, and what they compress
    return ", ".join(names)


def _has(part: Any, name: str) -> bool:
    """Return whether a part has an attribute, which may be one of its classes'
    (``Class.method``).
    """
    try:
        attrgetter(name)(part)
    except AttributeError:
        return False
    return True


def _run(
    rows: list[_Row], target: Target, how: Search, time_limit: float, jobs: int
) -> Generator[list[tuple[_Row, Outcome]], None, None]:
    """Run checks, ``jobs`` at a time; yield outcomes as they come, and stop running checks when
    closed.
    """
    waiting: dict[Check, list[str | None]] = {}
    for check, dtype in rows:
        waiting.setdefault(check, []).append(dtype)
    queue, running = list(waiting.items()), list[CheckTask]()
    isolation = Isolation(waiting, target, how, time_limit, fork=jobs > 0)
    try:
        while queue or running:
            while queue and len(running) < max(1, jobs):
                running.append(isolation.start(*queue.pop(0)))
            found = []
            for task in list(running):
                found += [((task.check, dtype), outcome) for dtype, outcome in task.poll()]
                if not task.waiting:
                    running.remove(task)
                    isolation.end(task)
            yield found
            wait_for(running)
    finally:
        for task in running:
            isolation.end(task)
        isolation.stop()


def verdict(outcome: Outcome, known_failure: bool) -> tuple[str, str]:
    """Return the status of an outcome, as in a report, and the message."""
    if outcome.skipped:
        return "skipped", outcome.skipped
    if not outcome.passed:
        return "xfailed" if known_failure else "failed", outcome.message
    return (
        ("xpassed", "passed, but is listed as a known failure: remove it from the list")
        if known_failure
        else ("passed", "")
    )


def read_xfails(path: Path, known: Sequence[str]) -> tuple[str, ...]:
    """Return the ids in a list of known failures: one per line, ``#`` begins a comment.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not text in UTF-8, or an id is unknown; the message names the file and the
            line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from None
    entries = {number: line.partition("#")[0].strip() for number, line in enumerate(lines, start=1)}
    for number, entry in entries.items():
        if entry and entry not in known:
            raise ValueError(f"{path} line {number}: no check is called {entry!r}")
    return tuple(filter(None, entries.values()))


def _known(argument: str, values: Iterable[str], allowed: Sequence[str]) -> list[str]:
    values = [values] if isinstance(values, str) else list(values)
    for value in values:
        if value not in allowed:
            close = difflib.get_close_matches(str(value), allowed, n=3) or list(allowed)[:8]
            raise ValueError(
                f"{argument}: {value!r} is unknown; closest are {', '.join(map(repr, close))}"
            )
    return values


def _known_checks(
    argument: str, values: Iterable[str], table: dict[str, Check], more: Iterable[str] = ()
) -> list[str]:
    """Return ``values`` if each names a check; other suites are imported only to look for names
    that these lack.
    """
    values = [values] if isinstance(values, str) else list(values)
    known = [*table, *check_ids(table.values()), *more]
    if not set(known).issuperset(values):
        known = [*all_checks(), *check_ids(), *more]
    return _known(argument, values, known)


def _jobs(jobs: int | None, target: Target) -> int:
    if jobs is not None and jobs < 0:
        raise ValueError(f"jobs={jobs} must be None, 0 or a number of processes")
    if not can_fork(target):
        return 0
    return (
        jobs
        if jobs is not None
        else 1
        if target.external
        else min(MOST_JOBS, max(1, torch.multiprocessing.cpu_count()))
    )


def _versions() -> dict[str, str]:
    import hypothesis

    return {
        "specification": SPEC_VERSION,
        "vectors": VECTORS_VERSION,
        "bagua_ref": __version__,
        "torch": str(torch.__version__),
        "hypothesis": hypothesis.__version__,
        "Python": platform.python_version(),
    }

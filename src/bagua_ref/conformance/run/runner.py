"""`run_conformance`: selection of checks, verdicts in this process or from workers, known
failures.
"""

from __future__ import annotations

import difflib
import gc
import os
import platform
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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
    prepare,
    variants,
)
from bagua_ref.conformance.clauses import (
    CLAUSES,
    NOT_COVERED,
    SPEC_VERSION,
    SUITES,
    VECTORS_VERSION,
)
from bagua_ref.conformance.lab.journal import Journal, last_call
from bagua_ref.conformance.lab.lab import KERNELS
from bagua_ref.conformance.run.report import Report, Result
from bagua_ref.conformance.run.search import PROFILES, Outcome, Search, search
from bagua_ref.conformance.run.workers import Workers
from bagua_ref.conformance.targets.reference_target import ReferenceTarget
from bagua_ref.conformance.targets.target import Target, capabilities_of, load, resolve

MOST_JOBS = 4
"""Default maximum of workers."""

_NEEDS = {
    "kernels": "kernels",
    "codec": "kernels",
    "collectives": "communicator",
}
"""Suite -> part of a target, unless both have the same name."""

Progress = Callable[[int, int, Result], None]
Row = tuple[Check, str | None]


@dataclass
class NamedTarget:
    """A target named by command-line options, which workers can load, too.

    Attributes:
        target: all parts of bagua_ref with this backend, or ``"pkg.mod:Class"``.
        backend: a backend's name, or ``"pkg.mod:Class"``.
        communicator: ``"pkg.mod:factory"``; it may be given with one of these.
        command: a program that answers requests.
    """

    target: str | None = None
    backend: str | None = None
    communicator: str | None = None
    command: str | None = None

    def __post_init__(self) -> None:
        """Initialize the cache of `load`."""
        self._loaded: Target | None = None

    def load(self, time_limit: float) -> Target:
        """Return the target, loaded once; a program must start within the time limit.

        Raises:
            ValueError: the combination of options is invalid, or a backend is unknown.
            ImportError, AttributeError: ``"pkg.mod:Class"`` is not there.
        """
        if self._loaded is None:
            self._loaded = self._load(time_limit)
        return self._loaded

    def _load(self, time_limit: float) -> Target:
        others = self.target or self.backend or self.communicator
        if bool(others) == bool(self.command) or (self.target and self.backend):
            raise ValueError(
                "name one of target, backend, communicator (also with one of these) and command"
            )
        if self.command:
            from bagua_ref.conformance.targets.process import ProcessTarget  # imports the samplers

            return resolve(ProcessTarget(self.command, time_limit))
        target = Target(str(self.communicator), {})
        if self.target and ":" not in self.target:
            target = resolve(ReferenceTarget(self.target))
        elif named := self.target or self.backend:
            target = resolve(named)
        if self.communicator:
            target.parts["communicator"] = factory = load(self.communicator)
            target = replace(target, **capabilities_of(factory))
        return target


def run_conformance(
    target: Any,
    suites: Sequence[str] | None = None,
    profile: str = "quick",
    xfail: Iterable[str] = (),
    fail_fast: bool = False,
    *,
    checks: Sequence[str] | None = None,
    seed: int = 0,
    jobs: int = 0,
    shrink: bool = True,
    time_limit: float = 10.0,
    progress: Progress | None = None,
) -> Report:
    """Check an implementation clause by clause.

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
        fail_fast: stop at the first failure; the remaining checks are not tried.
        checks: ids of checks, with or without ``[dtype]``, or clauses, S4 with S4.1, S4.2, ...;
            None: all checks of the suites.
        seed: seed of all inputs; the same seed and versions give the same inputs.
        jobs: number of worker processes, which load the target by its name; there is a verdict
            even if one crashes. 0: run in this process, where a crash ends it, and a call that
            hangs is left behind on a thread.
        shrink: make counterexamples small; workers always do.
        time_limit: time limit of a single call in seconds.
        progress: called with the number of results so far, the total number, and the latest result.

    Raises:
        ValueError: an unknown backend, suite, profile, check or xfail id.
        TypeError: a target without any part to check, or workers for a target that is no name.
        ImportError: Hypothesis is not installed.
        BackendUnavailableError: the backend cannot run here.

    >>> report = run_conformance("reference", suites=["codec"], checks=["S4.5"], seed=1)
    >>> report.passed
    True
    """
    _known("profile", [profile], tuple(PROFILES))
    plan = select(suites, checks)
    known = frozenset(_listed(xfail))
    if known:
        _known("xfail", known, [*all_checks(), *check_ids()])
    if not isinstance(jobs, int) or jobs < 0:
        raise ValueError(f"jobs={jobs} must be 0 or a number of processes")
    named = NamedTarget(backend=target) if isinstance(target, str) else target
    if jobs and not isinstance(named, NamedTarget):
        raise TypeError(
            f"jobs={jobs} needs a target that workers can load by its name, such as"
            f" 'pkg.mod:Class', not {target!r}; jobs=0 runs in this process"
        )
    judged = (
        named.load(time_limit)
        if isinstance(named, NamedTarget)
        else named
        if isinstance(named, Target)
        else resolve(named)
    )
    begun, results = time.perf_counter(), dict[str, Result]()
    run = CheckRun(judged, Search(profile, seed, shrink), time_limit, known)
    for result in _judge(plan, run, named, jobs):
        results[result.id] = result
        if progress is not None:
            progress(len(results), len(plan), result)
        if fail_fast and result.failed:
            break
    for row in plan:
        results.setdefault(row_id(*row), _result(row, "not tried", "after a failure (fail_fast)"))
    ordered = [results[row_id(*row)] for row in plan]
    wanted = set(_listed(checks)) if checks is not None else None
    uncovered = [
        clause for clause in NOT_COVERED if wanted is None or wanted & {clause, _whole(clause)}
    ]
    ordered += [Result(clause, "", clause, "not covered", CLAUSES[clause]) for clause in uncovered]
    seconds = time.perf_counter() - begun
    return Report(judged.name, ordered, profile, seed, _versions(), seconds, judged.max_ranks)


@dataclass
class CheckRun:
    """Settings and state shared by the checks of a run.

    Attributes:
        target: the implementation under test.
        how: settings of the search.
        time_limit: time limit of a single call in seconds.
        known: ids of known failures.
        folder: folder in which workers record their last calls; None: this process must survive, so
            checks run on another thread, which is abandoned if a call hangs.
        worker: the worker's name.
    """

    target: Target
    how: Search
    time_limit: float
    known: frozenset[str] = frozenset()
    folder: Path | None = None
    worker: str = ""

    def __post_init__(self) -> None:
        """Begin without prepared suites, calls that hang, and a thread."""
        self._hung: dict[str, str] = {}
        self._prepared: set[str] = set()
        self._thread: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def judge(self, check: Check, dtype: str | None) -> Result:
        """Return the result of a check for one dtype."""
        name = row_id(check, dtype)
        if reason := reason_to_skip(self.target, check, dtype):
            return _result((check, dtype), "skipped", reason)
        again, ended = self._ended(check.id)
        if ended and again != name:
            return _result((check, dtype), "not tried", f"{ended}, for another dtype")
        if self.folder is None:
            outcome = self._on_thread(check, dtype)
        else:
            outcome = self._in_worker(check, dtype, self.folder / self.worker, bool(again))
        if again:
            more = f"{outcome.message}; for another input, {ended}" if outcome.message else ""
            outcome.message = more or f"{ended}, but not when all inputs were tried again"
        status, message = verdict(outcome, bool(self.known & {name, check.id}))
        found = outcome.snippet, outcome.examples, outcome.seconds
        return _result((check, dtype), status, message, *found)

    def _ended(self, check: str) -> tuple[str, str]:
        """Return the id of the check and dtype whose call ended the process or hung, and a message;
        empty strings if there is none.
        """
        if self.folder is None:
            return "", self._hung.get(check, "")
        try:
            name, _, said = (self.folder / f"ended {check}").read_text("utf-8").partition("\n")
        except FileNotFoundError:
            return "", ""
        return name, last_call(said, self.time_limit)[0]

    def _on_thread(self, check: Check, dtype: str | None) -> Outcome:
        journal, outcomes = Journal(self.time_limit), queue.SimpleQueue[Outcome]()

        def work() -> None:
            outcomes.put(search(check, dtype, self.target, self.how, journal))

        # the same thread for all checks, as Hypothesis collects all garbage once on each
        if self._thread is None:
            self._thread = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._thread,), daemon=True).start()
        self._thread.put(work)
        while True:
            try:
                return outcomes.get(timeout=0.05)
            except queue.Empty:
                if overdue := journal.overdue():
                    self._hung[check.id] = overdue
                    self.close()
                    return Outcome(overdue)

    def close(self) -> None:
        """Let the thread of checks end."""
        if self._thread is not None:
            self._thread.put(None)
            self._thread = None

    def _in_worker(self, check: Check, dtype: str | None, path: Path, again: bool) -> Outcome:
        if check.suite not in self._prepared:
            prepare(check.suite)
            gc.freeze()  # modules stay, and need not be searched for garbage again
            self._prepared.add(check.suite)
        torch.set_num_threads(1)
        journal = Journal(self.time_limit, path, records=again)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return search(check, dtype, self.target, self.how, journal)
        finally:
            journal.close()


def _work(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while task := tasks.get():
        task()


def _judge(plan: Sequence[Row], run: CheckRun, named: Any, jobs: int) -> Iterator[Result]:
    """Yield the result of each row once it is known."""
    if not jobs:
        try:
            yield from (run.judge(*row) for row in plan)
        finally:
            run.close()
        return
    waiting = {}
    for row in plan:
        if reason := reason_to_skip(run.target, *row):
            yield _result(row, "skipped", reason)
        else:
            waiting[row_id(*row)] = row
    if not waiting:
        return
    options = {
        **asdict(named),
        "profile": run.how.profile,
        "seed": run.how.seed,
        "time-limit": run.time_limit,
        "suite": sorted({check.suite for check, _ in waiting.values()}),
        "check": [*waiting],
    }
    workers = Workers(options, sorted(run.known), min(jobs, len(waiting)))
    for said in workers.results():
        row = waiting.pop(said["id"])
        if "ended" in said:
            message, arguments = last_call(said["ended"], run.time_limit)
            known_failure = bool(run.known & {said["id"], row[0].id})
            yield _result(row, *verdict(Outcome(message), known_failure), arguments)
        else:
            yield Result(**said)
    for row in waiting.values():
        yield _result(row, "error", f"no worker has reported it: {workers.error()}")


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
    """Return the clause that contains this one: S4 for S4.1."""
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
        if part in target.cannot_be_asked:
            return f"cannot be asked: verify has no request for {part}; vectors check has"
        return _lack(target, "target", [part])
    if is_ours and (lacking := _lacking(target, dtype)):
        return f"the target's kernels have no {lacking}, which the package's own operations need"
    codecs = getattr(target.kernels, "codecs", {})
    missing = [
        name
        for name in check.needs
        if not (is_ours or name in codecs or _has(target.parts[part], name))
    ]
    if missing:
        return _lack(target, f"target's {part}", missing)
    if dtype is not None and target.dtypes is not None and dtype not in target.dtypes:
        return f"the target's capabilities exclude {dtype}"
    return ""


def _lack(target: Target, owner: str, names: Sequence[str]) -> str:
    """Return a message: the target, its part, or a program lacks these names."""
    if target.requests is None:
        return f"the {owner} has no {', '.join(names)}"
    # as the protocol calls them
    said = ["collectives" if name == "communicator" else name.strip("_") for name in names]
    return f"the program lacks {', '.join(said)}: its answer to hello does not name it"


def _lacking(target: Target, dtype: str | None) -> str:
    """Return a message about kernels that the package's own operations need and the target lacks;
    empty if it lacks none.
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
        names = ["float32"]  # which computes 16-bit numbers, and is compressed
    return ", ".join(names)


def _has(part: Any, name: str) -> bool:
    """Return whether a part has an attribute, or one of its classes has it (``Class.method``)."""
    try:
        attrgetter(name)(part)
    except AttributeError:
        return False
    return True


def verdict(outcome: Outcome, known_failure: bool) -> tuple[str, str]:
    """Return the status of an outcome, as used in reports, and the message."""
    if outcome.skipped:
        return "skipped", outcome.skipped
    if outcome.message:
        return "xfailed" if known_failure else "failed", outcome.message
    return (
        ("xpassed", "passed, but is listed as a known failure: remove it from the list")
        if known_failure
        else ("passed", "")
    )


def read_xfails(path: Path) -> tuple[str, ...]:
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
    known = {*all_checks(), *check_ids()}
    for number, entry in entries.items():
        if entry and entry not in known:
            raise ValueError(f"{path} line {number}: no check is called {entry!r}")
    return tuple(filter(None, entries.values()))


def select(suites: Sequence[str] | None = None, checks: Sequence[str] | None = None) -> list[Row]:
    """Return the selected checks with their dtypes.

    Args:
        suites: names in `SUITES`; None: all.
        checks: ids of checks, with or without ``[dtype]``, or clauses; None: all.

    Raises:
        ValueError: a suite or check is unknown.
    """
    wanted = _known("suites", SUITES if suites is None else suites, SUITES)
    table = checks_of(wanted)
    rows = [(check, dtype) for check in table.values() for dtype in variants(check)]
    if checks is None:
        return rows
    chosen, clauses = set(_listed(checks)), {*CLAUSES, *map(_whole, CLAUSES)}
    # Other suites are imported only to look for names that these lack.
    if not chosen <= {*table, *(row_id(*row) for row in rows), *clauses}:
        _known("checks", checks, [*all_checks(), *check_ids(), *clauses])
    return [
        (check, dtype)
        for check, dtype in rows
        if chosen & {row_id(check, dtype), check.id, check.clause, _whole(check.clause)}
    ]


def default_jobs(target: Target) -> int:
    """Return the default number of workers for a target."""
    return 1 if target.external else min(MOST_JOBS, max(1, os.cpu_count() or 1))


def _listed(values: Iterable[str]) -> list[str]:
    return [values] if isinstance(values, str) else list(values)


def _known(argument: str, values: Iterable[str], allowed: Sequence[str]) -> list[str]:
    values, known = _listed(values), set(allowed)
    for value in values:
        if value not in known:
            close = difflib.get_close_matches(str(value), allowed, n=3) or list(allowed)[:8]
            raise ValueError(
                f"{argument}: {value!r} is unknown; closest are {', '.join(map(repr, close))}"
            )
    return values


def _result(row: Row, status: str, message: str, *found: Any) -> Result:
    check = row[0]
    return Result(row_id(*row), check.suite, check.clause, status, check.sentence, message, *found)


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

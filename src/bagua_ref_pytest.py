"""A pytest plugin: every check of bagua_ref's specification as an item, and the fixture
``sim_world``.

It is a module beside the package, as pytest imports it wherever it is installed: it brings torch
only when a target is named.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Generator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from bagua_ref.conformance.run.report import Result
    from bagua_ref.conformance.run.runner import CheckRun

__all__ = ["SimWorld", "conclude", "sim_world"]


class SimWorld:
    """Runs functions of torch.distributed on simulated ranks for a test.

    Args:
        nodeid: of the test, for the line that repeats a failure.
        config: pytest's.
    """

    report: Any = None
    """The `bagua_ref.simulation.judge.Judgement` of the last call."""

    def __init__(self, nodeid: str, config: pytest.Config) -> None:
        self._nodeid, self._config = nodeid, config

    def __call__(
        self, function: Callable[..., Any], ranks: int = 2, *args: Any, **options: Any
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank, in forks of this process, under many schedules;
        return the results by rank. The test fails with the first error.

        Args:
            function: the program; its results must be picklable.
            ranks: the number of ranks.
            args: of the function.
            options: those of `bagua_ref.simulation.judge.Exploration`, such as ``seeds=20`` or
                ``faults=("kill",)``; ``cpu=True`` lets devices that it names be the CPU.
        """
        from bagua_ref.simulation.judge import Exploration, judge
        from bagua_ref.simulation.programs import Program
        from bagua_ref.simulation.schedules import Fault, Schedule

        if schedule := self._config.getoption("--sim-schedule", None):
            options["schedule"] = Schedule.parse(schedule)
        if fault := self._config.getoption("--sim-fault", None):
            options["fault"] = Fault.parse(fault)
        name, cpu = getattr(function, "__qualname__", repr(function)), options.pop("cpu", False)
        search = Exploration(options.pop("nodes", (ranks,)), **options)
        self.report = judge(Program(name, function=partial(function, *args), cpu=cpu), search)
        if self.report.verdict == "agree":
            return list(self.report.values)
        found = self.report.finding
        if found is None:
            pytest.fail(f"no verdict after {self.report.runs} runs", pytrace=False)
        words = ["pytest", self._nodeid, "--sim-schedule", str(found.schedule)]
        words += ["--sim-fault", str(found.fault)] if found.fault else []
        lines = [found.message, *(f"hint: {hint}" for hint in self.report.hints)]
        pytest.fail("\n".join([*lines, f"replay: {shlex.join(words)}"]), pytrace=False)

    def same_as_one(
        self, step: Callable[..., Any], batch: Any, *layouts: Any, **options: Any
    ) -> None:
        """Fail the test unless a training step on several ranks is that of one process; see
        `bagua_ref.simulation.same_as_one`.
        """
        from bagua_ref.simulation.same_as_one import LAYOUTS, same_as_one

        self.report = same_as_one(step, batch, layouts or LAYOUTS, **options)
        if self.report.differences or not self.report.is_comparable:
            pytest.fail(str(self.report), pytrace=False)


@pytest.fixture
def sim_world(request: pytest.FixtureRequest) -> SimWorld:
    """Return a `SimWorld`: ``sim_world(train, 4, seeds=20)`` runs ``train()`` on 4 simulated ranks."""
    return SimWorld(request.node.nodeid, request.config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of ``@pytest.mark.sim(ranks=[2, 4])`` one for each number of ranks."""
    mark = metafunc.definition.get_closest_marker("sim")
    ranks = mark.kwargs.get("ranks", 2) if mark else 2
    if isinstance(ranks, list | tuple):
        metafunc.fixturenames.append("sim_ranks")
        metafunc.parametrize("sim_ranks", ranks, ids=[f"{n} ranks" for n in ranks])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test of ``@pytest.mark.sim`` on every simulated rank."""
    mark = pyfuncitem.get_closest_marker("sim")
    if mark is None:
        return None
    options = {"ranks": 2, **mark.kwargs}
    if isinstance(options["ranks"], list | tuple):
        options["ranks"] = pyfuncitem.callspec.params["sim_ranks"]
    names = pyfuncitem._fixtureinfo.argnames
    function = partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names})
    SimWorld(pyfuncitem.nodeid, pyfuncitem.config)(partial(_no_result, function), **options)
    return True


def _no_result(function: Callable[[], Any]) -> None:
    function()


def conclude(result: Result) -> None:
    """End a test with the verdict of a check: pass, fail, skip or xfail."""
    if result.status in ("skipped", "not tried"):
        pytest.skip(result.message)
    if result.status == "xfailed":
        pytest.xfail(result.message)
    if result.status != "passed":
        pytest.fail(
            f"{result.id}: {result.sentence}\n{result.message}\n\n{result.counterexample}",
            pytrace=False,
        )


_TARGETS = ("target", "backend", "communicator", "command")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, which are those of ``bagua-ref verify``."""
    group = parser.getgroup("bagua_ref conformance")
    for name, metavar, said in (
        ("target", "NAME|pkg.mod:Class", "check all parts of bagua_ref with this backend"),
        ("backend", "NAME|pkg.mod:Class", "check this kernel backend or target"),
        ("communicator", "pkg.mod:factory", "check these collectives"),
        ("command", "PROGRAM", "check a program that answers requests"),
        ("xfails", "FILE", "ids of checks that are known to fail, one per line"),
    ):
        group.addoption(f"--bagua-{name}", metavar=metavar, help=said)
    for name, said in (("suite", "run only this suite"), ("check", "run only this check")):
        group.addoption(
            f"--bagua-{name}", action="append", metavar="NAME", help=f"{said}; may be repeated"
        )
    group.addoption(
        "--bagua-profile",
        choices=("quick", "full", "large"),
        default="quick",
        help="how many inputs to try, and how long long ones are",
    )
    group.addoption("--bagua-seed", type=int, default=0, help="seed of all inputs")
    group.addoption(
        "--bagua-time-limit", type=float, default=10.0, help="time limit of a call in seconds"
    )
    sim = parser.getgroup("bagua_ref simulated ranks")
    sim.addoption("--sim-schedule", metavar="SCHEDULE", help="run only this schedule of a test")
    sim.addoption("--sim-fault", metavar="FAULT", help="run only with this fault")
    # `bagua-ref verify` passes a folder for notes of workers, and a file descriptor for results.
    group.addoption("--bagua-workers", metavar="FOLDER:FD")


@pytest.hookimpl(tryfirst=True)  # before -k and -m select
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Append an item for each check and dtype, if a target is named."""
    said = {name: config.getoption(f"--bagua-{name}") for name in _TARGETS}
    if not any(said.values()):
        return
    from bagua_ref.conformance.run.runner import CheckRun, NamedTarget, read_xfails, row_id, select
    from bagua_ref.conformance.run.search import Search

    limit = config.getoption("--bagua-time-limit")
    try:
        xfails = config.getoption("--bagua-xfails")
        run = CheckRun(
            NamedTarget(**said).load(limit),
            Search(config.getoption("--bagua-profile"), config.getoption("--bagua-seed")),
            limit,
            frozenset(read_xfails(Path(xfails)) if xfails else ()),
            _folder(config),
            getattr(config, "workerinput", {}).get("workerid", ""),
        )
        rows = select(
            config.getoption("--bagua-suite") or None, config.getoption("--bagua-check") or None
        )
    except (ValueError, TypeError, ImportError, AttributeError, RuntimeError, OSError) as error:
        raise pytest.UsageError(f"{type(error).__name__}: {error}") from error
    for row in rows:
        name = row_id(*row)
        items.append(_Item.from_parent(session, name=name, nodeid=name, run=run, row=row))


class _Item(pytest.Item):
    def __init__(self, *, run: CheckRun, row: Any, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._run, self._row = run, row

    def runtest(self) -> None:
        self.result = self._run.judge(*self._row)
        conclude(self.result)

    def reportinfo(self) -> tuple[Path, None, str]:
        return Path(__file__), None, self.name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give a report its result, which a worker sends with it."""
    report = yield
    if call.when == "call" and hasattr(item, "result"):
        report.bagua_result = asdict(item.result)  # type: ignore[attr-defined]
    return report


def _folder(config: pytest.Config) -> Path | None:
    said = config.getoption("--bagua-workers")
    return Path(said.rpartition(":")[0]) if said else None


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark, and let the process that has the workers pass their results on."""
    config.addinivalue_line(
        "markers", "sim(ranks=2, **options): run the test's body on simulated ranks, see sim_world"
    )
    if (folder := _folder(config)) is not None and not hasattr(config, "workerinput"):
        fd = int(config.getoption("--bagua-workers").rpartition(":")[2])
        config.pluginmanager.register(_Results(folder, fd))


class _Results:
    """Results as lines of JSON; a check that ends a worker is repeated once, with its arguments
    recorded.
    """

    def __init__(self, folder: Path, fd: int) -> None:
        self._folder, self._fd = folder, fd

    @pytest.hookimpl(optionalhook=True)  # of xdist
    def pytest_handlecrashitem(self, crashitem: str, report: Any, sched: Any) -> None:
        said = (self._folder / report.node.gateway.id).read_text(encoding="utf-8")
        # Other dtypes of the check see this file, and are not tried.
        first = self._folder / f"ended {crashitem.partition('[')[0]}"
        if not first.exists():
            first.write_text(f"{crashitem}\n{said}", encoding="utf-8")
        elif first.read_text(encoding="utf-8").startswith(f"{crashitem}\n"):
            self._send({"id": crashitem, "ended": said})
            return
        sched.mark_test_pending(crashitem)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if hasattr(report, "bagua_result"):
            self._send(report.bagua_result)

    def _send(self, result: dict[str, Any]) -> None:
        line = json.dumps(result).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]

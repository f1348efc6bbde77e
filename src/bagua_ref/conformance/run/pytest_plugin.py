"""A pytest plugin, ``-p bagua_ref.conformance.run.pytest_plugin``: every check as an item, and the
fixture ``sim_world``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagua_ref.conformance.checks.registry import Check, all_checks, checks_of, variants
from bagua_ref.conformance.clauses import SUITES
from bagua_ref.conformance.run.runner import (
    OneByOne,
    check_ids,
    read_xfails,
    reason_to_skip,
    row_id,
    verdict,
)
from bagua_ref.conformance.run.search import Search
from bagua_ref.conformance.targets.target import Target, assemble
from bagua_ref.simulation import judge as simulation
from bagua_ref.simulation.programs import Program

__all__ = ["judge", "sim_world"]


@pytest.fixture
def sim_world() -> Callable[..., simulation.Judgement]:
    """Return ``check(function, ranks=2, **options)``, which runs a program of torch.distributed
    under many schedules.

    ``function()`` is called on every rank, in forks of this process. The test fails with the first
    error; else the report is returned. ``options`` are those of `Exploration`, such as ``seeds=20``
    or ``faults=("kill",)``.
    """

    def check(function: Callable[[], Any], ranks: int = 2, **options: Any) -> simulation.Judgement:
        name = getattr(function, "__qualname__", repr(function))
        report = simulation.judge(
            Program(name, function=function),
            simulation.Exploration(options.pop("nodes", (ranks,)), **options),
        )
        if report.verdict != "agree":
            found = report.finding
            pytest.fail(
                f"{found.message}\nschedule: {found.schedule}"
                if found
                else f"no verdict after {report.runs} runs",
                pytrace=False,
            )
        return report

    return check


def judge(
    runs: OneByOne,
    target: Target,
    check: Check,
    dtype: str | None,
    how: Search,
    xfail: tuple[str, ...],
    time_limit: float = 10.0,
) -> None:
    """Run a check for one dtype as a pytest test: pass, fail, skip or xfail; an expected failure
    that passes fails.
    """
    if reason := reason_to_skip(target, check, dtype):
        pytest.skip(reason)
    outcome = runs.run(target, check, dtype, how, time_limit)
    status, message = verdict(outcome, check.id in xfail or row_id(check, dtype) in xfail)
    if status == "skipped":
        pytest.skip(message)
    if status == "xfailed":
        pytest.xfail(message)
    if status == "xpassed":
        pytest.fail(f"{row_id(check, dtype)} {message}", pytrace=False)
    if status == "failed":
        pytest.fail(
            f"{check.id}: {check.sentence}\n{message} (seed {how.seed})\n\n{outcome.snippet}",
            pytrace=False,
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("bagua_ref conformance")
    group.addoption(
        "--bagua-backend", metavar="NAME|pkg.mod:Class", help="check this kernel backend or target"
    )
    group.addoption(
        "--bagua-communicator", metavar="pkg.mod:factory", help="check these collectives"
    )
    group.addoption(
        "--bagua-suite",
        action="append",
        choices=SUITES,
        help="run only this suite; may be repeated",
    )
    group.addoption(
        "--bagua-profile",
        choices=("quick", "full", "large"),
        default="quick",
        help="how many inputs to try, and how long long ones are",
    )
    group.addoption("--bagua-seed", type=int, default=0, help="seed of all inputs")
    group.addoption(
        "--bagua-xfails", metavar="FILE", help="ids of checks that are known to fail, one per line"
    )


@pytest.hookimpl(tryfirst=True)  # before -k and -m select
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Append an item for each check and dtype."""
    backend, communicator = (
        config.getoption("--bagua-backend"),
        config.getoption("--bagua-communicator"),
    )
    if backend is None and communicator is None:
        return
    try:
        target, path = assemble(backend, communicator), config.getoption("--bagua-xfails")
        xfail = read_xfails(Path(path), [*all_checks(), *check_ids()]) if path else ()
    except (ValueError, TypeError, ImportError, AttributeError, RuntimeError, OSError) as error:
        raise pytest.UsageError(f"--bagua-backend: {type(error).__name__}: {error}") from error
    runs = OneByOne()
    config.add_cleanup(runs.stop)
    how = Search(config.getoption("--bagua-profile"), config.getoption("--bagua-seed"))
    for check in checks_of(config.getoption("--bagua-suite") or SUITES).values():
        for dtype in variants(check):
            run = (runs, target, check, dtype, how, tuple(xfail))
            items.append(_Item.from_parent(session, name=row_id(check, dtype), run=run))


class _Item(pytest.Item):
    def __init__(self, *, run: tuple[Any, ...], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._run = run

    def runtest(self) -> None:
        judge(*self._run)

    def reportinfo(self) -> tuple[Path, None, str]:
        return Path(__file__), None, self.name

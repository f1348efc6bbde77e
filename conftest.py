"""Set up every test run: how hard Hypothesis searches, the order of tests, what a machine may lack, what examples may name."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

# Two pytest workers, each with ranks of its own, share the cores: more threads per rank only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

# A job in the background of a shell ignores Ctrl-C, and so would the tests that press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a borrowed GPU machine may lack it; its GPU tests do not need it
    collect_ignore_glob = ["src/bagua_ref/conformance/*.py"]
else:
    common = settings(
        deadline=None,  # a busy machine is no bug
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="CI" in os.environ,  # CI judges a change, not its luck; everyone else searches anew each time
        print_blob=True,
    )
    settings.register_profile("quick", common, max_examples=50)
    settings.register_profile("full", common, max_examples=100)
    # For property_tests/explore.py: the seed alone decides the inputs, in CI too.
    settings.register_profile("explore", common, max_examples=50, derandomize=False, database=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


# Importing these raises, on purpose: they stand for parts of the original that are left out.
_LEFT_OUT = (
    "checkpoint", "contrib/sync_batchnorm", "data_parallel/bagua_distributed", "distributed/launch", "distributed/run",
    "model_parallel", "moe", "service",
)  # fmt: skip
collect_ignore = [f"src/bagua_ref/{name}.py" for name in _LEFT_OUT]


SKIPPED_IN_CI = ("needs a CUDA device", "async asks for flat buckets")
"""Reasons to skip a test in CI; any other fails it there, as CI has every program and package that a test may want."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run tests in the random order that this seed gives")


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"random order: --shuffle={config.option.shuffle}"] if config.option.shuffle else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.shuffle:
        random.Random(config.option.shuffle).shuffle(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _fail_if_ci_lacks_something((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _fail_if_ci_lacks_something((yield))


def _fail_if_ci_lacks_something(report: Report) -> Report:
    if "CI" in os.environ and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(allowed in reason for allowed in SKIPPED_IN_CI):
            report.outcome, report.longrepr = (
                "failed",
                f"{reason}: CI must have what this needs, or SKIPPED_IN_CI in conftest.py name it",
            )
    return report


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_to_the_next_file() -> Iterator[None]:
    """Let no file meet what another left in its process: which files share one changes from run to run."""
    environment, children = _environment(), _children()
    gc.collect()
    gc.freeze()  # else every collection looks through what all files before left, and takes half a second
    yield
    _end_job_servers()
    from bagua_ref import backends
    from bagua_ref.runtime import current_world

    assert not torch.distributed.is_initialized()
    assert backends._process_wide == []
    assert current_world().observers == ()
    assert torch.get_default_dtype() is torch.float32
    assert _environment() == environment
    deadline = time.monotonic() + 10
    while (left := {pid: line for pid, line in _children().items() if pid not in children}) and time.monotonic() < deadline:
        time.sleep(0.05)  # one that was told to end may take a moment
    assert left == {}


def _environment() -> dict[str, str]:
    """Return the variables that say who a rank is and what it uses; other libraries leave some of their own."""
    return {name: text for name, text in os.environ.items() if any(word in name for word in ("BAGUA", "RANK", "WORLD", "MASTER"))}


def _children() -> dict[str, str]:
    """Return the command lines of this process's children, but for those that have ended or that multiprocessing keeps."""
    found, pids = {}, []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that thread has ended just now
            pids += path.read_text().split()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return {pid: line for pid, line in found.items() if line and "resource_tracker" not in line and "forkserver" not in line}


def _end_job_servers() -> None:
    job_servers = sys.modules.get("bagua_ref.contrib.cache.job_servers")  # to import it takes redis, which not everyone has
    for kind in ("redis", "fakeredis") if job_servers else ():
        job_servers.shutdown(kind)


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread behind."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture(autouse=True)
def _docstring_examples(request: pytest.FixtureRequest, doctest_namespace: dict[str, object]) -> None:
    """Let examples in docstrings use torch and the package's public names without importing them, and find no caches of others."""
    if isinstance(request.node, pytest.DoctestItem):
        import bagua_ref

        _end_job_servers()  # a test that ran before in this process may have filled its job's cache
        doctest_namespace.update({"torch": torch, "bagua_ref": bagua_ref})
        doctest_namespace.update({name: getattr(bagua_ref, name) for name in bagua_ref.__all__})

"""Configuration of every test run: Hypothesis profiles, random order, skips, and names for
docstring examples.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

# Two pytest workers and their ranks share the cores; more threads per rank would only slow them
# down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

# Background jobs of a shell ignore SIGINT, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # GPU machines may lack Hypothesis, which their GPU tests do not need
    collect_ignore_glob = ["src/bagua_ref/conformance/*.py"]
else:
    common = settings(
        deadline=None,  # busy machines are slow
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="CI" in os.environ,  # the same inputs in CI every time, new ones elsewhere
        print_blob=True,
    )
    # in CI the first ones of those that `make proof` tries
    settings.register_profile("quick", common, max_examples=10)
    settings.register_profile("proof", common, max_examples=100)
    # For property_tests/explore.py: the seed alone decides the inputs, in CI too.
    settings.register_profile("explore", common, max_examples=50, derandomize=False, database=None)
    settings.load_profile("quick")


# These import the trainers that they are for; tests/integrations has their tests.
_TRAINERS = (
    "integrations/lightning",
    "integrations/pytorch_lightning",
    "integrations/transformers",
)
collect_ignore = [f"src/bagua_ref/{name}.py" for name in _TRAINERS]
if sys.version_info < (3, 11):  # which transformers needs
    collect_ignore += [
        f"tests/integrations/test_{name}.py"
        for name in ("accelerate", "examples", "page", "transformers")
    ]


SKIPPED_IN_CI = (
    "needs a CUDA device",
    "There is no CUDA device here",
    "may not create network namespaces",
    "may not mount file systems",
)
"""Reasons for which CI may skip a test; any other skip fails there, as CI has every program and
package.
"""


_STARTS_PROCESSES = re.compile(
    r"subprocess|multiprocessing|pytester|from findings|tests(\.| import"
    r" )(launch|cache_servers|cache_jobs|oracle_c|cuda_emulation)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle",
        metavar="SEED",
        help="run the tests of each file in the random order that this seed gives",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"random order: --shuffle={config.option.shuffle}"] if config.option.shuffle else []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without proofs where only these are wanted, as each process would import all
    files for them.
    """
    if (
        config.option.markexpr != "proof"
        or collection_path.suffix != ".py"
        or collection_path.parent.name == "proof"
    ):
        return None
    return "proof" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "proof":
            item.add_marker("proof")
    if seed := config.option.shuffle:

        def chance(name: str) -> float:
            return random.Random(f"{seed} {name}").random()

        examples = {
            item.path
            for item in items
            if item.path.match("test*.py") and item.path.parent.name != "property_tests"
        }
        free = {path for path in examples if not _STARTS_PROCESSES.search(path.read_text())}
        # A file has the same order whatever runs beside it.
        items.sort(
            key=lambda item: (
                (chance(item.path.name), chance(item.nodeid)) if item.path in free else (0.0, 0.0)
            )
        )
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    # Workers end together if what takes long comes first: tests with a time limit of their own,
    # files with slow tests, large files.
    size = Counter(item.path for item in items)
    items.sort(
        key=lambda item: (
            item.get_closest_marker("timeout") is None,
            item.path not in slow,
            -size[item.path],
        )
    )
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of what catches warnings and logs
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    # a worker of xdist
    if hasattr(session.config, "workerinput") and "tests.launch" in sys.modules:
        from tests.fork_server import fork_server

        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # for what workers write
        fork_server()  # the test files are imported, and all that they need
        capture.suspend_global_capture()
    return (yield)


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
                (
                    f"{reason}: CI must have what this needs, or list the reason in SKIPPED_IN_CI"
                    " of conftest.py"
                ),
            )
    return report


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_to_the_next_file() -> Iterator[None]:
    """Let no file affect the next one in the same process, as the grouping of files changes from
    run to run.
    """
    environment, children = _environment(), _children()
    gc.collect()
    # otherwise every collection traverses the objects of all earlier files, which takes half a
    # second
    gc.freeze()
    yield
    _end_job_servers()
    from bagua_ref import backends

    assert not torch.distributed.is_initialized()
    assert backends._process_wide == []
    assert torch.get_default_dtype() is torch.float32
    assert _environment() == environment
    deadline = time.monotonic() + 10
    while (
        left := {pid: line for pid, line in _children().items() if pid not in children}
    ) and time.monotonic() < deadline:
        time.sleep(0.05)  # a process that was told to end may take a moment
    assert left == {}


def _environment() -> dict[str, str]:
    """Return the environment variables that describe ranks; other libraries may leave theirs."""
    return {
        name: text
        for name, text in os.environ.items()
        if any(word in name for word in ("BAGUA", "RANK", "WORLD", "MASTER"))
    }


def _children() -> dict[str, str]:
    """Return the command lines of this process's children, without ended ones and multiprocessing's
    own.
    """
    found, pids = {}, []
    for path in Path("/proc/self/task").glob("*/children"):
        # the thread has just ended
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids += path.read_text().split()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return {
        pid: line
        for pid, line in found.items()
        if line and "resource_tracker" not in line and "forkserver" not in line
    }


def _end_job_servers() -> None:
    servers = sys.modules.get("bagua_ref.contrib.cache.servers")
    if servers is not None:
        servers.shutdown()
    stores = sys.modules.get("bagua_ref.contrib.utils.redis_store")
    if stores is not None:
        stores._fakes.clear()


@pytest.fixture
def few_inputs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let conformance suites try no more inputs than other properties, except in proofs."""
    from bagua_ref.conformance.run.search import PROFILES

    if not request.node.get_closest_marker("proof"):
        monkeypatch.setitem(
            PROFILES, "quick", min(PROFILES["quick"], settings.default.max_examples)
        )


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread running."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture(autouse=True)
def _docstring_examples(
    request: pytest.FixtureRequest, doctest_namespace: dict[str, object]
) -> None:
    """Give docstring examples torch and the package's public names, and no cache of earlier
    tests.
    """
    if isinstance(request.node, pytest.DoctestItem):
        import bagua_ref

        _end_job_servers()  # an earlier test in this process may have filled its job's cache
        doctest_namespace.update({"torch": torch, "bagua_ref": bagua_ref})
        doctest_namespace.update({name: getattr(bagua_ref, name) for name in bagua_ref.__all__})

"""Runs of tests in forks of a pytest that has collected them: ``python -m tests.meta.warm_pytest``,
in a copy of the checkout.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing.forkserver
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any

import pytest
from tests.fork_server import fork_server
from tests.meta import edit
from tests.meta.mutate import planted_in

OPTIONS = [
    *(
        "-o",
        "addopts=--import-mode=importlib",
        "--assert=plain",
        "-v",
        "-s",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ),
    "--hypothesis-profile=no_shrinking",
    # where the limit ended the report of a failure, the failure would not count
    *("-o", "timeout_func_only=true"),
]
LIMIT = 60
"""Seconds after which a run is killed that not even pytest's own time limit has ended."""
BROKEN = 100
"""The exit code of a run that could not begin."""


class WarmPytest:
    """Runs of tests in ``copy``, one at a time; a context."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy

    def __enter__(self) -> WarmPytest:
        self._folder = tempfile.TemporaryDirectory()  # takes what runs leave that are killed
        environment = {**os.environ, "TMPDIR": self._folder.name, "PYTHONPATH": f"{self._copy}/src"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=self._copy, env=environment, text=True, **pipes
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.communicate()
        self._folder.cleanup()

    def run(
        self, test: str, where: str = "", changes: Sequence[str] = (), limit: int = 10
    ) -> tuple[int | None, str]:
        """Run a test with ``changes`` in the function ``where``; return pytest's exit code and its
        output.

        The code is None if not even pytest's own time limit of so many seconds has ended the test.
        """
        pipes: tuple[IO[str], IO[str]] = self._server.stdin, self._server.stdout  # type: ignore[assignment]
        with tempfile.NamedTemporaryFile() as output:
            order = {
                "test": test,
                "where": where,
                "changes": changes,
                "limit": limit,
                "output": output.name,
            }
            print(json.dumps(order), file=pipes[0], flush=True)
            code = json.loads(pipes[1].readline())
            return code, output.read().decode(errors="replace")


class Served:
    """A plugin that runs the tests that lines of standard input name, and writes their exit
    codes.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        return True  # each test is collected when it is asked for

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for line in sys.stdin:
            order = json.loads(line)
            items = session.perform_collect([order["test"]])  # imports the package as it is
            gc.freeze()  # no run traverses what it shares with this process
            with (
                planted_in(Path.cwd(), order["where"], *order.pop("changes"))
                if order["where"]
                else nullcontext()
            ):
                code = _in_fork(_run, items, **order)
                # other functions may have been built with the old code
                if code == 0 and order["where"]:
                    code = _in_fork(_run_anew, **order)
            print(json.dumps(code), file=self._answers, flush=True)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(report.longreprtext)


def _in_fork(run: Callable[..., int], *args: Any, output: str, **order: Any) -> int | None:
    """Return the exit code of a fork that calls ``run``, None if it has not ended at the limit."""
    pid = os.fork()
    if pid == 0:
        code = BROKEN
        try:
            os.setsid()
            for descriptor, opened in enumerate(
                (
                    os.open(os.devnull, os.O_RDONLY),
                    *[os.open(output, os.O_WRONLY | os.O_APPEND)] * 2,
                )
            ):
                os.dup2(opened, descriptor)
            code = run(*args, **order)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    ends = select.poll()
    ends.register(descriptor := os.pidfd_open(pid), select.POLLIN)
    in_time = ends.poll(1000 * LIMIT)
    os.close(descriptor)
    if not in_time:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None


def _run(items: list[pytest.Item], where: str, limit: int, **_: Any) -> int:
    """Run collected tests, up to the first that fails, with the changed function."""
    if where and not edit.change_code(where, edit.path_of(where).read_text(encoding="utf-8")):
        return 0
    multiprocessing.forkserver.set_forkserver_preload(["bagua_ref.conformance"])
    fork_server()
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.add_marker(pytest.mark.timeout(limit))
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        if item.session.testsfailed:
            return 1
    return 0


def _run_anew(test: str, limit: int, **_: Any) -> int:
    """Run a test with everything of the copy imported anew."""
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("bagua_ref", "conftest", "property_tests", "tests")
    ]:
        del sys.modules[name]
    multiprocessing.forkserver.set_forkserver_preload(["bagua_ref.conformance"])
    fork_server()
    return int(pytest.main([*OPTIONS, "-x", f"--timeout={limit}", test]))


if __name__ == "__main__":
    # what tests import only while they run
    for late in ("torch._dynamo", "torch.distributed.checkpoint", "cupy"):
        with suppress(ImportError):
            importlib.import_module(late)
    raise SystemExit(pytest.main(OPTIONS, [Served()]))

"""Files for each failure of a report: its script, and the raw requests that the script sends to a program."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bagua_ref.conformance.run.report import Report, script_name
from bagua_ref.conformance.targets.process_link import REQUESTS

__all__ = ["write_requests", "write_scripts"]

_START = 300.0


def write_scripts(report: Report, folder: str | Path | None = None) -> Path | None:
    """Write the script of each failure, whole, into a file that the report then names; return the folder.

    Args:
        report: of a run.
        folder: created if it does not exist; None: a new temporary folder.

    Returns:
        None if no failure has a script.

    Raises:
        OSError: a file cannot be written.

    >>> from bagua_ref.conformance.run.report import Result
    >>> failure = Result("kernels.S1.add[float32]", "kernels", "S1", "failed", counterexample="assert 1 == 2")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = write_scripts(Report("mine", [failure], "quick", 0), folder)
    ...     os.listdir(folder)
    ['kernels.S1.add.float32.py']
    """
    failures = [result for result in report.failures() if result.counterexample]
    if not failures:
        return None
    report.scripts = Path(tempfile.mkdtemp(prefix="bagua_ref-scripts-") if folder is None else folder)
    report.scripts.mkdir(parents=True, exist_ok=True)
    for result in failures:
        (report.scripts / script_name(result.id)).write_text(result.counterexample, encoding="utf-8")
    return report.scripts


def write_requests(report: Report, folder: str | Path, time_limit: float) -> None:
    """Run the script of each failure again, and write the requests that each process of the program gets.

    They are in ``folder/ID/rankR-PID.requests``, as they are sent, one after another: a process can read one of these files on its
    standard input.

    Args:
        report: of a run, after `write_scripts`.
        folder: created if it does not exist.
        time_limit: of a call in seconds; a script may run five minutes longer, as it imports torch and starts the program.

    Raises:
        OSError: a folder cannot be made.
    """
    for result in report.failures():
        if report.scripts is None or not result.counterexample:
            continue
        path = report.scripts / script_name(result.id)
        requests = Path(folder).absolute() / path.stem
        requests.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), REQUESTS: str(requests)}
        with contextlib.suppress(subprocess.TimeoutExpired):  # a program that hangs has had its requests
            subprocess.run(  # nosec B603 # the script fails, as it must
                [sys.executable, str(path)],
                env=environment, timeout=time_limit + _START, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip

"""Workers: pytest with pytest-xdist in a child process, as `bagua-ref verify` runs checks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class Workers:
    """A run of pytest whose plugin `bagua_ref_pytest` reports each check.

    The user's own pytest settings are ignored: configuration, plugins and options. A worker that
    dies is replaced; output of targets is discarded, so that it cannot mix with a report.

    Args:
        options: the plugin's options without ``--bagua-``; None is left out.
        known: ids of known failures.
        jobs: number of workers.
    """

    def __init__(self, options: Mapping[str, Any], known: Sequence[str], jobs: int) -> None:
        self._options, self._known, self._jobs = options, known, jobs
        self._printed, self._code = "", 0

    def results(self) -> Iterator[dict[str, Any]]:
        """Yield each result once it is known: a `Result`, or the contents of a crashed worker's
        file.
        """
        with tempfile.TemporaryDirectory(prefix="bagua_ref-") as name:
            folder = Path(name)
            xfails, printed, tests = folder / "xfails", folder / "printed", folder / "tests"
            xfails.write_text("\n".join(self._known), encoding="utf-8")
            tests.mkdir()
            readable, writable = os.pipe()
            command = [sys.executable, "-m", "pytest", tests, "-c", os.devnull, "--rootdir", tests]
            command += ["-q", "-W", "ignore", "-n", self._jobs, "--maxschedchunk", 1]
            # xdist would give up after four crashes of a worker.
            command += ["--max-worker-restart", 10**6]
            for plugin in ("xdist", "bagua_ref_pytest", "no:cacheprovider", "no:faulthandler"):
                command += ["-p", plugin]
            command += ["--bagua-workers", f"{folder}:{writable}", "--bagua-xfails", xfails]
            for option, value in self._options.items():
                values = value if isinstance(value, list) else [] if value is None else [value]
                command += [f"--bagua-{option}={each}" for each in values]
            environment = {
                variable: value
                for variable, value in os.environ.items()
                if not variable.startswith("PYTEST_")
            }
            environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            environment["TMPDIR"] = name  # files of a worker that dies are removed with the folder
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            with printed.open("w") as out, open(readable, encoding="utf-8") as lines:
                pytest = subprocess.Popen(  # noqa: S603 # ours
                    [str(word) for word in command],
                    env=environment,
                    pass_fds=[writable],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                os.close(writable)
                try:
                    yield from map(json.loads, lines)
                    self._code = pytest.wait()
                finally:
                    # Also processes started by workers, such as a program that does not end itself.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pytest.pid, signal.SIGKILL)
                    pytest.wait()
                    self._printed = printed.read_text(encoding="utf-8", errors="replace")

    def error(self) -> str:
        """Return an explanation of missing results, after `results` has ended: pytest's exit code
        and last lines.
        """
        last = self._printed.strip().splitlines()[-20:]
        return "\n".join([f"pytest has ended with exit code {self._code}", *last])

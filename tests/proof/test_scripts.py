"""Tests of the scripts that reports give for kernels and codecs: each fails on the target that it is about, and passes on
the reference.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.launch import launch
from tests.scripts import run_python
from tests.wrong_target import Wrong, healed

from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.checks.registry import checks_of, prepare, variants
from bagua_ref.conformance.run.runner import row_id

pytestmark = pytest.mark.slow


def exit_codes(suite: str, scripts: list[str]) -> list[int]:
    """Return the exit code of each script, run in a fork of this process, which has imported what
    scripts of the suite import.
    """
    prepare(suite)
    return [exit_code(script) for script in scripts]


def exit_code(script: str) -> int:
    pid = os.fork()
    if pid == 0:
        code, main = 1, ModuleType("__main__")
        sys.modules["__main__"] = main
        try:
            exec(compile(script, "<script>", "exec"), main.__dict__)
            code = 0
        finally:
            atexit._run_exitfuncs()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("suite", ["kernels", "codec"])
def test_a_script_fails_on_a_wrong_target_and_passes_on_the_reference(
    suite: str, tmp_path: Path
) -> None:
    checks = {row_id(check, variants(check)[0]): name for name, check in checks_of([suite]).items()}
    report = run_conformance(Wrong(), [suite], checks=list(checks), shrink=False, time_limit=60.0)
    scripts = {result.id: result.counterexample for result in report.failures()}
    assert scripts.keys() == checks.keys()
    both = [text for script in scripts.values() for text in (script, healed(script))]
    codes = launch(exit_codes, 1, suite, both, init=False, limit=900)[0]
    assert dict(
        zip(scripts, zip(codes[::2], codes[1::2], strict=True), strict=True)
    ) == dict.fromkeys(scripts, (1, 0))
    alone = tmp_path / "counterexample.py"
    alone.write_text(both[1])
    assert run_python(alone).returncode == 0  # also where nothing is imported

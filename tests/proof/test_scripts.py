"""Tests of the scripts that reports give: each fails on the target that it is about, and passes on the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launch import run_script
from tests.scripts import run_python
from tests.wrong_target import Wrong, healed

from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.clauses import SUITES
from bagua_ref.conformance.run.runner import row_id
from bagua_ref.conformance.suites.checks import all_checks, checks_of, variants

RIGHT = {"collectives.S3.9.barrier", "cache.S8.3.back", "algorithms.S10.5.messages", "algorithms.S10.5.same_bits"}
"""Checks of what `Wrong` does right: it sends what the reference sends, and its ranks are wrong alike."""

OF_PIECES = {
    "kernels.S1.long", "codec.S4.2.long", "codec.S12.1.long_MXFP8", "codec.S12.1.long_MXFP4", "codec.S12.1.long_MXINT8"
}  # fmt: skip
"""Checks that expect of a long input what the target makes of its pieces, which is wrong in `Wrong`'s script for the reference."""

REAL = [*all_checks()][:: len(all_checks()) // 20]
"""Checks whose scripts run as processes of their own; the others run in forks that have imported torch."""


def exit_code(check: str, script: str, folder: Path) -> int:
    path = folder / f"{check}.py"
    path.write_text(script)
    return (run_python(path) if check in REAL else run_script(script)).returncode


@pytest.mark.parametrize("suite", SUITES)
def test_a_script_fails_on_a_wrong_target_and_passes_on_the_reference(suite: str, tmp_path: Path) -> None:
    checks = {row_id(check, variants(check)[0]): name for name, check in checks_of([suite]).items()}
    report = run_conformance(Wrong(), [suite], checks=list(checks), jobs=2, time_limit=60.0)
    scripts = {result.id: result.counterexample for result in report.failures()}
    assert {name for row, name in checks.items() if row not in scripts} <= RIGHT
    codes = {row: [exit_code(checks[row], text, tmp_path) for text in (script, healed(script))] for row, script in scripts.items()}
    assert codes == {row: [1, int(checks[row] in OF_PIECES)] for row in scripts}

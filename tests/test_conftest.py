"""Tests of the pytest configuration: random order, and no skipped tests in CI."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launch import run_script

pytest_plugins = "pytester"
CONFTEST = Path(__file__).parents[1] / "conftest.py"

SKIPPING = """
    import pytest

    @pytest.mark.skipif(True, reason="there is no g++")
    def test_needs_a_compiler():
        pass

    def test_needs_openssl():
        pytest.skip("needs openssl")

    @pytest.mark.gpu
    def test_on_a_card():
        pytest.skip("needs a CUDA device")  # by itself, in case there is one here

    @pytest.mark.xfail
    def test_known_failure():
        assert False
"""


def run_pytest(*options: str) -> list[str]:
    """Return the lines that pytest prints in the current folder."""
    # run_script has imported Hypothesis already
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return run_script(f"import pytest; pytest.main({[*quiet, *options]})").stdout.splitlines()


def test_in_ci_a_missing_program_is_a_failure(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makepyfile(
        test_skipping=SKIPPING, test_module='import pytest\npytest.importorskip("no_such_package")'
    )
    lines = run_pytest("--continue-on-collection-errors")
    assert pytest.RunResult.parse_summary_nouns(lines) == {
        "errors": 2,
        "failed": 1,
        "skipped": 1,
        "xfailed": 1,
    }
    for missing in ("there is no g++", "needs openssl", "'no_such_package'"):
        assert any(f"{missing}: CI must have what this needs" in line for line in lines)

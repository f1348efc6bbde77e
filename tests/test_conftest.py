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


@pytest.mark.parametrize(
    ("ci", "expected"),
    [
        (False, {"skipped": 4, "xfailed": 1}),
        (True, {"errors": 2, "failed": 1, "skipped": 1, "xfailed": 1}),
    ],
)
def test_in_ci_a_missing_program_is_a_failure(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: bool, expected: dict[str, int]
) -> None:
    monkeypatch.setenv("CI", "true") if ci else monkeypatch.delenv("CI", raising=False)
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makepyfile(
        test_skipping=SKIPPING, test_module='import pytest\npytest.importorskip("no_such_package")'
    )
    lines = run_pytest("--continue-on-collection-errors")
    assert pytest.RunResult.parse_summary_nouns(lines) == expected
    if ci:
        for missing in ("there is no g++", "needs openssl", "'no_such_package'"):
            assert any(f"{missing}: CI must have what this needs" in line for line in lines)


@pytest.mark.proof
def test_a_random_order_is_that_of_its_seed_on_every_worker(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(
        "import pytest\n@pytest.mark.parametrize('i', range(30))\ndef test(i): pass"
    )

    def order(seed: int, *more: str) -> list[str]:
        lines = run_pytest(f"--shuffle={seed}", "-v", *more)
        assert pytest.RunResult.parse_summary_nouns(lines) == {"passed": 30}
        assert f"random order: --shuffle={seed}" in lines
        return [line.split()[0] for line in lines if " PASSED " in line]

    first = order(5)
    assert len(first) == 30
    assert first != order(6)
    order(5, "-n", "2")  # runs nothing if workers disagree

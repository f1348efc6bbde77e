"""Tests of the search for failing inputs with fresh seeds, on a planted property."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.scripts import ROOT

PLANTED = """
from hypothesis import given, strategies as st
from pathlib import Path

runs = [path for path in Path().glob("inputs-*")]
log = Path(f"inputs-{len(runs)}").open("a")

@given(st.integers())
def test_planted(number):
    print(number, file=log, flush=True)
    assert not runs or number == 0
"""


@pytest.mark.proof
def test_a_failing_input_is_found_in_a_later_round_and_its_seed_replays_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")  # where other runs take the same inputs every time
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "test_planted.py").write_text(PLANTED)

    def explore(*options: str) -> str:
        command = [
            sys.executable,
            ROOT / "property_tests" / "explore.py",
            "--workers",
            "0",
            *options,
            "test_planted.py",
        ]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 1, ended.stdout + ended.stderr
        return ended.stdout

    printed = explore("--minutes", "1", "--seed", "7")
    assert re.findall(r"replay: make explore SEED=(\d+)", printed) == ["7", "8"]
    assert "failed with seed 8. Replay the round: make explore SEED=8 MINUTES=0" in printed
    explore("--minutes", "0", "--seed", "8")
    first, second, replayed = ((tmp_path / f"inputs-{run}").read_text() for run in range(3))
    assert first != second[: len(first)]
    assert second == replayed

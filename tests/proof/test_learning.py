"""Tests that every algorithm learns like a single process, and that the documentation shows the last full run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.scripts import ROOT, load_script, run_python

from bagua_ref.cli.recipes import ALONE, RECIPES


def test_every_algorithm_reaches_the_accuracy_of_a_single_process(tmp_path: Path) -> None:
    ended = run_python("benchmarks/learning.py", "--json", tmp_path / "learning.json", limit=1500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads((tmp_path / "learning.json").read_text())["rows"]
    assert rows[0]["ours"] >= 95
    assert [row["work"] for row in rows] == [ALONE, *RECIPES]
    for row in rows:
        assert row["ours"] >= rows[0]["ours"] - 1.5, row


def test_the_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    learning = load_script("benchmarks/learning.py")
    results = [json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()) for name in learning.RESULTS]
    assert learning.PAGE.read_text() == learning.page(*results), "run: python benchmarks/learning.py"

"""Tests that every algorithm learns like a single process, and that the documentation shows the last full run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_ref.cli.recipes import ALONE, RECIPES

ROOT = Path(__file__).parents[2]


def test_every_algorithm_reaches_the_accuracy_of_a_single_process(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "benchmarks/learning.py", "--json", str(tmp_path / "learning.json")]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads((tmp_path / "learning.json").read_text())["rows"]
    assert rows[0]["ours"] >= 95
    assert [row["work"] for row in rows] == [ALONE, *RECIPES]
    for row in rows:
        assert row["ours"] >= rows[0]["ours"] - 1.5, row


def test_the_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("learning", ROOT / "benchmarks" / "learning.py")
    assert spec is not None
    assert spec.loader is not None
    learning = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(learning)
    results = [json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()) for name in learning.RESULTS]
    assert learning.PAGE.read_text() == learning.page(*results), "run: python benchmarks/learning.py"

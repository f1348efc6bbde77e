"""Tests that every algorithm learns like a single process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.scripts import run_python

from bagua_ref.cli.demo import ALONE, RECIPES


@pytest.mark.timeout(1800)
def test_every_algorithm_reaches_the_accuracy_of_a_single_process(tmp_path: Path) -> None:
    ended = run_python(
        "benchmarks/learning.py",
        "--seeds",
        0,
        1,
        2,
        "--json",
        tmp_path / "learning.json",
        limit=1500,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads((tmp_path / "learning.json").read_text())["rows"]
    assert rows[0]["ours"] >= 95
    assert [row["work"] for row in rows] == [ALONE, *RECIPES]
    for row in rows:
        assert row["ours"] >= rows[0]["ours"] - 1.5, row

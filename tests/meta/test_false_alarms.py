"""Tests of the log of false alarms: it names the checks that ran, and becomes outdated when they change."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.meta import false_alarms


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / false_alarms.SOURCES / "trace").mkdir(parents=True)
    (tmp_path / false_alarms.SOURCES / "checks.py").write_text("ONE = 1\n")
    (tmp_path / false_alarms.SOURCES / "trace/steps.py").write_text("TWO = 2\n")
    return tmp_path


def test_a_log_is_stale_once_a_check_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"commit": "a" * 40, "sources": false_alarms.fingerprint(root)}, {"commit": "b" * 40, "sources": "other"}]
    asked = []

    def git(*arguments: str, root: Path) -> str:
        asked.append(arguments[2])
        return f"{false_alarms.SOURCES}/trace/steps.py"

    monkeypatch.setattr(false_alarms, "git", git)
    assert false_alarms.staleness(rows[:1], root) == []
    (line,) = false_alarms.staleness(rows, root)
    assert line == "1 of 2 runs are of the checks at bbbbbbbbbbbb; changed since: trace/steps.py"
    (root / false_alarms.SOURCES / "trace/steps.py").write_text("TWO = 3\n")
    assert len(false_alarms.staleness(rows, root)) == 2
    assert asked == ["b" * 40, "a" * 40, "b" * 40]


def test_without_the_commit_it_is_stale_all_the_same(root: Path) -> None:
    (line,) = false_alarms.staleness([{"commit": "0" * 40, "sources": "other"}], root)
    assert "files unknown" in line
    (line,) = false_alarms.staleness([{}], root)
    assert "an unknown commit" in line


@pytest.mark.parametrize("stale", [True, False])
def test_check_says_so_and_runs_nothing(stale: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    log = tmp_path / "log.json"
    log.write_text(json.dumps([{"commit": "0" * 40, "sources": "other" if stale else false_alarms.fingerprint()}]))
    monkeypatch.setattr(false_alarms, "LOG", log)
    monkeypatch.setattr(sys, "argv", ["false_alarms.py", "--check"])
    assert false_alarms.main() == 0
    assert ("log.json: stale" in capsys.readouterr().out) == stale


def test_every_run_in_the_log_says_of_what_it_is() -> None:
    rows = json.loads(false_alarms.LOG.read_text())
    assert [false_alarms._entry(row) for row in rows] == false_alarms.PLAN
    assert all(len(row["commit"]) == 40 and len(row["sources"]) == 16 for row in rows)

"""Benchmarks: that they run, and that they keep earlier results as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.scripts import ROOT, load_script, run_python

# budget.py needs peers that are not installed here, namespaces.py is run by others, and the rest
# take minutes also as a smoke run.
LEFT_OUT = ("allreduce_step", "budget", "cache", "namespaces", "time_to_quality")
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if "\nif __name__" in path.read_text() and path.stem not in LEFT_OUT
)


@pytest.mark.proof
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_smoke_run_of_a_benchmark_gives_rows(script: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ended = run_python(f"benchmarks/{script}.py", "--quick", "--json", path, limit=240)
    if "nothing was measured" in ended.stdout:
        pytest.skip(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(path.read_text())["rows"]


def test_rows_that_are_measured_again_replace_earlier_ones_and_say_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common, path = load_script("benchmarks/common.py"), tmp_path / "result.json"

    def write(date: str, *works: str) -> dict[str, str]:
        monkeypatch.setattr(common, "circumstances", lambda: {"date": date})
        rows = [{"work": work, "unit": "s", "ours": date} for work in works]
        common.merge(path, "example", rows, ("work", "unit"), [("a", "s"), ("b", "s")])
        result = json.loads(path.read_text())
        assert all(row["ours"] == result["runs"][row["run"]]["date"] for row in result["rows"])
        return {row["work"]: row["ours"] for row in result["rows"]}

    assert write("Monday", "a", "b", "no longer measured") == {"a": "Monday", "b": "Monday"}
    assert write("Tuesday", "a") == {"a": "Tuesday", "b": "Monday"}
    assert list(write("Wednesday", "b").items()) == [("a", "Tuesday"), ("b", "Wednesday")]
    assert [run["date"] for run in json.loads(path.read_text())["runs"]] == ["Tuesday", "Wednesday"]


@pytest.mark.parametrize("arguments", [[], ["--only", "x"], ["--quick"]])
def test_only_whole_runs_replace_committed_results(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common, path = load_script("benchmarks/common.py"), tmp_path / "result.json"
    monkeypatch.setattr(common, "path_of", lambda name: path)
    monkeypatch.setattr("sys.argv", ["example.py", *arguments])
    row = common.Row("work", "s", 1.0, {"peer": 1.0}, "peer")
    assert (
        common.report("example", [row], common.arguments("An example.", only={"default": ""})) == 0
    )
    assert path.exists() == (not arguments)

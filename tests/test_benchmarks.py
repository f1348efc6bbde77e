"""Benchmarks: that they run, and that they keep earlier results as they are."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.cache_servers import need
from tests.scripts import load_script, run_python


def run(script: str, table: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark, its results in ``table``."""
    return run_python(f"benchmarks/{script}", "--quick", "--json", table, *options, limit=240)


@pytest.mark.proof
@pytest.mark.redis
def test_the_soak_test_runs_and_nothing_grows(tmp_path: Path) -> None:
    need()
    ended = run("soak.py", tmp_path / "soak.json")
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "soak.json").read_text())
    assert {"machine", "versions", "date"} <= set(result["runs"][0])
    assert [row["unit"] for row in result["rows"]] == ["MiB", "threads", "open files", "keys in Redis", "exit 0"]
    assert [row["kept"] for row in result["rows"][1:]] == [True] * 4, result["rows"]


def test_rows_that_are_measured_again_replace_earlier_ones_and_say_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.proof
@pytest.mark.parametrize(
    "script",
    [
        "fuse_step",
        "many_tensors",
        "published_order",
        "published_times",
        "record",
        "scale",
        "shared_memory",
        "sim_torch_distributed",
        "slow_link",
        "straggler",
    ],
)
def test_a_smoke_run_of_a_benchmark_of_training_gives_rows(script: str, tmp_path: Path) -> None:
    ended = run(f"{script}.py", tmp_path / "result.json")
    if "may not create network namespaces" in ended.stdout:
        pytest.skip(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "result.json").read_text())["rows"]


@pytest.mark.proof
def test_a_lost_link_is_an_error_and_one_that_comes_back_is_not(tmp_path: Path) -> None:
    ended = run("faults_training.py", tmp_path / "faults.json", "--only", "loses its link")
    if "may not create network namespaces" in ended.stdout:
        pytest.skip(ended.stdout)
    assert ended.returncode == 0, ended.stdout
    rows = json.loads((tmp_path / "faults.json").read_text())["rows"]
    assert [row["outcome"] for row in rows] == [["trains on", "trains on"], ["error", "error"]]


@pytest.mark.parametrize("arguments", [[], ["--only", "x"], ["--quick"]])
def test_only_whole_runs_replace_committed_results(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common, path = load_script("benchmarks/common.py"), tmp_path / "result.json"
    monkeypatch.setattr(common, "path_of", lambda name: path)
    monkeypatch.setattr("sys.argv", ["example.py", *arguments])
    row = common.Row("work", "s", 1.0, {"peer": 1.0}, "peer")
    assert common.report("example", [row], common.arguments("An example.", only={"default": ""})) == 0
    assert path.exists() == (not arguments)

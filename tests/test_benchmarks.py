"""Benchmarks: that they run, and that they keep earlier results as they are."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.cache_servers import need
from tests.scripts import ROOT, load_script, run_python


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
    assert [row["unit"] for row in result["rows"]] == [
        "MiB",
        "threads",
        "open files",
        "keys in Redis",
        "exit 0",
    ]
    assert [row["kept"] for row in result["rows"][1:]] == [True] * 4, result["rows"]


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


@pytest.mark.proof
@pytest.mark.parametrize(
    "script",
    [
        "fuse_step",
        "many_tensors",
        "predicted_times",
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


def test_the_report_draws_every_row_of_every_committed_result() -> None:
    load_script("docs/_benchmarks.py")  # finds benchmarks/, as its own call does
    page = load_script("benchmarks/report.py").page()
    sections = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL))
    results = {
        path.stem: json.loads(path.read_text())
        for path in (ROOT / "benchmarks/results").glob("*.json")
    }
    assert sections.keys() == results.keys()
    for name, result in results.items():
        rows = result if isinstance(result, list) else result["rows"]
        for row in rows:
            shown = row.get("work") or row.get("fault") or row["contender"]
            assert html.escape(shown) in sections[name], (name, shown)
        if name != "time_to_quality":  # its rows are curves
            assert sections[name].count("<circle") == sum(
                1 + len(row.get("peers", ())) for row in rows
            )
            assert sections[name].count("<b>missed</b>") == sum(
                not row.get("kept", True) for row in rows
            )
        assert (
            "curve" not in rows[-1]
            or "ours" in rows[-1]
            or sections[name].count("<polyline") == sum("curve" in row for row in rows)
        )
    places = [float(x) for x in re.findall(r'(?:cx|x1|x2)="([^"%]*)%?"', page)]
    places += [
        float(x)
        for points in re.findall(r'points="([^"]*)"', page)
        for x in re.split("[ ,]", points)
    ]
    assert all(0 <= place <= 100 for place in places)
    assert not re.search(r" (nan|inf)</span>", page)

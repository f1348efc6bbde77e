"""The mark, the fixture and the options with which people's own tests run on simulated ranks."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest, torch, torch.distributed as dist

def total(value):
    dist.init_process_group("gloo")
    x = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(x)
    return x

def test_values(sim_world):
    assert sim_world(total, 3, 2.0, seeds=2) == [torch.tensor([12.0])] * 3

@pytest.mark.sim(ranks=[2, 3], seeds=2)
def test_body(tmp_path):
    assert total(1) == {2: 3, 3: 6}[dist.get_world_size()]

@pytest.mark.sim(seeds=1)
def test_wrong():
    assert total(1) == dist.get_rank()

@pytest.mark.sim(ranks=3, seeds=50)
def test_race():
    dist.init_process_group("gloo")
    x = torch.ones(1) * dist.get_rank()
    if dist.get_rank() == 0:
        first, second = torch.zeros(1), torch.zeros(1)
        dist.recv(first); dist.recv(second)
        assert first <= second, "in order"
    else:
        dist.send(x, 0)
"""


def run(folder: Path, *options: str) -> str:
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root / "src"), str(root)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bagua_ref_pytest", *options]
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.stdout


@pytest.mark.proof
def test_bodies_and_functions_run_on_simulated_ranks_and_failures_can_be_replayed(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_own.py").write_text(TESTS)
    said = run(tmp_path, "-p", "xdist", "-n", "2", "test_own.py")
    assert "2 failed, 3 passed" in said, said
    assert re.search(r"exception on rank [01] at \S*test_own.py:\d+: AssertionError: assert", said)
    replay = re.search(r"replay: pytest (\S*test_race\S* --sim-schedule \S+)", said)
    assert replay is not None, said
    again = run(tmp_path, *shlex.split(replay[1]))
    assert "AssertionError: in order" in again
    assert "1 failed" in again


@pytest.mark.proof
def test_the_example_project_passes(tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "examples" / "sim_ci"
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    assert "4 passed" in run(tmp_path)

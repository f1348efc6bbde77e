"""Test of the page about trainers: its scripts run on two ranks, or on those of their mesh, and it names the versions."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.launch import launch

from bagua_ref.cli.doctor import TRAINERS

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
SCRIPTS = re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run(script: str, folder: str) -> None:
    os.chdir(folder)
    os.environ["TORCHELASTIC_RUN_ID"] = "1"  # as under torchrun
    exec(compile(script, "docs/trainers.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_script_of_the_page_runs(number: int, tmp_path: Path) -> None:
    launch(run, 4 if "(2, 2)" in SCRIPTS[number] else 2, SCRIPTS[number], str(tmp_path), init=False)


def test_the_page_and_doctor_name_the_versions_that_are_tested() -> None:
    assert len(SCRIPTS) == 7
    for name, tested in TRAINERS.items():
        assert version(name) == tested
        assert f"`{name}` {tested}" in PAGE

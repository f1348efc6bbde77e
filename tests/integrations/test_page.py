"""Tests of the pages about trainers, whose scripts run on two ranks or on their mesh, and of the
versions that are installed.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from tests.integrations.with_torchvision import TIMM
from tests.launch import launch

from bagua_ref.cli import doctor

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / name).read_text() for name in ("trainers.md", "data_parallel.md"))
PAGE += (DOCS / "metrics.md").read_text().partition("## In a trainer's log")[2]
SCRIPTS = re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run(script: str, folder: str) -> None:
    os.chdir(folder)
    os.environ["TORCHELASTIC_RUN_ID"] = "1"  # as under torchrun
    exec(compile(script, "docs/trainers.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_script_of_the_page_runs(number: int, tmp_path: Path) -> None:
    launch(run, 4 if "(2, 2)" in SCRIPTS[number] else 2, SCRIPTS[number], str(tmp_path), init=False)


def test_the_versions_that_the_docs_and_doctor_name_are_installed() -> None:
    assert len(SCRIPTS) == 9
    for name, tested in doctor.tested_versions().items():
        assert [
            found.version for found in distributions(name=name, path=[*sys.path, str(TIMM)])
        ] == [tested]

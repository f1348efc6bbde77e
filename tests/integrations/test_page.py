"""Tests of the pages about trainers, whose scripts run on two ranks or on their mesh, and of the
versions that are installed.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from tests.integrations.with_torchvision import TIMM
from tests.launch import launch
from torch.distributed.fsdp import FSDPModule

import bagua_ref
from bagua_ref.cli import doctor
from bagua_ref.integrations import installing

DOCS = Path(__file__).parents[2] / "docs"
NAMES = ("trainers.md", "data_parallel.md", "sharded.md")
PAGE = "".join((DOCS / name).read_text() for name in NAMES)
PAGE += (DOCS / "metrics.md").read_text().partition("## In a trainer's log")[2]
BLOCK, FLAGS = r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL
SCRIPTS = re.findall(BLOCK, PAGE, FLAGS)


def run(script: str, folder: str) -> None:
    os.chdir(folder)
    os.environ["TORCHELASTIC_RUN_ID"] = "1"  # as under torchrun
    exec(compile(script, "docs/trainers.md", "exec"), {"__name__": "__main__"})


def run_sharded(script: str, folder: str) -> None:
    """Run a script in which accelerate shards, as it does on accelerators only."""
    made, set_up = [], AcceleratorState.__init__

    def sharding(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        set_up(self, *args, **options)
        if fsdp_plugin is not None:
            shared = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": fsdp_plugin}
            self._shared_state.update(shared)

    def install(model: Any, *args: Any, **options: Any) -> Any:
        assert isinstance(model, FSDPModule)
        made.append(installing.install(model, *args, **options))
        return made[-1]

    AcceleratorState.__init__ = sharding
    bagua_ref.install = install
    run(script, folder)
    (installation,) = made
    counted = installation.metrics()
    assert counted["steps"] > 1
    assert counted["bytes_sent"] > 0


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_script_of_the_page_runs(number: int, tmp_path: Path) -> None:
    script = SCRIPTS[number]
    shards = "fsdp_plugin" in script or "fsdp_config" in script
    nranks = 4 if "(2, 2)" in script else 2
    launch(run_sharded if shards else run, nranks, script, str(tmp_path), init=False)


def test_the_versions_that_the_docs_and_doctor_name_are_installed() -> None:
    assert len(SCRIPTS) == 13
    for name, tested in doctor.tested_versions().items():
        assert [
            found.version for found in distributions(name=name, path=[*sys.path, str(TIMM)])
        ] == [tested]

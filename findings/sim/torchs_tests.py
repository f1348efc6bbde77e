"""torch's own tests of communication on three simulated ranks: ``python -m findings.sim.torchs_tests``.

It needs the package expecttest, which torch's tests import. Results go to torchs_tests.json.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import tempfile
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bagua_ref.simulation import SimulatedWorld

RANKS = 3
COMMUNICATES = re.compile(
    "all_reduce|reduce|broadcast|gather|scatter|all_to_all|send|recv|barrier|group|object|monitor"
)
TRAINS = re.compile("[dD][dD][pP]|Distributed|gradient|SyncBatchNorm|cuda|nccl|optim|Periodic|SGD")


def results() -> dict[str, str]:
    """Run each test; return "pass", "skip" with the reason, or the error, by its name."""
    folder = Path(tempfile.mkdtemp())
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir()
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS), "TEMP_DIR": str(folder)}
    os.environ["INIT_METHOD"] = "env://"
    tests: Any = importlib.import_module(
        "torch.testing._internal.distributed.distributed_test"
    ).DistributedTest._DistTestBase
    cases: Any = importlib.import_module("torch.testing._internal.common_utils").TestCase

    class Test(tests, cases):  # type: ignore[misc]
        world_size = RANKS

        def call_dist_op(self, title: str, is_async: bool, *args: Any, **options: Any) -> None:
            # torch's also counts the events of a profiler, which simulated ranks share
            super().call_dist_op(title, is_async, *args, **options | {"expect_event": False})

        def _barrier(self, *args: object, **options: object) -> None:
            dist.barrier()  # torch's goes by locks of files between processes

    names = [n for n in dir(tests) if n.startswith("test_")]
    names = [n for n in names if COMMUNICATES.search(n) and not TRAINS.search(n)]
    return {name: result(Test, name) for name in names}


def result(case: Any, name: str) -> str:
    def main() -> str:
        dist.init_process_group("gloo")
        test = case(name)
        test.rank = dist.get_rank()
        try:
            getattr(test, name)()
        except unittest.SkipTest as skipped:
            return f"skip: {skipped}"
        except SystemExit as ended:  # how torch's decorators skip in a process of several
            return f"skip: exit code {ended.code}"
        return "pass"

    try:
        found = SimulatedWorld(RANKS, torch_distributed=True).run(main)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return text.replace(f"{Path(__file__).parents[2]}/", "")[:300]
    return next((text for text in found if text != "pass"), "pass")


if __name__ == "__main__":
    found = results()
    for name, text in found.items():
        print(f"{name}: {text}", flush=True)
    counts = Counter(
        text.partition(":")[0] if text[:4] in ("pass", "skip") else "differs"
        for text in found.values()
    )
    print(dict(counts))
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps({"torch": torch.__version__, "results": found}, indent=1) + "\n")

"""Tests of ``import bagua_ref``: quick, without side effects and without optional packages."""

from __future__ import annotations

import functools
import json
import re
import statistics
from pathlib import Path

import pytest
from tests.scripts import run_python

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[1] / "src"
LIMIT_S = 0.15
ORACLE = "bagua_ref.conformance"

PROBE = """
import json, logging, os, sys, threading
import torch, torch.distributed

def state():
    return {
        "environment": dict(os.environ),
        "log handlers": [repr(h) for h in logging.root.handlers],
        "random numbers": torch.initial_seed(),
        "torch threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "torch.distributed is set up": torch.distributed.is_initialized(),
        "search path": list(sys.path),
        "native threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else None,
    }

started = []
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "socket.connect", "socket.bind")
sys.addaudithook(lambda event, args: started.append(event) if event in STARTS else None)
start = threading.Thread.start
threading.Thread.start = lambda thread: (started.append("threading.Thread.start"), start(thread))
before, loaded = state(), set(sys.modules)
{statement}
after = state()
print(json.dumps({
    "started": started,
    "changed": [name for name in before if before[name] != after[name]],
    "loaded": sorted(set(sys.modules) - loaded),
}))
"""

OPTIONAL = {
    "accelerate", "cupy", "fakeredis", "hiredis", "hypothesis", "jsonschema", "lightning", "lightning_fabric", "matplotlib",
    "pytorch_lightning", "redis", "rich", "safetensors", "sklearn", "transformers", "triton",
}  # fmt: skip


@functools.cache
def probe(statement: str) -> dict[str, list[str]]:
    return json.loads(run_python("-c", PROBE.replace("{statement}", statement)).stdout)


def test_import_starts_no_thread_and_no_process() -> None:
    assert probe("import bagua_ref")["started"] == []


def test_import_changes_nothing_of_the_process() -> None:
    assert probe("import bagua_ref")["changed"] == []


def test_import_brings_no_optional_package() -> None:
    loaded = {name.split(".")[0] for name in probe("import bagua_ref")["loaded"]}
    assert "bagua_ref" in loaded
    assert not loaded & OPTIONAL
    assert not [name for name in probe("import bagua_ref")["loaded"] if name.startswith("bagua_ref.cli")]


def test_import_brings_no_backend() -> None:
    loaded = {name for name in probe("import bagua_ref")["loaded"] if name.startswith("bagua_ref.backends")}
    assert loaded == {f"bagua_ref.backends{module}" for module in ("", ".base", ".codec")}


def test_the_oracle_and_the_command_line_bring_no_optional_package() -> None:
    loaded = probe("import bagua_ref.conformance, bagua_ref.cli")["loaded"]
    assert not {name.split(".")[0] for name in loaded} & {*OPTIONAL, "pytest"}
    assert not [name for name in loaded if name.startswith(f"{ORACLE}.suites.") and name != f"{ORACLE}.suites.checks"]


def test_a_run_of_one_suite_imports_only_what_that_suite_needs() -> None:
    loaded = probe("from bagua_ref.conformance import run_conformance; run_conformance('reference', ['kernels'], checks=['S7.2'])")[
        "loaded"
    ]
    suites = {name for name in loaded if name.startswith(f"{ORACLE}.suites.")}
    assert suites == {f"{ORACLE}.suites.checks", f"{ORACLE}.suites.kernels"}
    assert not {name.split(".")[0] for name in loaded} & (OPTIONAL - {"hypothesis"})
    assert not [name for name in loaded if name.startswith((f"{ORACLE}.vectors", f"{ORACLE}.trace", "bagua_ref.contrib"))]


def test_the_probe_sees_what_it_looks_for() -> None:
    planted = (
        "import logging, os, subprocess, sys, threading, hypothesis;"
        "threading.Thread(target=int).start(); subprocess.run([sys.executable, '-c', '']); logging.basicConfig()"
    )
    seen = probe(planted)
    assert seen["started"] == ["threading.Thread.start", "subprocess.Popen"]
    assert seen["changed"] == ["log handlers"]
    assert "hypothesis" in seen["loaded"]


def own_seconds(report: str) -> float:
    """Sum the modules' own times in `-X importtime`, without torch's and those of its imports.

    The report lists children before parents, indented by two more columns; read backwards, children follow their parents.
    """
    total, inside_torch = 0, None
    for line in reversed(report.splitlines()):
        row = re.fullmatch(r"import time:\s*(\d+) \|\s*\d+ \| (\s*)(\S+)", line)
        if row is None:
            continue
        microseconds, depth, module = int(row[1]), len(row[2]), row[3]
        if inside_torch is not None and depth > inside_torch:
            continue
        inside_torch = depth if module.split(".")[0] == "torch" else None
        total += 0 if inside_torch is not None else microseconds
    return total / 1e6


def test_own_seconds_leaves_out_torch_and_its_children() -> None:
    report = """
import time: self [us] | cumulative | imported package
import time:        10 |         10 |   numpy
import time:       100 |        110 | torch
import time:         7 |          7 |     json
import time:       100 |        107 |   torch.distributed
import time:         2 |          2 |     queue
import time:         3 |          5 |   bagua_ref.base.runtime
import time:         4 |        116 | bagua_ref
"""
    assert own_seconds(report) == 9 / 1e6


def test_import_takes_little_time_of_its_own() -> None:
    # As after an installation, which compiles: the first import is not counted, and the environment must not forbid bytecode.
    command = ("-X", "importtime", "-c", "import torch.distributed\nimport bagua_ref")
    times = [own_seconds(run_python(*command, PYTHONDONTWRITEBYTECODE="").stderr.split("| torch\n")[-1]) for _ in range(6)][1:]
    assert statistics.median(times) <= LIMIT_S, f"seconds of five imports: {times}"


def test_contrib_is_there_without_an_import_of_its_own_and_brings_no_redis() -> None:
    seen = probe(
        "import bagua_ref; assert 'bagua_ref.contrib' not in sys.modules; assert bagua_ref.contrib.fuse_optimizer is not None"
    )
    assert seen["started"] == []
    assert seen["changed"] == []
    assert not {name.split(".")[0] for name in seen["loaded"]} & {"redis", "fakeredis", "hiredis", "rich"}
    assert "bagua_ref.contrib.cache_loader" in seen["loaded"]

"""Tests of ``import bagua_ref``: quick, without side effects and without optional packages."""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Probe = Callable[..., dict[str, Any]]

SOURCE = Path(__file__).parents[1] / "src"
LIMIT_S = 0.12
ORACLE = "bagua_ref.conformance"

SERVER = """
import gc, json, logging, os, sys, threading, time
import torch, torch.distributed

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "socket.connect", "socket.bind")

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

def probe(statement, first):
    exec(first, {})
    started = []
    sys.addaudithook(lambda event, args: started.append(event) if event in STARTS else None)
    start = threading.Thread.start
    threading.Thread.start = lambda thread: (started.append("threading.Thread.start"), start(thread))
    before, loaded, seconds = state(), set(sys.modules), time.process_time()
    exec(statement, globals())
    seconds = time.process_time() - seconds
    after = state()
    return {
        "started": started,
        "changed": [name for name in before if before[name] != after[name]],
        "loaded": sorted(set(sys.modules) - loaded),
        "seconds": seconds,
    }

gc.freeze()  # a collection of torch's objects would take longer than all modules of the package
for line in sys.stdin:  # each statement in a process of its own, which has imported torch and nothing else
    if os.fork() == 0:
        print(json.dumps(probe(*json.loads(line))), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""

OPTIONAL = {
    "accelerate",
    "cupy",
    "fakeredis",
    "hiredis",
    "hypothesis",
    "jsonschema",
    "lightning",
    "lightning_fabric",
    "matplotlib",
    "pytorch_lightning",
    "redis",
    "safetensors",
    "sklearn",
    "transformers",
    "triton",
}


@pytest.fixture(scope="module")
def probe() -> Iterator[Probe]:
    """Run a statement in a process that has imported torch and run ``first``, and say what it did;
    seconds are the processor's.
    """
    # As after an installation, which compiles: the environment must not forbid bytecode.
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:

        def ask(statement: str, first: str = "") -> dict[str, Any]:
            server.stdin.write(json.dumps([statement, first]) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield functools.cache(ask)
        server.stdin.close()


def test_import_starts_no_thread_and_no_process(probe: Probe) -> None:
    assert probe("import bagua_ref")["started"] == []


def test_import_changes_nothing_of_the_process(probe: Probe) -> None:
    assert probe("import bagua_ref")["changed"] == []


def test_import_brings_no_optional_package(probe: Probe) -> None:
    loaded = {name.split(".")[0] for name in probe("import bagua_ref")["loaded"]}
    assert "bagua_ref" in loaded
    assert not loaded & OPTIONAL
    assert not [
        name
        for name in probe("import bagua_ref")["loaded"]
        if name.startswith(("bagua_ref.cli", "bagua_ref.record"))
    ]


def test_import_brings_no_backend(probe: Probe) -> None:
    loaded = {
        name
        for name in probe("import bagua_ref")["loaded"]
        if name.startswith("bagua_ref.backends")
    }
    assert loaded == {
        f"bagua_ref.backends{module}" for module in ("", ".base", ".chunks", ".codec")
    }


def test_the_oracle_and_the_command_line_bring_no_optional_package(probe: Probe) -> None:
    loaded = probe("import bagua_ref.conformance, bagua_ref.cli")["loaded"]
    assert not {name.split(".")[0] for name in loaded} & {*OPTIONAL, "pytest"}
    assert not [
        name
        for name in loaded
        if name.startswith(f"{ORACLE}.checks.") and name != f"{ORACLE}.checks.registry"
    ]


@pytest.mark.proof
def test_a_run_of_one_suite_imports_only_what_that_suite_needs(probe: Probe) -> None:
    loaded = probe(
        "from bagua_ref.conformance import run_conformance; run_conformance('reference',"
        " ['kernels'], checks=['S7.2'])"
    )["loaded"]
    suites = {name for name in loaded if name.startswith(f"{ORACLE}.checks.")}
    assert suites == {f"{ORACLE}.checks.registry", f"{ORACLE}.checks.kernels"}
    assert not {name.split(".")[0] for name in loaded} & (OPTIONAL - {"hypothesis"})
    assert not [
        name
        for name in loaded
        if name.startswith(
            (f"{ORACLE}.vectors", f"{ORACLE}.trace", "bagua_ref.contrib", "bagua_ref.checkpoint")
        )
    ]


def test_the_probe_sees_what_it_looks_for(probe: Probe) -> None:
    planted = (
        "import logging, os, subprocess, sys, threading,"
        " hypothesis;threading.Thread(target=int).start(); subprocess.run([sys.executable, '-c',"
        " '']); logging.basicConfig()"
    )
    seen = probe(planted)
    assert seen["started"] == ["threading.Thread.start", "subprocess.Popen"]
    assert seen["changed"] == ["log handlers"]
    assert "hypothesis" in seen["loaded"]


def test_import_takes_little_time_of_its_own(probe: Probe) -> None:
    of_torch = [
        name for name in probe("import bagua_ref")["loaded"] if name.split(".")[0] == "torch"
    ]
    first = "\n".join(f"import {name}" for name in of_torch)
    times = [probe("import bagua_ref", first + "\n" * run)["seconds"] for run in range(5)]
    assert statistics.median(times) <= LIMIT_S, f"seconds of five imports: {times}"


def test_contrib_is_there_without_an_import_of_its_own_and_brings_no_redis(probe: Probe) -> None:
    seen = probe(
        "import bagua_ref; assert 'bagua_ref.contrib' not in sys.modules; assert"
        " bagua_ref.contrib.fuse_optimizer is not None"
    )
    assert seen["started"] == []
    assert seen["changed"] == []
    assert not {name.split(".")[0] for name in seen["loaded"]} & {
        "redis",
        "fakeredis",
        "hiredis",
    }
    assert "bagua_ref.contrib.cache_loader" in seen["loaded"]

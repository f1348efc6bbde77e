"""Tests of targets in other programs: verdicts on them, faults of the protocol, and that nothing is
left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import oracle_c
from tests.launch import run_script, start_by_fork
from tests.scripts import ROOT

from bagua_ref.backends.base import KernelBackend
from bagua_ref.cli import main
from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.run.runner import NamedTarget
from bagua_ref.conformance.targets import process
from bagua_ref.conformance.targets.process import ProcessTarget
from bagua_ref.conformance.targets.process_link import DTYPES, ProgramError

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "vectors.md").read_text()
PYTHON = shlex.quote(sys.executable)
CODEC = f"{PYTHON} {ROOT}/tests/outside/numpy_codec.py"


def everything(fault: str = "") -> str:
    return f"{PYTHON} {ROOT}/tests/process_program.py {fault}"


def faulty(fault: str) -> str:
    return f"{PYTHON} {ROOT}/tests/faulty_program.py {fault}"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    )


@pytest.fixture
def program() -> Iterator[Callable[[str], ProcessTarget]]:
    """Return a function that makes the target of a command, whose processes end with the test."""
    with contextlib.ExitStack() as stack:

        def make(command: str) -> ProcessTarget:
            target = ProcessTarget(command)
            stack.callback(target.end)
            return target

        yield make


# Verdicts


@pytest.mark.usefixtures("few_inputs")
@pytest.mark.proof
@pytest.mark.parametrize(
    "fault",
    [
        None,
        ("minmax_uint8.c", "g.scale = 255.0f", "g.scale = 254.0f"),
        ("serve.c", "payload.data + i * size)", "payload.data)"),
    ],
    ids=str,
)
def test_a_program_in_C_is_judged(
    tmp_path: Path, fault: tuple[str, str, str] | None, program: Any
) -> None:
    oracle_c.need_compiler()
    target = program(str(oracle_c.build(tmp_path, fault)))
    report = run_conformance(target, ["kernels", "codec"], shrink=False, time_limit=60.0)
    assert report.passed == (fault is None), str(report)
    assert report.ran


@pytest.mark.proof
def test_faults_in_another_program_are_found(monkeypatch: pytest.MonkeyPatch, program: Any) -> None:
    start_by_fork(monkeypatch)
    checks = ["collectives.S3.9.allreduce", "kernels.S1.add_scaled[float32]"]
    report = run_conformance(
        program(everything("planted")), checks=checks, shrink=False, time_limit=120.0
    )
    kernel, ranks, *_ = report.failures()
    assert (kernel.id, ranks.suite) == (checks[1], "collectives")
    ended = run_script(kernel.counterexample)
    assert ended.returncode != 0
    assert "AssertionError" in ended.stderr


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"kernels": ["ad"]}, "must have protocol 2, and kernels of add, "),
        ({"protocol": 1}, "must have protocol 2"),
    ],
)
def test_what_a_program_says_of_itself_is_checked(
    said: dict[str, Any], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its capabilities are, like those of any target."""

    def program(*_: Any) -> Any:
        answer = {"protocol": 2, "kernels": ["add"], **said}
        return SimpleNamespace(ask=lambda *_, **__: (answer, {}), end=lambda: None)

    monkeypatch.setattr(process, "Program", program)
    with pytest.raises(ProgramError, match=wrong):
        ProcessTarget("program")


def test_operations_of_the_package_need_every_kernel(program: Any) -> None:
    report = run_conformance(program(CODEC), ["comm_ops"])
    assert not report.ran
    assert "no add_, add_scaled_" in report.results[0].message
    report = run_conformance(program(CODEC), ["collectives", "codec"], checks=["S3.9", "S12.1"])
    lacks = "the program lacks {}: its answer to hello does not name it"
    of = {result.suite: result.message for result in report.results}
    assert of["collectives"] == lacks.format("collectives")
    assert of["codec"] == lacks.format("MXINT8")
    assert report.not_tried() == ["codec", "collectives"]


# Faults of the protocol


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("dies", r"the program has ended with exit code 3\n.*\n.*ends with:\nout of cheese"),
        ("crashes", "the program has ended with signal SIGSEGV"),
        ("short", r"the program has ended with exit code 0\n.*\n.*ends with:\ntoo short"),
        ("garbage", r"the answer was b'hello world\\n'"),
        ("list", "the answer was b"),
        ("error", "answered add with an error: no cheese"),
        ("other", "its id is 1, not 2; the answer was"),
        ("shape", re.escape("{'x': 'float32[1, 4]'}, not {'x': 'float32[4]'}")),
        ("dtype", re.escape("{'x': 'int32[4]'}, not")),
        ("bytes", re.escape("16 bytes are no float32 of shape [5]")),
        ("sizes", "the answer was b"),
        ("base64", "the answer was b"),
        ("nothing", re.escape("it has {}, not {'x': 'float32[4]'}")),
        ("hangs", "no answer within 1 s"),
    ],
)
def test_what_breaks_the_protocol_is_said(fault: str, said: str) -> None:
    target = ProcessTarget(faulty(fault), 1.0 if fault == "hangs" else 30.0)
    with pytest.raises(ProgramError, match=said) as raised:
        target.kernels.add_(torch.ones(4), torch.ones(4))
    if fault != "error":
        assert 'expected one line of JSON with "id": 2 as the answer to add' in str(raised.value)
        assert '"call": "add", "tensors": {"x": {' in str(raised.value)
    target.end()


def test_a_crash_is_told_with_its_call() -> None:
    target = NamedTarget(command=faulty("crashes"))
    (failed,) = run_conformance(target, checks=["kernels.S1.add[float32]"]).failures()
    assert "as the answer to add, but the program has ended with signal SIGSEGV" in failed.message
    assert "result = kernels.add_(x, y)" in failed.counterexample


def test_a_program_that_says_nothing_ends_the_command_at_the_time_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    begin = time.monotonic()
    assert main(["verify", "--command", "sleep 600", "--time-limit", "1"]) == 2
    assert time.monotonic() - begin < 15
    assert "as the answer to hello, but no answer within 1 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/no/such/program", "cannot be started: .*No such file"),
        ("'", "cannot be started: No closing quotation"),
        ("", "cannot be started"),
        ("false", "as the answer to hello, but the program has ended with exit code 1"),
    ],
)
def test_a_command_that_cannot_run_is_said(command: str, said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        ProcessTarget(command)


# What is left behind


STUBBORN = """
import os, sys, time
print(os.getpid(), os.environ["TMPDIR"], file=open(sys.argv[1] + f"/{os.getpid()}", "w"))
sys.stdin.buffer.readline()
print('{"id":1,"protocol":2,"codecs":["OneBit"]}', flush=True)
time.sleep(600)
"""
"""It does not read its input again, and so does not see that it has closed."""


@pytest.mark.proof
def test_a_program_that_hangs_ends_with_the_command(tmp_path: Path) -> None:
    program = tmp_path / "stubborn.py"
    program.write_text(STUBBORN)
    command = ["verify", "--command", f"{PYTHON} {program} {tmp_path}", "--jobs", "1"]
    command += ["--check", "codec.S12.2.payload_OneBit[float32]", "--time-limit", "2"]
    ended = run_script(f"import sys; from bagua_ref.cli import main; sys.exit(main({command}))")
    assert ended.returncode == 1, ended.stderr
    assert "no answer within 2 s" in ended.stdout
    started = [path.read_text().split() for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(started) >= 2  # one says what it has
    until = time.monotonic() + 30
    while any(alive(int(pid)) for pid, _ in started) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(int(pid)) for pid, _ in started)
    assert not any(Path(folder).exists() for _, folder in started)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


# The page


def test_the_page_describes_every_request() -> None:
    sources = (ROOT / "src/bagua_ref/conformance/targets/process.py").read_text()
    calls = set(re.findall(r'(?:ask|_collective)\(\s*"(\w+)"', sources))
    calls |= {name.strip("_") for name in KernelBackend.__abstractmethods__}
    assert len(calls) > 25
    assert [call for call in calls if f"`{call}`" not in PAGE] == []
    assert [dtype for dtype in DTYPES if f"`{dtype}`" not in PAGE] == []


def test_the_session_on_the_page_is_what_is_said() -> None:
    """The page's example: requests, and the answers of the program beside it."""
    sent = re.findall(r"^> (.*)$", PAGE, re.MULTILINE)
    answers = re.findall(r"^< (.*)$", PAGE, re.MULTILINE)
    ended = subprocess.run(
        shlex.split(CODEC), input="\n".join(sent), capture_output=True, text=True, check=True
    )
    assert [json.loads(line) for line in ended.stdout.splitlines()] == list(
        map(json.loads, answers)
    )
    assert len(sent) == 3

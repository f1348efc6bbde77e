"""Tests of targets in other programs: verdicts on them, faults of the protocol, and that nothing is
left behind.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import oracle_c
from tests.launch import fork_program, run_script
from tests.scripts import ROOT

from bagua_ref.cli import main
from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.run.runner import NamedTarget
from bagua_ref.conformance.run.search import PROFILES
from bagua_ref.conformance.targets import process
from bagua_ref.conformance.targets.process import ProcessTarget
from bagua_ref.conformance.targets.process_link import DTYPES, ProgramError, Programs
from bagua_ref.conformance.targets.target import resolve

pytestmark = pytest.mark.slow

PAGES = [ROOT / "docs" / "conformance" / name for name in ("other-languages.md", "requests.md")]
PAGE = "".join(page.read_text() for page in PAGES)
PYTHON = shlex.quote(sys.executable)
CODEC = f"{PYTHON} {ROOT}/tests/outside/numpy_codec.py"
SAMPLER = f"{PYTHON} {ROOT}/tests/outside/plain_sampler.py"


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


# Verdicts


@pytest.mark.usefixtures("few_inputs")
@pytest.mark.proof
@pytest.mark.parametrize(
    "fault",
    [
        None,
        ("minmax_uint8.c", "g.scale = 255.0f", "g.scale = 254.0f"),
        ("serve.c", "payload.data + place * size)", "payload.data)"),
    ],
    ids=str,
)
def test_a_program_in_C_is_judged(tmp_path: Path, fault: tuple[str, str, str] | None) -> None:
    oracle_c.need_compiler()
    program = oracle_c.build(tmp_path, fault, "serve")
    report = run_conformance(
        ProcessTarget(str(program)), ["kernels", "codec"], shrink=False, time_limit=60.0
    )
    assert report.passed == (fault is None), str(report)
    assert report.ran


@pytest.mark.usefixtures("few_inputs")
def test_a_codec_in_another_program_is_judged() -> None:
    report = run_conformance(ProcessTarget(CODEC), ["codec"], checks=["S12.2"], time_limit=60.0)
    assert report.passed, str(report)
    assert report.counts()["passed"] > 10


def test_samplers_in_another_program_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROFILES, "quick", 4)
    options: Any = {
        "checks": ["samplers.S7.3.indices", "samplers.S7.4.batches"],
        "shrink": False,
        "time_limit": 60.0,
    }
    # tests/outside has all checks
    assert run_conformance(ProcessTarget(SAMPLER), ["samplers"], **options).passed
    program = tmp_path / "faulty.py"
    program.write_text(
        (ROOT / "tests" / "outside" / "plain_sampler.py")
        .read_text()
        .replace("place % mine", "min(place, mine - 1)")
    )
    report = run_conformance(ProcessTarget(f"{PYTHON} {program}"), ["samplers"], **options)
    assert {result.id for result in report.failures()} == {"samplers.S7.4.batches"}


@pytest.mark.proof
def test_a_fault_of_ranks_in_other_programs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Programs, "_start", fork_program)
    target = ProcessTarget(everything("planted"))
    report = run_conformance(
        target, checks=["collectives.S3.9.allreduce"], jobs=0, shrink=False, time_limit=120.0
    )
    target.end()
    assert report.failures()


def test_a_fault_in_another_program_is_found_with_a_script_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Programs, "_start", fork_program)
    target = ProcessTarget(everything("planted"))
    checks = ["kernels.S1.add_scaled[float32]"]
    (failure,) = run_conformance(
        target, checks=checks, jobs=0, shrink=False, time_limit=60.0
    ).failures()
    target.end()
    ended = run_script(failure.counterexample)
    assert ended.returncode != 0
    assert "AssertionError" in ended.stderr


@pytest.mark.parametrize(
    ("said", "capabilities"),
    [
        ({}, {"external": False}),
        ({"max_ranks": 2, "external": True}, {"external": True, "max_ranks": 2}),
    ],
)
def test_a_program_may_say_how_many_ranks_it_has_and_that_it_is_external(
    said: dict[str, Any], capabilities: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        process, "Programs", lambda *_: SimpleNamespace(hello=lambda: said, end=lambda: None)
    )
    target = ProcessTarget("program")
    assert target.capabilities == {"dtypes": list(DTYPES), **capabilities}


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"max_ranks": 0}, "'max_ranks'] must be from 1 to"),
        ({"max_ranks": 2.0}, "'max_ranks'] must be an integer"),
        ({"max_ranks": True}, "'max_ranks'] must be an integer"),
        ({"external": 1}, "'external'] must be a boolean"),
    ],
)
def test_a_program_that_says_no_number_of_ranks_is_refused(
    said: dict[str, Any], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        process, "Programs", lambda *_: SimpleNamespace(hello=lambda: said, end=lambda: None)
    )
    with pytest.raises(
        ProgramError, match=re.escape(f"the program's answer to hello: answer[{wrong}")
    ):
        ProcessTarget("program")


@pytest.mark.usefixtures("few_inputs")
def test_worlds_of_a_program_are_as_small_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Programs, "_start", fork_program)
    target = ProcessTarget(everything("two_ranks"))
    report = run_conformance(target, checks=["collectives.S3.9.long"], jobs=0, time_limit=60.0)
    target.end()
    assert report.passed, str(report)
    assert report.max_ranks == 2


def test_operations_of_the_package_need_every_kernel() -> None:
    report = run_conformance(ProcessTarget(CODEC), ["comm_ops"])
    assert not report.ran
    assert "no add_, add_scaled_" in report.results[0].message


# Faults of the protocol


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "dies",
            "the program has ended with exit code 3; its standard error ends with:\nout of cheese",
        ),
        ("crashes", "the program has ended with signal SIGSEGV"),
        ("garbage", r"b'hello world\\n' is not the header of an answer"),
        ("error", "answered add with an error: no cheese"),
        (
            "short",
            (
                r"the program has ended after 15 of 16 bytes of x with exit code 0; its standard"
                r" error ends with:\ntoo short"
            ),
        ),
        (
            "shape",
            re.escape("{'x': ('torch.float32', [1, 4])} instead of {'x': ('torch.float32', [4])}"),
        ),
        ("dtype", re.escape("{'x': ('torch.int32', [4])} instead of")),
        ("huge", "announces tensors of .* where at most 16 are expected"),
        ("nothing", re.escape("it has the tensors {} instead of")),
        ("hangs", "no answer within 0.3 s"),
    ],
)
def test_what_breaks_the_protocol_is_said(fault: str, said: str) -> None:
    target = ProcessTarget(faulty(fault))
    link = target.live().single().links[0]
    link.ask("hello")  # it has started
    link.limit(0.3 if fault == "hangs" else 30.0)
    with pytest.raises(ProgramError, match=said):
        target.kernels.add_(torch.ones(4), torch.ones(4))
    target.end()


def test_a_crash_is_told_with_its_call() -> None:
    target = NamedTarget(command=faulty("crashes"))
    (failed,) = run_conformance(target, checks=["kernels.S1.add[float32]"]).failures()
    assert "answer to add: the program has ended with signal SIGSEGV" in failed.message
    assert "result = kernels.add_(x, y)" in failed.counterexample


def test_a_program_that_says_nothing_ends_the_command_at_the_time_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    begin = time.monotonic()
    assert main(["verify", "--command", "sleep 600", "--time-limit", "1"]) == 2
    assert time.monotonic() - begin < 15
    assert "answer to hello: no answer within 1 s" in capsys.readouterr().err


def test_another_version_is_refused() -> None:
    with pytest.raises(
        ProgramError, match="speaks version 2 of the protocol, and this is version 1"
    ):
        ProcessTarget(faulty("version"))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/no/such/program", "cannot be started: .*No such file"),
        ("'", "is not a command"),
        ("", "it is empty"),
        ("false", "answer to hello: "),
    ],
)
def test_a_command_that_cannot_run_is_said(command: str, said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        ProcessTarget(command)


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--command", "/no/such/program"]) == 2
    assert "cannot load /no/such/program: ProgramError" in capsys.readouterr().err
    for arguments in (
        [],
        ["--command", "x", "--backend", "reference"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(["verify", *arguments])
        assert ended.value.code == 2


# What is left behind


STUBBORN = """
import os, sys, time
print(os.getpid(), os.environ["TMPDIR"], file=open(sys.argv[1] + f"/{os.getpid()}", "w"))
sys.stdin.buffer.readline()
print('{"protocol":1,"codecs":["OneBit"],"tensors":[]}', flush=True)
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
    assert not any(Path(folder).parent.exists() for _, folder in started)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


# The page


def test_the_page_describes_every_request() -> None:
    folder = ROOT / "src/bagua_ref/conformance/targets"
    sources = (folder / "process.py").read_text()
    calls = set(re.findall(r'(?:\.ask|\.ask_for|_in_place|_request)\(\s*"(\w+)"', sources)) | {
        "hello"
    }
    assert len(calls) > 25
    for call in calls:
        assert f"`{call}`" in PAGE, call
    for dtype in DTYPES:
        assert f"`{dtype}`" in PAGE


def test_the_session_on_the_page_is_what_is_said() -> None:
    """The page's example: requests, and the answers of the program beside it."""
    program = ProcessTarget(CODEC)
    payload = resolve(program).codec("OneBit").compress(torch.tensor([1.0, -1.0]), 1)
    program.end()
    assert payload.numel() == 64
    assert payload[32] == 0b10000000
    assert (
        '{"call":"payload_bytes","codec":"OneBit","elements":2,"dtype":"float32","tensors":[]}'
        in PAGE
    )
    assert '{"call":"compress","codec":"OneBit","num_chunks":1,"target_chunk":null,' in PAGE

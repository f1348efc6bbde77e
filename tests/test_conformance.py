"""Tests of the conformance house as users see it: verdicts, reports, the command and the pytest
plugin.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from tests import hostile_backends as hostile
from tests.launch import run_script
from tests.scripts import ROOT

from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.cli import main
from bagua_ref.conformance import Report, Result, run_conformance
from bagua_ref.conformance.checks.registry import all_checks
from bagua_ref.conformance.clauses import CLAUSES
from bagua_ref.conformance.lab.lab import Canary
from bagua_ref.conformance.run.runner import MOST_JOBS, OneByOne, check_ids
from bagua_ref.conformance.run.search import Search

pytestmark = pytest.mark.slow

ADD, SUBTRACT = "kernels.S1.add", "kernels.S1.subtract"
ONE, OTHER = f"{ADD}[float16]", f"{SUBTRACT}[float16]"


def on(target, check=ADD, **options):
    """Run one check."""
    return run_conformance(target, checks=[check], **{"time_limit": 2.0, **options})


# Verdicts


SAID = {
    hostile.Raises: "add_ raised RuntimeError: out of cheese",
    hostile.Sleeps: "add_: no answer within 1 s",
    hostile.HoldsTheInterpreter: "add_: no answer within 1 s",
    hostile.Segfaults: "add_ crashed: signal SIGSEGV",
    hostile.Leaves: "add_ crashed: exit code 0",
    hostile.WritesBeyondTheEnd: "memory beside x was written",
    hostile.ChangesItsInput: "y is only read, but element 0 was changed",
    hostile.DiffersNowAndThen: "results differ for the same input",
}
FATAL = (hostile.Segfaults, hostile.Leaves, hostile.HoldsTheInterpreter, hostile.Sleeps)
REPEATED = (
    hostile.Raises,
    hostile.WritesBeyondTheEnd,
    hostile.ChangesItsInput,
    hostile.ReadsBeyondTheEnd,
    hostile.ReturnsWrongShapes,
    hostile.ReturnsNaN,
)


@pytest.mark.parametrize("backend", hostile.ALL, ids=lambda backend: backend.__name__)
def test_a_backend_that_misbehaves_gets_a_verdict(backend):
    """A counterexample runs, fails by itself, and passes with the reference; a verdict needs no
    process, if none must end.
    """
    check = check_ids([all_checks()[hostile.CHECK_OF.get(backend, ADD)]])[0]
    report = on(backend(), check, time_limit=1.0)
    assert not report.passed
    (failed,) = report.failures()
    assert failed.message
    if backend in SAID:
        assert SAID[backend] in failed.message
        assert "kernels.add_(" in failed.counterexample
    if backend not in FATAL:
        assert on(backend(), check, jobs=0, shrink=False).failures()
    if backend in REPEATED:
        ran = run_script(failed.counterexample)
        assert ran.returncode == 1, failed.counterexample
        assert "Error" in ran.stderr
        imported = f"from tests.hostile_backends import {backend.__name__}"
        healed = failed.counterexample.replace(
            imported, "from bagua_ref.backends.reference import *"
        )
        ran = run_script(healed.replace(f"{backend.__name__}()", "ReferenceBackend()"))
        assert ran.returncode == 0, ran.stderr


def test_what_hangs_is_tried_for_one_dtype_only():
    first, *others = on(hostile.Sleeps(), time_limit=0.5).failures()
    assert first.message == "add_: no answer within 0.5 s"
    assert {failed.message for failed in others} == {
        f"not tried: {first.message}, for another dtype"
    }


def test_a_counterexample_is_small():
    class Off(ReferenceBackend):
        def _add_(self, x, y):
            super()._add_(x, y)
            x[x > 100] += 1

    (failed,) = on(Off(), ONE).failures()
    assert "1 of 1 elements differ" in failed.message
    assert failed.counterexample.count(",") < 15


def test_a_canary_tells_places():
    canary = Canary(torch.arange(6.0).view(2, 3).T[:2], shift=3)
    assert canary.tensor.tolist() == [[0, 3], [1, 4]]
    assert not canary.changed_inside() + canary.changed_outside()
    canary.tensor[1, 0] = 7
    # a gap between the rows
    canary.tensor.as_strided((1,), (1,), canary.tensor.storage_offset() + 2)[0] = 9
    assert (canary.changed_inside(), canary.changed_outside()) == ([1], [2])


# Selection of checks, and the overall verdict


def test_every_report_lists_the_clauses_that_are_not_covered():
    report = run_conformance(type("Empty", (), {"samplers": object()})(), ["kernels"])
    missing = set(CLAUSES) - {check.clause for check in all_checks().values()}
    assert (
        {result.id for result in report.results if result.status == "not covered"}
        == missing
        >= {"S5.7", "S6", "S8.4", "S12.4"}
    )
    assert {
        row["id"]
        for row in json.loads(report.to_json())["results"]
        if row["status"] == "not covered"
    } == missing
    shown = next(line for line in str(report).splitlines() if line.startswith("not covered"))
    assert set(shown.removeprefix("not covered").replace(",", " ").split()) == missing
    assert f"{len(missing)} not covered" in str(report)
    assert report.to_junit().count("not covered") == len(missing)
    asked = run_conformance("reference", checks=["S12.4", "codec.S4.1.header"])
    assert {result.id for result in asked.results if result.status == "not covered"} == {"S12.4"}


def test_the_table_of_clauses_has_every_heading_of_the_specification():
    headings = re.findall(
        r"^##+ (S[\d.]+) .* \{ #(\S+) \}$", (ROOT / "docs" / "spec.md").read_text(), re.MULTILINE
    )
    assert all(anchor == clause.lower().replace(".", "-") for clause, anchor in headings)
    names = [clause for clause, _ in headings]
    parents = {name.partition(".")[0] for name in names if "." in name}
    with_checks = {check.clause for check in all_checks().values()}
    assert list(CLAUSES) == [name for name in names if name not in parents or name in with_checks]


def test_nothing_ran_is_not_passed():
    report = run_conformance(type("Empty", (), {"samplers": object()})(), ["kernels"])
    assert not report.passed
    assert not report.ran
    assert "NOTHING RAN" in str(report)
    assert {result.message for result in report.results if result.status == "skipped"} == {
        "the target has no kernels"
    }


def test_capabilities_limit_dtypes():
    class Narrow(ReferenceBackend):
        capabilities = {"dtypes": [torch.float32, "float16"]}

    ran = {result.id: result.status for result in on(Narrow()).results}
    assert {name for name, status in ran.items() if status == "passed"} == {
        f"{ADD}[float16]",
        f"{ADD}[float32]",
    }
    assert {name for name, status in ran.items() if status == "skipped"} == {
        f"{ADD}[bfloat16]",
        f"{ADD}[float64]",
    }


@pytest.mark.parametrize("capabilities", [{"dtype": []}, ["float32"], {"dtypes": ["float33"]}])
def test_capabilities_that_say_nothing_are_refused(capabilities):
    with pytest.raises(ValueError, match="capabilities"):
        run_conformance(type("Odd", (ReferenceBackend,), {"capabilities": capabilities})())


def test_a_target_may_be_any_object_with_some_kernels():
    class OnlyAdd:
        def add_(self, x, y):
            x.copy_((x.double() + y.double()).float() if x.dtype is torch.float32 else x + y)

    report = run_conformance(type("Target", (), {"kernels": OnlyAdd()})(), checks=[ONE, OTHER])
    by_id = {result.id: result for result in report.results}
    assert by_id[ONE].status == "passed"
    assert by_id[OTHER].message == "the target's kernels has no subtract_"


@pytest.mark.proof
def test_known_failures_are_strict():
    class HalfWrong(ReferenceBackend):
        def _add_(self, x, y):
            super()._add_(x, y)
            if x.dtype is torch.bfloat16:
                x += 1

    exact = on(HalfWrong(), xfail=[f"{ADD}[bfloat16]"])
    assert exact.passed
    assert exact.counts() == {"passed": 3, "xfailed": 1}
    coarse = on(HalfWrong(), xfail=[ADD])
    assert not coarse.passed
    assert coarse.counts() == {"xpassed": 3, "xfailed": 1}
    assert not on("reference", xfail=[ADD]).passed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"xfail": ["kernels.S1.ad"]},
            "xfail: 'kernels.S1.ad' is unknown; closest are 'kernels.S1.add'",
        ),
        ({"suites": ["kernel"]}, "suites: 'kernel' is unknown; closest are 'kernels'"),
        ({"profile": "fast"}, "profile"),
        ({"checks": ["S99"]}, "checks"),
        ({"jobs": -1}, "jobs=-1"),
    ],
)
def test_what_is_not_known_is_refused(options, words):
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        run_conformance("reference", **options)


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("no such", ValueError),
        (3, TypeError),
        ("os:nothing", AttributeError),
        ("no.such:X", ImportError),
    ],
)
def test_a_target_that_is_none_is_refused(target, error):
    with pytest.raises(error):
        run_conformance(target)


def test_fail_fast_skips_the_rest():
    report = run_conformance(hostile.Raises(), ["kernels"], fail_fast=True, shrink=False)
    assert len(report.failures()) >= 1
    assert any("fail_fast" in result.message for result in report.results)


def test_the_same_seed_gives_the_same_inputs():
    class Remembers(ReferenceBackend):
        def __init__(self):
            self.seen = []

        def _add_(self, x, y):
            self.seen.append((x.tolist(), y.tolist()))
            super()._add_(x, y)

    def inputs(seed):
        backend = Remembers()
        assert on(backend, f"{ADD}[float16]", seed=seed, jobs=0).passed
        return repr(backend.seen)  # compared as text, as NaN differs from NaN

    assert inputs(1) == inputs(1) != inputs(2)


# Reports


def test_reports_as_json_and_junit(tmp_path):
    report = on(
        hostile.ReturnsNaN(), "kernels.S3.4.average", progress=lambda done, total, result: None
    )
    report.write(json_path=tmp_path / "r.json", junit_path=tmp_path / "r.xml")
    read = json.loads((tmp_path / "r.json").read_text())
    assert read["passed"] is False
    assert {"specification", "vectors", "bagua_ref"} <= read["versions"].keys()
    assert read["results"][0]["counterexample"].startswith(("import torch", "from math"))
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert (
        suite.get("failures")
        == str(len(report.failures()))
        == str(len(suite.findall("testcase/failure")))
    )
    assert len(suite.findall("testcase")) == int(suite.get("tests"))


def test_junit_can_hold_whatever_a_message_says():
    report = Report(
        "t", [Result("a", "kernels", "S1", "failed", message="\x00\x1b[31m <&>")], "quick", 0
    )
    failure = ElementTree.fromstring(report.to_junit()).find(".//failure")
    assert failure is not None
    assert "<&>" in f"{failure.get('message')} {failure.text}"


def test_ids_are_stable():
    """A change of this list can fail an implementation that passed before; note it in CHANGELOG
    under Conformance.
    """
    assert set(check_ids()) == set((ROOT / "tests" / "conformance_ids.txt").read_text().split())


# The command


def test_verify_passes_fails_and_says_when_it_cannot_run(tmp_path, capsys):
    assert (
        main(
            [
                "verify",
                "--backend",
                "reference",
                "--check",
                ONE,
                "--json-file",
                str(tmp_path / "r.json"),
            ]
        )
        == 0
    )
    assert json.loads((tmp_path / "r.json").read_text())["passed"] is True
    assert "PASSED: reference" in capsys.readouterr().out
    assert main(["verify", "--backend", "reference", "--check", ONE, "--check", OTHER]) == 0
    shown = capsys.readouterr().out
    assert ADD in shown
    assert SUBTRACT in shown
    assert main(["verify", "--backend", "tests.hostile_backends:Raises", "--check", ONE]) == 1
    shown = capsys.readouterr()
    assert "out of cheese" in shown.out
    assert "failed" in shown.err
    for arguments in (
        ["--backend", "no-such"],
        ["--backend", "tests.hostile_backends:NoSuch"],
        ["--backend", "reference", "--suite", "samplers"],
        ["--backend", "reference", "--check", ONE, "--json-file", str(tmp_path / "no" / "such")],
        ["--backend", "reference", "--check", ONE, "--junit", str(tmp_path / "no" / "such")],
    ):
        assert main(["verify", *arguments]) == 2, arguments
    capsys.readouterr()
    for arguments in (
        [],
        ["--backend", "reference", "--suite", "kernel"],
        ["--backend", "reference", "--xfails", str(tmp_path / "none")],
        ["--backend", "reference", "--check", "no-such"],
        ["--backend", "reference", "--jobs", "-1"],
        ["--backend", "reference", "--time-limit", "0"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["verify", *arguments])
        assert capsys.readouterr().err.startswith("usage: bagua-ref verify ")


def test_verify_prints_nothing_but_json_whatever_the_implementation_prints(capfd):
    assert (
        main(["verify", "--backend", "tests.hostile_backends:Prints", "--check", ONE, "--json"])
        == 0
    )
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    assert (found["passed"], {result["status"] for result in found["results"]}) == (
        True,
        {"passed"},
    )
    assert "look at me" in printed.err


def test_verify_reads_known_failures(tmp_path, capsys):
    known = tmp_path / "xfails"
    known.write_text(f"# broken since May\n{ADD}  # all of it\n\n")
    assert (
        main(
            [
                "verify",
                "--backend",
                "tests.hostile_backends:Raises",
                "--check",
                ONE,
                "--xfails",
                str(known),
            ]
        )
        == 0
    )
    assert main(["verify", "--backend", "reference", "--check", ONE, "--xfails", str(known)]) == 1
    known.write_text("kernels.S1.nothing\n")
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "--backend", "reference", "--xfails", str(known)])
    assert "line 1: no check is called 'kernels.S1.nothing'" in capsys.readouterr().err


def test_verify_ends_also_where_a_thread_hangs():
    command = [
        "verify",
        "--backend",
        "tests.hostile_backends:Sleeps",
        "--check",
        ONE,
        "--jobs",
        "0",
        "--time-limit",
        "1",
    ]
    ran = run_script(f"import sys; from bagua_ref.cli import main; sys.exit(main({command}))")
    assert ran.returncode == 1, ran.stderr
    assert "no answer within 1 s" in ran.stdout


def test_without_hypothesis_the_error_says_what_to_install():
    code = (
        "import sys\n"
        "from bagua_ref.cli import main\n"
        "sys.modules['hypothesis'] = None\n"
        "sys.exit(main(['verify', '--backend', 'reference']))"
    )
    ran = run_script(code)
    assert ran.returncode == 2, ran.stderr
    assert (
        f"conformance checks need Hypothesis; install with: pip install -e '{ROOT}[conformance]'"
        in ran.stderr
    )


# The pytest plugin and suites


def pytest_in(folder, *arguments):
    command = ["-q", "-p", "no:cacheprovider", *arguments]
    script = (
        f"import os, pytest, sys; os.chdir({str(folder)!r}); sys.exit(pytest.main({command!r}))"
    )
    ran = run_script(script, {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, limit=250)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize("failing", [hostile.Raises, hostile.Leaves])
def test_checks_of_a_suite_share_a_process_until_one_fails(failing, tmp_path):
    class Fails(ReferenceBackend):
        def _add_(self, x, y):
            with log.open("a") as file:
                print(os.getpid(), file=file)
            if x.dtype is torch.float16:
                failing._add_(self, x, y)
            super()._add_(x, y)

    def processes(dtype):
        log.write_text("")
        assert runs.run(target, all_checks()[ADD], dtype, Search()).passed == (dtype != "float16")
        return set(log.read_text().split())

    runs, log, backend = OneByOne(), tmp_path / "log", Fails()
    target = runs.resolve(backend)
    assert runs.resolve(backend) is target
    first, second, failed, third = map(processes, ("float32", "float64", "float16", "float32"))
    assert len(first) == 1
    assert first == second <= failed
    # what ends a process is tried again, in others
    assert (first == failed) == (failing is hostile.Raises)
    assert len(third) == 1
    assert third.isdisjoint(failed)
    runs.stop()
    assert multiprocessing.active_children() == []


def test_few_processes_are_kept_if_there_is_a_target_for_each_check():
    runs = OneByOne()
    for _ in range(MOST_JOBS + 2):
        assert runs.run(
            runs.resolve(ReferenceBackend()), all_checks()[ADD], "float32", Search()
        ).passed
    assert len(multiprocessing.active_children()) == MOST_JOBS
    runs.stop()
    assert multiprocessing.active_children() == []


def test_a_process_does_not_outlive_its_check_if_the_target_is_external():
    runs = OneByOne()
    target = runs.resolve(SimpleNamespace(kernels="reference", capabilities={"external": True}))
    assert runs.run(target, all_checks()[ADD], "float32", Search()).passed
    assert multiprocessing.active_children() == []


@pytest.mark.proof
def test_the_plugin_needs_no_test_file(tmp_path):
    plugin = ["-p", "bagua_ref.conformance.run.pytest_plugin"]
    (tmp_path / "xfails").write_text(f"{ADD}[float32]\n")
    backend = [*plugin, "--bagua-backend=tests.hostile_backends:Raises", "--bagua-xfails=xfails"]
    found, output = pytest_in(tmp_path, *backend, "-k", "S1.add[float16] or S1.add[float32]")
    assert (found, "1 xfailed" in output, "out of cheese" in output) == (1, True, True), output
    (tmp_path / "xfails").write_text("no.such\n")
    found, output = pytest_in(tmp_path, *backend)
    assert (found, "no check is called 'no.such'" in output) == (4, True), output

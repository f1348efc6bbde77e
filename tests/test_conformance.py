"""Tests of the conformance house as users see it: verdicts, reports, the command and the pytest
plugin.
"""

from __future__ import annotations

import json
import os
import re
import threading
from xml.etree import ElementTree

import pytest
import torch
from tests import hostile_backends as hostile
from tests.launch import run_script
from tests.scripts import ROOT, run_python

from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.cli import main
from bagua_ref.conformance import Report, Result, run_conformance
from bagua_ref.conformance.checks.registry import all_checks
from bagua_ref.conformance.clauses import CLAUSES
from bagua_ref.conformance.run.runner import check_ids
from bagua_ref.conformance.run.search import PROFILES

pytestmark = pytest.mark.slow
pytest_plugins = "pytester"

ADD, SUBTRACT = "kernels.S1.add", "kernels.S1.subtract"
ONE, OTHER = f"{ADD}[float16]", f"{SUBTRACT}[float16]"


def on(target, check=ADD, **options):
    """Run one check."""
    return run_conformance(target, checks=[check], **options)


# Verdicts


@pytest.mark.parametrize("what", hostile.DISHONEST)
def test_a_target_that_misbehaves_gets_the_right_verdict(what):
    target, check, status, said = hostile.DISHONEST[what]
    check = next(name for name in check_ids() if check in name)
    (result,) = [row for row in on(target, check, shrink=False).results if row.id == check]
    assert result.status == status, result
    assert said in result.message


def test_a_run_in_this_process_leaves_no_thread():
    before = {*threading.enumerate()}
    assert on("reference", ONE, jobs=0).passed
    left = {*threading.enumerate()} - before
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left)


CRASHED, HUNG, ONCE, PRINTS = (
    "kernels.S5.5.update_momentum",
    "kernels.S3.7.reduce_chunks",
    "codec.S12.1.ties_MXFP8",
    "kernels.S2.3.scatter_flat",
)
DEADLY = {
    CRASHED: "update_momentum_ ended the process: Segmentation fault",
    HUNG: "reduce_chunks_: no answer within 4 s",
    ONCE: "MXFP8.compress ended the process, but not when all inputs were tried again",
}


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_target_that_ends_the_process_gets_the_right_verdict(tmp_path):
    (tmp_path / "xfails").write_text(f"# known\n{ADD}[float64]  # in one dtype\n\n")
    command = "-m bagua_ref.cli verify --target tests.hostile_backends:Deadly --time-limit 4"
    checks = ["--json", "--jobs", "1", "--junit", tmp_path / "r.xml"]
    checks += ["--xfails", tmp_path / "xfails", "--check", ADD, PRINTS, *DEADLY]
    ran = run_python(*command.split(), *checks, limit=550, CRASHED=str(tmp_path / "crashed"))
    report, junit = json.loads(ran.stdout), ElementTree.parse(tmp_path / "r.xml").getroot()
    assert ran.returncode == 1
    of: dict[str, list[dict[str, str]]] = {}
    for row in report["results"]:
        of.setdefault(row["id"].partition("[")[0], []).append(row)
    assert {row["status"] for row in of[PRINTS]} == {"passed"}
    for check, said in DEADLY.items():
        (first,) = (row for row in of[check] if row["status"] == "failed")
        assert said in first["message"]
        assert ("= torch.tensor([" in first["counterexample"]) == (check != ONCE)
        others = {(row["status"], row["message"]) for row in of[check] if row is not first}
        assert others == {("not tried", f"{said.partition(',')[0]}, for another dtype")}
    counts = report["counts"]
    assert (counts["failed"], counts["xpassed"], counts["not tried"]) == (3, 1, 8)
    assert int(junit.get("failures")) == 4 == len(junit.findall(".//failure"))
    assert len(junit.findall("testcase")) == int(junit.get("tests")) == len(report["results"])


def test_a_call_that_hangs_in_this_process_is_left_behind():
    class Waits(ReferenceBackend):
        def _add_(self, x, y):
            event.wait()

    event = threading.Event()
    report = on(Waits(), time_limit=1.0)
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith(ADD):
            thread.join()
    (failed,), others = report.failures(), report.results[1:]
    assert failed.message == "add_: no answer within 1 s"
    assert {(other.status, other.message) for other in others} == {
        ("not tried", f"{failed.message}, for another dtype")
    }


def test_failures_of_one_cause_are_one_group():
    class Raises(ReferenceBackend):
        def _add_(self, x, y):
            raise RuntimeError(f"no card {x.numel()}")

        def _subtract_(self, x, y):
            raise RuntimeError(f"no card {x.numel() + 100}")

        def _average_(self, x, y):
            x.zero_()

    report = run_conformance(Raises(), checks=[ADD, SUBTRACT, "kernels.S3.4.average"], shrink=False)
    assert [len(group) for group in report.causes()] == [8, 4]
    assert "7 more of this cause: kernels.S1.add[bfloat16]" in str(report)


def test_a_counterexample_is_small():
    class Off(ReferenceBackend):
        def _add_(self, x, y):
            super()._add_(x, y)
            x[x > 100] += 1

    (failed,) = on(Off(), ONE).failures()
    assert "1 of 1 elements differ" in failed.message
    assert failed.counterexample.count(",") < 15


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
    (shown,) = (line for line in str(report).splitlines() if line[7:].startswith("not covered"))
    assert set(shown[7:].removeprefix("not covered").replace(",", " ").split()) == missing
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

    for target in (type("Target", (), {"kernels": OnlyAdd()})(), OnlyAdd(), OnlyAdd):
        one, other = run_conformance(target, checks=[ONE, OTHER]).results
        assert one.status == "passed"
        assert other.message == "the target's kernels has no subtract_"


def test_known_failures_are_strict(monkeypatch):
    class HalfWrong(ReferenceBackend):
        def _add_(self, x, y):
            super()._add_(x, y)
            if x.dtype is torch.bfloat16:
                x += 1

    monkeypatch.setitem(PROFILES, "quick", 2)
    exact = on(HalfWrong(), xfail=[f"{ADD}[bfloat16]"], shrink=False)
    assert exact.passed
    assert exact.counts() == {"passed": 3, "xfailed": 1}
    coarse = on(HalfWrong(), xfail=[ADD], shrink=False)
    assert not coarse.passed
    assert coarse.counts() == {"xpassed": 3, "xfailed": 1}


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


def test_verify_says_when_it_cannot_run(tmp_path, capsys):
    for arguments in (
        ["--backend", "no-such"],
        ["--backend", "tests.hostile_backends:NoSuch"],
        ["--backend", "reference", "--suite", "samplers"],
    ):
        assert main(["verify", *arguments]) == 2, arguments
    capsys.readouterr()
    (tmp_path / "xfails").write_text("\nkernels.S1.nothing\n")
    for arguments, said in (
        ([], "one of --backend"),
        (["--backend", "reference", "--suite", "kernel"], "invalid choice"),
        (["--backend", "reference", "--xfails", str(tmp_path / "none")], "no such file"),
        (
            ["--backend", "reference", "--xfails", str(tmp_path / "xfails")],
            "line 2: no check is called 'kernels.S1.nothing'",
        ),
        (["--backend", "reference", "--check", "no-such"], "'no-such' is unknown"),
        (["--backend", "reference", "--jobs", "0"], "must be an integer from 1"),
        (["--backend", "reference", "--time-limit", "0"], "--time-limit"),
    ):
        assert main(["verify", *arguments]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("bagua-ref verify: error: ")
        assert said in shown


@pytest.mark.proof
def test_verify_says_what_no_worker_has_reported(tmp_path, monkeypatch, capsys):
    """A worker that cannot even load the target reports nothing, which is an error; as is a file
    that cannot be written.
    """
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "once.py").write_text(
        "import os\n"
        "from bagua_ref.backends.reference import ReferenceBackend as Kernels\n"
        "assert 'PYTEST_DISABLE_PLUGIN_AUTOLOAD' not in os.environ, 'not here'\n"
    )
    command = ["verify", "--backend", "once:Kernels", "--check", ONE, "--jobs", "1"]
    assert main([*command, "--junit", str(tmp_path / "no" / "such")]) == 2
    shown = capsys.readouterr()
    assert "no worker has reported it" in shown.out
    assert "not here" in shown.out
    assert "NOTHING RAN: once:Kernels: 1 error" in shown.out
    assert "cannot write" in shown.err


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
        f"bagua-ref verify needs hypothesis; install with: pip install -e '{ROOT}[conformance]'"
        in ran.stderr
    )


# The pytest plugin


def test_the_plugin_needs_no_test_file(pytester, monkeypatch):
    """The release check runs it from a wheel."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    known = pytester.makefile(".txt", f"{ADD}[float32]")
    options = ["-c", os.devnull, "-p", "no:cacheprovider", "-p", "bagua_ref_pytest"]
    options += ["--bagua-backend=tests.hostile_backends:Raises", f"--bagua-xfails={known}"]
    options += ["--bagua-check=S1", "-k", "S1.add[float16] or S1.add[float32]"]
    ran = pytester.runpytest_inprocess(*options)
    ran.assert_outcomes(failed=1, xfailed=1)
    ran.stdout.fnmatch_lines(["*kernels.S1.add[[]float16]*", "*out of cheese*"])


def test_the_plugin_brings_no_torch():
    ran = run_python("-c", "import bagua_ref_pytest, sys; sys.exit('torch' in sys.modules)")
    assert ran.returncode == 0

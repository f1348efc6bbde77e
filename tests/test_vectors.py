"""Tests of golden vectors: the committed files equal a fresh export, wrong outputs are detected,
and the C client passes.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file
from tests import oracle_c
from tests.oracle_c import VECTORS

from bagua_ref.cli import main
from bagua_ref.conformance.cases.case import Case
from bagua_ref.conformance.cases.table import all_cases
from bagua_ref.conformance.cases.tensor_files import (
    DamagedFileError,
    read_safetensors,
    write_safetensors,
)
from bagua_ref.conformance.vectors import check_program, export_vectors

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VECTORS / "manifest.json").read_text())
    return found


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return list(all_cases())


# Committed files


def test_a_fresh_export_is_what_is_committed(
    tmp_path: Path, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    # whose expected outputs are computed once for all tests
    monkeypatch.setattr("bagua_ref.conformance.vectors.files.all_cases", lambda: cases)
    export_vectors(tmp_path)
    names = sorted(path.name for path in VECTORS.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    changed = [
        name for name in names if (VECTORS / name).read_bytes() != (tmp_path / name).read_bytes()
    ]
    assert not changed, (
        "once released, vectors must not change: what gives other results is a new version"
    )
    assert sum(path.stat().st_size for path in VECTORS.iterdir()) <= 6 * 2**20


def test_the_manifest_matches_its_schema_and_lists_every_tensor(manifest: dict[str, Any]) -> None:
    schema = json.loads((VECTORS / "manifest.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(manifest)
    listed = defaultdict(set)
    for case in manifest["cases"]:
        for kind, names in (("inputs", case["inputs"]), ("expected", case["outputs"])):
            listed[f"{case['suite']}.{kind}.safetensors"] |= {f"{case['id']}:{x}" for x in names}
    for file in manifest["files"]:
        assert load_file(VECTORS / file["name"]).keys() == listed.pop(file["name"])
    assert not listed


def test_every_case_has_a_name_of_its_own_and_every_clause_edge_values(cases: list[Case]) -> None:
    assert len({case.id for case in cases}) == len(cases)
    flags = defaultdict(set)
    for case in cases:
        flags[case.operation.partition("/")[0]].add(case.flag)
    plain = {"algorithms", "local_updates"}  # of which some rows have no other numbers
    assert all(found == {"valid", "edge"} for suite, found in flags.items() if suite not in plain)
    assert {case.tolerance.partition("(")[0] for case in cases} == {"EXACT", "ULP", "SUM"}


def test_chunks_are_poisoned_where_the_clause_says_so(cases: list[Case]) -> None:
    for case in cases:
        if case.operation == "codecs/decompress" and "every-code" not in case.id:
            poisoned = bool(case.outputs["x"].isnan().any())
            clause = "special" in case.id or case.clause in ("S4.4", "S12.3")
            assert poisoned == clause, case.id


def test_the_page_lists_every_operation(manifest: dict[str, Any]) -> None:
    page = (oracle_c.ROOT / "docs" / "vectors.md").read_text()
    names = {
        name
        for case in manifest["cases"]
        for name in (case["operation"], *case["parameters"], *case["outputs"])
        if name not in ("t2", "t3")  # as t0, t1
    }
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


# Verdicts

CASE = "kernels/add/float32/plain:x"
CODEC = "codecs/compress/float32/nan-last-MinMaxUInt8:payload"
SPECIAL, ZEROS = "kernels/add/float32/special:x", "kernels/add/float32/zeros:x"


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Return a folder of correct outputs."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    for path in VECTORS.glob("*.expected.safetensors"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def check(
    capsys: pytest.CaptureFixture[str],
    outputs: Path,
    cases: list[Case],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, str]]:
    """Return a function that checks outputs and returns the exit code and the printed text."""
    monkeypatch.setattr("bagua_ref.conformance.vectors.files.all_cases", lambda: cases)

    def run(*more: str, outputs: Path | None = outputs) -> tuple[int, str]:
        code = main(["vectors", "check", *([str(outputs)] if outputs else []), *more])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def change(outputs: Path, suite: str, edit: Callable[[Tensors], object]) -> None:
    """Edit one file of outputs with the safetensors package."""
    path = outputs / f"{suite}.expected.safetensors"
    found = load_file(path)
    edit(found)
    save_file(
        {name: x.clone(memory_format=torch.contiguous_format) for name, x in found.items()}, path
    )


def test_right_outputs_pass(check: Any, cases: list[Case]) -> None:
    code, printed = check()
    assert code == 0, printed
    assert f"PASSED: {len(cases)} passed, 0 failed, 0 missing, 0 problems" in printed
    assert "specification 1.1" in printed


@pytest.mark.parametrize(
    ("suite", "edit", "message"),
    [
        (
            "kernels",
            lambda t: t[CASE].view(torch.int32)[3].add_(1),
            "1 of 33 elements differ (tolerance EXACT); first at (3,)",
        ),
        (
            "kernels",
            lambda t: t.pop(CASE),
            "S1 kernels/add/float32/plain [valid]: missing: no output x",
        ),
        (
            "kernels",
            lambda t: t.update({CASE: t[CASE].double()}),
            "x: torch.float64 of shape (33,) instead of torch.float32",
        ),
        (
            "kernels",
            lambda t: t.update({CASE: t[CASE].view(3, 11)}),
            "x: torch.float32 of shape (3, 11) instead of",
        ),
        (
            "kernels",
            lambda t: t.update(mine=t[CASE]),
            "kernels.expected.safetensors: mine: extra: no case has such an output",
        ),
        (
            "kernels",
            lambda t: t.update({f"{CASE}2": t[CASE]}),
            f"{CASE}2: extra: no case has such an output",
        ),
        (
            "samplers",
            lambda t: t.update({CASE: torch.zeros(33)}),
            f"{CASE}: given twice: it is also in kernels.expected",
        ),
        (
            "codecs",
            lambda t: t[CODEC][2].fill_(0xC1),
            "S4.4 codecs/compress/float32/nan-last-MinMaxUInt8 [edge]: payload",
        ),
    ],
    ids=["value", "missing", "dtype", "shape", "extra", "of a case", "twice", "bits of a NaN"],
)
def test_a_wrong_output_fails(
    check: Any, outputs: Path, suite: str, edit: Any, message: str
) -> None:
    change(outputs, suite, edit)
    code, printed = check("--only", "kernels/add/float32", "nan-last")
    assert code == 1
    assert message in printed
    assert "FAILED" in printed


def test_files_that_have_no_place_and_damaged_ones_fail(check: Any, outputs: Path) -> None:
    path = outputs / "codecs.expected.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (outputs / "notes.txt").write_text("hello")
    code, printed = check("--only", "kernels/add/")
    assert code == 1
    assert "codecs.expected.safetensors: not a complete safetensors file" in printed
    assert "notes.txt: foreign: only *.safetensors files" in printed
    for found in outputs.iterdir():
        found.unlink()
    code, printed = check("--only", "kernels/add/")
    assert code == 1
    assert "FAILED: 0 passed, 0 failed," in printed


def test_json_has_every_case(check: Any, outputs: Path, cases: list[Case]) -> None:
    change(outputs, "kernels", lambda t: t.pop(CASE))
    report = outputs.parent / "report.json"
    code, printed = check("--json", "--json-file", str(report))
    found = json.loads(printed)
    assert json.loads(report.read_text()) == found
    assert (code, found["passed"]) == (1, False)
    assert found["counts"] == {"passed": len(cases) - 1, "failed": 0, "missing": 1}
    assert len(found["cases"]) == len(cases)
    (wrong,) = [case for case in found["cases"] if case["status"] != "passed"]
    assert (wrong["id"], wrong["clause"], wrong["message"]) == (
        "kernels/add/float32/plain",
        "S1",
        "missing: no output x",
    )


def test_a_selection_asks_for_its_cases_only(check: Any, outputs: Path) -> None:
    change(outputs, "kernels", lambda t: t[CASE].zero_())
    code, printed = check("--only", "shift_one_peer", "average")
    assert code == 0
    assert "not selected" in printed
    assert check("--only", "/float16/")[0] == 0
    assert check("--only", "/add/", "--only", "/float32/")[0] == 1


def test_what_cannot_be_checked_is_said(check: Any, outputs: Path) -> None:
    assert check(outputs=outputs / "nowhere")[0] == 2
    code, printed = check("--only", "adds")
    assert (code, "no case's id contains 'adds'" in printed) == (2, True)
    assert check("--only", "shift_one_peer", "--only", "float16")[0] == 2
    code, printed = check("--command", "x")
    assert (code, "name a folder of outputs, or a program" in printed) == (2, True)
    assert check(outputs=None)[0] == 2


def test_export_leaves_other_files_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bagua_ref.conformance.vectors.files.all_cases", list)
    (tmp_path / "mine").write_text("x")
    assert main(["vectors", "export", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert main(["vectors", "export", str(tmp_path / "mine")]) == 2
    capsys.readouterr()
    new = tmp_path / "new"
    assert main(["vectors", "export", str(new), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"directory": str(new), "vectors_version": "3", "cases": 0}


def test_the_sign_of_a_zero_counts_and_the_bits_of_a_nan_do_not(check: Any, outputs: Path) -> None:
    def other_nan(found: Tensors) -> None:
        x = found[SPECIAL]
        assert x.isnan().any()
        found[SPECIAL] = torch.where(
            x.isnan(), torch.tensor(-1, dtype=torch.int32).view(torch.float32), x
        )

    change(outputs, "kernels", other_nan)
    assert check("--only", "kernels/add/")[0] == 0
    change(outputs, "kernels", lambda t: t.update({ZEROS: -t[ZEROS]}))
    assert check("--only", "kernels/add/")[0] == 1


# Files


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    data = write_safetensors(path, {"a": torch.arange(3), "b": torch.zeros(2)})
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedFileError, match="not a complete safetensors file"):
            read_safetensors(path)


def test_a_dtype_that_torch_lacks_is_named(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(DamagedFileError, match="F6_E2M3"):  # safetensors 0.4 has its own words
        read_safetensors(path)


# Programs


@pytest.mark.proof
def test_the_client_in_c_passes(tmp_path: Path, cases: list[Case]) -> None:
    oracle_c.need_compiler()
    program = str(oracle_c.build(tmp_path))
    only = [["codecs/"], ["MinMaxUInt8"]]
    report = check_program(program, only=only)
    assert report.passed, report.as_json()
    assert len(report.verdicts) > 300
    report = check_program(program, only=[["bfloat16/plain"]])
    assert {verdict.case.id for verdict in report.verdicts if verdict.status == "passed"} == {
        case.id
        for case in cases
        if "bfloat16/plain" in case.id
        and (case.operation.startswith("kernels/add") or case.id.endswith("plain-MinMaxUInt8"))
    }
    assert (report.count("failed"), report.passed) == (0, False)


@pytest.mark.proof
def test_the_program_in_javascript_passes() -> None:
    if shutil.which("node") is None:
        pytest.skip("needs node")
    program = f"node {shlex.quote(str(oracle_c.ROOT / 'examples' / 'oracle_js' / 'serve.mjs'))}"
    only = [["codecs/", "kernels/"], ["MinMaxUInt8", "kernels/"]]
    report = check_program(program, only=only)
    assert report.passed, report.as_json()
    assert len(report.verdicts) > 800


ANSWERS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    x = request["tensors"]["x"]
    answers = {"kernels/add": {"tensors": {"x": x}}, "kernels/subtract": {"error": "no cheese"}}
    print(json.dumps({"id": request["id"], **answers[request["call"]]}), flush=True)
"""


def test_a_program_is_asked_for_each_case(check: Any, tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text(ANSWERS)
    program = ["--command", f"{shlex.quote(sys.executable)} {tmp_path}/answers.py"]
    code, printed = check(*program, "--only", "kernels/add/", "kernels/sub", outputs=None)
    assert (code, "FAILED: 4 passed, 24 failed, 28 missing" in printed) == (1, True), printed
    assert "S1 kernels/add/float16/plain [valid]: x: 33 of 33 elements differ" in printed
    _, printed = check(*program, "--only", "kernels/subtract/", outputs=None)
    assert "answered kernels/subtract with an error: no cheese" in printed
    code, printed = check(*program, "--only", "kernels/average/", outputs=None)
    assert (code, "the program has ended with exit code 1" in printed) == (2, True)
    assert "KeyError: 'kernels/average'" in printed

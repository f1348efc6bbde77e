"""Tests of golden vectors: the committed files equal a fresh export, wrong outputs are detected,
and the C client passes.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file
from tests import oracle_c
from tests.oracle_c import OPERATIONS, VECTORS

from bagua_ref.backends import get_backend, get_codec
from bagua_ref.base.not_provided import install_command
from bagua_ref.cli import main
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.cases.tensor_files import (
    CODES,
    DamagedFileError,
    name_of,
    read_safetensors,
    write_safetensors,
)
from bagua_ref.conformance.vectors import (
    VECTORS_VERSION,
    VectorsError,
    answers,
    check_outputs,
    export_vectors,
    read_manifest,
)
from bagua_ref.conformance.vectors.case import canonical
from bagua_ref.conformance.vectors.files import (
    manifest_text,
    read_vectors,
    schema_text,
    tolerance_named,
)

SUITES = (
    "codec",
    "comm_ops",
    "kernels",
    "peers",
    "qadam",
    "samplers",
    "graphs",
    "local_updates",
    "codecs",
    "compressed_gradients",
    "collectives",
    "algorithms",
)

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return read_manifest(VECTORS)


@pytest.fixture(scope="module")
def tensors(manifest: dict[str, Any]) -> dict[str, Tensors]:
    return read_vectors(VECTORS, manifest)


def of_one_dtype(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each case in one of its dtypes, which take turns."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        alike.setdefault(case["id"].replace(f"/{case['dtype']}/", "/"), []).append(case)
    return [of_dtypes[place % len(of_dtypes)] for place, of_dtypes in enumerate(alike.values())]


def wrong_answers(
    suite: str,
    manifest: dict[str, Any],
    tensors: dict[str, Tensors],
    choose: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    solve: Callable[..., Tensors] = answers.answer,
) -> Iterator[str]:
    """Yield a message for each output of a suite that ``solve`` gives otherwise."""
    inputs = tensors[f"{suite}.inputs.safetensors"]
    expected = tensors[f"{suite}.expected.safetensors"]
    for case in choose([case for case in manifest["cases"] if case["suite"] == suite]):
        given = {entry["name"]: inputs[entry["tensor"]] for entry in case["inputs"]}
        found = solve(suite, case["operation"], case["dtype"], case["parameters"], given)
        for output in case["outputs"]:
            try:
                assert_equal(
                    found[output["name"]],
                    expected[output["tensor"]],
                    tolerance_named(case["tolerance"]),
                    magnitude=inputs.get(output.get("magnitude")),
                )
            except AssertionError as error:
                yield f"{output['tensor']}: {error}"


# Committed files


@pytest.mark.proof
def test_a_fresh_export_is_what_is_committed(tmp_path: Path) -> None:
    count, names = (
        export_vectors(tmp_path / "fresh"),
        sorted(path.name for path in VECTORS.iterdir()),
    )
    assert names == sorted(path.name for path in (tmp_path / "fresh").iterdir())
    changed = [
        name
        for name in names
        if (VECTORS / name).read_bytes() != (tmp_path / "fresh" / name).read_bytes()
    ]
    assert not changed, (
        "once released, vectors must not change: what gives other results is a new version"
    )
    assert count == len(read_manifest(VECTORS)["cases"])


def test_they_are_small_and_complete(manifest: dict[str, Any]) -> None:
    assert sum(path.stat().st_size for path in VECTORS.iterdir()) <= 6 * 2**20
    files = {f"{suite}.{kind}.safetensors" for suite in SUITES for kind in ("inputs", "expected")}
    assert {path.name for path in VECTORS.iterdir()} == {
        *files,
        "manifest.json",
        "manifest.schema.json",
    }
    assert {entry["name"] for entry in manifest["files"]} == files
    assert {flag for case in manifest["cases"] for flag in case["flags"]} == {
        "valid",
        "edge",
        "poison",
    }
    assert {case["tolerance"].partition("(")[0] for case in manifest["cases"]} == {
        "EXACT",
        "ULP",
        "SUM",
    }


def test_the_schema_is_one_and_is_committed() -> None:
    Draft202012Validator.check_schema(json.loads(schema_text()))
    assert (VECTORS / "manifest.schema.json").read_text("utf-8") == schema_text()


def test_the_page_lists_every_operation(manifest: dict[str, Any]) -> None:
    page = (oracle_c.ROOT / "docs" / "reference" / "vectors.md").read_text()
    named = {
        name for case in manifest["cases"] for name in (case["operation"], *case["parameters"])
    }
    assert [name for name in named if f"`{name}`" not in page] == []


@pytest.mark.parametrize("suite", SUITES)
def test_the_files_alone_are_enough_to_compute_every_case(
    suite: str, manifest: dict[str, Any], tensors: Any
) -> None:
    # a fresh export computes all
    assert list(wrong_answers(suite, manifest, tensors, of_one_dtype)) == []


def test_no_nan_has_bits_of_its_own(tensors: Any) -> None:
    for file in tensors.values():
        for name, x in file.items():
            if x.dtype.is_floating_point and x.numel():
                assert torch.equal(
                    x.reshape(-1).view(torch.uint8), canonical(x).reshape(-1).view(torch.uint8)
                ), name


def by_the_package(
    suite: str, operation: str, dtype: str, parameters: dict[str, Any], x: Tensors
) -> Tensors:
    kernels = get_backend("reference")
    if operation == "order_by_complexity":
        return {"order": kernels.order_by_complexity(x["keys"])}
    if operation == "gather_flat":
        flat = torch.empty(sum(t.numel() for t in x.values()), dtype=getattr(torch, dtype))
        kernels.gather_flat(list(x.values()), flat)
        return {"flat": flat}
    if operation == "scatter_flat":
        parts = [torch.empty(shape, dtype=x["flat"].dtype) for shape in parameters["shapes"]]
        kernels.scatter_flat(x["flat"], parts)
        return {f"t{place}": part for place, part in enumerate(parts)}
    if suite == "kernels":
        first, *others = (value.clone() for value in x.values())
        getattr(kernels, f"{operation}_")(first, *others, **parameters)
        return {"x": first}
    codec, num_chunks = parameters.get("codec", "MinMaxUInt8"), parameters["num_chunks"]
    codec, found = get_codec(codec, "reference"), dict(x)
    if "x" in x:
        before = x["payload"].clone() if "payload" in x else None
        found["payload"] = codec.compress(
            x["x"], num_chunks, parameters.get("target_chunk"), before
        )
    size = parameters["num_elements"] if "x" not in x else x["x"].numel()
    found["x"] = torch.empty(size, dtype=getattr(torch, dtype))
    codec.decompress(found["payload"], num_chunks, found["x"])
    return found


@pytest.mark.parametrize(
    "choose", [of_one_dtype, pytest.param(list, marks=pytest.mark.proof)], ids=["one_dtype", "all"]
)
@pytest.mark.parametrize("suite", ["kernels", "codec", "codecs"])
def test_kernels_and_codecs_give_the_expected_values(
    suite: str, choose: Any, manifest: dict[str, Any], tensors: Any
) -> None:
    assert list(wrong_answers(suite, manifest, tensors, choose, by_the_package)) == []


# Verdicts

CASE = "kernels/add/float32/plain:x"
CODEC = "codec/compress_minmax_uint8/float32/edges-nan-first:payload"
MEAN = "comm_ops/centralized_full_precision/float32/3-flat-any-order-mean:x"
SPECIAL, ZEROS = "kernels/add/float32/special:x", "kernels/add/float32/zeros:x"


@pytest.fixture(scope="module")
def some(manifest: dict[str, Any], tensors: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a few vectors of each operation and dtype, which are checked quickly."""
    folder = tmp_path_factory.mktemp("some")
    wanted = {name.partition(":")[0] for name in (CASE, CODEC, MEAN, SPECIAL, ZEROS)}
    first = {
        (case["suite"], case["operation"], case["dtype"]): case["id"]
        for case in reversed(manifest["cases"])
    }.values()
    chosen = [case for case in manifest["cases"] if case["id"] in {*wanted, *first}]
    files = {}
    for suite in SUITES:
        entries = [case for case in chosen if case["suite"] == suite]
        names = {
            kind: {entry["tensor"] for case in entries for entry in case[kind]}
            for kind in ("inputs", "outputs")
        }
        names["inputs"] |= {
            output["magnitude"]
            for case in entries
            for output in case["outputs"]
            if "magnitude" in output
        }
        for kind, file in (
            ("inputs", f"{suite}.inputs.safetensors"),
            ("outputs", f"{suite}.expected.safetensors"),
        ):
            files[file] = write_safetensors(
                folder / file, {name: tensors[file][name] for name in names[kind]}
            )
    (folder / "manifest.json").write_text(manifest_text(chosen, files))
    return folder


@pytest.fixture
def outputs(tmp_path: Path, some: Path) -> Path:
    """Return a folder of correct outputs for some cases."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    for path in some.glob("*.expected.safetensors"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def check(
    capsys: pytest.CaptureFixture[str], some: Path, outputs: Path
) -> Callable[..., tuple[int, str]]:
    """Return a function that checks outputs against vectors and returns the exit code and the
    printed text.
    """

    def run(*more: str, outputs: Path = outputs, vectors: Path = some) -> tuple[int, str]:
        try:
            code = main(["vectors", "check", str(vectors), "--outputs", str(outputs), *more])
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def change(outputs: Path, suite: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Edit one file of outputs with the safetensors package."""
    path = outputs / f"{suite}.expected.safetensors"
    found = load_file(path)
    edit(found)
    save_file(
        {name: x.clone(memory_format=torch.contiguous_format) for name, x in found.items()}, path
    )


def cut_off(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def test_right_outputs_pass(check: Any, some: Path) -> None:
    code, printed = check()
    assert code == 0, printed
    assert (
        f"PASSED: {len(read_manifest(some)['cases'])} passed, 0 failed, 0 missing, 0 problems"
        in printed
    )
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
            "x: wrong dtype: float64 instead of float32",
        ),
        (
            "kernels",
            lambda t: t.update({CASE: t[CASE].view(3, 11)}),
            "x: wrong shape: [3, 11] instead of [33]",
        ),
        (
            "kernels",
            lambda t: t.update(mine=t[CASE]),
            "kernels.expected.safetensors: mine: extra: no case has such an output",
        ),
        (
            "peers",
            lambda t: t.update({CASE: torch.zeros(33)}),
            f"{CASE}: given twice: it is also in kernels.expected",
        ),
        (
            "codec",
            lambda t: t[CODEC][2].fill_(0xC1),
            "S4.4 codec/compress_minmax_uint8/float32/edges-nan-first [poison]: payload",
        ),
    ],
    ids=[
        "value",
        "missing",
        "dtype",
        "shape",
        "extra",
        "twice",
        "nan bits of a header",
    ],
)
def test_a_wrong_output_fails(
    check: Any, outputs: Path, suite: str, edit: Any, message: str
) -> None:
    change(outputs, suite, edit)
    code, printed = check()
    assert code == 1
    assert message in printed
    assert "FAILED" in printed


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda o: cut_off(o / "codec.expected.safetensors", 1),
            "codec.expected.safetensors: not a complete safetensors file",
        ),
        (
            lambda o: (o / "notes.txt").write_text("hello"),
            "notes.txt: foreign: only *.safetensors files",
        ),
        (lambda o: [path.unlink() for path in o.iterdir()], "FAILED: 0 passed, 0 failed,"),
    ],
    ids=["truncated", "foreign", "nothing"],
)
def test_a_file_that_has_no_place_fails(
    check: Any, outputs: Path, damage: Any, message: str
) -> None:
    damage(outputs)
    code, printed = check()
    assert code == 1
    assert message in printed


def test_json_has_every_case(check: Any, outputs: Path, some: Path) -> None:
    change(outputs, "kernels", lambda t: t.pop(CASE))
    report = some.parent / "report.json"
    code, printed = check("--json", "--json-file", str(report))
    found = json.loads(printed)
    assert json.loads(report.read_text()) == found
    assert (code, found["passed"]) == (1, False)
    count = len(read_manifest(some)["cases"])
    assert found["counts"] == {"passed": count - 1, "failed": 0, "missing": 1}
    assert len(found["cases"]) == count
    (wrong,) = [case for case in found["cases"] if case["status"] != "passed"]
    assert (wrong["id"], wrong["clause"], wrong["message"]) == (
        "kernels/add/float32/plain",
        "S1",
        "missing: no output x",
    )


def test_a_selection_asks_for_its_cases_only(check: Any, outputs: Path) -> None:
    change(outputs, "kernels", lambda t: t[CASE].zero_())
    assert check()[0] == 1
    code, printed = check("--operation", "shift_one_peer", "average")
    assert code == 0
    assert "not selected" in printed
    assert check("--dtype", "float16")[0] == 0
    assert check("--operation", "add", "--dtype", "float32")[0] == 1


@pytest.fixture
def vectors(tmp_path: Path, some: Path) -> Path:
    """Return a copy of some vectors that a test may damage."""
    return Path(shutil.copytree(some, tmp_path / "vectors"))


def flip(vectors: Path) -> None:
    path = vectors / "codec.inputs.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit_manifest(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(vectors: Path) -> None:
        path = vectors / "manifest.json"
        found = json.loads(path.read_text())
        edit(found)
        path.write_text(json.dumps(found))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "is not what was exported: its sha256 is"),
        (
            lambda v: (v / "peers.expected.safetensors").unlink(),
            "peers.expected.safetensors' cannot be read",
        ),
        (lambda v: (v / "manifest.json").unlink(), "is this a directory of vectors?"),
        (lambda v: (v / "manifest.json").write_text("{"), "is not valid JSON"),
        (lambda v: (v / "manifest.json").write_text("[]"), "does not match the schema at the top"),
        (
            edit_manifest(lambda m: m.update(vectors_version="3")),
            "has vectors_version '3'; this bagua_ref checks '2'",
        ),
        (
            edit_manifest(lambda m: m["cases"][0].update(tolerance="5 %")),
            "does not match the schema at cases/0/tolerance",
        ),
        (
            edit_manifest(lambda m: m["cases"][0]["outputs"][0].update(shape=[7])),
            "as the manifest describes it",
        ),
        (
            edit_manifest(lambda m: m["cases"][0]["inputs"][0].update(dtype="int64")),
            "as the manifest describes it",
        ),
        (
            edit_manifest(lambda m: m["cases"][0]["inputs"][0].update(tensor="no/such:x")),
            "has no 'no/such:x' as the manifest describes it",
        ),
    ],
)
def test_damaged_vectors_cannot_be_used(
    check: Any, vectors: Path, damage: Any, message: str
) -> None:
    damage(vectors)
    code, printed = check(vectors=vectors)
    assert code == 2
    assert message in printed


def test_what_cannot_be_checked_is_said(check: Any, outputs: Path) -> None:
    assert check(outputs=outputs / "nowhere")[0] == 2
    code, printed = check("--operation", "adds")
    assert (code, "operation 'adds' has no case; known are add, " in printed) == (2, True)
    assert check("--operation", "shift_one_peer", "--dtype", "float16")[0] == 2


def test_without_jsonschema_the_command_that_installs_it_is_named(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    hint = f"golden vectors need jsonschema; install with: {install_command('conformance')}"
    code, printed = check()
    assert (code, hint in printed) == (2, True)
    with pytest.raises(VectorsError, match="golden vectors need jsonschema"):
        export_vectors(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_export_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bagua_ref.conformance.vectors.files._write", lambda directory: 7)
    monkeypatch.setattr("bagua_ref.conformance.vectors.files.read_manifest", lambda directory: {})
    assert main(["vectors", "export", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "directory": str(tmp_path),
        "vectors_version": VECTORS_VERSION,
        "cases": 7,
    }


def test_export_leaves_other_files_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("x")
    assert main(["vectors", "export", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert main(["vectors", "export", str(tmp_path / "mine")]) == 2


# Tolerances


def moved(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Return positive numbers moved by the given number of steps between neighbouring floats."""
    return (x.view(torch.int32 if x.dtype is torch.float32 else torch.int64) + steps).view(x.dtype)


@pytest.mark.parametrize(("steps", "code"), [(4, 0), (-4, 0), (5, 1), (-5, 1)])
def test_ulp(check: Any, outputs: Path, steps: int, code: int) -> None:
    change(outputs, "qadam", lambda t: t.update({name: moved(x, steps) for name, x in t.items()}))
    assert check()[0] == code


@pytest.mark.parametrize(("epsilons", "code"), [(2.5, 0), (-2.5, 0), (12, 1), (-12, 1)])
def test_sum(check: Any, outputs: Path, epsilons: float, code: int, tensors: Any) -> None:
    magnitude = tensors["comm_ops.inputs.safetensors"][f"{MEAN}.magnitude"]
    eps = torch.finfo(torch.float32).eps
    change(
        outputs,
        "comm_ops",
        lambda t: t.update({MEAN: (t[MEAN].double() + epsilons * eps * magnitude).float()}),
    )
    assert check()[0] == code


def test_the_sign_of_a_zero_counts_and_the_bits_of_a_nan_do_not(check: Any, outputs: Path) -> None:
    def other_nan(found: dict[str, torch.Tensor]) -> None:
        x = found[SPECIAL]
        assert x.isnan().any()
        found[SPECIAL] = torch.where(
            x.isnan(), torch.tensor(-1, dtype=torch.int32).view(torch.float32), x
        )

    change(outputs, "kernels", other_nan)
    assert check()[0] == 0
    change(outputs, "kernels", lambda t: t.update({ZEROS: -t[ZEROS]}))
    assert check()[0] == 1


# Files


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    written = {name_of(dtype): torch.arange(6).to(dtype).view(2, 3) for dtype in CODES}
    written |= {"empty": torch.zeros(0, 5), "scalar": torch.tensor(2.5)}
    write_safetensors(tmp_path / "x.safetensors", written)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == written.keys()
    for name, x in found.items():
        assert_equal(x, written[name], EXACT)


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


# The C client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    oracle_c.need_compiler()
    return oracle_c.build(tmp_path_factory.mktemp("oracle_c"))


@pytest.mark.proof
def test_the_client_in_c_passes(client: Path, tmp_path: Path, manifest: dict[str, Any]) -> None:
    ended = oracle_c.run(client, VECTORS, tmp_path / "outputs")
    assert ended.returncode == 0, ended.stderr
    report = check_outputs(VECTORS, tmp_path / "outputs")
    answered = {case["id"] for case in manifest["cases"] if case["operation"] in OPERATIONS}
    assert {
        verdict.case["id"] for verdict in report.verdicts if verdict.status == "passed"
    } == answered
    assert ended.stdout.startswith(f"{len(answered)} cases answered")
    assert (report.count("failed"), report.count("missing") > 0) == (0, True)
    assert not report.passed  # outputs of a part are not taken for the whole


@pytest.mark.proof
@pytest.mark.parametrize(
    "damage",
    [
        lambda v: (v / "manifest.json").unlink(),
        lambda v: (v / "manifest.json").write_text('{"vectors_version": "2", "cases": ['),
        lambda v: cut_off(v / "codec.inputs.safetensors", 5000),
    ],
    ids=["no manifest", "cut manifest", "cut safetensors"],
)
def test_the_client_in_c_says_what_it_cannot_read(
    client: Path, vectors: Path, tmp_path: Path, damage: Any
) -> None:
    damage(vectors)
    ended = oracle_c.run(client, vectors, tmp_path / "outputs")
    assert ended.returncode == 2
    assert ended.stderr

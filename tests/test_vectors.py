"""Tests of golden vectors: the committed files equal a fresh export, wrong outputs are detected, and the C client passes."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file
from tests import oracle_c
from tests.oracle_c import OPERATIONS, VECTORS

from bagua_ref.algorithms.q_adam import QAdamOptimizer
from bagua_ref.backends.base import COMPRESSIBLE, FLOATS
from bagua_ref.base.not_provided import install_command
from bagua_ref.cli import main
from bagua_ref.conformance import EXACT, ULP, assert_equal
from bagua_ref.conformance.clauses import VECTORS_VERSIONS
from bagua_ref.conformance.vectors import VECTORS_VERSION, VectorsError, check_outputs, export_vectors, read_manifest
from bagua_ref.conformance.vectors.case import canonical, name_of
from bagua_ref.conformance.vectors.check import tolerance_named
from bagua_ref.conformance.vectors.in_order import InOrder
from bagua_ref.conformance.vectors.independent import solve
from bagua_ref.conformance.vectors.manifest import manifest_text, read_vectors, schema_text
from bagua_ref.conformance.vectors.numbers import Numbers
from bagua_ref.conformance.vectors.safetensors_file import CODES, DamagedFileError, read_safetensors, write_safetensors
from bagua_ref.contrib.utils.store import ClusterStore

LIMITS = {"1": 5 * 2**20, "2": 6 * 2**20}
LATEST = VECTORS.parent / f"v{VECTORS_VERSION}"
SUITES = ("cache", "codec", "comm_ops", "kernels", "peers", "qadam", "samplers")
LATEST_SUITES = (*SUITES, "graphs", "local_updates", "codecs", "compressed_gradients", "collectives", "algorithms")


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return read_manifest(VECTORS)


@pytest.fixture(scope="module")
def tensors(manifest: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    return read_vectors(VECTORS, manifest)


@pytest.fixture(scope="module")
def latest() -> dict[str, Any]:
    return read_manifest(LATEST)


@pytest.fixture(scope="module")
def latest_tensors(latest: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    return read_vectors(LATEST, latest)


def inputs_of(case: dict[str, Any], tensors: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {entry["name"]: tensors[f"{case['suite']}.inputs.safetensors"][entry["tensor"]] for entry in case["inputs"]}


def cases_of(manifest: dict[str, Any], operation: str) -> list[dict[str, Any]]:
    found = [case for case in manifest["cases"] if case["operation"] == operation]
    assert found
    return found


# Committed files


@pytest.mark.proof
@pytest.mark.parametrize("version", ["1", VECTORS_VERSION])
def test_a_fresh_export_is_what_is_committed(version: str, tmp_path: Path) -> None:
    count, committed = export_vectors(tmp_path / "fresh", version), VECTORS.parent / f"v{version}"
    names = sorted(path.name for path in committed.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "fresh").iterdir())
    changed = [name for name in names if (committed / name).read_bytes() != (tmp_path / "fresh" / name).read_bytes()]
    assert not changed, "released vectors must never change: what gives other results is a new version"
    assert count == len(read_manifest(committed)["cases"])


@pytest.mark.slow
def test_a_later_version_has_every_case_of_an_earlier_one(manifest: dict[str, Any], latest: dict[str, Any]) -> None:
    later = {case["id"]: case for case in latest["cases"]}
    assert all(later[case["id"]] == case for case in manifest["cases"])
    for entry in manifest["files"]:
        assert (LATEST / entry["name"]).read_bytes() == (VECTORS / entry["name"]).read_bytes()


def test_they_are_small_and_complete(manifest: dict[str, Any]) -> None:
    for version, limit in LIMITS.items():
        assert sum(path.stat().st_size for path in (VECTORS.parent / f"v{version}").iterdir()) <= limit
    files = {f"{suite}.{kind}.safetensors" for suite in SUITES for kind in ("inputs", "expected")}
    assert {path.name for path in VECTORS.iterdir()} == {*files, "manifest.json", "manifest.schema.json"}
    assert {entry["name"] for entry in manifest["files"]} == files
    assert {flag for case in manifest["cases"] for flag in case["flags"]} == {"valid", "edge", "poison"}
    assert {case["tolerance"].partition("(")[0] for case in manifest["cases"]} == {"EXACT", "ULP", "SUM"}
    for dtype in FLOATS:
        operations = {case["operation"] for case in manifest["cases"] if case["dtype"] == name_of(dtype)}
        assert {"add", "subtract", "add_scaled", "average", "divide", "combine_ring", "async_average"} <= operations
        assert {"update_momentum", "reduce_chunks", "gather_flat", "scatter_flat", "order_by_complexity"} <= operations
        assert {"centralized_scatter_gather", "decentralized_shift_one", "decentralized_all"} <= operations
    for dtype in COMPRESSIBLE:
        operations = {case["operation"] for case in manifest["cases"] if case["dtype"] == name_of(dtype)}
        assert {*OPERATIONS[:3], "centralized_low_precision", "low_precision_decentralized", "qadam_momentum"} <= operations
        worlds = [case["parameters"]["nodes"] for case in manifest["cases"] if case["suite"] == "comm_ops"]
        assert {sum(nodes) for nodes in worlds} >= {1, 2, 3, 4, 5, 6, 8}
        assert any(len(set(nodes)) > 1 for nodes in worlds)


@pytest.mark.parametrize("version", VECTORS_VERSIONS)
def test_the_schema_is_one_and_is_committed(version: str) -> None:
    Draft202012Validator.check_schema(json.loads(schema_text(version)))
    assert (VECTORS.parent / f"v{version}" / "manifest.schema.json").read_text("utf-8") == schema_text(version)


@pytest.mark.parametrize("suite", LATEST_SUITES)
def test_the_page_lists_every_operation(suite: str, latest: dict[str, Any]) -> None:
    page = (oracle_c.ROOT / "docs" / "vectors.md").read_text()
    for case in (case for case in latest["cases"] if case["suite"] == suite):
        assert f"`{case['operation']}`" in page
        for name in case["parameters"]:
            assert f"`{name}`" in page


@pytest.mark.parametrize("suite", LATEST_SUITES)
def test_the_files_alone_are_enough_to_compute_every_case(suite: str, latest: dict[str, Any], latest_tensors: Any) -> None:
    tensors, cases = latest_tensors, [case for case in latest["cases"] if case["suite"] == suite]
    assert cases
    for case in cases:
        found = solve(suite, case["operation"], case["dtype"], case["parameters"], inputs_of(case, tensors))
        for output in case["outputs"]:
            expected = tensors[f"{suite}.expected.safetensors"][output["tensor"]]
            magnitude = tensors[f"{suite}.inputs.safetensors"].get(output.get("magnitude"))
            assert_equal(found[output["name"]], expected, tolerance_named(case["tolerance"]), magnitude=magnitude)


@pytest.mark.parametrize("name", [f"{suite}.{kind}" for suite in LATEST_SUITES for kind in ("inputs", "expected")])
def test_the_safetensors_library_reads_the_same(name: str, latest_tensors: Any) -> None:
    found, ours = load_file(LATEST / f"{name}.safetensors"), latest_tensors[f"{name}.safetensors"]
    assert found.keys() == ours.keys()
    for key, x in found.items():
        assert_equal(ours[key], x, EXACT)


def test_no_nan_has_bits_of_its_own(latest_tensors: Any) -> None:
    for file in latest_tensors.values():
        for name, x in file.items():
            if x.dtype.is_floating_point and x.numel():
                assert torch.equal(x.reshape(-1).view(torch.uint8), canonical(x).reshape(-1).view(torch.uint8)), name


@pytest.mark.filterwarnings("ignore:step .* is past warmup_steps")
def test_S5_5_the_frozen_step_is_that_of_the_optimizer(latest: dict[str, Any], latest_tensors: Any) -> None:
    for case in cases_of(latest, "qadam_step") + cases_of(latest, "qadam_frozen_step"):
        inputs, settings = inputs_of(case, latest_tensors), case["parameters"]
        p = torch.nn.Parameter(inputs["p"].clone())
        betas = (settings["beta1"], settings["beta2"])
        optimizer = QAdamOptimizer([p], lr=settings["lr"], betas=betas, eps=settings["eps"])
        optimizer.param_groups[0]["warmup_steps"] = optimizer.step_id = settings["s"] - 1
        state = optimizer.ensure_state(p)
        state["exp_avg"].copy_(inputs["m"])
        state["exp_avg_sq"].copy_(inputs["v"])
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert_equal(p, latest_tensors[f"{case['suite']}.expected.safetensors"][case["outputs"][0]["tensor"]], ULP(4))


@pytest.mark.parametrize(
    ("key", "digest"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"abcd", 0xDE0327B0D25D92CC),
        (b"message digest", 0x066ED728FCEEB3BE),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
        (b"1234567890" * 8, 0xE04A477F19EE145D),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, bytes) else "",
)
def test_S8_1_the_hash_is_xxh64_with_seed_0(key: bytes, digest: int) -> None:
    """Published test vectors for every length that the algorithm treats separately."""
    assert xxhash.xxh64_intdigest(key) == digest


def test_S8_1_the_cluster_store_places_keys_likewise(manifest: dict[str, Any], tensors: Any) -> None:
    for case in cases_of(manifest, "cache_store"):
        inputs, settings = inputs_of(case, tensors), case["parameters"]
        data, places = bytes(inputs["keys"].tolist()), []
        cluster = ClusterStore(list(range(settings["num_stores"])))  # type: ignore[arg-type]
        for length in inputs["lengths"].tolist():
            places.append(cluster.route(f"{settings['dataset_name']}_{data[:length].decode()}"))
            data = data[length:]
        assert places == tensors["cache.expected.safetensors"][f"{case['id']}:store"].tolist()


def test_S7_2_noise_and_chunk_order_are_what_torch_draws(manifest: dict[str, Any], tensors: Any) -> None:
    for case in cases_of(manifest, "sampler_indices"):
        inputs, settings = inputs_of(case, tensors), case["parameters"]
        costs, n, r = inputs["complexities"].tolist(), settings["N"], settings["num_replicas"]
        chunks = max(1, n // r if settings["drop_last"] else -(-n // r))
        noise, order = torch.zeros(n, dtype=torch.int64), torch.arange(chunks)
        if settings["shuffle"]:
            generator = torch.Generator().manual_seed(settings["seed"] + settings["epoch"])
            noise = torch.randint(int((max(costs) - min(costs)) * settings["random_level"] + 1), (n,), generator=generator)
            order = torch.randperm(chunks, generator=generator)
        assert torch.equal(inputs["noise"], noise)
        assert torch.equal(inputs["chunk_order"], order)


def test_numbers_are_those_of_version_1() -> None:
    numbers = Numbers(7)
    drawn = [numbers.uniform(2, torch.float32), numbers.wide(2, torch.float32), numbers.halves(2, torch.float32)]
    pinned = [[-1078696657, -1070414874], [840601233, 974321922], [-1014710272, 1083179008]]
    assert [x.view(torch.int32).tolist() for x in drawn] == pinned


# Verdicts

CASE = "kernels/add/float32/plain:x"
CODEC = "codec/compress_minmax_uint8/float32/edges-nan-first:payload"
MEAN = "comm_ops/centralized_full_precision/float32/3-flat-any-order-mean:x"
SPECIAL, ZEROS = "kernels/add/float32/special:x", "kernels/add/float32/zeros:x"


@pytest.fixture(scope="module")
def some(manifest: dict[str, Any], tensors: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a few vectors of each operation and dtype, which are checked quickly."""
    folder = tmp_path_factory.mktemp("some")
    count: Counter[tuple[str, str]] = Counter()
    chosen, wanted = [], {name.partition(":")[0] for name in (CASE, CODEC, MEAN, SPECIAL, ZEROS)}
    for case in manifest["cases"]:
        count[case["operation"], case["dtype"]] += 1
        if count[case["operation"], case["dtype"]] == 1 or case["id"] in wanted:
            chosen.append(case)
    files = {}
    for suite in SUITES:
        entries = [case for case in chosen if case["suite"] == suite]
        names = {kind: {entry["tensor"] for case in entries for entry in case[kind]} for kind in ("inputs", "outputs")}
        names["inputs"] |= {output["magnitude"] for case in entries for output in case["outputs"] if "magnitude" in output}
        for kind, file in (("inputs", f"{suite}.inputs.safetensors"), ("outputs", f"{suite}.expected.safetensors")):
            files[file] = write_safetensors(folder / file, {name: tensors[file][name] for name in names[kind]})
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
def check(capsys: pytest.CaptureFixture[str], some: Path, outputs: Path) -> Callable[..., tuple[int, str]]:
    """Return a function that checks outputs against vectors and returns the exit code and the printed text."""

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
    save_file({name: x.clone(memory_format=torch.contiguous_format) for name, x in found.items()}, path)


def test_right_outputs_pass(check: Any, tmp_path: Path, manifest: dict[str, Any]) -> None:
    assert check()[0] == 0
    folder = tmp_path / "all"
    folder.mkdir()
    for path in VECTORS.glob("*.expected.safetensors"):
        shutil.copy(path, folder)
    code, printed = check(vectors=VECTORS, outputs=folder)
    assert code == 0, printed
    assert f"PASSED: {len(manifest['cases'])} passed, 0 failed, 0 missing, 0 problems" in printed
    assert "specification 1.0" in printed


@pytest.mark.parametrize(
    ("suite", "edit", "message"),
    [
        ("kernels", lambda t: t[CASE].view(torch.int32)[3].add_(1), "1 of 33 elements differ (tolerance EXACT); first at (3,)"),
        ("kernels", lambda t: t.pop(CASE), "S1 kernels/add/float32/plain [valid]: missing: no output x"),
        ("kernels", lambda t: t.update({CASE: t[CASE].double()}), "x: wrong dtype: float64 instead of float32"),
        ("kernels", lambda t: t.update({CASE: t[CASE].view(3, 11)}), "x: wrong shape: [3, 11] instead of [33]"),
        ("kernels", lambda t: t.update({CASE: t[CASE].fill_(torch.nan)}), "33 of 33 elements differ"),
        ("kernels", lambda t: t.update(mine=t[CASE]), "kernels.expected.safetensors: mine: extra: no case has such an output"),
        ("kernels", lambda t: t.update({CASE + "x": t.pop(CASE)}), "extra: no case has such an output"),
        ("peers", lambda t: t.update({CASE: torch.zeros(33)}), f"{CASE}: given twice: it is also in kernels.expected"),
        ("codec", lambda t: t[CODEC][2].fill_(0xC1), "S4.4 codec/compress_minmax_uint8/float32/edges-nan-first [poison]: payload"),
        ("codec", lambda t: t[CODEC][63].fill_(1), "1 of 64 elements differ"),  # the padding after the levels
    ],
    ids=["value", "missing", "dtype", "shape", "nan", "extra", "renamed", "twice", "nan bits of a header", "padding"],
)
def test_a_wrong_output_fails(check: Any, outputs: Path, suite: str, edit: Any, message: str) -> None:
    change(outputs, suite, edit)
    code, printed = check()
    assert code == 1
    assert message in printed
    assert "FAILED" in printed


def damage_truncated(outputs: Path) -> None:
    path = outputs / "codec.expected.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def damage_foreign(outputs: Path) -> None:
    (outputs / "notes.txt").write_text("hello")


def damage_folder(outputs: Path) -> None:
    (outputs / "more.safetensors").mkdir()


def damage_pickle(outputs: Path) -> None:
    torch.save(torch.zeros(3), outputs / "peers.expected.safetensors")


def damage_nothing_left(outputs: Path) -> None:
    for path in outputs.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncated, "codec.expected.safetensors: not a complete safetensors file"),
        (damage_foreign, "notes.txt: foreign: only *.safetensors files"),
        (damage_folder, "more.safetensors: foreign: only *.safetensors files"),
        (damage_pickle, "peers.expected.safetensors: not a complete safetensors file"),
        (damage_nothing_left, "FAILED: 0 passed, 0 failed,"),
    ],
    ids=["truncated", "foreign", "folder", "pickle", "nothing"],
)
def test_a_file_that_has_no_place_fails(check: Any, outputs: Path, damage: Any, message: str) -> None:
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
    assert (wrong["id"], wrong["clause"], wrong["message"]) == ("kernels/add/float32/plain", "S1", "missing: no output x")


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
        (lambda v: (v / "peers.expected.safetensors").unlink(), "peers.expected.safetensors' cannot be read"),
        (lambda v: (v / "manifest.json").unlink(), "is this a directory of vectors?"),
        (lambda v: (v / "manifest.json").write_text("{"), "is not valid JSON"),
        (lambda v: (v / "manifest.json").write_text("[]"), "does not match the schema at the top"),
        (edit_manifest(lambda m: m.update(vectors_version="3")), "has vectors_version '3'; this bagua_ref checks '1', '2'"),
        (edit_manifest(lambda m: m["cases"][0].update(tolerance="5 %")), "does not match the schema at cases/0/tolerance"),
        (edit_manifest(lambda m: m["cases"][0]["outputs"][0].update(shape=[7])), "as the manifest describes it"),
        (edit_manifest(lambda m: m["cases"].append(m["cases"][0])), "has a case twice"),
        (edit_manifest(lambda m: m["files"].pop()), "as the manifest describes it"),
        (edit_manifest(lambda m: m["files"][0].update(name="../x.inputs.safetensors")), "does not match the schema"),
    ],
)
def test_damaged_vectors_cannot_be_used(check: Any, vectors: Path, damage: Any, message: str) -> None:
    damage(vectors)
    code, printed = check(vectors=vectors)
    assert code == 2
    assert message in printed


def test_what_cannot_be_checked_is_said(check: Any, outputs: Path) -> None:
    assert check(outputs=outputs / "nowhere")[0] == 2
    code, printed = check("--operation", "adds")
    assert (code, "operation 'adds' has no case; known are add, " in printed) == (2, True)
    assert check("--operation", "shift_one_peer", "--dtype", "float16")[0] == 2


def test_without_jsonschema_wrong_arguments_are_named_first(
    check: Any, outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    hint = f"golden vectors need jsonschema; install with: {install_command('conformance')}"
    code, printed = check()
    assert (code, hint in printed) == (2, True)
    for folders in ({"outputs": tmp_path / "nowhere"}, {"vectors": tmp_path / "nowhere"}):
        code, printed = check(**folders)
        assert (code, hint in printed, "no such folder" in printed) == (2, False, True)
    assert main(["vectors", "export", str(outputs)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["vectors", "export", str(tmp_path / "new")]) == 2
    assert hint in capsys.readouterr().err
    assert list((tmp_path / "new").iterdir()) == []


def test_export_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("bagua_ref.conformance.vectors.export._write", lambda directory, version: 7)
    monkeypatch.setattr("bagua_ref.conformance.vectors.export.read_manifest", lambda directory: {})
    assert main(["vectors", "export", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"directory": str(tmp_path), "vectors_version": VECTORS_VERSION, "cases": 7}


def test_export_leaves_other_files_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    assert main(["vectors", "export", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert main(["vectors", "export", str(tmp_path / "mine")]) == 2


# Tolerances


def moved(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Return positive numbers moved by the given number of steps between neighbouring floats."""
    return (x.view(torch.int32 if x.dtype is torch.float32 else torch.int64) + steps).view(x.dtype)


@pytest.mark.parametrize(("steps", "code"), [(0, 0), (4, 0), (-4, 0), (5, 1), (-5, 1)])
def test_ulp(check: Any, outputs: Path, steps: int, code: int) -> None:
    change(outputs, "qadam", lambda t: t.update({name: moved(x, steps) for name, x in t.items()}))
    assert check()[0] == code


@pytest.mark.parametrize(("epsilons", "code"), [(0, 0), (2.5, 0), (-2.5, 0), (12, 1), (-12, 1)])
def test_sum(check: Any, outputs: Path, epsilons: float, code: int, tensors: Any) -> None:
    magnitude = tensors["comm_ops.inputs.safetensors"][f"{MEAN}.magnitude"]
    eps = torch.finfo(torch.float32).eps
    change(outputs, "comm_ops", lambda t: t.update({MEAN: (t[MEAN].double() + epsilons * eps * magnitude).float()}))
    assert check()[0] == code


def test_the_sign_of_a_zero_counts_and_the_bits_of_a_nan_do_not(check: Any, outputs: Path) -> None:
    def other_nan(found: dict[str, torch.Tensor]) -> None:
        x = found[SPECIAL]
        assert x.isnan().any()
        found[SPECIAL] = torch.where(x.isnan(), torch.tensor(-1, dtype=torch.int32).view(torch.float32), x)

    change(outputs, "kernels", other_nan)
    assert check()[0] == 0
    change(outputs, "kernels", lambda t: t.update({ZEROS: -t[ZEROS]}))
    assert check()[0] == 1


# Files


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    written = {name_of(dtype): torch.arange(6).to(dtype).view(2, 3) for dtype in CODES}
    written |= {"empty": torch.zeros(0, 5), "scalar": torch.tensor(2.5)}
    save_file(written, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    found = read_safetensors(tmp_path / "theirs.safetensors")
    write_safetensors(tmp_path / "ours.safetensors", written)
    for name, x in load_file(tmp_path / "ours.safetensors").items():
        assert torch.equal(x, written[name])
        assert torch.equal(found[name], written[name])
    assert found.keys() == written.keys()


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    data = write_safetensors(path, {"a": torch.arange(3), "b": torch.zeros(2)})
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedFileError, match="not a complete safetensors file"):
            read_safetensors(path)


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    "data",
    [
        b"PK\x03\x04" + bytes(100),
        file_of(b"\xff\xfe"),
        file_of([]),
        file_of(b"[" * 100_000),
        file_of({"a": 5}),
        file_of({"a": entry(dtype="F8")}, bytes(8)),
        file_of({"a": entry(dtype=None)}, bytes(8)),
        file_of({"a": entry(shape=[3])}, bytes(8)),
        file_of({"a": entry(shape=[-2])}, bytes(8)),
        file_of({"a": entry(shape=[2.0])}, bytes(8)),
        file_of({"a": entry(shape="2")}, bytes(8)),
        file_of({"a": entry(data_offsets=[8, 0])}, bytes(8)),
        file_of({"a": entry(data_offsets=[0])}, bytes(8)),
        file_of({"a": entry(data_offsets=[4, 12])}, bytes(12)),
        file_of({"a": entry(shape=[2**61, 2**61, 0], data_offsets=[0, 0])}),
        file_of({"a": entry(), "b": entry()}, bytes(8)),
        file_of({"a": entry()}, bytes(9)),
        file_of(b'{"a":1,"a":2}'),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(DamagedFileError):
        read_safetensors(tmp_path / "x.safetensors")


# The C client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    oracle_c.need_compiler()
    return oracle_c.build(tmp_path_factory.mktemp("oracle_c"))


@pytest.mark.slow
@pytest.mark.parametrize("version", VECTORS_VERSIONS)
def test_the_client_in_c_passes(client: Path, tmp_path: Path, manifest: dict[str, Any], version: str) -> None:
    vectors = VECTORS.parent / f"v{version}"
    ended = oracle_c.run(client, vectors, tmp_path / "outputs")
    assert ended.returncode == 0, ended.stderr
    report = check_outputs(vectors, tmp_path / "outputs", operations=OPERATIONS)
    assert report.passed, [verdict for verdict in report.verdicts if verdict.status != "passed"][:5]
    assert report.count("passed") == sum(case["operation"] in OPERATIONS for case in manifest["cases"])
    assert ended.stdout.startswith(f"{report.count('passed')} cases answered")


def test_outputs_of_a_part_are_not_taken_for_the_whole(client: Path, tmp_path: Path) -> None:
    oracle_c.run(client, VECTORS, tmp_path / "outputs")
    report = check_outputs(VECTORS, tmp_path / "outputs")
    assert not report.passed
    assert report.count("failed") == 0
    assert report.count("missing") > 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda v: (v / "manifest.json").unlink(),
        lambda v: (v / "manifest.json").write_text('{"vectors_version": "1", "cases": ['),
        lambda v: (v / "manifest.json").write_text("[" * 10_000),
        lambda v: (v / "manifest.json").write_text('{"vectors_version": "1'),
        lambda v: (v / "codec.inputs.safetensors").write_bytes(b"\xff" * 100),
        lambda v: (v / "codec.inputs.safetensors").write_bytes((v / "codec.inputs.safetensors").read_bytes()[:-5000]),
    ],
    ids=["no manifest", "cut manifest", "deep manifest", "cut string", "no safetensors", "cut safetensors"],
)
def test_the_client_in_c_says_what_it_cannot_read(client: Path, vectors: Path, tmp_path: Path, damage: Any) -> None:
    damage(vectors)
    ended = oracle_c.run(client, vectors, tmp_path / "outputs")
    assert ended.returncode == 2
    assert ended.stderr


def test_an_unusable_call_raises(tmp_path: Path) -> None:
    with pytest.raises(VectorsError, match="is this a directory of vectors"):
        check_outputs(tmp_path, tmp_path)


def test_products_of_the_export_are_summed_in_order_whatever_the_library_does() -> None:
    a, b = torch.tensor([[1e16, 1.0, -1e16]], dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    into = torch.empty(1, 1, dtype=torch.float64)
    with InOrder():
        products = [a @ b, torch.mm(a, b, out=into), torch.zeros_like(into).addmm_(a, b, alpha=-1)]
        norm = torch.linalg.vector_norm(torch.tensor([[3e8, 1.0, 4e8]], dtype=torch.float64), dim=-1, keepdim=True)
    # 1e16 + 1 is 1e16 in float64; any other order of the terms gives 1 or 2.
    assert [product.item() for product in products] == [0.0, 0.0, 0.0]
    assert products[1] is into
    assert norm.shape == (1, 1)
    assert norm.item() == (((3e8**2) + 1.0) + 4e8**2) ** 0.5

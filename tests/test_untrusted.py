"""Tests of hostile input: the checks of its form, and small inputs that must cost neither much time
nor much memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from property_tests import fuzz, test_hostile_input

from bagua_ref.base.launch_environment import read_launch
from bagua_ref.base.untrusted import (
    NATURAL,
    SCALAR,
    NotRegularError,
    check_form,
    check_hash_collisions,
    load_json,
    one_line,
    open_file,
    read_file,
)
from bagua_ref.cli import main
from bagua_ref.communicators.job_store import TorchDistributedTransport
from bagua_ref.communicators.rendezvous import rendezvous
from bagua_ref.conformance.formats import write_safetensors
from bagua_ref.conformance.run.runner import read_xfails
from bagua_ref.conformance.trace import Recorder, TraceError, check_trace, read_trace
from bagua_ref.conformance.vectors import VectorsError, check_outputs, read_manifest
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError

VECTORS = Path(__file__).parents[1] / "vectors" / "v2"


@pytest.mark.parametrize(
    "key",
    [
        lambda number: number * (2**61 - 1),
        lambda number: (None, number * (2**61 - 1)),
        lambda number: ((number * (2**61 - 1),), 1.5),
        lambda number: complex(-1000003 * number, number),
    ],
    ids=["int", "tuple", "nested", "complex"],
)
def test_keys_with_one_hash_are_refused(key: Any) -> None:
    colliding = [key(number) for number in range(101)]
    assert len(set(map(hash, colliding))) == 1
    check_hash_collisions([*range(1, 10_000), *colliding[:100]])
    with pytest.raises(ValueError, match="more than 100 of its keys have the hash"):
        check_hash_collisions([*range(1, 10_000), *colliding])


def test_keys_of_different_hashes_that_meet_in_a_dict_are_refused() -> None:
    """Half of a dict's places are taken in the order in which it looks for a free one, and other
    keys begin to look there.
    """
    last = 2**13 - 1
    first = [0]
    while len(first) < 5000:
        first.append(5 * first[-1] + 1 & last)
    order = np.full(last + 1, -1)
    order[first] = range(len(first))
    found = rest = np.random.default_rng(0).integers(2**20, 2**61 - 1, 2_000_000)
    place = found & last
    for _ in range(13):  # then nothing is left of a hash, and the order is that of ``first``
        taken = order[place] >= 0
        found, rest, place = found[taken], rest[taken] >> 5, place[taken]
        place = 5 * place + rest + 1 & last
    found = found[(order[place] >= 0) & (order[place] < 1000)]
    keys = [*first, *found[:400].tolist()]
    assert len(set(map(hash, keys))) == 5400
    with pytest.raises(ValueError, match="the hashes of its keys collide so often"):
        check_hash_collisions(keys)


@pytest.mark.parametrize("shift", [*range(0, 61, 5), 60, -20, -53])
def test_numbers_at_equal_distances_are_keys(shift: int) -> None:
    check_hash_collisions(number * 2**shift for number in range(5000))
    check_hash_collisions((number * -3 * 2**shift, "a") for number in range(200))


def test_powers_of_two_are_keys() -> None:
    check_hash_collisions(2**k for k in range(1000))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is not valid JSON"),
        (b"\xff", "it is not valid JSON: 'utf-8'"),
        ('{"a": 1}'.encode("utf-16"), "it is not valid JSON: 'utf-8'"),
        (b"[NaN]", "NaN is not a number"),
        (b"-Infinity", "-Infinity is not a number"),
        (b'{"a": {"b": 0, "c": 1, "c": 1}}', "duplicate key 'c'"),
        (b"[" * 51 + b"]" * 51, "nested more than 50 levels deep"),
        (b'{"a":' * 51 + b"0" + b"}" * 51, "nested more than 50 levels deep"),
        (b"[" * 10**6, "nested more than 50 levels deep"),
    ],
)
def test_json_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_json(data)


def test_json_is_read() -> None:
    assert load_json('{"a": [1, 2.5, null, true, "ä"], "b": {}}'.encode()) == {
        "a": [1, 2.5, None, True, "ä"],
        "b": {},
    }
    assert str(load_json(b"[" * 50 + b"0" + b"]" * 50)).count("[") == 50


@pytest.mark.parametrize(
    ("value", "form", "message"),
    [
        (True, int, "it must be an integer, not a boolean"),
        (1.0, NATURAL, "it must be an integer, not a number"),
        (-1, NATURAL, "it must be from 0 to 9223372036854775807"),
        (2**63, NATURAL, "it must be from 0 to 9223372036854775807"),
        (10**400, (int, float), r"it must be from -1.79769e\+308 to 1.79769e\+308"),
        (-(10**400), SCALAR, "it must be from -1.79769e"),
        (
            [],
            SCALAR,
            "it must be a string or an integer or a number or a boolean or null, not a list",
        ),
        (None, [int], "it must be a list, not null"),
        (["a"], [int], r"it\[0\] must be an integer, not a string"),
        ([1], [int, int], "it must have 2 items, not 1"),
        ([1, "a"], [int, int], r"it\[1\] must be an integer"),
        ({}, {"a": int}, "it must have the key 'a'"),
        ({"a": None}, {"a": int}, r"it\['a'\] must be an integer, not null"),
        ({"a": "x"}, {"a?": int}, r"it\['a'\] must be an integer, not a string"),
        ({"\x1b": {}}, {str: [int]}, r"it\['\\x1b'\] must be a list, not an object"),
        ([{"a": [{}]}], [{"a": [{"b": int}]}], r"it\[0\]\['a'\]\[0\] must have the key 'b'"),
    ],
)
def test_another_form_is_refused(value: Any, form: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        check_form(value, form, "it")


def test_the_right_form_is_accepted() -> None:
    form = {"a": [NATURAL], "b?": {str: SCALAR}, "c": object, "d": [str, (int, float)]}
    check_form({"a": [], "c": None, "d": ["x", 1]}, form, "it")
    check_form({"a": [0, 2**63 - 1], "b": None, "c": [{}], "d": ["", 0.5], "more": ...}, form, "it")
    check_form({"a": [1], "b": {"": None}, "c": 0, "d": ["x", 1]}, form, "it")


def test_text_is_printed_on_one_line_without_commands_to_the_terminal() -> None:
    assert one_line("bucket 0\u202e\x9b[2J\r\n\ud800ä") == r"bucket 0\u202e\x9b[2J\r\n\ud800ä"


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null"), tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(path)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A valid trace of one rank and two steps."""
    with Recorder(tmp_path / "trace", rank=0, world_size=1, algorithm="bytegrad") as recorder:
        for _ in range(2):
            recorder.before_op("0", torch.ones(4))
            recorder.after_op("0", torch.ones(4))
            recorder.step()
    assert check_trace(tmp_path / "trace").values == 8
    return tmp_path / "trace" / "rank0"


@pytest.mark.parametrize("name", ["manifest.json", "steps.jsonl", "00000000.safetensors"])
def test_a_trace_may_not_refer_to_a_device(trace: Path, name: str) -> None:
    (trace / name).unlink()
    (trace / name).symlink_to("/dev/null")
    with pytest.raises(TraceError, match=f"{name}' cannot be read: not a regular file"):
        check_trace(trace.parent)


def test_two_steps_of_a_trace_may_not_share_a_file(trace: Path) -> None:
    """Otherwise a short index could have a large file read many times."""
    index = trace / "steps.jsonl"
    index.write_text(index.read_text().replace("00000001.safe", "00000000.safe"))
    with pytest.raises(
        TraceError, match=r"line 2 .*file='00000000.safetensors' is already that of step 0"
    ):
        read_trace(trace.parent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 10**12}, r"nodes=\[1\]"),
        ({"world_size": 10**12, "nodes": [10**12]}, "rank1/manifest.json' is missing"),
        ({"algorithm": ["bytegrad"]}, r"\['algorithm'\] must be a string"),
        (
            {"options": {"average": "maybe"}},
            "rank0/manifest.json': option average='maybe' must be true or false",
        ),
        (
            {
                "buckets": {
                    "0": {
                        "dtype": "float32",
                        "elements": 4,
                        "tensors": [{"name": "w", "shape": [1] * 65}],
                    }
                }
            },
            "64 dimensions",
        ),
        (
            {"buckets": {"0": {"dtype": "float32"}}},
            r"\['buckets'\]\['0'\] must have the key 'elements'",
        ),
        ({"stopped": {"reason": 7}}, r"\['stopped'\]\['reason'\] must be a string"),
    ],
)
def test_a_manifest_of_a_trace_is_refused(
    trace: Path, change: dict[str, Any], message: str
) -> None:
    manifest = json.loads((trace / "manifest.json").read_text())
    (trace / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(TraceError, match=message):
        check_trace(trace.parent)


def test_names_in_a_trace_send_no_commands_to_the_terminal(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = {"dtype": "float32", "elements": 4, "tensors": []}
    manifest = json.loads((trace / "manifest.json").read_text())
    manifest |= {
        "buckets": {"\x1b[2J\ud800": bucket},
        "stopped": {"reason": "\x1b[2J\nPASSED"},
        "complete": False,
    }
    (trace / "manifest.json").write_text(json.dumps(manifest))
    assert main(["trace", "show", str(trace.parent)]) == 0
    assert main(["trace", "check", str(trace.parent)]) == 0
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert r"\x1b[2J\nPASSED" in shown


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    """Golden vectors with one case, whose tolerance is a SUM."""
    manifest = json.loads((VECTORS / "manifest.json").read_text())
    case = next(case for case in manifest["cases"] if case["tolerance"].startswith("SUM"))
    case = {
        **case,
        "inputs": [],
        "outputs": [
            {"name": "x", "tensor": "x", "dtype": "float32", "shape": [3], "magnitude": "m"}
        ],
    }
    folder = tmp_path / "vectors"
    folder.mkdir()
    files = []
    for kind, tensors in (("inputs", {"m": torch.ones(3)}), ("expected", {"x": torch.ones(3)})):
        data = write_safetensors(folder / f"{case['suite']}.{kind}.safetensors", tensors)
        name = f"{case['suite']}.{kind}.safetensors"
        files.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": files, "cases": [case]}))
    (tmp_path / "outputs").mkdir()
    shutil.copy(folder / files[1]["name"], tmp_path / "outputs" / "mine.safetensors")
    assert check_outputs(folder, tmp_path / "outputs").passed
    return folder


def test_vectors_that_would_cost_much_are_refused(vectors: Path) -> None:
    path = vectors / "manifest.json"
    whole = json.loads(path.read_text())
    case, file = whole["cases"][0], whole["files"][0]

    def refused(message: str, **change: Any) -> None:
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(VectorsError, match=message):
            check_outputs(vectors, vectors.parent / "outputs")

    refused(
        "does not match the schema at cases/0/flags",
        cases=[{**case, "flags": [{"a": k} for k in range(30_000)]}],
    )
    refused(
        "does not match the schema at cases/0/tolerance",
        cases=[{**case, "tolerance": f"ULP({'9' * 20})"}],
    )
    refused(f"lists '{file['name']}' twice", files=[*whole["files"], file])
    refused("has a case twice", cases=[case] * 2)
    data = write_safetensors(vectors / file["name"], {"m": torch.ones(1000, 1)})
    refused(
        "has no 'm' of the shape of 'x'",
        files=[{**file, "sha256": hashlib.sha256(data).hexdigest()}, whole["files"][1]],
    )


def test_names_of_outputs_send_no_commands_to_the_terminal(
    vectors: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_safetensors(
        vectors.parent / "outputs" / "mine.safetensors", {"\x1b[2J\nPASSED": torch.ones(3)}
    )
    assert (
        main(["vectors", "check", str(vectors), "--outputs", str(vectors.parent / "outputs")]) == 1
    )
    assert r"\x1b[2J\nPASSED: extra" in capsys.readouterr().out


def test_a_manifest_may_not_refer_to_a_device(vectors: Path) -> None:
    (vectors / "manifest.json").unlink()
    (vectors / "manifest.json").symlink_to("/dev/null")
    with pytest.raises(VectorsError, match="cannot be read: not a regular file"):
        read_manifest(vectors)


@pytest.mark.parametrize("tasks", ["1(x10000000)", "1(x999999999)", "0(x999999999),2"])
def test_slurms_short_lists_are_not_written_out(tasks: str) -> None:
    names = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "0",
    }
    tracemalloc.start()
    with pytest.raises(ValueError, match="contradict each other"):
        read_launch({**names, "SLURM_STEP_TASKS_PER_NODE": tasks})
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_the_fuzzer_runs_a_property(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    with pytest.raises(SystemExit, match="pip install atheris"):
        fuzz.main(["test_x"])
    given: list[Any] = []
    atheris = SimpleNamespace(
        instrument_imports=lambda include: nullcontext(), Setup=lambda *setup: given.extend(setup)
    )
    atheris.Fuzz = lambda: given[1](b"\x01" + bytes(100))
    monkeypatch.setitem(sys.modules, "atheris", atheris)
    with pytest.raises(SystemExit, match="must be one of\n  test_S4_3"):
        fuzz.main(["test_x"])
    read = mock.Mock(side_effect=read_xfails)
    monkeypatch.setattr(test_hostile_input, "read_xfails", read)
    fuzz.main(["test_a_hostile_list_of_known_failures_is_read_or_refused_by_name", "-runs=1"])
    assert given[0][-1] == "-runs=1"
    read.assert_called_once()


def test_errors_send_no_commands_to_the_terminal(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((trace / "manifest.json").read_text())
    manifest["buckets"]["\x1b[2J"] = {"dtype": "float32", "elements": 4, "tensors": []}
    (trace / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SystemExit):
        main(["trace", "check", str(trace.parent), "--bucket", "7"])
    header = json.dumps(
        {"\x1b[2J": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}
    ).encode()
    (trace / "00000000.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(8)
    )
    assert main(["trace", "check", str(trace.parent)]) == 2
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert printed.count(r"\x1b[2J") == 2


def test_a_momentum_factor_out_of_range_is_not_replayed(tmp_path: Path) -> None:
    with Recorder(
        tmp_path, rank=0, world_size=1, algorithm="qadam", options={"warmup_steps": 0}
    ) as recorder:
        recorder.before_op("0", {"momentum": torch.ones(4), "grad": torch.ones(4)}, beta1=7)
        recorder.after_op("0", torch.ones(4))
        recorder.step()
    with pytest.raises(
        TraceError, match=r"nothing could be replayed: .*beta1=7 must be a number from 0 to 1"
    ):
        check_trace(tmp_path)


def test_ranks_of_another_version_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("bagua_ref/m/answer1", json.dumps(["mark", ["node", 1]]))
    monkeypatch.setattr("uuid.uuid4", lambda: SimpleNamespace(hex="m"))
    with pytest.raises(
        CommunicationError,
        match=(
            r"rank 1 wrote an invalid message .*it\[1\] must have 5 items, not 2. All ranks"
            r" must run"
        ),
    ):
        TorchDistributedTransport(store, 0, 2, -1, 0.2)


def test_a_proposal_that_is_no_text_is_not_an_answer() -> None:
    store = dist.HashStore()
    store.set("proposed", b"\xff")
    with pytest.raises(CommunicationTimeoutError, match="rank 1 timed out after"):
        rendezvous(store, 1, 2, None, 0.1)


def test_a_file_that_becomes_a_pipe_between_looking_and_opening_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pipe"
    path.write_bytes(b"")
    found = path.stat()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(Path, "stat", lambda self: found)
    with pytest.raises(NotRegularError, match="not a regular file"):
        open_file(path)


def test_a_file_larger_than_allowed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(ValueError, match="larger than 4 bytes"):
        read_file(path, 4)

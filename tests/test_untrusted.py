"""Tests of hostile input: the checks of its form, and small inputs that must cost neither much time
nor much memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
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
from property_tests import fuzz, test_hostile_input

import bagua_ref
from bagua_ref.base.launch_environment import read_launch
from bagua_ref.base.untrusted import (
    NATURAL,
    SCALAR,
    check_form,
    check_hash_collisions,
    load_json,
    one_line,
    read_file,
)
from bagua_ref.cli import main
from bagua_ref.conformance.run.runner import read_xfails
from bagua_ref.conformance.vectors import VectorsError, check_outputs, read_manifest
from bagua_ref.record import RecordingError, diff_records, read_recording
from bagua_ref.record.tensor_files import write_safetensors

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
def recording(tmp_path: Path) -> Path:
    """A recording of one rank and two steps with values."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bagua_ref.record(model, optimizer, tmp_path / "run", what="values", rank=0, world_size=1):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    return tmp_path / "run" / "rank0"


@pytest.mark.parametrize("name", ["manifest.json", "steps.jsonl", "00000000.safetensors"])
def test_a_recording_may_not_refer_to_a_device(recording: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(recording.parent, tmp_path / "other")
    index = tmp_path / "other" / "rank0" / "steps.jsonl"
    index.write_text(re.sub('"output:", "[0-9a-f]+"', '"output:", "0"', index.read_text()))
    (recording / name).unlink()
    (recording / name).symlink_to("/dev/null")
    with pytest.raises(RecordingError, match=f"{name}' cannot be read: not a regular file"):
        diff_records(recording.parent, tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 10**12}, "rank1/manifest.json' is missing"),
        ({"rank": 1}, "is of rank 1 of 1, not of rank 0 of 1"),
        ({"command": "python"}, r"\['command'\] must be a list"),
        ({"stopped": {"reason": 7}}, r"\['stopped'\] must be a string"),
    ],
)
def test_a_manifest_of_a_recording_is_refused(
    recording: Path, change: dict[str, Any], message: str
) -> None:
    manifest = json.loads((recording / "manifest.json").read_text())
    (recording / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(RecordingError, match=message):
        read_recording(recording.parent)


def test_names_in_a_recording_send_no_commands_to_the_terminal(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(recording.parent, tmp_path / "other")
    manifest = json.loads((recording / "manifest.json").read_text())
    manifest |= {"stopped": "\x1b[2J\nPASSED", "command": ["\x1b[2J\ud800"]}
    (recording / "manifest.json").write_text(json.dumps(manifest))
    index = recording / "steps.jsonl"
    index.write_text(index.read_text().replace('"input:0"', '"input:\\u001b[2J"'))
    assert main(["trace", "show", str(recording.parent)]) == 0
    assert main(["trace", "diff", str(recording.parent), str(tmp_path / "other")]) == 1
    index.write_text('{"step": 0, "entries": [["\\u001b[2J", "\\u001b[2J", null]]}\n')
    assert main(["trace", "show", str(recording.parent)]) == 2
    shown = capsys.readouterr()
    assert (shown.out + shown.err).replace("\n", "").isprintable()
    assert r"\x1b[2J\nPASSED" in shown.out


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

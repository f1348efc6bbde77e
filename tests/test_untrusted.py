"""Tests of input from outside of this program: what is damaged is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua_ref
from bagua_ref.base.untrusted import NATURAL, SCALAR, check_form, load_json, one_line
from bagua_ref.cli import main
from bagua_ref.record import RecordingError, read_recording


@pytest.mark.parametrize("data", [b"", b"\xff", b'{"a": 1', b"PK\x03\x04"])
def test_what_is_no_json_is_named(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^it is not valid JSON: "):
        load_json(data)


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


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A recording of one rank and two steps."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bagua_ref.record(model, optimizer, tmp_path / "run", rank=0, world_size=1):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    return tmp_path / "run" / "rank0"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("manifest.json", "{", "", "manifest.json' is damaged: it is not valid JSON"),
        ("manifest.json", '"rank": 0', '"rank": 1', "it holds rank 1 of 1"),
        ("manifest.json", '"rank"', '"node"', r"damaged: it must have the key 'rank'"),
        (
            "manifest.json",
            '"command": [',
            '"command": [[], ',
            r"\['command'\]\[0\] must be a string",
        ),
        ("steps.jsonl", '"step": 1', '"step": -1', "steps.jsonl' is damaged: line 2: "),
    ],
)
def test_a_damaged_recording_is_named(
    recording: Path, name: str, old: str, new: str, message: str
) -> None:
    text = (recording / name).read_text()
    assert old in text
    (recording / name).write_text(text.replace(old, new))
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
    index.write_text(index.read_text().replace('["rng:python", "', '["rng:python", "\\u001b[2J'))
    assert main(["trace", "show", str(recording.parent)]) == 2
    shown = capsys.readouterr()
    assert (shown.out + shown.err).replace("\n", "").isprintable()
    assert r"\x1b[2J\nPASSED" in shown.out

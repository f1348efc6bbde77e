"""Tests of what checkpoints hold, where they are saved and what load() says about it (S5)."""

from __future__ import annotations

import collections
import datetime
import errno
import io
import json
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch import launch
from tests.scripts import ROOT
from tests.trainings import on_every_rank
from torch import nn

import bagua_ref
from bagua_ref import checkpoint
from bagua_ref.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua_ref.checkpoint import folder as folders
from bagua_ref.errors import CheckpointError, CommunicationError

ONES = torch.ones(3, 4)
TAKEN: dict[str, Any] = {
    "bytes": b"\x00\xff",
    "complex number": 1j,
    "dtype": torch.float8_e4m3fn,
    "device": torch.device("cpu"),
    "size": ONES.shape,
    "set": {1, "a"},
    "counter": collections.Counter("aab"),
    "keys": {(1, "a"): 2, torch.float32: None, b"x": 2**80},
    **{str(d): ONES.to(d) for d in (torch.float8_e5m2, torch.uint16, torch.complex64, torch.bool)},
    "conjugate": ONES.to(torch.complex64).conj(),
    "sparse": ONES.to_sparse(),
    "transposed": ONES.t(),
    "expanded": ONES.expand(2, 3, 4),
    "empty": ONES[:0],
    "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one storage, two dtypes": [ONES, ONES.view(torch.int32), ONES[1]],
}
REFUSED: dict[str, Any] = {
    "a ndarray": np.zeros(2),
    "a PosixPath": Path("x"),
    "a datetime": datetime.datetime(2026, 1, 1),
    "a int": 1 << 5000,
    "a function": on_every_rank,
    "a Linear": nn.Linear(1, 1),
    "a Tensor": ONES.to("meta"),
}


def make(names: str = "ab", named: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in names})
    model.forward = lambda x: model["a"](x) * 10 + model["b"](x)
    parameters = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return model.with_bagua([optimizer], GradientAllReduceAlgorithm()), optimizer


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", TAKEN)
@on_every_rank(1)
def test_what_torch_loads_is_saved(r: int, tmp_path: Path, name: str) -> None:
    model, optimizer = make()
    checkpoint.save(tmp_path, model, optimizer, step=1, extra={"x": TAKEN[name]})
    found: Any = checkpoint.load(tmp_path, model, optimizer)
    loaded, saved = found.extra["x"], TAKEN[name]
    assert type(loaded) is type(saved)
    if isinstance(saved, torch.Tensor):
        assert loaded.dtype == saved.dtype
        assert loaded.to_dense().tolist() == saved.to_dense().tolist()
    elif name.startswith("one storage"):
        assert list(map(torch.Tensor.tolist, loaded)) == list(map(torch.Tensor.tolist, saved))
    else:
        assert loaded == saved


@pytest.mark.parametrize("kind", REFUSED)
@on_every_rank(2)
def test_what_torch_does_not_load_is_refused_when_saving(r: int, tmp_path: Path, kind: str) -> None:
    model, optimizer = make()
    with pytest.raises((TypeError, CheckpointError), match=rf"extra\['a'\]\[1\] is {kind}\b"):
        checkpoint.save(tmp_path, model, optimizer, step=1, extra={"a": [1, REFUSED[kind]]})
    assert not list(tmp_path.rglob("manifest.json"))


@on_every_rank(1)
def test_extra_state_of_modules_and_options_are_taken(r: int, tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return io.BytesIO(b"scales")

        def set_extra_state(self, state: Any) -> None:
            self.loaded = state.getvalue()

    model: Any = Extra(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["state_dtype"] = torch.bfloat16
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    checkpoint.save(tmp_path, model, optimizer, step=1)
    checkpoint.load(tmp_path, model, optimizer)
    assert model.loaded == b"scales"
    assert optimizer.param_groups[0]["state_dtype"] is torch.bfloat16


@on_every_rank(1)
def test_what_shares_memory_with_another_part_is_loaded_apart(r: int, tmp_path: Path) -> None:
    model, optimizer = make()
    step(model, optimizer)
    extra = {
        "best": model.state_dict(),
        "momenta": optimizer.state_dict(),
        "view": model["a"].weight[1],
    }
    checkpoint.save(tmp_path, model, optimizer, step=1, extra=extra)
    before = [
        model["a"].weight.clone(),
        optimizer.state[model["a"].weight]["momentum_buffer"].clone(),
    ]
    found: Any = checkpoint.load(tmp_path, model, optimizer)
    step(model, optimizer)
    best, momenta = found.extra["best"], found.extra["momenta"]["state"][0]["momentum_buffer"]
    assert torch.equal(best["a.weight"], before[0])
    assert torch.equal(momenta, before[1])
    assert best._metadata == model.state_dict()._metadata


@pytest.mark.parametrize("named", [False, True])
@on_every_rank(1)
def test_the_optimizers_state_follows_names(r: int, tmp_path: Path, named: bool) -> None:
    def momenta() -> dict[str, float]:
        return {
            name: optimizer.state[parameter]["momentum_buffer"].mean().item()
            for name, parameter in model.named_parameters()
        }

    model, optimizer = make("ab", named)
    step(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    saved = momenta()
    model, optimizer = make("ba", named)
    checkpoint.load(tmp_path, model, optimizer)
    assert momenta() == saved == {"a.weight": 20.0, "b.weight": 2.0}
    if named:
        assert optimizer.param_groups[0]["param_names"] == ["b.weight", "a.weight"]


@on_every_rank(1)
def test_groups_of_other_parameters_are_refused(r: int, tmp_path: Path) -> None:
    for order in ("ab", "ba"):
        model: Any = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "ab"})
        groups = [{"params": model[name].parameters()} for name in order]
        optimizer = torch.optim.SGD(groups[: 1 + (order == "ab")], lr=0.1)
        model.with_bagua([optimizer], GradientAllReduceAlgorithm())
        if order == "ab":
            optimizer = torch.optim.SGD(model["a"].parameters(), lr=0.1)
            checkpoint.save(tmp_path, model, optimizer, step=1)
    with pytest.raises(ValueError, match=r"group 0 of the SGD has .*b.weight, .*with a.weight"):
        checkpoint.load(tmp_path, model, optimizer)


@on_every_rank(1)
def test_what_load_does_with_each_kind_of_path(r: int, tmp_path: Path) -> None:
    model, optimizer = make()
    folder, empty = tmp_path / "run", tmp_path / "empty"
    empty.mkdir()
    for place, text in ((folder, "does not exist"), (empty, "holds no complete checkpoint")):
        with pytest.warns(UserWarning, match=rf"{place} {text}, so load\(\) returns None"):
            assert checkpoint.load(place, model, optimizer) is None
    one, two = (checkpoint.save(folder, model, optimizer, step=step) for step in (1, 2))
    (tmp_path / "latest").symlink_to(one)
    for path, expected in ((folder, 2), (one, 1), (two, 2), (tmp_path / "latest", 1)):
        assert checkpoint.load(path, model, optimizer).step == expected  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="is a file; pass the folder"):
        checkpoint.load(one / "manifest.json", model, optimizer)
    with pytest.raises(ValueError, match=r"step=2, but .* is the checkpoint of step 1"):
        checkpoint.load(one, model, optimizer, step=2)
    with pytest.raises(ValueError, match="is that of one checkpoint; pass the folder that holds"):
        checkpoint.save(one, model, optimizer, step=3)
    (one / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        checkpoint.load(one, model, optimizer)


@on_every_rank(1)
def test_an_earlier_longer_run_is_not_loaded_without_a_word(r: int, tmp_path: Path) -> None:
    model, optimizer = make()
    checkpoint.save(tmp_path, model, optimizer, step=100, extra="old")
    with pytest.warns(UserWarning, match="holds the checkpoint of a later step, 100"):
        checkpoint.save(tmp_path, model, optimizer, step=10, keep=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        checkpoint.save(tmp_path, model, optimizer, step=20, extra="new", keep=1)
    with pytest.warns(UserWarning, match=r"later steps \(100\).*continuing from step 20"):
        found: Any = checkpoint.load(tmp_path, model, optimizer)
    assert (found.step, found.extra) == (20, "new")
    assert checkpoint.load(tmp_path, model, optimizer, step=100).extra == "old"  # type: ignore[union-attr]


@on_every_rank(1)
def test_the_format_of_another_version_is_named(r: int, tmp_path: Path) -> None:
    model, optimizer = make()
    path = checkpoint.save(tmp_path, model, optimizer, step=1) / "manifest.json"
    content = json.loads(path.read_text())["manifest"] | {"format": 1}
    path.write_text(json.dumps({"manifest": content, "sha256": folders._checksum(content)}))
    with pytest.raises(CheckpointError, match=rf"{path} is damaged: it has another format"):
        checkpoint.load(tmp_path, model, optimizer)


def save_on_the_first_rank(folder: Path) -> str:
    """Return the error of a training in which only rank 0 saves."""
    model, optimizer = make()
    try:
        for number in range(3):
            if number == 2 and bagua_ref.get_rank() == 0:
                checkpoint.save(folder, model, optimizer, step=number)
            step(model, optimizer)
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_save_on_one_rank_only_is_named_on_all_ranks(tmp_path: Path) -> None:
    for error in launch(save_on_the_first_rank, 2, tmp_path, limit=60):
        assert "rank 0 waits in bagua_ref.checkpoint.save (" in error


OTHER_JOB = """
import sys, time, torch, bagua_ref
from bagua_ref import checkpoint
bagua_ref.init_process_group()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], "gradient_allreduce")
checkpoint.save(sys.argv[1], model, optimizer, step=1)
print("saved", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@on_every_rank(1)
def test_two_jobs_cannot_save_in_one_folder(r: int, tmp_path: Path) -> None:
    model, optimizer = make()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-c", OTHER_JOB, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        with pytest.raises(
            CheckpointError,
            match=rf"is in use by process {other.pid} on host {os.uname().nodename}",
        ):
            checkpoint.save(tmp_path, model, optimizer, step=2)
        other.kill()
    checkpoint.save(tmp_path, model, optimizer, step=2)  # its lock has gone with it


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
@on_every_rank(1)
def test_a_file_system_that_cannot_flush_is_used_with_one_warning(
    r: int, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_for_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, "no")

    monkeypatch.setattr(os, "fsync", fails_for_folders)
    monkeypatch.setattr(folders, "_warned", set())
    model, optimizer = make()
    if number == errno.EIO:
        with pytest.raises(OSError, match=rf"no: '{tmp_path}/step_00000001'"):
            checkpoint.save(tmp_path, model, optimizer, step=1)
        return
    with pytest.warns(UserWarning, match="cannot be flushed"):
        checkpoint.save(tmp_path, model, optimizer, step=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, model, optimizer, step=2)


def test_a_part_of_a_bucket_is_saved_alone_when_detached() -> None:
    def size(value: Any) -> int:
        file = io.BytesIO()
        torch.save(value, file)
        return file.tell()

    bagua_ref.init_process_group()
    model: Any = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
    alone = size(model[1].state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], Algorithm.init("decentralized", hierarchical=False))
    head: Any = model[1].state_dict()
    assert size(head) > 10 * alone
    detached: Any = checkpoint.detached(head)
    assert size(detached) == alone
    assert detached._metadata == head._metadata
    detached["weight"].zero_()
    assert model[1].weight.any()
    bagua_ref.destroy_process_group()

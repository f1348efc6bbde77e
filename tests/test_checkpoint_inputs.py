"""Tests of what checkpoints hold, where they are saved and what load() says about it (S5)."""

from __future__ import annotations

import collections
import contextlib
import datetime
import errno
import io
import multiprocessing
import os
import stat
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch import launch
from tests.trainings import on_every_rank, simulate
from torch import nn

import bagua_ref
from bagua_ref import checkpoint
from bagua_ref.algorithms import Algorithm, GradientAllReduceAlgorithm
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
    "file": io.BytesIO(b"scales"),  # extra state of TransformerEngine's modules
    "options": [None, "a", (2**80, -0.0)],
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


@on_every_rank(1)
def test_what_torch_loads_is_saved(r: int, tmp_path: Path) -> None:
    model, optimizer = make()
    checkpoint.save(tmp_path, model, optimizer, step=1, extra=TAKEN)
    found: Any = checkpoint.load(tmp_path, model, optimizer)
    for name, saved in TAKEN.items():
        loaded = found.extra[name]
        assert type(loaded) is type(saved), name
        if isinstance(saved, torch.Tensor):
            assert loaded.dtype == saved.dtype, name
            assert loaded.to_dense().tolist() == saved.to_dense().tolist(), name
        elif name.startswith("one storage"):
            assert list(map(torch.Tensor.tolist, loaded)) == list(map(torch.Tensor.tolist, saved))
        elif name == "file":
            assert loaded.getvalue() == saved.getvalue()
        else:
            assert loaded == saved, name


@pytest.mark.parametrize("kind", REFUSED)
@on_every_rank(2)
def test_what_torch_does_not_load_is_refused_on_all_ranks_when_saving(
    r: int, tmp_path: Path, kind: str
) -> None:
    model, optimizer = make()
    checkpoint.save(tmp_path, model, optimizer, step=1)
    value = REFUSED[kind] if r == 1 else 2
    failed = "" if r == 1 else "checkpoint of step 2 was not saved, as rank 1 failed: TypeError: "
    with pytest.raises(
        TypeError if r == 1 else CheckpointError, match=rf"{failed}extra\['a'\]\[1\] is {kind}\b"
    ):
        checkpoint.save(tmp_path, model, optimizer, step=2, extra={"a": [1, value]})
    assert checkpoint.load(tmp_path, model, optimizer).step == 1  # type: ignore[union-attr]


@on_every_rank(1)
def test_what_shares_memory_with_another_part_is_loaded_apart(r: int, tmp_path: Path) -> None:
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])
    step(model, optimizer)
    scheduler.step()
    weight = model["a"].weight
    # A dtype of its own, which torch's load_state_dict would change.
    momentum = optimizer.state[weight]["momentum_buffer"] = torch.full((3, 3), 1 / 3).double()
    extra = {
        "best": model.state_dict(),
        "momenta": optimizer.state_dict(),
        "view": weight[1],
        "scheduler": scheduler.state_dict(),
    }
    checkpoint.save(tmp_path, model, optimizer, step=1, extra=extra)
    before = weight.clone(), momentum.clone()
    found: Any = checkpoint.load(tmp_path, model, optimizer)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], before[1])
    step(model, optimizer)
    best, momenta = found.extra["best"], found.extra["momenta"]["state"][0]["momentum_buffer"]
    assert torch.equal(best["a.weight"], before[0])
    assert torch.equal(momenta, before[1])
    assert best._metadata == model.state_dict()._metadata
    scheduler.load_state_dict(found.extra["scheduler"])
    assert scheduler.milestones == {1: 1, 3: 2}


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


@pytest.mark.parametrize(
    ("before", "after"), [("a b", "b a"), ("a", "ab"), ("ab", "a b"), ("a", "b"), ("ab", "LBFGS")]
)
@on_every_rank(1)
def test_groups_of_parameters_follow_names_or_are_refused(
    r: int, tmp_path: Path, before: str, after: str
) -> None:
    def grouped(groups: str) -> tuple[Any, torch.optim.Optimizer]:
        model, _ = make("ba" if groups == "LBFGS" else "ab")
        if "LBFGS" in (before, after):
            return model, torch.optim.LBFGS(model.parameters())
        layers = groups.split()
        return model, torch.optim.SGD(
            [
                {"params": [model[name].weight for name in names], "lr": ord(names[0])}
                for names in layers
            ]
        )

    checkpoint.save(tmp_path, *grouped(before), step=1)
    model, optimizer = grouped(after)
    rates = [group["lr"] for group in optimizer.param_groups]
    refused = pytest.raises(
        ValueError, match=r"group 0 of the \w+ has the parameters .* saved with "
    )
    with contextlib.nullcontext() if after == "b a" else refused:
        checkpoint.load(tmp_path, model, optimizer)
    # those of the same layers, or not touched
    assert [group["lr"] for group in optimizer.param_groups] == rates


@on_every_rank(1)
def test_what_load_does_with_each_kind_of_path(r: int, tmp_path: Path) -> None:
    model, optimizer = make()
    folder, empty = tmp_path / "run", tmp_path / "empty"
    empty.mkdir()
    for place in (folder, empty):
        with pytest.warns(UserWarning, match=rf"{place} holds no .*, so load\(\) returns None"):
            assert checkpoint.load(place, model, optimizer) is None
    one, two = (checkpoint.save(folder, model, optimizer, step=step) for step in (1, 2))
    (tmp_path / "latest").symlink_to(one)
    for path, expected in ((folder, 2), (one, 1), (two, 2), (tmp_path / "latest", 1)):
        assert checkpoint.load(path, model, optimizer).step == expected  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="is a file; pass the folder"):
        checkpoint.load(one / "manifest.json", model, optimizer)
    for place, number in ((one, 2), (folder, 7)):
        with pytest.raises(CheckpointError, match=f"no complete checkpoint of step {number}"):
            checkpoint.load(place, model, optimizer, step=number)
    assert checkpoint.load(folder, model, optimizer, step=1).path == one  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="is that of one checkpoint; pass the folder that holds"):
        checkpoint.save(one, model, optimizer, step=3)
    (one / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        checkpoint.load(one, model, optimizer)


@on_every_rank(1)
def test_an_earlier_longer_run_is_not_loaded_without_a_word(r: int, tmp_path: Path) -> None:
    model, optimizer = make()
    checkpoint.save(tmp_path, model, optimizer, step=100, extra="old")
    for number in (10, 20):
        checkpoint.save(tmp_path, model, optimizer, step=number, extra="new", keep=1)
    with pytest.warns(UserWarning, match=r"later steps \(100\).*continuing from step 20"):
        found: Any = checkpoint.load(tmp_path, model, optimizer)
    assert (found.step, found.extra) == (20, "new")
    assert checkpoint.load(tmp_path, model, optimizer, step=100).extra == "old"  # type: ignore[union-attr]


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


def save_and_wait(folder: Path, pipe: Connection) -> None:
    bagua_ref.init_process_group()
    checkpoint.save(folder, *make(), step=1)
    pipe.send("saved")
    pipe.recv()


def test_two_jobs_cannot_save_in_one_folder(tmp_path: Path) -> None:
    def save(r: int) -> None:
        checkpoint.save(tmp_path, *make(), step=2)

    forks = multiprocessing.get_context("forkserver")  # that of tests.launch
    here, there = forks.Pipe()
    other = forks.Process(target=save_and_wait, args=(tmp_path, there))
    other.start()
    there.close()
    assert here.recv() == "saved"
    with pytest.raises(
        CheckpointError, match=rf"is in use by process {other.pid} on host {os.uname().nodename}"
    ):
        simulate(1, save)
    other.kill()
    other.join()
    simulate(1, save)  # its lock has gone with it


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
@on_every_rank(1)
def test_a_file_system_that_cannot_flush_is_used_with_one_warning(
    r: int, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_for_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, "no")

    model, optimizer = make()
    checkpoint.save(tmp_path, model, optimizer, step=1)
    monkeypatch.setattr(os, "fsync", fails_for_folders)
    if number == errno.EIO:
        with pytest.raises(OSError, match=rf"no: '{tmp_path}/step_00000002'"):
            checkpoint.save(tmp_path, model, optimizer, step=2)
    else:
        with pytest.warns(UserWarning, match=rf"files in {tmp_path} cannot be flushed"):
            checkpoint.save(tmp_path, model, optimizer, step=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint.save(tmp_path, model, optimizer, step=3)
    found: Any = checkpoint.load(tmp_path, model, optimizer)
    assert found.step == (1 if number == errno.EIO else 3)


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

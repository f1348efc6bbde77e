"""Tests of bagua_ref.checkpoint: resuming bit for bit, damaged and hostile files, crashes, other numbers of ranks (S5, S7)."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch import launch, outcomes
from tests.scripts import ROOT, load_script
from tests.trainings import simulate, weights
from torch import nn

import bagua_ref
from bagua_ref import checkpoint
from bagua_ref.algorithms import Algorithm, QAdamOptimizer
from bagua_ref.checkpoint.folder import _checksum
from bagua_ref.checkpoint.plain import read_plain
from bagua_ref.contrib import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.errors import CheckpointError

LENGTHS = torch.randint(1, 50, (48,), generator=torch.Generator().manual_seed(5)).tolist()
INPUTS = torch.randn(48, 6, generator=torch.Generator().manual_seed(6))

ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient_allreduce": ("gradient_allreduce", {}),
    "bytegrad": ("bytegrad", {"hierarchical": False}),
    "bytegrad with memory": ("bytegrad", {"hierarchical": False, "error_feedback": True}),
    "decentralized_all": ("decentralized", {"hierarchical": False, "communication_interval": 2}),
    "decentralized_shift_one": ("decentralized", {"hierarchical": False, "peer_selection_mode": "shift_one"}),
    "low_precision_decentralized": ("low_precision_decentralized", {"hierarchical": False, "communication_interval": 2}),
    "qadam": ("qadam", {"hierarchical": False}),
    "async": ("async", {"sync_interval_ms": 1}),
    "local_sgd": ("local_sgd", {"period": 3, "warmup_steps": 1}),
    "diloco": ("diloco", {"period": 6, "fragments": 2, "delay": 2, "mix": 0.5}),
    "powersgd": ("powersgd", {"warmup_steps": 2, "min_compression_rate": 0.5}),
    "topk": ("topk", {"ratio": 0.2, "warmup_steps": 1}),
}
DETERMINISTIC = [name for name in ALGORITHMS if name != "async"]


class Run:
    """One rank's training, with a sampler that is in the middle of an epoch most of the time."""

    def __init__(
        self, name: str = "gradient_allreduce", *, wrapper: bool = False, wrapped: bool = True, seed: int | None = None
    ) -> None:
        torch.manual_seed(bagua_ref.get_rank() if seed is None else seed)
        self.model: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
        registered, options = ALGORITHMS[name]
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        if name == "qadam":
            self.optimizer = QAdamOptimizer(self.model.parameters(), lr=0.05, warmup_steps=4)
            options = {**options, "q_adam_optimizer": self.optimizer}
        if wrapped and wrapper:
            algorithm = Algorithm.init(registered, **options)
            self.model = DistributedDataParallel(self.model, optimizers=[self.optimizer], algorithm=algorithm)
        elif wrapped:
            self.model.with_bagua([self.optimizer], Algorithm.init(registered, **options))
        balanced = LoadBalancingDistributedSampler(LENGTHS, None, complexities=LENGTHS)
        self.sampler = LoadBalancingDistributedBatchSampler(balanced, lambda i: [i[k : k + 4] for k in range(0, len(i), 4)])
        self.epoch, self.step = 0, 0
        self._batches: Iterator[list[int]] | None = None

    def train(self, until: int) -> None:
        while self.step < until:
            if self._batches is None:
                self.sampler.set_epoch(self.epoch)
                self._batches = iter(self.sampler)
            batch = next(self._batches, None)
            if batch is None:
                self.epoch, self._batches = self.epoch + 1, None
                continue
            self.optimizer.zero_grad()
            self.model(INPUTS[batch]).square().mean().backward()
            self.optimizer.step()
            self.step += 1

    def save(self, folder: Path, **options: Any) -> Path:
        options = {"sampler": self.sampler, "extra": {"epoch": self.epoch}, **options}
        return checkpoint.save(folder, self.model, [self.optimizer], step=self.step, **options)

    def load(self, folder: Path, **options: Any) -> checkpoint.Checkpoint | None:
        found = checkpoint.load(folder, self.model, [self.optimizer], **{"sampler": self.sampler, **options})
        if found is not None:
            self.step, self.epoch, self._batches = found.step, found.extra["epoch"], None
        return found

    def state(self) -> torch.Tensor:
        buffers = [buffer.reshape(-1).double() for buffer in self.model.buffers()]
        return torch.cat([weights(self.model).double(), *buffers])


def trained(
    folder: Path, ranks: int, name: str = "gradient_allreduce", steps: tuple[int, ...] = (2, 4), **options: Any
) -> list[Any]:
    """Train in a simulated world and save at ``steps``; return each rank's states there."""

    def rank(r: int) -> list[torch.Tensor]:
        run = Run(name, **options)
        states = []
        for step in steps:
            run.train(step)
            run.save(folder)
            states.append(run.state())
        if name == "async":
            run.model.bagua_algorithm.abort(run.model)
        return states

    return simulate(ranks, rank)


def loaded(
    folder: Path, ranks: int, name: str = "gradient_allreduce", wrapped: bool = True, **options: Any
) -> list[tuple[int | None, torch.Tensor]]:
    """Load in a new simulated world; return each rank's step, None if there was no checkpoint, and its state."""

    def rank(r: int) -> tuple[int | None, torch.Tensor]:
        run = Run(name, wrapped=wrapped)
        found = run.load(folder, **options)
        return found and found.step, run.state()

    return simulate(ranks, rank, seed=1)


@pytest.mark.parametrize(
    ("name", "saved", "wrapper"),
    [
        *((name, 5, False) for name in DETERMINISTIC),
        ("qadam", 2, False),  # in its warm-up
        ("qadam", 4, False),  # at its end
        ("gradient_allreduce", 5, True),
        ("low_precision_decentralized", 5, True),
    ],
)
def test_S5_a_training_continues_bit_for_bit(tmp_path: Path, name: str, saved: int, wrapper: bool) -> None:
    def in_one_go(r: int) -> torch.Tensor:
        run = Run(name, wrapper=wrapper)
        run.train(saved)
        run.save(tmp_path)
        assert 0 < run.sampler.state_dict()["batches"] < len(run.sampler)
        run.train(11)
        return run.state()

    def resumed(r: int) -> torch.Tensor:
        run = Run(name, wrapper=wrapper)
        run.train(1)  # a script may have trained before it loads
        run.load(tmp_path)
        assert run.step == saved
        run.train(11)
        return run.state()

    for whole, continued in zip(simulate(4, in_one_go), simulate(4, resumed, seed=1), strict=True):
        assert torch.equal(whole, continued)


def test_what_is_equal_on_all_ranks_is_written_once(tmp_path: Path) -> None:
    trained(tmp_path, 3, steps=(4,))
    parts = {path.name.split("-")[0]: torch.load(path, weights_only=True) for path in tmp_path.glob("step_00000004/*.pt")}
    own = {"model": ["1.running_mean", "1.running_var"], "rng": ["torch"]}
    for r in range(3):
        assert {component: sorted(entries) for component, entries in parts[f"rank{r}"].items()} == own
    assert sorted(parts["common"]) == ["algorithm", "extra", "model", "optimizers", "rng", "sampler", "versions"]
    assert not {"1.running_mean", "1.running_var"} & parts["common"]["model"].keys()


def test_random_states_continue(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),  # noqa: NPY002
            np.random.randn(),  # noqa: NPY002
            torch.rand(()).item(),
            torch.randn(()).item(),
        ]

    def rank(r: int) -> None:
        run = Run()
        draw()
        run.save(tmp_path)
        expected = draw()
        assert draw() != expected
        run.load(tmp_path)
        assert draw() == expected

    simulate(1, rank)


def test_the_state_of_an_optimizer_keeps_its_dtype_and_a_schedulers_goes_into_extra(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any, Any]:
        model = nn.Linear(3, 2).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])

    def rank(r: int) -> None:
        model, optimizer, scheduler = make()
        model(torch.ones(1, 3).bfloat16()).sum().backward()
        optimizer.step()
        scheduler.step()
        momentum = torch.full((2, 3), 1 / 3)
        optimizer.state[model.weight]["momentum_buffer"] = momentum
        checkpoint.save(tmp_path, model, optimizer, step=1, extra=[scheduler.state_dict(), None, "a", (2**80, -0.0)])
        model, optimizer, scheduler = make()
        found = checkpoint.load(tmp_path, model, optimizer)
        assert found is not None
        assert found.extra[1:] == [None, "a", (2**80, -0.0)]
        scheduler.load_state_dict(found.extra[0])
        assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], momentum)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
        assert scheduler.milestones == {1: 1, 3: 2}
        assert found.path == tmp_path / "step_00000001"

    simulate(1, rank)


def test_the_checkpoint_of_either_kind_of_model_loads_into_the_other(tmp_path: Path) -> None:
    (state,) = trained(tmp_path / "wrapper", 1, wrapper=True, steps=(3,))
    assert torch.equal(loaded(tmp_path / "wrapper", 1)[0][1], state[0])
    (state,) = trained(tmp_path / "plain", 1, steps=(3,))

    def rank(r: int) -> None:
        run = Run(wrapper=True)
        run.load(tmp_path / "plain")
        assert torch.equal(run.state(), state[0])

    simulate(1, rank)


def test_an_empty_folder_has_no_checkpoint_and_one_step_can_be_asked_for(tmp_path: Path) -> None:
    assert loaded(tmp_path / "nowhere", 1)[0][0] is None
    states = trained(tmp_path, 2, steps=(1, 2, 3))
    for r, (step, state) in enumerate(loaded(tmp_path, 2, step=2)):
        assert step == 2
        assert torch.equal(state, states[r][1])
    with pytest.raises(CheckpointError, match=r"step_00000007 is not a complete checkpoint"):
        loaded(tmp_path, 2, step=7)


# Damaged files


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


DAMAGES: list[Callable[[Path], object]] = [flip, truncate, append, Path.unlink, lambda path: path.write_bytes(b"")]


@pytest.mark.parametrize("file", ["manifest.json", "common", "rank0", "rank1"])
@pytest.mark.parametrize("damage", DAMAGES, ids=["flipped", "truncated", "longer", "missing", "empty"])
def test_all_ranks_fall_back_to_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, file: str, damage: Callable[[Path], object], recwarn: pytest.WarningsRecorder
) -> None:
    states = trained(tmp_path, 2, "low_precision_decentralized")
    (path,) = (tmp_path / "step_00000004").glob(f"{file}*")
    damage(path)
    for r, (step, state) in enumerate(loaded(tmp_path, 2, "low_precision_decentralized")):
        assert step == 2
        assert torch.equal(state, states[r][0])
    warned = {str(warning.message) for warning in recwarn}
    if file == "manifest.json" and not path.exists():  # as if saving had not finished
        assert warned == set()
    else:
        (text,) = warned
        assert text.startswith(f"{path} is ")
        assert text.endswith("; continuing from the checkpoint of step 2")


def test_if_all_checkpoints_are_damaged_training_does_not_start_anew(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    for path in tmp_path.glob("*/common*"):
        flip(path)
    with pytest.raises(CheckpointError, match=r"step_00000004/common-\w+.pt is damaged.*step_00000002/common"):
        loaded(tmp_path, 1)


# Crashes


class CrashError(BaseException):
    """The process ends here."""


def crashing(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> Iterator[int]:
    """Let the call number ``at`` of those that change the disk raise ``error``."""
    count = itertools.count()

    def instrumented(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(count) == at:
                raise error
            return function(*args, **kwargs)

        return call

    for owner, name in ((os, "fsync"), (os, "replace"), (torch, "save"), (Path, "unlink"), (Path, "mkdir"), (Path, "rmdir")):
        monkeypatch.setattr(owner, name, instrumented(getattr(owner, name)))
    return count


def test_after_a_crash_at_any_moment_a_whole_checkpoint_is_there(tmp_path: Path) -> None:
    seen = []
    for at in itertools.count():
        folder = tmp_path / str(at)

        def rank(r: int, at: int = at, folder: Path = folder) -> bool:
            run = Run()
            for step in (1, 2):
                run.train(step)
                run.save(folder, keep=2)
            before = run.state()
            run.train(3)
            with pytest.MonkeyPatch.context() as monkeypatch:
                crashing(monkeypatch, at, CrashError())
                try:
                    run.save(folder, keep=2)
                except CrashError:
                    crashed = True
                else:
                    crashed = False
            after = run.state()
            found = run.load(folder)
            assert found is not None
            assert torch.equal(run.state(), after if found.step == 3 else before)
            seen.append(found.step)
            run.train(4)
            run.save(folder, keep=2)
            assert sorted(path.name for path in folder.iterdir()) == [f"step_0000000{s}" for s in ((2, 3)[found.step == 3], 4)]
            assert not list(folder.glob("*/*.tmp"))
            assert run.load(folder).step == 4  # type: ignore[union-attr]
            return crashed

        if not simulate(1, rank)[0]:
            break
    assert seen == sorted(seen)
    assert seen.count(2) >= 7
    assert seen.count(3) >= 4


@pytest.mark.parametrize("failing", [0, 1])
def test_if_saving_fails_on_one_rank_it_fails_on_all(tmp_path: Path, failing: int) -> None:
    def rank(r: int) -> None:
        run = Run()
        run.train(1)
        run.save(tmp_path)
        run.train(2)
        bad = {1, 2} if r == failing else None
        with pytest.raises((TypeError, CheckpointError)) as raised:
            run.save(tmp_path, extra=bad)
        if r == failing:
            assert str(raised.value).startswith("extra is a set; a checkpoint holds tensors,")
        else:
            expected = f"the checkpoint of step 2 was not saved, as rank {failing} failed: TypeError: extra is a set"
            assert str(raised.value).startswith(expected)
        found = run.load(tmp_path)
        assert found is not None
        assert found.step == 1

    simulate(2, rank)


def test_a_full_disk_on_one_rank_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(r: int) -> int:
        run = Run()
        run.train(1)
        run.save(tmp_path)
        run.train(2)
        if r == 0:
            crashing(monkeypatch, 3, OSError(28, "No space left on device"))
        with pytest.raises((OSError, CheckpointError), match="No space left on device"):
            run.save(tmp_path)
        return run.load(tmp_path).step  # type: ignore[union-attr]

    assert simulate(2, rank) == [1, 1]


def test_a_folder_that_ranks_do_not_share_is_an_error_on_all_of_them(tmp_path: Path) -> None:
    def rank(r: int) -> None:
        run = Run("low_precision_decentralized")
        with pytest.raises(
            CheckpointError, match=r"rank1-\w+.pt was written but is not here; ranks on several nodes need a folder"
        ):
            run.save(tmp_path / f"disk{r}")

    simulate(2, rank)


def test_older_checkpoints_are_removed_and_nothing_else_is(tmp_path: Path) -> None:
    def rank(r: int) -> None:
        run = Run("bytegrad")
        for step in range(1, 6):
            run.train(step)
            run.save(tmp_path, keep=3 if step > 2 else None)
            if step == 2 and r == 0:
                (tmp_path / "step_00000001" / "notes.txt").write_text("mine")
                (tmp_path / "step_00000099").mkdir()
                (tmp_path / "step_00000099" / "common-01234567.pt.tmp").write_text("left by a crash")
                (tmp_path / "best").mkdir()
        run.step = 3
        run.save(tmp_path, keep=2)  # after step 5
        run.step = 2
        path = run.save(tmp_path, keep=1)
        assert path == tmp_path / "step_00000002"
        run.save(tmp_path, keep=1)

    simulate(2, rank)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", *(f"step_0000000{step}" for step in range(1, 6))]
    assert [path.name for path in (tmp_path / "step_00000001").iterdir()] == ["notes.txt"]
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "step_00000003").iterdir()) == [
        "common",
        "manifest.json",
        "rank0",
        "rank1",
    ]


# Other numbers of ranks


def test_what_is_equal_on_all_ranks_loads_at_another_number_of_ranks(tmp_path: Path) -> None:
    def train(r: int) -> torch.Tensor:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model.with_bagua([optimizer], Algorithm.init("bytegrad", hierarchical=False))
        found = checkpoint.load(tmp_path, model, optimizer)
        for step in range(found.step if found else 0, 4):
            model(INPUTS[step : step + 4]).square().mean().backward()
            optimizer.step()
        if found is None:
            checkpoint.save(tmp_path, model, optimizer, step=4)
        assert model.bagua_train_step_counter == 4
        return weights(model)

    def rank(r: int) -> torch.Tensor:
        torch.manual_seed(3)
        return train(r)

    (saved, _) = simulate(2, rank)
    for ranks in (1, 3):
        for state in simulate(ranks, rank):
            assert torch.equal(state, saved)


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("gradient_allreduce", r"model \(1.running_mean, 1.running_var\), rng \(torch\)"),
        ("qadam", r"model \(1.running_mean, 1.running_var\), rng \(torch\)"),
        ("decentralized_shift_one", r"model \(0.weight, 0.bias, 1.weight and 5 more\), optimizers \(0\), rng \(torch\)"),
        ("low_precision_decentralized", r"algorithm \(\w+, \w+\)"),
        ("async", r"model \(0.weight, .*\), optimizers \(0\)"),
        ("local_sgd", r"model \(1.running_mean, 1.running_var\), optimizers \(0\), rng \(torch\)\. "),  # step 4 averages
        ("diloco", r"model \(0.weight, .*\), optimizers \(0\), rng \(torch\)\. "),
        ("powersgd", r"algorithm \(memories\)"),
        ("topk", r"algorithm \(memories\)"),
        ("bytegrad with memory", r"algorithm \(memories\)"),
    ],
)
def test_what_belongs_to_a_rank_is_refused_by_name_or_dropped(tmp_path: Path, name: str, belongs: str) -> None:
    states = trained(tmp_path, 2, name)
    message = rf"step_00000004 was saved by 2 ranks and this training has 4, but .*single ranks: .*{belongs}.*drop_rank_state=True"

    def refused(r: int) -> None:
        run = Run(name)
        before = run.state()
        with pytest.raises(ValueError, match=message):
            run.load(tmp_path)
        assert torch.equal(run.state(), before)

    simulate(4, refused)

    def dropped(r: int) -> torch.Tensor:
        run = Run(name)
        noise = torch.get_rng_state()
        run.load(tmp_path, drop_rank_state=True)
        assert torch.equal(torch.get_rng_state(), noise)
        assert run.sampler.state_dict()["batches"] == 0
        assert run.model.bagua_train_step_counter == 4
        state = run.state()
        run.epoch = 2
        run.train(8)
        if name == "async":
            run.model.bagua_algorithm.abort(run.model)
        return state

    for state in simulate(4, dropped):
        assert torch.equal(state, states[0][1])


def test_the_position_of_a_sampler_is_refused_by_name_at_another_number_of_ranks(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    with pytest.raises(ValueError, match=r"num_replicas=1, and here it is 2; which batches are left"):
        loaded(tmp_path, 2)


def test_S3_5_a_ring_of_another_size_starts_with_equal_replicas(tmp_path: Path) -> None:
    trained(tmp_path, 1, "low_precision_decentralized")
    with pytest.raises(ValueError, match=r"saved by 1 ranks and this training has 2, .* algorithm \("):
        loaded(tmp_path, 2, "low_precision_decentralized")

    def rank(r: int) -> list[torch.Tensor]:
        run = Run("low_precision_decentralized")
        run.load(tmp_path, drop_rank_state=True)
        (bucket,) = run.model.bagua_buckets
        replicas = [bucket._weight, bucket._left_peer_weight, bucket._right_peer_weight]
        assert all(torch.equal(replica, bucket.flattened_tensor()) for replica in replicas)
        run.epoch = 1
        run.train(7)
        return replicas

    replicas = simulate(3, rank)
    for r, (_, left, right) in enumerate(replicas):
        assert torch.equal(left, replicas[r - 1][0])
        assert torch.equal(right, replicas[(r + 1) % 3][0])


def test_a_model_that_is_not_wrapped_gets_the_first_ranks_weights(tmp_path: Path) -> None:
    states = trained(tmp_path, 2, "decentralized_all")
    with pytest.raises(ValueError, match="model is not wrapped, so the state of its algorithm cannot be loaded; wrap it"):
        loaded(tmp_path, 1, wrapped=False)
    ((step, state),) = loaded(tmp_path, 1, wrapped=False, drop_rank_state=True)
    assert step == 4
    assert torch.equal(state, states[0][1])


def test_a_part_of_the_ranks_can_save_and_load(tmp_path: Path) -> None:
    def rank(r: int) -> torch.Tensor | None:
        group = bagua_ref.new_group([1, 2])
        if r == 0:
            return None
        torch.manual_seed(r)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        algorithm = Algorithm.init("low_precision_decentralized", hierarchical=False)
        model.with_bagua([optimizer], algorithm, process_group=group)
        found = checkpoint.load(tmp_path, model, optimizer)
        for step in range(found.step if found else 0, 2):
            model(INPUTS[step : step + r]).square().mean().backward()
            optimizer.step()
        if found is None:
            checkpoint.save(tmp_path, model, optimizer, step=2)
        return weights(model)

    _, *saved = simulate(3, rank)
    _, *loaded = simulate(3, rank)
    assert not torch.equal(saved[0], saved[1])
    assert all(map(torch.equal, saved, loaded))


# Loading is local


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_rank_alone_can_load(tmp_path: Path, name: str) -> None:
    states = trained(tmp_path, 2, name)

    def rank(r: int) -> torch.Tensor:
        run = Run(name)
        if r == 1:
            run.load(tmp_path)
        return run.state()

    assert torch.equal(simulate(2, rank)[1], states[1][1])


@pytest.mark.parametrize("aborted", [False, True])
def test_async_stops_for_saving_and_keeps_whether_it_was_aborted(tmp_path: Path, aborted: bool) -> None:
    def whole(r: int) -> tuple[torch.Tensor, str]:
        run = Run("async")
        algorithm = run.model.bagua_algorithm
        run.train(4)
        if aborted:
            algorithm.abort(run.model)
        assert algorithm._rounds.state.name == ("ABORTED" if aborted else "RUNNING")
        run.save(tmp_path)
        state = run.state()
        run.train(6)
        assert algorithm._rounds.state.name == ("ABORTED" if aborted else "RUNNING")
        if not aborted:
            with pytest.raises(RuntimeError, match=r"averaging is under way.*call abort\(model\) on every rank before"):
                run.load(tmp_path)
        algorithm.abort(run.model)
        return state

    def resumed(r: int) -> torch.Tensor:
        run = Run("async")
        run.load(tmp_path)
        state = run.state()
        run.train(6)
        algorithm = run.model.bagua_algorithm
        assert algorithm._rounds.state.name == ("ABORTED" if aborted else "RUNNING")
        algorithm.abort(run.model)
        return state

    def alone(r: int) -> None:
        if r == 1:
            Run("async").load(tmp_path)
        else:
            Run("async")

    for saved, state in zip(simulate(2, whole), simulate(2, resumed), strict=True):
        assert torch.equal(saved, state)
    simulate(2, alone)


# Hostile files


class Hostile:
    """Pickled as a call of ``function(*arguments)``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def plant(folder: Path, content: bytes) -> Path:
    """Put ``content`` in the place of the common part of the newest checkpoint, with a manifest that fits."""
    (part,) = folder.glob("step_00000004/common*")
    part.write_bytes(content)
    path = part.with_name("manifest.json")
    found = json.loads(path.read_text())["manifest"]
    for entry in found["parts"]:
        if entry["name"] == part.name:
            entry |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps({"manifest": found, "sha256": _checksum(found)}))
    return part


def saved_by_torch(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def compressed(value: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved_by_torch(value))) as given, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for entry in given.infolist():
            made.writestr(entry.filename, given.read(entry))
    return file.getvalue()


def with_pickle(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
    return file.getvalue()


def nested_lists() -> Any:
    value: Any = [0]
    for _ in range(60):
        value = [value, value]
    return value


def one_storage_many_times() -> Any:
    tensor = torch.zeros(1000)
    return [tensor[:] for _ in range(1000)]


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "executes": (r"it refers to 'posix mkdir'", lambda: saved_by_torch(Hostile(os.mkdir, "executed"))),
    "executes through memory": (
        r"it refers to 'STACK_GLOBAL'",
        lambda: with_pickle(b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c\x08executed\x85R."),
    ),
    "large bytearray": (r"it refers to '\w+ bytearray'", lambda: saved_by_torch(Hostile(bytearray, 10**12))),
    "compressed zeros": ("its entries are compressed", lambda: compressed({"model": {"w": torch.zeros(10**6)}})),
    "nested lists": ("its content is larger than the file", lambda: saved_by_torch(nested_lists())),
    "one storage many times": ("its content is larger than the file", lambda: saved_by_torch(one_storage_many_times())),
    "expanded": ("its content is larger than the file", lambda: saved_by_torch(torch.zeros(1).expand(10**9))),
    "a window": ("a tensor is not of the size of its storage", lambda: saved_by_torch(torch.zeros(100)[:1])),
    "a set": (r"it refers to '\w+ set'", lambda: saved_by_torch({1, 2})),
    "deep": ("RecursionError", lambda: with_pickle(b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".")),
    "no pickle": ("opcode b'n' unknown", lambda: with_pickle(b"no pickle")),
    "empty archive": ("it is not a file of torch.save", lambda: b"PK\x05\x06" + bytes(18)),
    "text": ("not a zip file", lambda: b"hello"),
    "something else": ("holds no state of a training", lambda: saved_by_torch([1, 2])),
    "no state": (r"holds no state of a training, only \['model'\]", lambda: saved_by_torch({"model": {}})),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_an_error_that_names_it_and_executes_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, 1)
    message, make = HOSTILE[kind]
    part = plant(tmp_path, make())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(part.parent))}.*{message}"):
        loaded(tmp_path, 1)
    assert not (tmp_path / "executed").exists()


def test_files_are_loaded_as_weights_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, 2)
    calls = []

    def load(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return real(*args, **options)

    real = torch.load
    monkeypatch.setattr(torch, "load", load)
    loaded(tmp_path, 2)
    assert [options["weights_only"] for options in calls] == [True] * 4


def test_a_part_with_any_bits_flipped_is_read_or_is_an_error(tmp_path: Path) -> None:
    trained(tmp_path, 1, steps=(4,))
    (path,) = tmp_path.glob("*/common*")
    content, draw, outcomes = path.read_bytes(), random.Random(0), set()
    for _ in range(100):
        changed = bytearray(content)
        for _ in range(draw.choice([1, 3, 30])):
            # Most bytes are numbers; the beginning has the pickle, the end the directory.
            at = draw.choice([draw.randrange(len(content)), draw.randrange(2000), -1 - draw.randrange(2000)])
            changed[at] ^= 1 << draw.randrange(8)
        path.write_bytes(changed[: draw.choice([None, draw.randrange(len(changed))])])
        try:
            read_plain(path)
            outcomes.add("read")
        except CheckpointError as error:
            outcomes.add(str(error).partition(": ")[0])
    assert outcomes == {"read", f"{path} cannot be read"}


def manifest(**content: Any) -> dict[str, Any]:
    return {"format": 1, "step": 4, "ranks": 1, "algorithm": "", "token": "", "parts": [], **content}


@pytest.mark.parametrize(
    "written",
    [
        *(b"[" * 10**5, b"{}", b"null", b"\xff", b'{"manifest": 1, "sha256": ""}'),
        *(
            json.dumps({"manifest": content, "sha256": _checksum(content)}).encode()
            for content in (
                *([], {}, {"format": 2}, {"format": 1, "step": 4}),
                manifest(step=2),
                manifest(step="4"),
                manifest(parts=[{}]),
                manifest(parts=[{"name": "../x", "size": 0, "sha256": ""}]),
            )
        ),
    ],
    ids=itertools.count(),
)
@pytest.mark.filterwarnings("ignore:.*continuing from the checkpoint of step 2")
def test_a_hostile_manifest_is_damage(tmp_path: Path, written: bytes) -> None:
    trained(tmp_path, 1)
    (tmp_path / "step_00000004" / "manifest.json").write_bytes(written)
    assert loaded(tmp_path, 1)[0][0] == 2
    with pytest.raises(CheckpointError, match=r"step_00000004.manifest.json is damaged: "):
        loaded(tmp_path, 1, step=4)


def test_every_kind_of_tensor_is_saved_with_a_storage_of_its_own(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = [
        *(base, base[1], base.t(), base[:0], base.expand(2, 3, 4), base.to(torch.complex64).conj()),
        *(base.bool(), base.bfloat16(), base.long(), torch.tensor(1.5)),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        *[torch.randn(40, 1000)] * 2,  # as tied weights are
    ]

    def rank(r: int) -> None:
        run = Run()
        path = run.save(tmp_path, extra={"epoch": 0, "tensors": tensors})
        found = run.load(tmp_path)
        assert found is not None
        loaded = found.extra["tensors"]
        assert all(map(torch.equal, loaded, tensors))
        assert [t.dtype for t in loaded] == [t.dtype for t in tensors]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in loaded)
        assert path == found.path

    simulate(2, rank)


# Wrong use


def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path) -> None:
    def rank(r: int) -> None:
        run = Run()
        for extra, message in (
            ({"a": [1, b"x"]}, r"extra\['a'\]\[1\] is a bytes; a checkpoint holds tensors, numbers"),
            (np.zeros(2), r"extra is a ndarray; .*torch.as_tensor makes a tensor of it"),
            (torch.zeros(2).to_sparse(), r"extra is a Tensor \(torch.float32, torch.sparse_coo\), which a checkpoint cannot hold"),
        ):
            with pytest.raises(TypeError, match=message):
                run.save(tmp_path, extra=extra)

    simulate(1, rank)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    def rank(r: int) -> None:
        run, plain = Run(), nn.Linear(2, 1)
        save, load = checkpoint.save, checkpoint.load
        for error, message, call in (
            (TypeError, r"step=1.5 must be an int", lambda: save(tmp_path, run.model, run.optimizer, step=1.5)),  # type: ignore[arg-type]
            (ValueError, r"step=-1 must be a number of steps", lambda: save(tmp_path, run.model, run.optimizer, step=-1)),
            (ValueError, r"keep=0 must be a number of checkpoints", lambda: run.save(tmp_path, keep=0)),
            (ValueError, r"model is not wrapped; wrap it", lambda: save(tmp_path, plain, (), step=1)),
            (TypeError, r"model=5 must be a torch.nn.Module", lambda: save(tmp_path, 5, (), step=1)),  # type: ignore[arg-type]
            (TypeError, r"optimizers=.* must be a torch.optim", lambda: save(tmp_path, run.model, [plain], step=1)),  # type: ignore[list-item]
            (TypeError, r"sampler=3 must have state_dict", lambda: save(tmp_path, run.model, run.optimizer, step=1, sampler=3)),
            (TypeError, r"sampler is a state; it must be the sampler", lambda: run.load(tmp_path, sampler={})),
        ):
            with pytest.raises(error, match=message):
                call()
        run.save(tmp_path, sampler=None)
        for message, call in (
            (r"saved without a sampler, and load\(\) was given sampler=Load", lambda: run.load(tmp_path)),
            (r"saved with 1 optimizers, and load\(\) was given 0", lambda: load(tmp_path, run.model)),
            (
                r"with GradientAllReduceAlgorithmImpl, .* wrapped with ByteGrad",
                lambda: Run("bytegrad").load(tmp_path, sampler=None),
            ),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        run.save(tmp_path)
        with pytest.raises(ValueError, match=r"saved with a sampler; pass sampler= to load its position"):
            run.load(tmp_path, sampler=None)

    simulate(1, rank)


def test_ranks_at_different_steps_cannot_save(tmp_path: Path) -> None:
    def rank(r: int) -> None:
        run = Run()
        run.step = 5 + r
        with pytest.raises(ValueError, match=r"step differs between ranks, which called save\(\) with step=\[5, 6\]"):
            run.save(tmp_path)

    simulate(2, rank)


# Real processes


def elastic(arguments: list[str]) -> tuple[int, str]:
    return load_script("examples/elastic.py").main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "async"]
)
def test_processes_resume_after_one_was_killed(tmp_path: Path, name: str) -> None:
    arguments = ["--algorithm", name, "--folder", str(tmp_path / "killed"), "--kill-step", "8"]
    _, killed = outcomes(elastic, 2, [*arguments, "--kill-rank", "1"], init=False, limit=60)
    assert killed.exitcode == -signal.SIGKILL
    steps, digests = zip(*launch(elastic, 2, arguments, init=False), strict=True)
    assert steps == (5, 5)
    if name != "async":  # which no run repeats
        arguments[3] = str(tmp_path / "undisturbed")
        assert launch(elastic, 2, arguments, init=False) == [(0, digest) for digest in digests]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "ranks", "kill_step"),
    [
        ("gradient_allreduce", 2, 13),
        ("gradient_allreduce", 4, 13),
        ("bytegrad", 4, 13),
        ("decentralized", 4, 13),
        ("low_precision_decentralized", 4, 13),
        ("qadam", 4, 13),
        ("qadam", 2, 7),  # it resumes in its warm-up
        ("async", 4, 13),
    ],
)
def test_torchrun_restarts_every_algorithm(tmp_path: Path, name: str, ranks: int, kill_step: int) -> None:
    """Kill the last rank of the example; torchrun restarts all, and the final weights are those of an undisturbed run."""
    arguments = ["--algorithm", name, "--folder", str(tmp_path / "killed")]
    kill = ["--kill-rank", str(ranks - 1), "--kill-step", str(kill_step)]
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--max-restarts=1", "examples/elastic.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, *launcher, *arguments, *kill]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(f"resuming from step {kill_step // 5 * 5}") == 1
    final = dict(re.findall(r"rank (\d): weights (\w+) after step 20", ended.stdout))
    assert len(final) == ranks
    if name != "async":
        arguments[3] = str(tmp_path / "undisturbed")
        assert launch(elastic, ranks, arguments, init=False) == [(0, final[str(rank)]) for rank in range(ranks)]

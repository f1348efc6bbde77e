"""Tests of bagua_ref.checkpoint: resuming bit for bit, damaged and hostile files, crashes, other
numbers of ranks (S5, S7).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import json
import operator
import os
import pickle
import pickletools
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.launch import launch, outcomes
from tests.scripts import ROOT, load_script, run_python
from tests.trainings import on_every_rank, simulate, weights, wrap
from torch import nn

import bagua_ref
from bagua_ref import checkpoint
from bagua_ref.algorithms import Algorithm, QAdamOptimizer
from bagua_ref.checkpoint.folder import _checksum
from bagua_ref.checkpoint.plain import digest, plain, read_plain
from bagua_ref.checkpoint.training_state import TrainingState
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
    "decentralized_shift_one": (
        "decentralized",
        {"hierarchical": False, "peer_selection_mode": "shift_one"},
    ),
    "low_precision_decentralized": (
        "low_precision_decentralized",
        {"hierarchical": False, "communication_interval": 2},
    ),
    "qadam": ("qadam", {"hierarchical": False}),
    "async": ("async", {"sync_interval_ms": 1}),
    "local_sgd": ("local_sgd", {"period": 3, "warmup_steps": 1}),
    "diloco": ("diloco", {"period": 6, "fragments": 2, "delay": 2, "mix": 0.5}),
    "powersgd": ("powersgd", {"warmup_steps": 2, "min_compression_rate": 0.5}),
    "topk": ("topk", {"ratio": 0.2, "warmup_steps": 1}),
}


class Run:
    """One rank's training, with a sampler that is in the middle of an epoch most of the time."""

    def __init__(
        self,
        name: str = "gradient_allreduce",
        *,
        wrapper: bool = False,
        wrapped: bool = True,
        seed: int | None = None,
    ) -> None:
        torch.manual_seed(bagua_ref.get_rank() if seed is None else seed)
        self.model: Any = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
        )
        registered, options = ALGORITHMS[name]
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        if name == "qadam":
            self.optimizer = QAdamOptimizer(self.model.parameters(), lr=0.05, warmup_steps=4)
            options = {**options, "q_adam_optimizer": self.optimizer}
        if wrapped and wrapper:
            algorithm = Algorithm.init(registered, **options)
            self.model = DistributedDataParallel(
                self.model, optimizers=[self.optimizer], algorithm=algorithm
            )
        elif wrapped:
            self.model.with_bagua([self.optimizer], Algorithm.init(registered, **options))
        balanced = LoadBalancingDistributedSampler(LENGTHS, None, complexities=LENGTHS)
        self.sampler = LoadBalancingDistributedBatchSampler(
            balanced, lambda i: [i[k : k + 4] for k in range(0, len(i), 4)]
        )
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
        found = checkpoint.load(
            folder, self.model, [self.optimizer], **{"sampler": self.sampler, **options}
        )
        if found is not None:
            self.step, self.epoch, self._batches = found.step, found.extra["epoch"], None
        return found

    def state(self) -> torch.Tensor:
        buffers = [buffer.reshape(-1).double() for buffer in self.model.buffers()]
        return torch.cat([weights(self.model).double(), *buffers])


def trained(
    folder: Path, ranks: int, name: str = "gradient_allreduce", steps: tuple[int, ...] = (2, 4)
) -> list[Any]:
    """Copy the checkpoints of a training to ``folder``; return each rank's states when they were
    saved.
    """
    made, states = checkpoints(ranks, name, steps)
    shutil.copytree(made.name, folder, dirs_exist_ok=True)
    return states


@functools.cache
def checkpoints(
    ranks: int, name: str, steps: tuple[int, ...]
) -> tuple[tempfile.TemporaryDirectory[str], list[Any]]:
    """Train in a simulated world and save at ``steps``; return the folder and each rank's states
    there.
    """
    folder = tempfile.TemporaryDirectory()

    def rank(r: int) -> list[torch.Tensor]:
        run = Run(name)
        states = []
        for step in steps:
            run.train(step)
            run.save(Path(folder.name))
            states.append(run.state())
        if name == "async":
            run.model.bagua_algorithm.abort(run.model)
        return states

    return folder, simulate(ranks, rank)


def loaded(
    folder: Path, ranks: int, name: str = "gradient_allreduce", wrapped: bool = True, **options: Any
) -> list[tuple[int | None, torch.Tensor]]:
    """Load in a new simulated world; return each rank's step, None if there was no checkpoint, and
    its state.
    """

    def rank(r: int) -> tuple[int | None, torch.Tensor]:
        run = Run(name, wrapped=wrapped)
        found = run.load(folder, **options)
        return found and found.step, run.state()

    return simulate(ranks, rank, seed=1)


@pytest.mark.parametrize(
    ("name", "saved", "wrapper"),
    [
        *(
            (name, 5, False)
            for name in ("bytegrad with memory", "decentralized_shift_one", "diloco", "powersgd")
        ),
        ("qadam", 4, False),  # at the end of its warm-up
        ("gradient_allreduce", 5, True),
        ("low_precision_decentralized", 5, True),
    ],
)
def test_S5_a_training_continues_bit_for_bit(
    tmp_path: Path, name: str, saved: int, wrapper: bool
) -> None:
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

    for whole, continued in zip(simulate(2, in_one_go), simulate(2, resumed, seed=1), strict=True):
        assert torch.equal(whole, continued)


def test_what_is_equal_on_all_ranks_is_written_once(tmp_path: Path) -> None:
    trained(tmp_path, 3, steps=(4,))
    parts = {
        path.name.split("-")[0]: torch.load(path, weights_only=True)
        for path in tmp_path.glob("step_00000004/*.pt")
    }
    own = {"model": ["1.running_mean", "1.running_var"], "rng": ["torch"]}
    for r in range(3):
        assert {
            component: sorted(entries) for component, entries in parts[f"rank{r}"].items()
        } == own
    assert sorted(parts["common"]) == [
        "algorithm",
        "extra",
        "model",
        "optimizers",
        "rng",
        "sampler",
        "versions",
    ]
    assert not {"1.running_mean", "1.running_var"} & parts["common"]["model"].keys()


@on_every_rank(1)
def test_random_states_continue(r: int, tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),  # noqa: NPY002
            np.random.randn(),  # noqa: NPY002
            torch.rand(()).item(),
            torch.randn(()).item(),
        ]

    run = Run()
    draw()
    run.save(tmp_path)
    expected = draw()
    assert draw() != expected
    run.load(tmp_path)
    assert draw() == expected


@on_every_rank(1)
def test_the_state_of_an_optimizer_keeps_its_dtype_and_a_schedulers_goes_into_extra(
    r: int, tmp_path: Path
) -> None:
    def make() -> tuple[Any, Any, Any]:
        model, optimizer = wrap(
            nn.Linear(3, 2).bfloat16(), Algorithm.init("gradient_allreduce"), lr=0.1, momentum=0.9
        )
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])

    model, optimizer, scheduler = make()
    model(torch.ones(1, 3).bfloat16()).sum().backward()
    optimizer.step()
    scheduler.step()
    momentum = torch.full((2, 3), 1 / 3)
    optimizer.state[model.weight]["momentum_buffer"] = momentum
    checkpoint.save(
        tmp_path, model, optimizer, step=1, extra=[scheduler.state_dict(), None, "a", (2**80, -0.0)]
    )
    model, optimizer, scheduler = make()
    found = checkpoint.load(tmp_path, model, optimizer)
    assert found is not None
    assert found.extra[1:] == [None, "a", (2**80, -0.0)]
    scheduler.load_state_dict(found.extra[0])
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], momentum)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert scheduler.milestones == {1: 1, 3: 2}
    assert found.path == tmp_path / "step_00000001"


@on_every_rank(1)
def test_the_checkpoint_of_either_kind_of_model_loads_into_the_other(
    r: int, tmp_path: Path
) -> None:
    for wrapper in (False, True):
        saved, loaded = Run(wrapper=wrapper), Run(wrapper=not wrapper)
        saved.train(3 + wrapper)
        saved.save(tmp_path)
        loaded.load(tmp_path)
        assert torch.equal(loaded.state(), saved.state())


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


DAMAGES: list[Callable[[Path], object]] = [
    flip,
    truncate,
    append,
    Path.unlink,
    lambda path: path.write_bytes(b""),
]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((file, damage) for file in ("manifest.json", "rank1") for damage in DAMAGES),
        ("common", flip),
        ("rank0", append),
    ],
    ids=itertools.count(),
)
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
    with pytest.raises(
        CheckpointError, match=r"step_00000004/common-\w+.pt is damaged.*step_00000002/common"
    ):
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

    for owner, name in (
        (os, "fsync"),
        (os, "replace"),
        (torch, "save"),
        (Path, "unlink"),
        (Path, "mkdir"),
        (Path, "rmdir"),
    ):
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
            assert sorted(path.name for path in folder.iterdir()) == [
                f"step_0000000{s}" for s in ((2, 3)[found.step == 3], 4)
            ]
            assert not list(folder.glob("*/*.tmp"))
            assert run.load(folder).step == 4  # type: ignore[union-attr]
            return crashed

        if not simulate(1, rank)[0]:
            break
    assert seen == sorted(seen)
    assert seen.count(2) >= 7
    assert seen.count(3) >= 4


@pytest.mark.parametrize("failing", [0, 1])
@on_every_rank(2)
def test_if_saving_fails_on_one_rank_it_fails_on_all(r: int, tmp_path: Path, failing: int) -> None:
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
        expected = (
            f"the checkpoint of step 2 was not saved, as rank {failing} failed: TypeError: extra is"
            " a set"
        )
        assert str(raised.value).startswith(expected)
    found = run.load(tmp_path)
    assert found is not None
    assert found.step == 1


def test_a_full_disk_on_one_rank_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def save_until_the_disk_is_full(folder: Path, limited: bool) -> tuple[str, list[str], bool]:
    """Return the error of the first save without enough space, what it leaves in ``folder``, and
    whether the one before loads.
    """
    run = Run()
    run.train(1)
    run.save(folder)
    if limited:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
    try:
        while run.step < 50:
            run.step += 1
            run.save(folder)
    except OSError as error:
        failed = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tried = run.step
    left = sorted(str(path) for path in folder.rglob(f"step_{tried:08d}*"))
    return failed, left, run.load(folder).step == tried - 1  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_file_that_cannot_grow_is_the_systems_error_and_nothing_is_left_of_it(
    tmp_path: Path,
) -> None:
    assert launch(save_until_the_disk_is_full, 1, tmp_path, True) == [
        ("[Errno 27] File too large", [], True)
    ]


MOUNT = [
    "unshare",
    "--map-root-user",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=64k tmpfs "$0" && exec "$@"',
]
"""A command that runs another one with a disk of 64 kB, which only it sees, in a folder."""


@pytest.mark.proof
def test_a_full_disk_is_the_systems_error_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    if subprocess.run([*MOUNT, str(tmp_path), "true"], capture_output=True).returncode != 0:
        pytest.skip("may not mount file systems")
    code = (
        "import sys, pathlib, bagua_ref\nfrom tests.test_checkpoint_files import"
        " save_until_the_disk_is_full\nbagua_ref.init_process_group()\nprint(save_until_the_disk_is_full(pathlib.Path(sys.argv[1]),"
        " False))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [*MOUNT, str(tmp_path), sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(("[Errno 28] No space left on device", [], True))


@on_every_rank(1)
def test_a_link_in_the_place_of_a_file_to_come_is_not_followed(r: int, tmp_path: Path) -> None:
    victim, folder, run = tmp_path / "victim", tmp_path / "checkpoints" / "step_00000000", Run()
    victim.write_text("mine")
    folder.mkdir(parents=True)
    for name in ("manifest.json", "manifest.json.tmp"):
        (folder / name).symlink_to(victim)
    run.save(folder.parent)
    assert not (folder / "manifest.json").is_symlink()
    assert run.load(folder.parent) is not None
    assert victim.read_text() == "mine"


@on_every_rank(1)
def test_a_link_that_appears_while_saving_is_an_error(
    r: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    unlink = Path.unlink

    def put_back(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        if path.name == "manifest.json.tmp" and not path.is_symlink():
            path.symlink_to(victim)

    monkeypatch.setattr(Path, "unlink", put_back)
    with pytest.raises(FileExistsError, match=r"manifest.json.tmp"):
        Run().save(tmp_path / "checkpoints")
    assert victim.read_text() == "mine"


def test_checkpoints_behind_a_link_are_not_removed(tmp_path: Path) -> None:
    trained(tmp_path / "other", 1, steps=(1,))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "step_00000001").symlink_to(tmp_path / "other" / "step_00000001")

    def rank(r: int) -> None:
        run = Run()
        run.train(2)
        run.save(tmp_path / "own", keep=1)

    simulate(1, rank)
    assert loaded(tmp_path / "other", 1)[0][0] == 1


@on_every_rank(2)
def test_a_folder_that_ranks_do_not_share_is_an_error_on_all_of_them(
    r: int, tmp_path: Path
) -> None:
    run = Run("low_precision_decentralized")
    with pytest.raises(
        CheckpointError,
        match=r"rank1-\w+.pt was written but is not here; ranks on several nodes need a folder",
    ):
        run.save(tmp_path / f"disk{r}")


def test_older_checkpoints_are_removed_and_nothing_else_is(tmp_path: Path) -> None:
    def rank(r: int) -> None:
        run = Run("bytegrad")
        for step in range(1, 6):
            run.train(step)
            run.save(tmp_path, keep=3 if step > 2 else None)
            if step == 2 and r == 0:
                (tmp_path / "step_00000001" / "notes.txt").write_text("mine")
                (tmp_path / "step_00000099").mkdir()
                (tmp_path / "step_00000099" / "common-01234567.pt.tmp").write_text(
                    "left by a crash"
                )
                (tmp_path / "best").mkdir()
        run.step = 3
        run.save(tmp_path, keep=2)  # after step 5
        run.step = 2
        path = run.save(tmp_path, keep=1)
        assert path == tmp_path / "step_00000002"
        run.save(tmp_path, keep=1)

    simulate(2, rank)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best",
        *(f"step_0000000{step}" for step in range(1, 6)),
    ]
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

    saved, _ = simulate(2, rank)
    for ranks in (1, 3):
        for state in simulate(ranks, rank):
            assert torch.equal(state, saved)


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("gradient_allreduce", r"model \(1.running_mean, 1.running_var\), rng \(torch\)"),
        ("qadam", r"model \(1.running_mean, 1.running_var\), rng \(torch\)"),
        (
            "decentralized_shift_one",
            r"model \(0.weight, 0.bias, 1.weight and 5 more\), optimizers \(0\), rng \(torch\)",
        ),
        ("low_precision_decentralized", r"algorithm \(\w+, \w+\)"),
        ("async", r"model \(0.weight, .*\), optimizers \(0\)"),
        # step 4 averages
        (
            "local_sgd",
            r"model \(1.running_mean, 1.running_var\), optimizers \(0\), rng \(torch\)\. ",
        ),
        ("diloco", r"model \(0.weight, .*\), optimizers \(0\), rng \(torch\)\. "),
        ("powersgd", r"algorithm \(memories\)"),
        ("bytegrad with memory", r"algorithm \(memories\)"),
    ],
)
def test_what_belongs_to_a_rank_is_refused_by_name_or_dropped(
    tmp_path: Path, name: str, belongs: str
) -> None:
    states = trained(tmp_path, 2, name)
    message = (
        r"step_00000004 was saved by 2 ranks and this training has 4, but .*single ranks:"
        rf" .*{belongs}.*drop_rank_state=True"
    )

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
        assert run.sampler.state_dict()["num_replicas"] == 2  # where the two ranks were
        assert run.model.bagua_train_step_counter == 4
        state = run.state()
        run.epoch = 2
        run.train(8)
        if name == "async":
            run.model.bagua_algorithm.abort(run.model)
        return state

    for state in simulate(4, dropped):
        assert torch.equal(state, states[0][1])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2), (2, 4)])
def test_S7_6_another_number_of_ranks_draws_the_rest_of_the_epoch(
    tmp_path: Path, before: int, after: int
) -> None:
    def first(r: int) -> list[int]:
        run = Run()
        drawn = [index for batch in itertools.islice(run.sampler, 2) for index in batch]
        run.save(tmp_path)
        return drawn

    def rest(r: int) -> list[int]:
        run = Run()
        run.load(tmp_path, drop_rank_state=True)
        drawn = [index for batch in run.sampler for index in batch]
        assert len(list(run.sampler)) == len(list(Run().sampler))  # the epoch anew
        return drawn

    drawn = [index for part in (*simulate(before, first), *simulate(after, rest)) for index in part]
    assert set(drawn) == set(range(len(LENGTHS)))
    assert len(drawn) < len(LENGTHS) + before + after


def test_S3_5_a_ring_of_another_size_starts_with_equal_replicas(tmp_path: Path) -> None:
    trained(tmp_path, 1, "low_precision_decentralized")

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
    with pytest.raises(
        ValueError,
        match="model is not wrapped, so the state of its algorithm cannot be loaded; wrap it",
    ):
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
def test_async_stops_for_saving_and_keeps_whether_it_was_aborted(
    tmp_path: Path, aborted: bool
) -> None:
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
            with pytest.raises(
                RuntimeError,
                match=r"averaging is under way.*call abort\(model\) on every rank before",
            ):
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

    for saved, state in zip(simulate(2, whole), simulate(2, resumed), strict=True):
        assert torch.equal(saved, state)


# Hostile files


class Hostile:
    """Pickled as a call of ``function(*arguments)``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def plant(folder: Path, content: bytes) -> Path:
    """Put ``content`` in the place of the common part of the newest checkpoint, with a manifest
    that fits.
    """
    (part,) = folder.glob("step_00000004/common*")
    part.write_bytes(content)
    path = part.with_name("manifest.json")
    found = json.loads(path.read_text())["manifest"]
    found["parts"] = [
        described(part) if entry["name"] == part.name else entry for entry in found["parts"]
    ]
    path.write_text(json.dumps({"manifest": found, "sha256": _checksum(found)}))
    return part


def described(part: Path) -> dict[str, Any]:
    """Return what a manifest says of a part."""
    content = part.read_bytes()
    return {"name": part.name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def saved_by_torch(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def compressed(value: Any) -> bytes:
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved_by_torch(value))) as given,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made,
    ):
        for entry in given.infolist():
            made.writestr(entry.filename, given.read(entry))
    return file.getvalue()


def with_pickle(content: bytes, **others: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in {
            "data.pkl": content,
            "byteorder": sys.byteorder.encode(),
            "version": b"3\n",
            **others,
        }.items():
            archive.writestr(f"archive/{name}", data)
    return file.getvalue()


def with_pickled_tensor(
    numel: int = 4, offset: int = 0, size: Any = (4,), stride: Any = (1,), stored: int = 16
) -> bytes:
    """Return an archive of a float32 tensor of which the pickle says this, and of a storage of
    ``stored`` bytes.
    """
    storage = (
        b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
        + pickled(numel)
        + b"tQ"
    )
    arguments = (
        b"("
        + storage
        + b"".join(map(pickled, (offset, size, stride, False)))
        + b"ccollections\nOrderedDict\n)Rt"
    )
    return with_pickle(
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R.",
        **{"data/0": bytes(stored)},
    )


def pickled(value: Any) -> bytes:
    """Return the pickle of ``value`` without what begins, remembers and ends it."""
    content = pickletools.optimize(pickle.dumps(value, protocol=2))
    return content.removeprefix(b"\x80\x02").removesuffix(b".")


def nested_lists() -> Any:
    value: Any = [0]
    for _ in range(60):
        value = [value, value]
    return value


def one_storage_many_times() -> Any:
    tensor = torch.zeros(1000)
    return [tensor[:] for _ in range(1000)]


def of_one_hash() -> dict[int, None]:
    return {number * sys.hash_info.modulus: None for number in range(2000)}


def one_by_one(values: dict[int, None]) -> bytes:
    return b"\x80\x02}" + b"".join(pickled(key) + b"Ns" for key in values) + b"."


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "executes": (
        r"it refers to 'posix mkdir'",
        lambda: saved_by_torch(Hostile(os.mkdir, "executed")),
    ),
    "executes through memory": (
        r"it contains the operation 'SHORT_BINUNICODE'",
        lambda: with_pickle(b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c\x08executed\x85R."),
    ),
    "large bytearray": (
        r"it refers to '\w+ bytearray'",
        lambda: saved_by_torch(Hostile(bytearray, 10**12)),
    ),
    "compressed zeros": (
        "its entries are compressed",
        lambda: compressed({"model": {"w": torch.zeros(10**6)}}),
    ),
    "nested lists": (
        "it contains a value in several places",
        lambda: saved_by_torch(nested_lists()),
    ),
    "one storage many times": (
        r"a tensor is not of the size of its storage|that of several tensors",
        lambda: saved_by_torch(one_storage_many_times()),
    ),
    "expanded": (
        "a tensor is not of the size of its storage",
        lambda: saved_by_torch(torch.zeros(1).expand(10**9)),
    ),
    "a window": (
        "a tensor is not of the size of its storage",
        lambda: saved_by_torch(torch.zeros(100)[:1]),
    ),
    "a set": (r"it refers to '\w+ set'", lambda: saved_by_torch({1, 2})),
    "deep": (
        "nested more than 100 deep",
        lambda: with_pickle(b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."),
    ),
    "deep tuple": (
        "nested more than 100 deep",
        lambda: with_pickle(b"\x80\x02})" + b"\x85" * 10**6 + b"Ns."),
    ),
    "keys of one hash": (
        "more than 100 of its keys have the hash 0",
        lambda: saved_by_torch(of_one_hash()),
    ),
    "keys of one hash one by one": (
        "more than 100 of its keys have the hash 0",
        lambda: with_pickle(one_by_one(of_one_hash())),
    ),
    "a storage beyond its end": (
        "the storage '0' has 16 bytes",
        lambda: with_pickled_tensor(numel=10**9, size=(10**9,)),
    ),
    "strides beyond the storage": ("RuntimeError", lambda: with_pickled_tensor(stride=(10**9,))),
    "an offset": (
        "a tensor is not of the size of its storage",
        lambda: with_pickled_tensor(offset=2),
    ),
    "a negative size": (
        "a tensor has more than 64 dimensions, or",
        lambda: with_pickled_tensor(size=(-2, -2), stride=(1, 1)),
    ),
    "dimensions": (
        "a tensor has more than 64 dimensions",
        lambda: with_pickled_tensor(size=(4, *[1] * 65), stride=(1,) * 66),
    ),
    "a storage": (
        "it contains a part of a tensor in another place",
        lambda: with_pickle(b"\x80\x02](ctorch\nFloatStorage\ne."),
    ),
    "calls something else": (
        "it contains a call that makes no tensor",
        lambda: with_pickle(b"\x80\x02ctorch\nFloatStorage\n)R."),
    ),
    "no end": ("it has no end|not exhausted|STOP", lambda: with_pickle(b"\x80\x02N")),
    "no pickle": ("opcode b'n' unknown", lambda: with_pickle(b"no pickle")),
    "empty archive": ("it is not a file of torch.save", lambda: b"PK\x05\x06" + bytes(18)),
    "text": ("not a zip file", lambda: b"hello"),
    "something else": ("holds no state of a training", lambda: saved_by_torch([1, 2])),
    "no state": (
        r"holds no state of a training, only \['model'\]",
        lambda: saved_by_torch({"model": {}}),
    ),
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


def test_a_tensor_written_by_hand_is_read(tmp_path: Path) -> None:
    """What the hostile ones above differ from."""
    (tmp_path / "part").write_bytes(with_pickled_tensor())
    assert torch.equal(read_plain(tmp_path / "part"), torch.zeros(4))


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, 2)
    for owner, name in (
        (torch, "load"),
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
    ):
        monkeypatch.setattr(owner, name, None)
    simulate(1, lambda r: checkpoint.load(tmp_path, Run(wrapped=False).model, drop_rank_state=True))


REMOVED = object()
OTHERS: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        2**40,
        2**63,
        2**70,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\x1b[2J\n",
        REMOVED,
    ),
    *([], (), {}, [[]], [1, 2], (None, None), {"x": 1}, {0: {}}, {"state": {}, "param_groups": []}),
    *(
        torch.zeros(()),
        torch.zeros(3),
        torch.zeros(0),
        torch.tensor([2**40]),
        torch.zeros(2, 2, dtype=torch.bool),
    ),
    *(torch.full((5056,), 255, dtype=torch.uint8), torch.full((624,), 2**40)),
]


def others(value: Any) -> Iterator[Any]:
    """Yield values of other types, sizes, dtypes and strides than ``value``."""
    yield from OTHERS
    if isinstance(value, torch.Tensor):
        yield from (
            value.double().t() if value.dim() == 2 else value.double(),
            value.to(torch.complex64),
            value.to(torch.int8),
        )
        yield from (
            torch.full_like(value, 255),
            torch.zeros_like(value),
            value.reshape(-1)[:-1],
            torch.cat([value.reshape(-1)] * 2),
        )
    elif isinstance(value, (list, tuple)):
        yield from (value[:-1], (*value, *value[-1:]), type(value)(reversed(value)))
    elif isinstance(value, dict):
        yield from ({**value, "x": 1}, {**value, 0: 1}, dict(reversed(value.items())), list(value))
    elif type(value) in (int, float):
        yield from (value + 1, -value - 1, str(value), [value])


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a tree; of long sequences, only of the first and the last
    items.
    """
    if path:
        yield path
    keys = (
        list(value)
        if isinstance(value, dict)
        else list(range(len(value)))
        if isinstance(value, (list, tuple))
        else []
    )
    for key in keys if len(keys) < 30 else (keys[0], keys[-1]):
        yield from places_in(value[key], (*path, key))


def replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    """Return a copy of a tree with another value in one place."""
    if not path:
        return other
    key, *rest = path
    items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    items[key] = replaced(items[key], tuple(rest), other)
    if items[key] is REMOVED:
        del items[key]
    return type(value)(items if isinstance(value, dict) else items.values())


def load_with_others_for_each_value(
    folder: Path, name: str, component: str | None, per_place: int
) -> tuple[list[str], dict[str, int]]:
    """Return what went wrong, and how often loading did what, with other values in the places of a
    checkpoint.

    After each file that was loaded, training takes a step, which may fail, but not end the process.

    Args:
        folder: for the checkpoint.
        name: of the algorithm.
        component: in which values are replaced; None: in all.
        per_place: the number of other values in each place.
    """
    run, draw = Run(name), random.Random(name)
    run.train(4)
    whole = run.save(folder)
    (part,) = whole.glob("common*")
    content, tree = part.read_bytes(), torch.load(part, weights_only=True)
    algorithm = run.model.bagua_algorithm

    def load() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint.load(folder, run.model, [run.optimizer], sampler=run.sampler)

    def state() -> bytes:
        training = TrainingState(run.model, [run.optimizer], run.sampler)
        return digest(
            plain(training.collect({} if name == "async" else algorithm.state_dict()), "state")
        )

    def reset() -> bytes:
        if name == "async":
            algorithm.abort(run.model)
        plant(folder, content)
        load()
        if name == "async":
            algorithm.abort(run.model)
        # Else what is loaded in spite of an error would be what is there already.
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(1)
        run.optimizer.param_groups[0]["lr"] /= 2
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
        return state()

    before, wrong, ends = reset(), [], {"loaded": 0, "refused": 0}
    for path in places_in(tree):
        values = (
            list(others(functools.reduce(operator.getitem, path, tree)))
            if component in (None, path[0])
            else []
        )
        for other in draw.sample(values, min(per_place, len(values))):
            about = (
                f"{path} ="
                f" {other if not isinstance(other, torch.Tensor) else (other.shape, other.dtype)}"
            )
            plant(folder, saved_by_torch(replaced(tree, path, other)))
            try:
                load()
            except (ValueError, CheckpointError) as error:
                ends["refused"] += 1
                if (
                    str(whole) not in str(error)
                    or not str(error).isprintable()
                    or len(str(error)) > 2000
                ):
                    wrong.append(f"{about}: {error}")
                if state() != before:
                    wrong.append(f"{about}: something has changed, though {error}")
                    before = reset()
            except Exception as error:
                wrong.append(f"{about}: {type(error).__name__}: {error}")
            else:
                ends["loaded"] += 1
                with contextlib.suppress(Exception):
                    run.optimizer.step()
                if reset() != before:
                    wrong.append(f"{about}: the checkpoint cannot be loaded any more")
    return wrong, ends


def load_with_others(
    folder: Path, names: list[str], component: str | None, per_place: int
) -> dict[str, Any]:
    return {
        name: load_with_others_for_each_value(folder / name, name, component, per_place)
        for name in names
    }


EACH = [name for name in ALGORITHMS if "shift_one" not in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "component", "per_place"),
    [
        (["gradient_allreduce"], None, 1),
        (EACH, "algorithm", 1),
        *(pytest.param([name], None, 3, marks=pytest.mark.proof) for name in EACH),
    ],
    ids=str,
)
def test_any_value_in_a_checkpoint_is_loaded_or_refused_by_name_and_then_nothing_has_changed(
    tmp_path: Path, names: list[str], component: str | None, per_place: int
) -> None:
    (found,) = launch(load_with_others, 1, tmp_path, names, component, per_place, limit=280)
    for name, (wrong, ends) in found.items():
        assert wrong == [], name
        assert ends["refused"] > 0, name
        assert component or ends["loaded"] > 0, name


@pytest.mark.parametrize(
    ("path", "other", "message"),
    [
        *(
            (("numpy", 2), place, r"position of NumPy's generator\[0\] must be")
            for place in (625, -1, 10**9, 2**70, True, "1")
        ),
        (("numpy", 3), 2, r"position of NumPy's generator\[1\] must be from 0 to 1"),
        (("numpy", 4), None, r"position of NumPy's generator\[2\] must be a number"),
        (("numpy", 0), "PCG64", "not one of MT19937"),
        (("numpy", 1), torch.zeros(623, dtype=torch.int64), "not one of MT19937, with 624 keys"),
        (
            ("numpy", 1),
            torch.full((624,), 2**32),
            r"keys of NumPy's generator must be from 0 to 2\*\*32 - 1",
        ),
        (("python", 1, 624), 625, "invalid state"),
        (("python", 2), "x", "not one that random.getstate"),
        (("torch",), torch.zeros(5056, dtype=torch.uint8), "mt19937"),
    ],
    ids=str,
)
@on_every_rank(1)
def test_states_of_generators_are_checked_before_anything_is_loaded(
    r: int, tmp_path: Path, path: tuple[Any, ...], other: Any, message: str
) -> None:
    run = Run()
    run.train(4)
    run.save(tmp_path)
    (part,) = tmp_path.glob("*/common*")
    plant(
        tmp_path,
        saved_by_torch(replaced(torch.load(part, weights_only=True), ("rng", *path), other)),
    )
    run.train(5)
    before, drawn = run.state(), torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"rng in {part.name} of .*{message}"):
        run.load(tmp_path)
    assert torch.equal(run.state(), before)
    assert torch.equal(torch.get_rng_state(), drawn)


MOMENTA = {"Adam": "exp_avg_sq", "AdamW": "exp_avg", "Adagrad": "sum", "SGD": "momentum_buffer"}


@pytest.mark.parametrize(
    "changed", [lambda t: t[:-1], lambda t: t.expand(3, *t.shape), lambda t: t.int(), lambda t: 1.0]
)
@pytest.mark.parametrize("name", MOMENTA)
@on_every_rank(1)
def test_momenta_that_a_fused_step_would_read_beyond_their_end_are_refused(
    r: int, tmp_path: Path, name: str, changed: Any
) -> None:
    def make() -> tuple[Any, Any]:
        model, options = nn.Linear(3, 2), {"momentum": 0.9} if name == "SGD" else {}
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=True, **options)

    model, optimizer = make()
    model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.weight][MOMENTA[name]]
    optimizer.state[model.weight][MOMENTA[name]] = changed(momentum)
    checkpoint.save(tmp_path, model, optimizer, step=4)
    model, optimizer = make()
    model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
    before = digest(plain([model.state_dict(), optimizer.state_dict()], "state"))
    with pytest.raises(
        ValueError,
        match=(
            rf"optimizers in common-\w+.pt of .*step_00000004 cannot.*{MOMENTA[name]} of"
            r" parameter 0"
        ),
    ):
        checkpoint.load(tmp_path, model, optimizer)
    assert digest(plain([model.state_dict(), optimizer.state_dict()], "state")) == before


def manifest(**content: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "step": 4,
        "ranks": 1,
        "algorithm": "",
        "token": "",
        "parts": [],
        **content,
    }


def put_in_place(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path.symlink_to(kind)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*continuing from the checkpoint of step 2")
@pytest.mark.parametrize("file", ["manifest.json", "common"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "/dev/zero", "/dev/tty"])
def test_what_is_no_regular_file_is_damage_and_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, file: str
) -> None:
    trained(tmp_path, 1)
    (path,) = tmp_path.glob(f"step_00000004/{file}*")
    if file == "common":
        plant(tmp_path, b"")  # a device has no size either
    monkeypatch.chdir(path.parent)
    put_in_place(Path(path.name), kind)  # the path of a socket must be short
    assert loaded(tmp_path, 1)[0][0] == 2
    with pytest.raises(
        CheckpointError, match=rf"step_00000004/{path.name} is damaged: .*not a regular file"
    ):
        loaded(tmp_path, 1, step=4)


def test_a_link_to_a_part_is_followed(tmp_path: Path) -> None:
    ((_, state),) = trained(tmp_path / "a", 1)
    (path,) = tmp_path.glob("a/step_00000004/common*")
    path.symlink_to(path.rename(tmp_path / "elsewhere"))
    assert torch.equal(loaded(tmp_path / "a", 1)[0][1], state)


def test_names_from_a_manifest_cannot_control_a_terminal(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    for content, message in (
        (manifest(algorithm="\x1b[2J\n"), r"saved with \x1b[2J\n, and"),
        (manifest(**{"\x1b[2J": 1}), ""),
        (
            manifest(parts=[{"name": "\x1b[2J\n", "size": 0, "sha256": ""}]),
            r"'\x1b[2J\n' is not the name of a part",
        ),
    ):
        (part,) = (tmp_path / "step_00000004").glob("common*")
        if "algorithm" in message or content["algorithm"]:
            content |= {"token": part.stem[-8:], "parts": [described(part)]}
        path = part.with_name("manifest.json")
        path.write_text(json.dumps({"manifest": content, "sha256": _checksum(content)}))
        with pytest.raises((CheckpointError, ValueError)) as raised:
            loaded(tmp_path, 1, step=4)
        text = str(raised.value).partition("\nraised in rank")[0]
        assert text.isprintable()
        assert message in text


@pytest.mark.parametrize(
    "written",
    [
        *(b"[" * 10**5, b"null", b"\xff"),
        *(
            json.dumps({"manifest": content, "sha256": _checksum(content)}).encode()
            for content in (
                {"format": 2},
                manifest(step=2),
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


@on_every_rank(2)
def test_every_kind_of_tensor_is_saved_with_a_storage_of_its_own(r: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = torch.arange(12.0).reshape(3, 4)
    tensors = [
        *(base, base[1], base.t(), base[:0], base.expand(2, 3, 4), base.to(torch.complex64).conj()),
        *(base.bool(), base.bfloat16(), base.long(), torch.tensor(1.5)),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        *[torch.randn(40, 1000)] * 2,  # as tied weights are
    ]

    run = Run()
    path = run.save(tmp_path, extra={"epoch": 0, "tensors": tensors})
    found = run.load(tmp_path)
    assert found is not None
    loaded = found.extra["tensors"]
    assert all(map(torch.equal, loaded, tensors))
    assert [t.dtype for t in loaded] == [t.dtype for t in tensors]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in loaded)
    assert path == found.path


# Wrong use


@on_every_rank(1)
def test_what_a_checkpoint_cannot_hold_is_named(r: int, tmp_path: Path) -> None:
    run = Run()
    for extra, message in (
        ({"a": [1, b"x"]}, r"extra\['a'\]\[1\] is a bytes; a checkpoint holds tensors, numbers"),
        (np.zeros(2), r"extra is a ndarray; .*torch.as_tensor makes a tensor of it"),
        (
            torch.zeros(2).to_sparse(),
            (
                r"extra is a Tensor \(torch.float32, torch.sparse_coo\), which a checkpoint cannot"
                r" hold"
            ),
        ),
    ):
        with pytest.raises(TypeError, match=message):
            run.save(tmp_path, extra=extra)


@on_every_rank(1)
def test_wrong_arguments_are_named(r: int, tmp_path: Path) -> None:
    run, plain = Run(), nn.Linear(2, 1)
    save, load = checkpoint.save, checkpoint.load
    for error, message, call in (
        (
            TypeError,
            r"step=1.5 must be an int",
            lambda: save(tmp_path, run.model, run.optimizer, step=1.5),
        ),  # type: ignore[arg-type]
        (
            ValueError,
            r"step=-1 must be a number of steps",
            lambda: save(tmp_path, run.model, run.optimizer, step=-1),
        ),
        (ValueError, r"keep=0 must be a number of checkpoints", lambda: run.save(tmp_path, keep=0)),
        (ValueError, r"model is not wrapped; wrap it", lambda: save(tmp_path, plain, (), step=1)),
        (TypeError, r"model=5 must be a torch.nn.Module", lambda: save(tmp_path, 5, (), step=1)),  # type: ignore[arg-type]
        (
            TypeError,
            r"optimizers=.* must be a torch.optim",
            lambda: save(tmp_path, run.model, [plain], step=1),
        ),  # type: ignore[list-item]
        (
            TypeError,
            r"sampler=3 must have state_dict",
            lambda: save(tmp_path, run.model, run.optimizer, step=1, sampler=3),
        ),
        (
            TypeError,
            r"sampler is a state; it must be the sampler",
            lambda: run.load(tmp_path, sampler={}),
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    run.save(tmp_path, sampler=None)
    for message, call in (
        (
            r"saved without a sampler, and load\(\) was given sampler=Load",
            lambda: run.load(tmp_path),
        ),
        (r"saved with 1 optimizers, and load\(\) was given 0", lambda: load(tmp_path, run.model)),
        (
            r"with GradientAllReduceAlgorithmImpl, .* wrapped with ByteGrad",
            lambda: Run("bytegrad").load(tmp_path, sampler=None),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    run.save(tmp_path)
    with pytest.raises(
        ValueError, match=r"saved with a sampler; pass sampler= to load its position"
    ):
        run.load(tmp_path, sampler=None)


@on_every_rank(2)
def test_ranks_at_different_steps_cannot_save(r: int, tmp_path: Path) -> None:
    run = Run()
    run.step = 5 + r
    with pytest.raises(
        ValueError, match=r"step differs between ranks, which called save\(\) with step=\[5, 6\]"
    ):
        run.save(tmp_path)


# Real processes


def train_with_kernels_of_this_process(folder: str) -> None:
    """Twice load, train ten steps and save; print steps, weights that were loaded and trained, and
    warnings, as JSON.
    """
    bagua_ref.init_process_group()
    found = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            run = Run(seed=0)
            run.load(Path(folder))
            begun = weights(run.model).tolist()
            run.train(run.step + 10)
            run.save(Path(folder))
        found.append(
            [
                run.step,
                begun,
                weights(run.model).tolist(),
                [str(warning.message) for warning in warned],
            ]
        )
    print(json.dumps(found))


@pytest.mark.proof
def test_ranks_with_other_cpu_kernels_are_warned_and_their_checkpoints_load(tmp_path: Path) -> None:
    """Weights drift apart in torch's optimizer, which uses other kernels on rank 1."""
    code = (
        "from tests.test_checkpoint_files import *;"
        f" train_with_kernels_of_this_process({str(tmp_path)!r})"
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    kernels: list[dict[str, str]] = [{}, {"ATEN_CPU_CAPABILITY": "default"}]

    def run(rank: int) -> Any:
        environment = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank), **kernels[rank]}
        # torch chooses its kernels when they are first used
        return json.loads(run_python("-c", code, **environment).stdout)

    with ThreadPoolExecutor() as threads:
        printed = list(threads.map(run, range(2)))
    for (step, begun, ended, said), (_, others_begun, others_ended, others_said), steps in zip(
        *printed, (10, 20), strict=True
    ):
        assert step == steps
        assert begun == others_begun
        assert ended != others_ended
        assert said == others_said
        at_wrapping, at_saving = said
        here = torch.backends.cpu.get_cpu_capability()
        assert (
            f"though gradients are equal: CPU kernels: {here} on rank 0, DEFAULT on rank 1. Use one"
            " torch" in at_wrapping
        )
        assert "differ from those of rank 0, though GradientAllReduceAlgorithmImpl" in at_saving


def elastic(arguments: list[str]) -> tuple[int, str]:
    return load_script("examples/elastic.py").main(arguments)


def what_elastic_prints(arguments: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        elastic(arguments)
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("low_precision_decentralized", "async", "local_sgd", "diloco", "powersgd", "topk"),
        *(
            pytest.param(name, marks=pytest.mark.proof)
            for name in ("gradient_allreduce", "bytegrad", "decentralized", "qadam")
        ),
    ],
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
def test_torchrun_restarts_a_training(tmp_path: Path) -> None:
    """Kill the last rank of the example; torchrun restarts all, and the final weights are those of
    an undisturbed run.
    """
    ranks, kill_step = 3, 13
    # above, qadam resumes in its warm-up
    arguments = ["--algorithm", "qadam", "--folder", str(tmp_path / "killed")]
    kill = ["--kill-rank", str(ranks - 1), "--kill-step", str(kill_step)]
    launcher = [
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={ranks}",
        "--max-restarts=1",
        "examples/elastic.py",
    ]
    ended = run_python(*launcher, *arguments, *kill, limit=200, TMPDIR=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(f"resuming from step {kill_step // 5 * 5}") == 1
    final = dict(re.findall(r"rank (\d): weights (\w+) after step 20", ended.stdout))
    assert len(final) == ranks
    arguments[3] = str(tmp_path / "undisturbed")
    assert launch(elastic, ranks, arguments, init=False) == [
        (0, final[str(rank)]) for rank in range(ranks)
    ]


@pytest.mark.proof
def test_S7_6_a_job_shrinks_and_grows_and_uses_every_sample(tmp_path: Path) -> None:
    """Continue the example with other ranks in the middle of epochs, once after a kill; it checks
    each epoch's samples itself.
    """
    arguments = ["--folder", str(tmp_path / "checkpoints"), "--save-every", "3", "--steps"]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=3",
        "--max-restarts=1",
        "examples/elastic.py",
    ]
    printed = launch(what_elastic_prints, 4, [*arguments, "6"], init=False)
    ended = run_python(
        *launcher,
        *arguments,
        "13",
        "--kill-rank",
        "2",
        "--kill-step",
        "11",
        limit=200,
        TMPDIR=str(tmp_path),
    )
    assert ended.returncode == 0, ended.stderr
    printed = "".join(
        [*printed, ended.stdout, *launch(what_elastic_prints, 2, [*arguments, "24"], init=False)]
    )
    assert re.findall(r"resuming from step (\d+) on (\d) ranks", printed) == [
        ("6", "3"),
        ("9", "3"),
        ("12", "2"),
    ]
    # it stops in the sixth
    assert set(re.findall(r"epoch (\d): all 96 samples used, 0 of them twice", printed)) == set(
        "01234"
    )

"""Tests of bagua_ref.checkpoint: resuming bit for bit, damaged files, crashes, other numbers of
ranks (S5, S7).
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.launch import launch, outcomes
from tests.scripts import load_script, run_python
from tests.trainings import on_every_rank, simulate, weights, wrap
from torch import nn

import bagua_ref
from bagua_ref import checkpoint
from bagua_ref.algorithms import Algorithm, QAdamOptimizer
from bagua_ref.checkpoint.contents import digest, plain
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
            assert sorted(path.name for path in folder.glob("s*")) == [
                f"step_0000000{s}" for s in ((2, 3)[found.step == 3], 4)
            ]
            assert not list(folder.glob("*/*.tmp"))
            assert run.load(folder).step == 4  # type: ignore[union-attr]
            return crashed

        if not simulate(1, rank)[0]:
            break
    assert seen == sorted(seen)
    assert seen.count(2) >= 6
    assert seen.count(3) >= 2


@pytest.mark.parametrize("failing", [0, 1])
@on_every_rank(2)
def test_if_saving_fails_on_one_rank_it_fails_on_all(r: int, tmp_path: Path, failing: int) -> None:
    run = Run()
    run.train(1)
    run.save(tmp_path)
    run.train(2)
    with pytest.raises((TypeError, CheckpointError)) as raised:
        run.save(tmp_path, extra={"epoch": print} if r == failing else None)
    other = f"the checkpoint of step 2 was not saved, as rank {failing} failed: TypeError: "
    refused = "extra['epoch'] is a builtin_function_or_method, which torch.load(weights_only=True)"
    assert str(raised.value).startswith(("" if r == failing else other) + refused)
    assert run.load(tmp_path).step == 1  # type: ignore[union-attr]


def save_until_files_cannot_grow(folder: Path) -> tuple[str, list[str], bool]:
    """Return the error of the first save without enough space, what it leaves in ``folder``, and
    whether the one before loads.
    """
    run = Run()
    run.train(1)
    run.save(folder)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
    run.step = 2
    with pytest.raises(OSError) as raised:
        run.save(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = sorted(str(path) for path in folder.rglob("step_00000002*"))
    return str(raised.value), left, run.load(folder).step == 1  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_full_disk_is_an_error_that_names_the_file_and_nothing_is_left_of_it(
    tmp_path: Path,
) -> None:
    ((error, left, loads),) = launch(save_until_files_cannot_grow, 1, tmp_path)
    assert re.fullmatch(
        rf"\[Errno 27\] File too large: '{tmp_path}/step_00000002/common-\w+.pt'", error
    )
    assert not left
    assert loads


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
        with pytest.raises((OSError, CheckpointError), match="No space left on device: '/"):
            run.save(tmp_path)
        return run.load(tmp_path).step  # type: ignore[union-attr]

    assert simulate(2, rank) == [1, 1]
    assert [path.name for path in tmp_path.glob("s*")] == ["step_00000001"]


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
                left = tmp_path / "step_00000099" / "common-01234567.pt"
                left.write_text("left by a crash")
                (tmp_path / "best").mkdir()
        run.save(tmp_path, keep=3)  # again

    simulate(2, rank)
    steps = [f"step_0000000{step}" for step in (1, 3, 4, 5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "best", *steps]
    assert [path.name for path in (tmp_path / "step_00000001").iterdir()] == ["notes.txt"]
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "step_00000005").iterdir()) == [
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
            rf"step_00000004: its optimizers cannot.*{MOMENTA[name]} of"
            r" parameter 0"
        ),
    ):
        checkpoint.load(tmp_path, model, optimizer)
    assert digest(plain([model.state_dict(), optimizer.state_dict()], "state")) == before


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
        at_wrapping, at_saving = (text for text in said if "returns None" not in text)
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

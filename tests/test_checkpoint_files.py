"""Tests of bagua_ref.checkpoint: resuming bit for bit, damaged files, crashes, other numbers of
ranks (S5, S7). What checkpoints hold is in test_checkpoint_inputs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import random
import re
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch import launch, outcomes
from tests.scripts import load_script, run_python
from tests.trainings import on_every_rank, simulate, weights
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

FLAT: dict[str, Any] = {"hierarchical": False}
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient_allreduce": ("gradient_allreduce", {}),
    "bytegrad": ("bytegrad", FLAT),
    "bytegrad with memory": ("bytegrad", {**FLAT, "error_feedback": True}),
    "decentralized_all": ("decentralized", {**FLAT, "communication_interval": 2}),
    "decentralized_shift_one": ("decentralized", {**FLAT, "peer_selection_mode": "shift_one"}),
    "low_precision_decentralized": (
        "low_precision_decentralized",
        {**FLAT, "communication_interval": 2},
    ),
    "qadam": ("qadam", FLAT),
    "async": ("async", {"sync_interval_ms": 1}),
    "local_sgd": ("local_sgd", {"period": 3, "warmup_steps": 1}),
    "diloco": ("diloco", {"period": 6, "fragments": 2, "delay": 2, "mix": 0.5}),
    "powersgd": ("powersgd", {"warmup_steps": 2, "min_compression_rate": 0.5}),
    "topk": ("topk", {"ratio": 0.2, "warmup_steps": 1}),
}


class Run:
    """One rank's training, with a sampler that is in the middle of an epoch most of the time."""

    def __init__(
        self, name: str = "gradient_allreduce", wrapper: bool = False, wrapped: bool = True
    ) -> None:
        torch.manual_seed(bagua_ref.get_rank())
        self.model: Any = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
        )
        registered, options = ALGORITHMS[name]
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        if name == "qadam":
            self.optimizer = QAdamOptimizer(self.model.parameters(), lr=0.05, warmup_steps=4)
            options = {**options, "q_adam_optimizer": self.optimizer}
        if wrapped:
            algorithm = Algorithm.init(registered, **options)
            wrap = functools.partial(DistributedDataParallel, self.model)
            self.model = (wrap if wrapper else self.model.with_bagua)(
                optimizers=[self.optimizer], algorithm=algorithm
            )
        balanced = LoadBalancingDistributedSampler(LENGTHS, None, complexities=LENGTHS)
        self.sampler = LoadBalancingDistributedBatchSampler(
            balanced, lambda i: [i[k : k + 4] for k in range(0, len(i), 4)]
        )
        self.epoch, self.step = 0, 0
        self._batches: Iterator[list[int]] | None = None

    def train(self, until: int) -> Run:
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
        return self

    def save(self, folder: Path, **options: Any) -> Path:
        options = {"sampler": self.sampler, "extra": {"epoch": self.epoch}, **options}
        return checkpoint.save(folder, self.model, [self.optimizer], step=self.step, **options)

    def load(self, folder: Path, **options: Any) -> int | None:
        """Return the step, None if there was no checkpoint."""
        options = {"sampler": self.sampler, **options}
        found = checkpoint.load(folder, self.model, [self.optimizer], **options)
        if found is not None:
            self.step, self.epoch, self._batches = found.step, found.extra["epoch"], None
        return None if found is None else found.step

    def state(self) -> torch.Tensor:
        buffers = [buffer.reshape(-1).double() for buffer in self.model.buffers()]
        return torch.cat([weights(self.model).double(), *buffers])

    def abort(self) -> None:
        if hasattr(self.model.bagua_algorithm, "abort"):
            self.model.bagua_algorithm.abort(self.model)


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
    folder = tempfile.TemporaryDirectory()

    def rank(r: int) -> list[torch.Tensor]:
        run = Run(name)
        states = []
        for step in steps:
            run.train(step).save(Path(folder.name))
            states.append(run.state())
        run.abort()
        return states

    return folder, simulate(ranks, rank)


def loaded(
    folder: Path, ranks: int, name: str = "gradient_allreduce", wrapped: bool = True, **options: Any
) -> list[tuple[int | None, torch.Tensor]]:
    """Load in a new simulated world; return each rank's step and state."""

    def rank(r: int) -> tuple[int | None, torch.Tensor]:
        run = Run(name, wrapped=wrapped)
        return run.load(folder, **options), run.state()

    return simulate(ranks, rank, seed=1)


@pytest.mark.parametrize(
    ("name", "saved", "wrapper"),
    [
        ("bytegrad with memory", 5, False),
        ("decentralized_shift_one", 5, False),
        ("diloco", 5, False),
        ("powersgd", 5, False),
        ("qadam", 4, False),  # at the end of its warm-up
        ("gradient_allreduce", 5, True),
        ("low_precision_decentralized", 5, True),
    ],
)
def test_S5_a_training_continues_bit_for_bit(
    tmp_path: Path, name: str, saved: int, wrapper: bool
) -> None:
    def in_one_go(r: int) -> tuple[torch.Tensor, torch.Tensor]:
        run = Run(name, wrapper).train(saved)
        run.save(tmp_path)
        assert 0 < run.sampler.state_dict()["batches"] < len(run.sampler)
        return run.state(), run.train(11).state()

    def resumed(r: int) -> tuple[torch.Tensor, torch.Tensor]:
        of_other_kind = Run(name, wrapper=not wrapper)
        of_other_kind.load(tmp_path)
        run = Run(name, wrapper).train(1)  # a script may have trained before it loads
        assert run.load(tmp_path) == saved
        return of_other_kind.state(), run.train(11).state()

    for whole, continued in zip(simulate(2, in_one_go), simulate(2, resumed, seed=1), strict=True):
        assert all(map(torch.equal, whole, continued))


def test_what_is_equal_on_all_ranks_is_written_once(tmp_path: Path) -> None:
    trained(tmp_path, 3, steps=(4,))
    parts = {
        path.name.split("-")[0]: torch.load(path, weights_only=True).keys()
        for path in tmp_path.glob("step_00000004/*.pt")
    }
    own = {"model/1.running_mean", "model/1.running_var", "rng/torch", "algorithm/rank"}
    assert all(parts.pop(f"rank{r}") == own for r in range(3))
    (common,) = parts.values()
    assert {"extra", "sampler", "optimizers/0", "model/0.weight", "rng/python"} < common
    assert not own & common


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


# Damaged files


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES: list[Callable[[Path], object]] = [
    flip,
    lambda path: os.truncate(path, path.stat().st_size // 2),
    lambda path: path.write_bytes(path.read_bytes() + b"x"),
    Path.unlink,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=itertools.count())
@pytest.mark.parametrize("file", ["manifest.json", "rank1", "common"])
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


def crash(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let the call number ``at`` of those that change the disk raise CrashError."""
    count = itertools.count()

    def instrumented(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(count) == at:
                raise CrashError
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


def test_after_a_crash_at_any_moment_a_whole_checkpoint_is_there(tmp_path: Path) -> None:
    seen = []
    for at in itertools.count():
        folder = tmp_path / str(at)

        def rank(r: int, at: int = at, folder: Path = folder) -> bool:
            run = Run()
            for step in (1, 2):
                run.train(step).save(folder, keep=2)
            before = run.state()
            run.train(3)
            crashed = False
            with pytest.MonkeyPatch.context() as monkeypatch:
                crash(monkeypatch, at)
                try:
                    run.save(folder, keep=2)
                except CrashError:
                    crashed = True
            after = run.state()
            step_found = run.load(folder)
            assert torch.equal(run.state(), after if step_found == 3 else before)
            seen.append(step_found)
            run.train(4).save(folder, keep=2)
            assert sorted(path.name for path in folder.glob("s*")) == [
                f"step_0000000{s}" for s in ((2, 3)[step_found == 3], 4)
            ]
            assert not list(folder.glob("*/*.tmp"))
            assert run.load(folder) == 4
            return crashed

        if not simulate(1, rank)[0]:
            break
    assert seen == sorted(seen)
    assert seen.count(2) >= 6
    assert seen.count(3) >= 2


def save_until_files_cannot_grow(folder: Path) -> tuple[str, list[str], int | None]:
    """Return the error of a save without enough space, the files that it leaves, and the step that
    loads afterwards.
    """
    run = Run()
    run.train(1).save(folder)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
    run.step = 2
    with pytest.raises(OSError) as raised:
        run.save(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(raised.value), [str(p) for p in folder.glob("step_00000002/*")], run.load(folder)


@pytest.mark.slow
def test_a_full_disk_is_an_error_that_names_the_file_and_nothing_is_left_of_it(
    tmp_path: Path,
) -> None:
    ((error, *rest),) = launch(save_until_files_cannot_grow, 1, tmp_path)
    named = re.escape(f"[Errno 27] File too large: '{tmp_path}/step_00000002/common-")
    assert re.fullmatch(rf"{named}\w+.pt'", error)
    assert rest == [[], 1]


@on_every_rank(2)
def test_a_folder_that_ranks_do_not_share_is_an_error_on_all_of_them(
    r: int, tmp_path: Path
) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"rank1-\w+.pt was written but is not here; ranks on several nodes need a folder",
    ):
        Run("low_precision_decentralized").save(tmp_path / f"disk{r}")


def test_older_checkpoints_are_removed_and_nothing_else_is(tmp_path: Path) -> None:
    trained(tmp_path / "other", 1, steps=(1,))
    folder = tmp_path / "own"

    def rank(r: int) -> None:
        run = Run("bytegrad")
        for step in range(1, 6):
            run.train(step).save(folder, keep=3 if step > 2 else None)
            if step == 2 and r == 0:
                (folder / "step_00000001" / "notes.txt").write_text("mine")
                (folder / "step_00000099").mkdir()
                left = folder / "step_00000099" / "common-1234567.pt"
                left.write_text("left by a crash")
                (folder / "best").mkdir()
                (folder / "step_00000000").symlink_to(tmp_path / "other" / "step_00000001")
        run.save(folder, keep=3)  # again

    simulate(2, rank)
    steps = [f"step_0000000{step}" for step in (0, 1, 3, 4, 5)]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "best", *steps]
    assert [path.name for path in (folder / "step_00000001").iterdir()] == ["notes.txt"]
    parts = sorted(path.name.split("-")[0] for path in (folder / "step_00000005").iterdir())
    assert parts == ["common", "manifest.json", "rank0", "rank1"]
    assert loaded(tmp_path / "other", 1)[0][0] == 1


# Other numbers of ranks


def resume(folder: Path, name: str, group: Any = None) -> torch.Tensor:
    """Train to step 4, or load it; return the weights."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    algorithm = Algorithm.init(name, hierarchical=False)
    model.with_bagua([optimizer], algorithm, process_group=group)
    found = checkpoint.load(folder, model, optimizer)
    for step in range(found.step if found else 0, 4):
        model(INPUTS[step : step + bagua_ref.get_rank() + 1]).square().mean().backward()
        optimizer.step()
    if found is None:
        checkpoint.save(folder, model, optimizer, step=4)
    assert model.bagua_train_step_counter == 4
    return weights(model)


def test_what_is_equal_on_all_ranks_loads_at_another_number_of_ranks(tmp_path: Path) -> None:
    saved, _ = simulate(2, lambda r: resume(tmp_path, "bytegrad"))
    for ranks in (1, 3):
        for state in simulate(ranks, lambda r: resume(tmp_path, "bytegrad")):
            assert torch.equal(state, saved)


def test_a_part_of_the_ranks_can_save_and_load(tmp_path: Path) -> None:
    def rank(r: int) -> torch.Tensor | None:
        group = bagua_ref.new_group([1, 2])
        return resume(tmp_path, "low_precision_decentralized", group) if r else None

    _, *saved = simulate(3, rank)
    _, *loaded = simulate(3, rank)
    assert not torch.equal(saved[0], saved[1])
    assert all(map(torch.equal, saved, loaded))


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("gradient_allreduce", r": model/1.running_mean, model/1.running_var, rng/torch\."),
        ("low_precision_decentralized", r"algorithm/replicas, "),
        ("async", r"model/0.weight, .*, optimizers/0, "),
        ("local_sgd", r": model/1.\w+mean, model/1.running_var, optimizers/0, rng/"),  # averaged
        ("diloco", r"model/0.weight, .*, optimizers/0, rng/torch\. "),
        ("powersgd", r"algorithm/memories, "),
    ],
)
def test_what_belongs_to_a_rank_is_refused_by_name_or_dropped(
    tmp_path: Path, name: str, belongs: str
) -> None:
    states = trained(tmp_path, 2, name)
    message = (
        r"step_00000004 was saved by 2 ranks and this training has 4, but .*single ranks"
        rf".*{belongs}.*drop_rank_state=True"
    )

    def rank(r: int) -> torch.Tensor:
        run = Run(name)
        before, noise = run.state(), torch.get_rng_state()
        with pytest.raises(ValueError, match=message):
            run.load(tmp_path)
        assert torch.equal(run.state(), before)
        run.load(tmp_path, drop_rank_state=True)
        assert torch.equal(torch.get_rng_state(), noise)
        assert run.sampler.state_dict()["num_replicas"] == 2  # where the two ranks were
        assert run.model.bagua_train_step_counter == 4
        if name == "low_precision_decentralized":  # replicas start as copies (S3.5)
            (bucket,) = run.model.bagua_buckets
            for copy in (bucket._weight, bucket._left_peer_weight, bucket._right_peer_weight):
                assert torch.equal(copy, bucket.flattened_tensor())
        state = run.state()
        run.epoch = 2
        run.train(8).abort()
        return state

    for state in simulate(4, rank):
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


def test_a_model_that_is_not_wrapped_gets_the_first_ranks_weights(tmp_path: Path) -> None:
    states = trained(tmp_path, 2, "decentralized_all")
    with pytest.raises(ValueError, match="model is not wrapped, so the state of its algorithm"):
        loaded(tmp_path, 1, wrapped=False)
    ((step, state),) = loaded(tmp_path, 1, wrapped=False, drop_rank_state=True)
    assert step == 4
    assert torch.equal(state, states[0][1])


# Loading is local


@pytest.mark.parametrize("name", ["low_precision_decentralized", "async", "diloco", "topk"])
def test_one_rank_alone_can_load(tmp_path: Path, name: str) -> None:
    states = trained(tmp_path, 2, name)

    def rank(r: int) -> torch.Tensor:
        run = Run(name)
        if r == 1:
            run.load(tmp_path, step=2)
        return run.state()

    assert torch.equal(simulate(2, rank)[1], states[1][0])


@pytest.mark.parametrize("state", ["RUNNING", "ABORTED"])
def test_async_stops_for_saving_and_keeps_whether_it_was_aborted(
    tmp_path: Path, state: str
) -> None:
    def whole(r: int) -> torch.Tensor:
        run = Run("async").train(4)
        if state == "ABORTED":
            run.abort()
        run.save(tmp_path)
        saved = run.state()
        assert run.train(6).model.bagua_algorithm._rounds.state.name == state
        if state == "RUNNING":
            with pytest.raises(
                RuntimeError, match=r"averaging is under way.*call abort\(model\) on every rank"
            ):
                run.load(tmp_path)
        run.abort()
        return saved

    def resumed(r: int) -> torch.Tensor:
        run = Run("async")
        run.load(tmp_path)
        loaded = run.state()
        assert run.train(6).model.bagua_algorithm._rounds.state.name == state
        run.abort()
        return loaded

    assert all(map(torch.equal, simulate(2, whole), simulate(2, resumed)))


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
        kind = getattr(torch.optim, name)
        optimizer = kind(model.parameters(), lr=0.1, fused=True, **options)
        return model.with_bagua([optimizer], Algorithm.init("gradient_allreduce")), optimizer

    model, optimizer = make()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.weight][MOMENTA[name]]
    optimizer.state[model.weight][MOMENTA[name]] = changed(momentum)
    checkpoint.save(tmp_path, model, optimizer, step=4)
    model, optimizer = make()
    before = digest(plain([model.state_dict(), optimizer.state_dict()], "state"))
    with pytest.raises(
        ValueError,
        match=rf"step_00000004: its optimizers cannot.*{MOMENTA[name]} of parameter 0",
    ):
        checkpoint.load(tmp_path, model, optimizer)
    assert digest(plain([model.state_dict(), optimizer.state_dict()], "state")) == before


@pytest.mark.parametrize("wrong", ["model", "sampler"])
@on_every_rank(1)
def test_if_something_does_not_fit_nothing_is_loaded(r: int, tmp_path: Path, wrong: str) -> None:
    Run().train(2).save(tmp_path)
    run = Run().train(1)
    if wrong == "model":
        run.model[4].register_buffer("other", torch.ones(2))
    else:
        run.sampler.load_state_dict = lambda state: 1 / 0  # type: ignore[method-assign, assignment]
    parts = [run.model.state_dict(), run.optimizer.state_dict(), torch.get_rng_state()]
    before = digest(plain(parts, "parts"))
    with pytest.raises(ValueError, match=f"step_00000002: its {wrong} cannot be loaded: "):
        run.load(tmp_path)
    parts = [run.model.state_dict(), run.optimizer.state_dict(), torch.get_rng_state()]
    assert digest(plain(parts, "parts")) == before


# What is wrong, its message, and the options of the call
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "step=1.5 must be a number of steps": ("save", {"step": 1.5}),
    "step=-1 must be a number of steps": ("save", {"step": -1}),
    "keep=0 must be a number of checkpoints": ("save", {"keep": 0}),
    "model is not wrapped; wrap it": ("save", {"model": nn.Linear(2, 1)}),
    "model=5 must be a torch.nn.Module": ("save", {"model": 5}),
    r"optimizers=\[3\] must be a torch.optim": ("save", {"optimizers": [3]}),
    "object has no attribute 'state_dict'": ("save", {"sampler": 3}),
    "object has no attribute 'load_state_dict'": ("load", {"sampler": {}}),
    r"saved with a sampler, and load\(\) was given sampler=None": ("load", {"sampler": None}),
    r"saved with 1 optimizers, and load\(\) was given 0": ("load", {"optimizers": []}),
}


@on_every_rank(1)
def test_wrong_arguments_are_named(r: int, tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path)
    options = {"model": run.model, "optimizers": run.optimizer, "sampler": run.sampler}
    for message, (function, wrong) in WRONG.items():
        given = options | ({"step": 1} if function == "save" else {}) | wrong
        with pytest.raises((TypeError, ValueError, AttributeError), match=message):
            getattr(checkpoint, function)(tmp_path, **given)
    run.save(tmp_path, sampler=None)
    with pytest.raises(ValueError, match=r"without a sampler, .* was given sampler=Load"):
        run.load(tmp_path)
    with pytest.raises(ValueError, match=r"with GradientAllReduce.*, .* wrapped with ByteGrad"):
        Run("bytegrad").load(tmp_path, sampler=None)


@on_every_rank(2)
def test_ranks_at_different_steps_cannot_save(r: int, tmp_path: Path) -> None:
    run = Run()
    run.step = 5 + r
    with pytest.raises(ValueError, match=r"step differs between ranks, .* step=\[5, 6\]"):
        run.save(tmp_path)


# Real processes


def elastic(arguments: list[str]) -> tuple[int, str]:
    return load_script("examples/elastic.py").main(arguments)


def what_elastic_prints(arguments: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        elastic(arguments)
    return printed.getvalue()


def restarted(arguments: list[str], killed: int, tmp_path: Path) -> str:
    """Return what three ranks print, the last of which is killed once after ``killed`` steps."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=3", "--max-restarts=1"]
    kill = ["--kill-rank", "2", "--kill-step", str(killed)]
    script = ["examples/elastic.py", *arguments, *kill]
    ended = run_python(*launcher, *script, limit=200, TMPDIR=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("async", "powersgd"),
        *(
            pytest.param(name, marks=pytest.mark.proof)
            for name in ("low_precision_decentralized", "qadam", "local_sgd", "diloco")
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
def test_S7_6_a_job_shrinks_and_grows_and_uses_every_sample(tmp_path: Path) -> None:
    """Continue the example with other ranks in the middle of epochs, once after a kill; it checks
    each epoch's samples itself.
    """
    arguments = ["--folder", str(tmp_path / "checkpoints"), "--save-every", "3", "--steps"]
    printed = launch(what_elastic_prints, 4, [*arguments, "6"], init=False)
    printed.append(restarted([*arguments, "13"], 11, tmp_path))
    text = "".join(printed + launch(what_elastic_prints, 2, [*arguments, "24"], init=False))
    resumed = re.findall(r"resuming from step (\d+) on (\d) ranks", text)
    assert resumed == [("6", "3"), ("9", "3"), ("12", "2")]
    # it stops in the sixth
    used = re.findall(r"epoch (\d): all 96 samples used, 0 of them twice", text)
    assert set(used) == set("01234")

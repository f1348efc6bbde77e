"""Tests of training with Hugging Face's Trainer: equal to a training by hand, over gloo, with a
tiny GPT-2.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from tests.integrations.language_model import BATCH, by_hand, language_model, sequences
from tests.integrations.trainings import ALGORITHMS, CASES, STEPS, optimizer_of, weights_of
from tests.launch import launch, preload
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

import bagua_ref
from bagua_ref.integrations.transformers import use_bagua

preload(__name__)


def rank() -> int:
    return int(os.environ["RANK"])


class Ordered(Trainer):
    """A Trainer that takes the samples in their order."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer_of(name: str, folder: Path, accumulate: int = 1, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.0,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        max_steps=STEPS,
        **{"save_strategy": "no", "report_to": [], **options},
    )
    model = language_model(rank())
    optimizer = optimizer_of(name, model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    samples = sequences(2 * BATCH * STEPS * accumulate)
    trainer = Ordered(model, arguments, train_dataset=samples, optimizers=(optimizer, constant))
    # the mean of each batch, instead of a sum over the tokens of all ranks
    trainer.model_accepts_loss_kwargs = False
    return trainer


def train_with_each(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for name, accumulate in CASES:
        trainer = trainer_of(name, folder, accumulate)
        use_bagua(trainer, name, **ALGORITHMS[name])
        trainer.train()
        assert trainer.model_wrapped is trainer.model
        found[f"{name}, {accumulate} batches"] = (
            weights_of(trainer.model),
            by_hand(rank(), name, accumulate),
        )
    return found


def test_the_trainer_trains_to_the_weights_of_a_loop_by_hand(tmp_path: Path) -> None:
    for of_rank in launch(train_with_each, 2, tmp_path, init=False):
        for name, (ours, theirs) in of_rank.items():
            assert torch.equal(ours, theirs), name


def train_with_hooks(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for name in ("gradient_allreduce", "bytegrad", "powersgd", "topk"):
        trainer = trainer_of(name, folder)

        class Hook(TrainerCallback):
            def on_train_begin(
                self, *_: Any, trainer: Trainer = trainer, name: str = name, **__: Any
            ) -> None:
                trainer.model_wrapped.register_comm_hook(
                    *bagua_ref.ddp_comm_hook(name, **ALGORITHMS[name])
                )

        trainer.add_callback(Hook())
        trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        found[name] = weights_of(trainer.model), by_hand(rank(), name, hook=True)
    found["as with_bagua"] = found["gradient_allreduce"][0], by_hand(rank(), "gradient_allreduce")
    return found


def test_a_hook_in_the_trainer_gives_what_it_gives_by_hand(tmp_path: Path) -> None:
    for of_rank in launch(train_with_hooks, 2, tmp_path, init=False):
        for name, (ours, theirs) in of_rank.items():
            assert torch.equal(ours, theirs), name


def resume_each(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in ALGORITHMS.items():
        trainer = trainer_of(name, folder / name, save_strategy="steps", save_steps=STEPS // 2)
        use_bagua(trainer, name, **options)
        trainer.train()
        resumed = trainer_of(name, folder / name)
        use_bagua(resumed, name, **options)
        resumed.train(resume_from_checkpoint=str(folder / name / f"checkpoint-{STEPS // 2}"))
        found[name] = weights_of(trainer.model), weights_of(resumed.model)
    lost = folder / "local_sgd" / f"checkpoint-{STEPS // 2}"
    if rank() == 0:
        shutil.rmtree(lost / "bagua")
    bagua_ref.barrier()
    trainer = trainer_of("local_sgd", folder / "local_sgd")
    use_bagua(trainer, "local_sgd", **ALGORITHMS["local_sgd"])
    try:
        trainer.train(resume_from_checkpoint=str(lost))
    except ValueError as error:
        found["error"] = str(error)
    return found


def test_the_trainer_resumes_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    for of_rank in launch(resume_each, 2, tmp_path, init=False):
        assert "training cannot resume: there is no" in of_rank.pop("error")
        for name, (whole, resumed) in of_rank.items():
            assert torch.equal(resumed, whole), name


def log_each(folder: Path) -> list[Any]:
    """Return what the first rank of several trainings has logged, in the Trainer's history and to
    TensorBoard.
    """
    found = []
    for every, accumulate in ((2, 1), (3, 1), (2, 2)):
        trainer = trainer_of("", folder, accumulate, report_to=["tensorboard"], logging_steps=every)
        (board,) = (
            callback
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, TensorBoardCallback)
        )
        board.tb_writer = writer = Mock()
        # it would wait for the other rank forever
        use_bagua(trainer, "local_sgd", period=3, log_metrics=rank() == 0)
        trainer.train()
        metrics = {
            f"bagua/{name}": value
            for name, value in trainer.model.bagua_metrics().items()
            if "since" not in name
        }
        written = {
            call.args[0]: call.args[1]
            for call in writer.add_scalar.call_args_list
            if call.args[2] == STEPS
        }
        found.append((trainer.state.log_history, written, metrics))
    return found


def test_what_report_to_names_gets_the_metrics_of_the_first_rank_with_the_loss(
    tmp_path: Path,
) -> None:
    first, second = launch(log_each, 2, tmp_path, init=False)
    size = 4 * sum(p.numel() for p in language_model(0).parameters())
    by_twos = [(2, 0), (4, size), (6, 2 * size)]
    for (history, written, metrics), expected in zip(
        first, (by_twos, [(3, size), (6, 2 * size)], by_twos), strict=True
    ):
        with_loss = [entry for entry in history if "loss" in entry]
        assert [(entry["step"], entry["bagua/bytes_sent"]) for entry in with_loss] == expected
        assert all(entry["bagua/steps"] == entry["step"] for entry in with_loss)
        assert metrics.items() <= with_loss[-1].items()
        assert {
            f"train/{name}": value for name, value in metrics.items()
        }.items() <= written.items()
        assert not any(
            name.startswith("bagua/") for entry in history if "loss" not in entry for name in entry
        )
    assert "bagua/" not in str([history for history, _, _ in second])
    assert [written for _, written, _ in second] == [{}] * 3


class Slow(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(0.02)


def train_async_twice(folder: Path) -> list[Any]:
    states = []
    trainer = trainer_of("async", folder)
    use_bagua(trainer, "async", sync_interval_ms=5)
    trainer.add_callback(Slow())
    for _ in range(2):
        trainer.train()
        rounds = trainer.model.bagua_algorithm._rounds
        states.append((rounds.state.name, rounds.completed > 0))
    return states


def test_asynchronous_averaging_ends_with_the_training(tmp_path: Path) -> None:
    assert launch(train_async_twice, 2, tmp_path, init=False) == [[("ABORTED", True)] * 2] * 2


def refuse(folder: Path) -> list[str]:
    errors = []
    trainer = trainer_of("bytegrad", folder, torch_compile=True)
    try:
        use_bagua(trainer, "bytegrad")
    except NotImplementedError as error:
        errors.append(str(error))
    for name in ("nonsense", "qadam"):
        trainer = trainer_of("bytegrad", folder)
        try:
            use_bagua(trainer, name)
            trainer.train()
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_what_cannot_train_is_refused(tmp_path: Path) -> None:
    for compiled, unknown, qadam in launch(refuse, 2, tmp_path, init=False):
        assert "call model.compile()" in compiled
        assert "'nonsense' is not a registered algorithm" in unknown
        assert "needs exactly one optimizer, a QAdamOptimizer; there are: SGD" in qadam

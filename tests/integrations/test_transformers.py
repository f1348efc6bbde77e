"""Tests of training with Hugging Face's Trainer: equal to a training by hand, over gloo, with a tiny GPT-2."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from tests.integrations.language_model import BATCH, by_hand, language_model, sequences
from tests.integrations.trainings import ALGORITHMS, STEPS, optimizer_of, weights_of
from tests.launch import launch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments

import bagua_ref
from bagua_ref.integrations.transformers import use_bagua


def rank() -> int:
    return int(os.environ["RANK"])


class Ordered(Trainer):
    """A Trainer that takes the samples in their order."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer_of(name: str, folder: Path, accumulate: int = 1, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=BATCH, gradient_accumulation_steps=accumulate, max_grad_norm=0.0,
        report_to=[], disable_tqdm=True, ddp_find_unused_parameters=False, max_steps=STEPS, **{"save_strategy": "no", **options},
    )  # fmt: skip
    model = language_model(rank())
    optimizer = optimizer_of(name, model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    samples = sequences(2 * BATCH * STEPS * accumulate)
    trainer = Ordered(model, arguments, train_dataset=samples, optimizers=(optimizer, constant))
    trainer.model_accepts_loss_kwargs = False  # the mean of each batch, instead of a sum over the tokens of all ranks
    return trainer


def train_with_each(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for name, options in ALGORITHMS.items():
        for accumulate in (1, 2):
            trainer = trainer_of(name, folder, accumulate)
            use_bagua(trainer, name, **options)
            trainer.train()
            assert trainer.model_wrapped is trainer.model
            found[f"{name}, {accumulate} batches"] = weights_of(trainer.model), by_hand(rank(), name, accumulate)
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
            def on_train_begin(self, *_: Any, trainer: Trainer = trainer, name: str = name, **__: Any) -> None:
                trainer.model_wrapped.register_comm_hook(*bagua_ref.ddp_comm_hook(name, **ALGORITHMS[name]))

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

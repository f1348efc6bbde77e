"""Train a small GPT-2 on the text of Python's help(), byte by byte, in Hugging Face's Trainer, once
with each algorithm.

torchrun --nproc_per_node=2 examples/gpt2_hf_trainer.py --plot gpt2.png
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from loss_curves import Point, draw
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import bagua_ref
from bagua_ref.integrations.transformers import use_bagua

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "local_sgd": {"period": 16},
}
LENGTH = 64


def samples() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Return pieces of the text to train on, and held-out pieces."""
    text = "".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    codes = torch.tensor(list(text.encode()))
    pieces = codes[: len(codes) // LENGTH * LENGTH].view(-1, LENGTH)
    rows = [{"input_ids": piece, "labels": piece} for piece in pieces]
    held_out = len(rows) // 10
    return rows[:-held_out], rows[-held_out:][:256]


class Curve(TrainerCallback):
    """Keeps a point for each evaluation."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sent = kwargs["model"].bagua_metrics()["bytes_sent"]
        self.points.append(Point(state.global_step, sent / 1e6, kwargs["metrics"]["eval_loss"]))


def train(name: str, steps: int, folder: str) -> list[Point]:
    set_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=128,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    training, held_out = samples()
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        eval_strategy="steps",
        eval_steps=max(1, steps // 20),
        per_device_eval_batch_size=64,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    curve = Curve()
    trainer = Trainer(
        model, arguments, train_dataset=training, eval_dataset=held_out, callbacks=[curve]
    )
    use_bagua(trainer, name, **ALGORITHMS[name])
    trainer.train()
    return curve.points


def main(argv: Sequence[str] | None = None) -> dict[str, list[Point]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses")
    arguments = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        curves = {name: train(name, arguments.steps, folder) for name in arguments.algorithms}
    if bagua_ref.get_rank() == 0:
        for name, points in curves.items():
            print(
                f"{name}: held-out loss {points[-1].loss:.3f} after {points[-1].megabytes:.1f} MB"
                " sent by each rank"
            )
        if arguments.plot:
            draw(curves, "GPT-2 on the text of Python's help()", arguments.plot)
    return curves


if __name__ == "__main__":
    main()

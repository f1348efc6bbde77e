"""``bagua-ref same``: compare a training step on several ranks with that of one process."""

from __future__ import annotations

import argparse
from pathlib import Path

from bagua_ref.cli.command import (
    CommandError,
    Commands,
    add_command,
    load_object,
    write_json,
)

__all__ = ["add_parser"]


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``same`` to the commands of ``bagua-ref``."""
    same = add_command(
        commands,
        "same",
        _run,
        examples=(
            "bagua-ref same train:step --batch batch.pt --model train:make_model",
            "bagua-ref same train:train_one_step --batch batch.pt",
        ),
        description=(
            "Run one training step on simulated ranks, with the batch divided in several ways, and"
            " compare gradients and weights with those of one process: every sample and token must"
            " weigh the same. step(model, microbatches) makes the backward passes;"
            " step(microbatches) also makes the model, and returns it."
        ),
        epilog="Exit status is 0 if all agree, 1 if some differ, 2 for bad usage, 3 if none can be compared.",
    )
    same.add_argument("step", metavar="MODULE:STEP", help="the function that makes one step")
    same.add_argument(
        "--batch", required=True, type=Path, metavar="FILE", help="a batch, saved by torch.save"
    )
    same.add_argument("--model", metavar="MODULE:FUNCTION", help="makes the model on each rank")
    same.add_argument(
        "--labels", default="labels", metavar="KEY", help="of the labels (default: %(default)s)"
    )


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    import torch

    from bagua_ref.simulation.same_as_one import same_as_one

    step = load_object(arguments.step)
    model = arguments.model and load_object(arguments.model)
    labels = int(arguments.labels) if arguments.labels.isdecimal() else arguments.labels
    try:
        batch = torch.load(arguments.batch, weights_only=True)
        report = same_as_one(step, batch, model=model, labels=labels)
    except (OSError, ValueError, TypeError) as error:
        raise CommandError(str(error)) from None
    if not arguments.json:
        print(report)
    compared = len(report.layouts) if report.is_comparable else 0
    write_json(
        arguments,
        {
            "compared": compared,
            "differences": {str(layout): text for layout, text in report.differences.items()},
            "notes": list(report.notes),
        },
    )
    return 1 if report.differences else 0 if compared else 3

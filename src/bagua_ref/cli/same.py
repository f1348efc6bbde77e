"""``bagua-ref same``: compare a training step on several ranks with that of one process."""

from __future__ import annotations

from argparse import Namespace

import torch

from bagua_ref.cli.command import CommandError, Outcome, load_object
from bagua_ref.simulation.same_as_one import same_as_one

__all__ = ["run"]


def run(arguments: Namespace) -> Outcome:
    """Compare different layouts of a batch."""
    step = load_object(arguments.step)
    model = arguments.model and load_object(arguments.model)
    labels = int(arguments.labels) if arguments.labels.isdecimal() else arguments.labels
    try:
        batch = torch.load(arguments.batch, weights_only=True)
        report = same_as_one(step, batch, model=model, labels=labels)
    except (OSError, ValueError, TypeError) as error:
        raise CommandError(str(error)) from None
    compared = len(report.layouts) if report.is_comparable else 0
    differences = {str(layout): text for layout, text in report.differences.items()}
    result = {"compared": compared, "differences": differences, "notes": list(report.notes)}
    return Outcome(str(report), result, 1 if differences else 0 if compared else 3)

"""Drawing of what `gpt2_hf_trainer.py` and `timm_lightning.py` have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure


class Point(NamedTuple):
    """What has been reached at one step of a training."""

    step: int
    megabytes: float
    loss: float


def draw(curves: Mapping[str, Sequence[Point]], title: str, path: Path) -> None:
    """Draw the losses of each algorithm over steps, and over what each rank has sent."""
    figure = Figure(figsize=(5.4, 6.4), layout="constrained", dpi=160)
    figure.suptitle(title)
    by_step, by_bytes = figure.subplots(2, 1)
    for (name, points), style in zip(curves.items(), ("-", "--", "-.", ":"), strict=False):
        steps, megabytes, losses = zip(*points, strict=True)
        by_step.plot(steps, losses, style, label=name, linewidth=1.8)
        by_bytes.plot(megabytes, losses, style, linewidth=1.8)
    by_step.set(xlabel="step", ylabel="held-out loss")
    by_bytes.set(xlabel="MB sent by each rank", ylabel="held-out loss", xscale="log")
    by_step.legend(frameon=False)
    for axes in (by_step, by_bytes):
        axes.grid(color="#d5d8dd", linewidth=0.6)
    figure.savefig(path, metadata={"Software": None})

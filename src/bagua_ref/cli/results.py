"""The reports of the demo's ranks during training, and the outcome over all ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagua_ref.cli.recipes import ALONE, Settings, make_model

__all__ = ["RankReport", "Reports", "TrainingOutcome"]


@dataclass
class RankReport:
    """The report of one rank on one algorithm so far."""

    losses: list[float] = field(default_factory=list)
    """Of each step."""
    bytes_sent: list[int] = field(default_factory=list)
    """Bytes sent from the first step up to each step."""
    result: dict[str, float] | None = None
    """At the end: accuracy on the test set, seconds, weight_difference."""


@dataclass(frozen=True)
class TrainingOutcome:
    """The outcome of training with one algorithm.

    Attributes:
        algorithm: its name, or `ALONE`.
        test_accuracy: the share of test images that are classified correctly, mean over ranks.
        final_loss: the training loss, mean over ranks and the last epoch.
        bytes_per_step: bytes sent per step and rank.
        ratio: bytes_per_step divided by the bytes of a float32 all-reduce of the gradients; None if that needs no communication.
        steps_per_second: the speed of the slowest rank.
        weight_difference: the largest difference of any weight between two ranks after the last step.
        losses: the loss of each step, mean over ranks.
        bytes_sent: bytes sent up to each step, mean over ranks.
    """

    algorithm: str
    test_accuracy: float
    final_loss: float
    bytes_per_step: float
    ratio: float | None
    steps_per_second: float
    weight_difference: float
    losses: list[float]
    bytes_sent: list[float]


class Reports:
    """All ranks' reports, read from the files that they write.

    Args:
        exchange: the folder of the files ``rank<r>.jsonl``.
        settings: the settings of the run.
    """

    def __init__(self, exchange: Path, settings: Settings) -> None:
        self._settings = settings
        self._files = [(exchange / f"rank{rank}.jsonl", rank) for rank in range(settings.workers)]
        self._read = [0] * settings.workers
        self.of = {
            name: [RankReport() for _ in range(1 if name == ALONE else settings.workers)] for name in (ALONE, *settings.algorithms)
        }
        """Each algorithm's reports, by rank."""

    def poll(self) -> None:
        """Read what was written since the last update."""
        for path, rank in self._files:
            if not path.exists():
                continue
            with path.open("rb") as stream:
                stream.seek(self._read[rank])
                whole, _, _ = stream.read().rpartition(b"\n")  # the last line may be incomplete
            if whole:
                self._read[rank] += len(whole) + 1
                for line in whole.splitlines():
                    self._take(rank, json.loads(line))

    def _take(self, rank: int, news: dict[str, Any]) -> None:
        report = self.of[news["algorithm"]][rank]
        if "result" in news:
            report.result = news["result"]
        else:
            report.losses.append(news["loss"])
            report.bytes_sent.append(news["bytes_sent"])

    def steps_done(self, name: str) -> int:
        """Return the number of steps that all ranks have finished with algorithm ``name``."""
        return min(len(report.losses) for report in self.of[name])

    def outcome(self, name: str) -> TrainingOutcome | None:
        """Return the outcome of training with ``name``, None until all ranks are done."""
        reports = self.of[name]
        results = [report.result for report in reports if report.result is not None]
        if len(results) < len(reports):
            return None
        ranks = len(reports)
        losses = [sum(step) / ranks for step in zip(*(report.losses for report in reports), strict=True)]
        bytes_sent = [sum(step) / ranks for step in zip(*(report.bytes_sent for report in reports), strict=True)]
        last_epoch = losses[-self._settings.steps_per_epoch :]
        full = full_precision_bytes(ranks)
        return TrainingOutcome(
            algorithm=name,
            test_accuracy=sum(result["accuracy"] for result in results) / ranks,
            final_loss=sum(last_epoch) / len(last_epoch),
            bytes_per_step=bytes_sent[-1] / len(bytes_sent),
            ratio=bytes_sent[-1] / len(bytes_sent) / full if full else None,
            steps_per_second=len(losses) / max(result["seconds"] for result in results),
            weight_difference=max(result["weight_difference"] for result in results),
            losses=losses,
            bytes_sent=bytes_sent,
        )


def full_precision_bytes(ranks: int) -> float:
    """Return the bytes that each of ``ranks`` sends per step in a float32 all-reduce of all gradients: 2(n-1)/n of their size."""
    parameters = sum(parameter.numel() for parameter in make_model().parameters())
    return 2 * (ranks - 1) / ranks * 4 * parameters

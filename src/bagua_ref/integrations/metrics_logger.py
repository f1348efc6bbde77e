"""Logging of `bagua_metrics` to TensorBoard, Weights & Biases, MLflow, or any function of a
dictionary and a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bagua_ref.observe.meter import PER_STEP

__all__ = ["MetricsLogger"]


class MetricsLogger:
    """Logs the metrics of a wrapped model every ``every`` calls; call it after each optimizer step,
    on each rank that logs.

    Names get the prefix "bagua/". The means over steps are those since the last time, not since the
    beginning.

    Args:
        model: wrapped, or a `bagua_ref.data_parallel.DistributedDataParallel`; in ``train()``, call
            the logger in its context.
        write: a ``torch.utils.tensorboard.SummaryWriter``, or a function such as ``wandb.log`` or
            ``mlflow.log_metrics`` that takes a dictionary and a step.
        every: number of calls per log entry, at least 1.

    Raises:
        ValueError: ``every`` is below 1.
        TypeError: ``write`` is neither a SummaryWriter nor a function.

    >>> import bagua_ref
    >>> bagua_ref.init_process_group()
    >>> model = torch.nn.Linear(4, 2).with_bagua([], bagua_ref.algorithms.GradientAllReduceAlgorithm())
    >>> log = MetricsLogger(model, lambda metrics, step: print(step, metrics["bagua/rounds"]), every=2)
    >>> for _ in range(4):
    ...     model(torch.ones(1, 4)).sum().backward()
    ...     log()
    2 2
    4 4
    >>> bagua_ref.destroy_process_group()
    """

    def __init__(self, model: torch.nn.Module, write: Any, every: int = 100) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every={every!r} must be an int, 1 or more")
        add_scalar: Callable[..., Any] | None = getattr(write, "add_scalar", None)
        if add_scalar is None and not callable(write):
            raise TypeError(
                f"write={write!r} must be a SummaryWriter, or a function of a dictionary and a step"
            )
        self._model: Any = model
        self._write, self._add_scalar, self._every = write, add_scalar, every
        self._calls = 0
        self._last: dict[str, float | int] = {}

    def __call__(self, step: int | None = None) -> None:
        """Count a step, and log the metrics every ``every`` steps.

        Args:
            step: step number for the log; None: the number of calls.
        """
        self._calls += 1
        if self._calls % self._every:
            return
        now = self._model.bagua_metrics()
        steps = max(now["steps"] - self._last.get("steps", 0), 1)
        for name in PER_STEP:
            if name in now and name in self._last:
                now[f"{name}_per_step"] = (now[name] - self._last[name]) / steps
        self._last = now
        named = prefixed(now)
        step = self._calls if step is None else step
        if self._add_scalar is None:
            self._write(named, step)
        else:
            for name, value in named.items():
                self._add_scalar(name, value, step)


def prefixed(metrics: dict[str, float | int]) -> dict[str, float | int]:
    """Return ``metrics`` with the prefix "bagua/" of logs."""
    return {f"bagua/{name}": value for name, value in metrics.items()}

"""Callbacks that record the trainings of Lightning's and Hugging Face's Trainer; both libraries are imported when asked for."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bagua_ref.base.not_provided import install_command
from bagua_ref.conformance.trace.recording import Recording, record

__all__ = ["lightning_callback", "transformers_callback"]


def lightning_callback(folder: str | Path, **options: Any) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])`` of Lightning 2 that records batches, losses and all that `record` does.

    Args:
        folder: as for `record`; a training that goes on from a checkpoint adds to it.
        options: ``what``, ``window``, ``rank`` and ``world_size`` of `record`.

    Raises:
        ModuleNotFoundError: Lightning is not installed.

    >>> trainer = Trainer(callbacks=[lightning_callback("runs/a")])  # doctest: +SKIP
    """
    package = next((name for name in ("lightning", "pytorch_lightning") if find_spec(name) is not None), None)
    if package is None:
        raise ModuleNotFoundError(f"lightning_callback() needs Lightning; install it with: {install_command('lightning')}")
    base = import_module("lightning.pytorch" if package == "lightning" else package).Callback
    return type("LightningRecorder", (_OfLightning, base), {})(folder, options)


def transformers_callback(folder: str | Path, **options: Any) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])`` of transformers that records inputs, losses and all that `record` does.

    Args:
        folder: as for `lightning_callback`.
        options: likewise.

    Raises:
        ModuleNotFoundError: transformers is not installed.

    >>> trainer = Trainer(model, arguments, callbacks=[transformers_callback("runs/a")])  # doctest: +SKIP
    """
    if find_spec("transformers") is None:
        raise ModuleNotFoundError(f"transformers_callback() needs transformers; install it with: {install_command('transformers')}")
    return type("TransformersRecorder", (_OfTransformers, import_module("transformers").TrainerCallback), {})(folder, options)


class _Recorder:
    """A recording that begins and ends with a trainer's."""

    def __init__(self, folder: str | Path, options: dict[str, Any]) -> None:
        self._folder, self._options = folder, options
        self._recording: Recording | None = None

    def _enter(self, model: Any, optimizers: list[Any], step: int) -> None:
        inside = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        self._recording = record(model, inside, self._folder, first_step=step or None, **self._options)
        self._recording.__enter__()

    def _exit(self, error: BaseException | None = None) -> None:
        if self._recording is not None:
            self._recording.__exit__(None if error is None else type(error), error, None)
            self._recording = None


class _OfLightning(_Recorder):
    """The methods that Lightning's Trainer calls."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record."""
        self._enter(pl_module, trainer.optimizers, trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Record the batch."""
        if self._recording is not None:
            self._recording.batch(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Record the loss."""
        if self._recording is not None:
            self._recording.loss(loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End."""
        self._exit()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End with the step that failed."""
        self._exit(exception)


class _OfTransformers(_Recorder):
    """The methods that Hugging Face's Trainer calls."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to record."""
        self._enter(kwargs["model"], [kwargs["optimizer"]], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End."""
        self._exit()

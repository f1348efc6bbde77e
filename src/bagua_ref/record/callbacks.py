"""Callbacks that record runs of Lightning's and Hugging Face's Trainer; both libraries are imported
lazily.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from bagua_ref.base.not_provided import install_command
from bagua_ref.record.recording import Recording


def lightning_callback(folder: str | Path, **options: Any) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])`` of Lightning 2 that records batches,
    losses and everything that `record` does.

    Args:
        folder: as for `record`; a run resumed from a checkpoint appends to it.
        options: ``rank`` and ``world_size`` of `record`.

    Raises:
        ModuleNotFoundError: Lightning is not installed.

    >>> from bagua_ref.record import lightning_callback
    >>> trainer = Trainer(callbacks=[lightning_callback("runs/a")])  # doctest: +SKIP
    """
    session = _Session(folder, options)
    methods = {
        "on_train_start": lambda self, trainer, module: session.enter(
            module,
            trainer.optimizers,
            trainer.global_step // max(1, len(trainer.optimizers)),  # counts each optimizer's steps
        ),
        "on_train_batch_start": lambda self, trainer, module, batch, index: (
            session.recording and session.recording.batch(batch)
        ),
        "on_before_backward": lambda self, trainer, module, loss: (
            session.recording and session.recording.loss(loss)
        ),
        "on_train_end": lambda self, trainer, module: session.exit(),
        "on_exception": lambda self, trainer, module, error: session.exit(error),
    }
    base = trainer_class("Callback", "lightning.pytorch", "pytorch_lightning")
    return type("LightningRecorder", (base,), methods)()


def transformers_callback(folder: str | Path, **options: Any) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])`` of transformers that records inputs,
    losses and everything that `record` does.

    Args:
        folder: as for `lightning_callback`.
        options: likewise.

    Raises:
        ModuleNotFoundError: transformers is not installed.

    >>> from bagua_ref.record import transformers_callback
    >>> trainer = Trainer(model, arguments, callbacks=[transformers_callback("runs/a")])  # doctest: +SKIP
    """
    session = _Session(folder, options)
    methods = {
        "on_train_begin": lambda self, args, state, control, **of: session.enter(
            of["model"], [of["optimizer"]], state.global_step
        ),
        "on_train_end": lambda self, args, state, control, **of: session.exit(),
    }
    return type(
        "TransformersRecorder", (trainer_class("TrainerCallback", "transformers"),), methods
    )()


def trainer_class(name: str, *packages: str) -> Any:
    """Return the trainer class of the first of these packages that is installed."""
    for package in packages:
        try:
            return getattr(import_module(package), name)
        except ModuleNotFoundError as error:
            if error.name != package.partition(".")[0]:
                raise
    command = install_command(packages[0].partition(".")[0])
    raise ModuleNotFoundError(f"{packages[0]} is not installed; install it with: {command}")


class _Session:
    """A recording that starts and stops with a trainer's loop."""

    def __init__(self, folder: str | Path, options: dict[str, Any]) -> None:
        self._folder, self._options = folder, options
        self.recording: Recording | None = None

    def enter(self, model: Any, optimizers: list[Any], step: int) -> None:
        """Start recording at a step; optimizers wrapped by accelerate or Lightning are
        unwrapped.
        """
        inside = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        self.recording = Recording(
            model, inside, self._folder, first_step=step or None, **self._options
        ).__enter__()

    def exit(self, error: BaseException | None = None) -> None:
        """Stop recording; after an error, the failed step is included."""
        if self.recording is not None:
            self.recording.__exit__(None if error is None else type(error), error, None)
            self.recording = None

"""Callbacks that record the trainings of Lightning's and Hugging Face's Trainer; both libraries are
imported when asked for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bagua_ref.base.not_provided import install_command
from bagua_ref.conformance.trace.recording import Recording, record

__all__ = ["lightning_callback", "transformers_callback"]


def lightning_callback(folder: str | Path, **options: Any) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])`` of Lightning 2 that records batches,
    losses and all that `record` does.

    Args:
        folder: as for `record`; a training that goes on from a checkpoint adds to it.
        options: ``what``, ``window``, ``rank`` and ``world_size`` of `record`.

    Raises:
        ModuleNotFoundError: Lightning is not installed.

    >>> from bagua_ref.conformance.trace.callbacks import lightning_callback
    >>> trainer = Trainer(callbacks=[lightning_callback("runs/a")])  # doctest: +SKIP
    """
    package = next(
        (name for name in ("lightning", "pytorch_lightning") if find_spec(name) is not None), None
    )
    if package is None:
        raise ModuleNotFoundError(
            f"lightning_callback() needs Lightning; install it with: {install_command('lightning')}"
        )
    base = import_module("lightning.pytorch" if package == "lightning" else package).Callback
    session = _TrainerRecording(folder, options)
    methods = {
        "on_train_start": lambda self, trainer, module: session.enter(
            module,
            trainer.optimizers,
            trainer.global_step // max(1, len(trainer.optimizers)),  # which counts those of each
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
    return type("LightningRecorder", (base,), methods)()


def transformers_callback(folder: str | Path, **options: Any) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])`` of transformers that records inputs,
    losses and all that `record` does.

    Args:
        folder: as for `lightning_callback`.
        options: likewise.

    Raises:
        ModuleNotFoundError: transformers is not installed.

    >>> from bagua_ref.conformance.trace.callbacks import transformers_callback
    >>> trainer = Trainer(model, arguments, callbacks=[transformers_callback("runs/a")])  # doctest: +SKIP
    """
    if find_spec("transformers") is None:
        raise ModuleNotFoundError(
            "transformers_callback() needs transformers; install it with:"
            f" {install_command('transformers')}"
        )
    session = _TrainerRecording(folder, options)
    methods = {
        "on_train_begin": lambda self, args, state, control, **of: session.enter(
            of["model"], [of["optimizer"]], state.global_step
        ),
        "on_train_end": lambda self, args, state, control, **of: session.exit(),
    }
    return type("TransformersRecorder", (import_module("transformers").TrainerCallback,), methods)()


class _TrainerRecording:
    """A recording that begins and ends with a trainer's loop."""

    def __init__(self, folder: str | Path, options: dict[str, Any]) -> None:
        self._folder, self._options = folder, options
        self.recording: Recording | None = None

    def enter(self, model: Any, optimizers: list[Any], step: int) -> None:
        """Begin to record at a step; of optimizers of accelerate and Lightning, those inside."""
        inside = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        self.recording = record(
            model, inside, self._folder, first_step=step or None, **self._options
        ).__enter__()

    def exit(self, error: BaseException | None = None) -> None:
        """End, after an error with the step that failed."""
        if self.recording is not None:
            self.recording.__exit__(None if error is None else type(error), error, None)
            self.recording = None

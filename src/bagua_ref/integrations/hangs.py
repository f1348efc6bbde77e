"""Callbacks that explain hangs of Lightning's and Hugging Face's Trainer; both libraries are
imported when asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bagua_ref.explain import HangWatch, explain_hangs
from bagua_ref.record.callbacks import trainer_class

__all__ = ["lightning_callback", "transformers_callback"]


def lightning_callback(folder: str | Path, **options: Any) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])`` of Lightning 2 that calls
    `bagua_ref.explain_hangs` while the Trainer runs.

    Args:
        folder: of the dumps.
        options: ``after``.

    Raises:
        ModuleNotFoundError: Lightning is not installed.

    >>> from bagua_ref.integrations.hangs import lightning_callback
    >>> trainer = Trainer(callbacks=[lightning_callback("dumps")])  # doctest: +SKIP
    """
    session = _Session(folder, options)
    methods = {
        "setup": lambda self, trainer, module, stage: session.enter(),
        "teardown": lambda self, trainer, module, stage: session.exit(),
    }
    base = trainer_class("Callback", "lightning.pytorch", "pytorch_lightning")
    return type("LightningHangs", (base,), methods)()


def transformers_callback(folder: str | Path, **options: Any) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])`` of transformers that calls
    `bagua_ref.explain_hangs` while the Trainer trains.

    Args:
        folder: as for `lightning_callback`.
        options: likewise.

    Raises:
        ModuleNotFoundError: transformers is not installed.

    >>> from bagua_ref.integrations.hangs import transformers_callback
    >>> trainer = Trainer(model, arguments, callbacks=[transformers_callback("dumps")])  # doctest: +SKIP
    """
    session = _Session(folder, options)
    methods = {
        "on_train_begin": lambda self, args, state, control, **of: session.enter(),
        "on_train_end": lambda self, args, state, control, **of: session.exit(),
    }
    return type("TransformersHangs", (trainer_class("TrainerCallback", "transformers"),), methods)()


class _Session:
    """A watch that begins and ends with a trainer's loop."""

    def __init__(self, folder: str | Path, options: dict[str, Any]) -> None:
        self._folder, self._options = folder, options
        self._watch: HangWatch | None = None

    def enter(self) -> None:
        """Begin, unless it has begun."""
        self._watch = self._watch or explain_hangs(self._folder, **self._options)

    def exit(self) -> None:
        """End, with a last dump."""
        if self._watch is not None:
            self._watch.close("exit")
            self._watch = None

"""Callbacks that explain hangs of Lightning's and Hugging Face's Trainer; both libraries are
imported lazily.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bagua_ref.explain import HangWatch, explain_hangs
from bagua_ref.record.callbacks import trainer_class

__all__ = ["lightning_callback", "transformers_callback"]


def lightning_callback(folder: str | Path, **options: Any) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])`` of Lightning 2 that calls
    `bagua_ref.explain_hangs` while the Trainer runs.

    Args:
        folder: folder of the dumps.
        options: ``after``.

    Raises:
        ModuleNotFoundError: Lightning is not installed.

    >>> from bagua_ref.integrations.hangs import lightning_callback
    >>> trainer = Trainer(callbacks=[lightning_callback("dumps")])  # doctest: +SKIP
    """
    base = trainer_class("Callback", "lightning.pytorch", "pytorch_lightning")
    return _callback(base, "setup", "teardown", folder, options)


def transformers_callback(folder: str | Path, **options: Any) -> Any:
    """Return a callback for ``Trainer(callbacks=[...])`` of transformers that calls
    `bagua_ref.explain_hangs` while the Trainer trains.

    Args:
        folder: see `lightning_callback`.
        options: likewise.

    Raises:
        ModuleNotFoundError: transformers is not installed.

    >>> from bagua_ref.integrations.hangs import transformers_callback
    >>> trainer = Trainer(model, arguments, callbacks=[transformers_callback("dumps")])  # doctest: +SKIP
    """
    base = trainer_class("TrainerCallback", "transformers")
    return _callback(base, "on_train_begin", "on_train_end", folder, options)


def _callback(
    base: Any, begin: str, end: str, folder: str | Path, options: Mapping[str, Any]
) -> Any:
    """Return a callback that runs a watchdog from the trainer's event ``begin`` to its event
    ``end``.
    """
    watches: list[HangWatch] = []

    def enter(*_: Any, **of: Any) -> None:
        if not watches:
            watches.append(explain_hangs(folder, **options))

    def leave(*_: Any, **of: Any) -> None:
        while watches:
            watches.pop().close("exit")

    return type("ExplainHangs", (base,), {begin: enter, end: leave})()

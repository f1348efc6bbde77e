"""Loading of checkpoints, by each rank on its own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bagua_ref.base.untrusted import one_line
from bagua_ref.checkpoint.folder import Manifest, checked_step, found_steps, read_manifest, step_folder, verify
from bagua_ref.checkpoint.plain import read_plain
from bagua_ref.checkpoint.training_state import RestoreError, State, TrainingState, listed
from bagua_ref.errors import CheckpointError

__all__ = ["Checkpoint", "load"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded.

    Attributes:
        step: as it was saved: the number of steps taken.
        extra: as it was saved, with tensors on the CPU.
        path: the checkpoint's own folder.
    """

    step: int
    extra: Any
    path: Path


def load(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    sampler: Any = None,
    step: int | None = None,
    drop_rank_state: bool = False,
) -> Checkpoint | None:
    """Continue from the newest complete checkpoint; return its step and extra, or None if there is no checkpoint yet.

    Each rank loads by itself, without communication, after wrapping: its own state, and what was equal on all ranks. It reads and
    compares the checksums of all ranks' files, so that all ranks come to the same conclusion: if any file is damaged, a warning
    names it, and all of them load the checkpoint before. Nothing in a file is executed, and if this raises, model, optimizers,
    algorithm and random generators are as they were.

    Args:
        folder: as passed to `save`.
        model: wrapped with the same algorithm as when it was saved. With drop_rank_state=True it may also be a plain module; then
            the first rank's model and optimizers are loaded, and nothing of the algorithm.
        optimizers: as many as were saved.
        sampler: has ``load_state_dict()``.
        step: load the checkpoint of this step only; None: the newest.
        drop_rank_state: if the number of ranks has changed, continue without what belonged to single ranks: all ranks take the
            first rank's model, optimizers and extra; the sampler and random states that differed between ranks stay as they are.

    Raises:
        ValueError: the checkpoint was saved by another number of ranks and some of it belongs to single ranks (the message lists
            what), with another algorithm, or for another model, other optimizers or another sampler, or holds something that no
            training saves; the message names the file.
        CheckpointError: there are checkpoints, but all of them are damaged; the checkpoint of ``step`` is damaged or missing.
        RuntimeError: the algorithm works in the background; the message says how to stop it.
    """
    training = TrainingState(model, optimizers, sampler)
    if isinstance(sampler, Mapping):
        raise TypeError("sampler is a state; it must be the sampler to load into")
    if training.context is None and not drop_rank_state:
        raise ValueError(
            "model is not wrapped, so the state of its algorithm cannot be loaded; wrap it with_bagua(...) first, or call "
            "bagua_ref.checkpoint.load(..., drop_rank_state=True) to load the first rank's model and optimizers alone"
        )
    found = _newest(Path(folder), step)
    if found is None:
        return None
    place, manifest = found
    state, files = _to_load(training, place, manifest, drop_rank_state)
    try:
        training.restore(state)
    except RestoreError as error:
        names = " and ".join(files[error.component])
        raise ValueError(f"{error.component} in {names} of {place} cannot be loaded: {one_line(str(error))}") from error
    return Checkpoint(manifest.step, state["extra"]["extra"], place)


def _newest(folder: Path, step: int | None) -> tuple[Path, Manifest] | None:
    """Return the newest complete checkpoint, or that of ``step``; None if there is none.

    Raises:
        CheckpointError: all are damaged, or that of ``step`` is damaged or missing.
    """
    damages: list[str] = []
    for found in found_steps(folder) if step is None else [checked_step(step)]:
        place = step_folder(folder, found)
        try:
            manifest = read_manifest(place)
            if manifest is None and step is not None:
                raise CheckpointError(f"{place} is not a complete checkpoint")
            if manifest is not None:
                verify(place, manifest)
        except CheckpointError as damage:
            damages.append(str(damage))
            continue
        if manifest is not None:
            for damaged in damages:
                warnings.warn(f"{damaged}; continuing from the checkpoint of step {found}", stacklevel=3)
            return place, manifest
    if damages:
        raise CheckpointError("; ".join(damages))
    return None


def _to_load(training: TrainingState, place: Path, manifest: Manifest, drop: bool) -> tuple[State, dict[str, list[str]]]:
    """Return the state that this rank continues from, and the names of the files of each of its components."""
    rank, ranks = training.place()
    rank_state = training.algorithm.rank_state if training.context is not None else frozenset()
    resized = training.context is None or ranks != manifest.ranks
    parts = {owner: manifest.part(owner) for owner in ("common", "rank0" if resized else f"rank{rank}")}
    common, own = ({} if part is None else _read(place / part.name, part.size) for part in parts.values())
    state = {component: common.get(component, {}) | own.get(component, {}) for component in {**common, **own}}
    if not {"model", "versions", "algorithm", "extra"} <= state.keys() or "extra" not in state["extra"]:
        raise CheckpointError(f"{place} holds no state of a training, only {sorted(state)}")
    _check_fit(training, place, manifest, state, drop)
    if resized:
        bound = {**own, "algorithm": {**own.get("algorithm", {}), **dict.fromkeys(rank_state & state["algorithm"].keys())}}
        bound["algorithm"].pop("rank", None)  # it says who saved this, for whoever reads it
        if not drop and any(bound.values()):
            raise ValueError(
                f"{place} was saved by {manifest.ranks} ranks and this training has {ranks}, but part of it belongs to single "
                f"ranks: {one_line(listed(bound))}. Load it with {manifest.ranks} ranks, or call "
                "bagua_ref.checkpoint.load(..., drop_rank_state=True) to continue with the first rank's model and optimizers and "
                "without the rest of this"
            )
    if resized and drop:
        if own.get("sampler"):
            del state["sampler"]
        state["rng"] = common.get("rng", {})
        state["algorithm"] = {name: value for name, value in state["algorithm"].items() if name not in rank_state}
    read = [(part.name, entries) for part, entries in zip(parts.values(), (common, own), strict=True) if part is not None]
    return state, {component: [name for name, entries in read if component in entries] for component in state}


def _read(path: Path, size: int) -> State:
    """Return a part of a checkpoint."""
    state: State = read_plain(path, size)
    if type(state) is not dict or not all(type(name) is str and type(entries) is dict for name, entries in state.items()):
        raise CheckpointError(f"{path} holds no state of a training")
    return state


def _check_fit(training: TrainingState, place: Path, manifest: Manifest, state: State, drop: bool) -> None:
    """Raise ValueError if ``state`` is of another kind of training."""
    wrapped = training.context is not None
    if wrapped and type(training.algorithm).__name__ != manifest.algorithm:
        saved_with, here = one_line(manifest.algorithm), type(training.algorithm).__name__
        raise ValueError(
            f"{place} was saved with {saved_with}, and the model is wrapped with {here}; to continue with another algorithm, call "
            "bagua_ref.checkpoint.load(..., drop_rank_state=True) before wrapping"
        )
    saved, given = len(state.get("optimizers", ())), len(training.optimizers)
    if saved != given and (wrapped or given):
        raise ValueError(f"{place} was saved with {saved} optimizers, and load() was given {given}")
    if training.sampler is not None and "sampler" not in state:
        raise ValueError(f"{place} was saved without a sampler, and load() was given sampler={training.sampler!r}")
    if training.sampler is None and "sampler" in state and wrapped and not drop:
        raise ValueError(f"{place} was saved with a sampler; pass sampler= to load its position")

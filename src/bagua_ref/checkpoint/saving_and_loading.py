"""Saving of checkpoints, collectively, and loading of them, by each rank on its own."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bagua_ref.base.ranks import format_ranks
from bagua_ref.checkpoint.contents import check_loadable, digest, plain, read
from bagua_ref.checkpoint.folder import (
    Manifest,
    Part,
    commit,
    discard,
    is_step_folder,
    lock,
    manifests,
    read_manifest,
    remove_old,
    step_folder,
    step_folders,
    verify,
    write_part,
)
from bagua_ref.checkpoint.training_state import State, TrainingState, listed
from bagua_ref.communicators.base import Communicator
from bagua_ref.communicators.waiting import collective_call
from bagua_ref.errors import CheckpointError, CommunicationError

__all__ = ["Checkpoint", "load", "save"]

_Key = tuple[str, str]
"""Component and name of an entry."""


def save(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    step: int,
    sampler: Any = None,
    extra: Any = None,
    keep: int | None = None,
) -> Path:
    """Save everything that training needs to continue bit for bit; collective: every rank of the
    model's group calls this.

    Saved are the states of the model, the optimizers, the algorithm and the sampler, the random
    states of Python, NumPy and torch (with CUDA, of the current device), and ``extra``. What is
    equal on all ranks is written once. A checkpoint counts once its manifest is written, which the
    first rank does after all parts are durable; a crash at any moment before leaves the earlier
    checkpoints as they were. Saving a step again replaces it.

    Weights and optimizer state that the algorithm keeps equal on all ranks, but that have drifted
    apart because ranks have other versions of torch or other CPU kernels, are saved as the first
    rank has them, so that the checkpoint can be loaded; a warning on every rank says so.

    Args:
        folder: holds the checkpoints of one training, and is shared by all ranks. As long as the
            model lives, no other process can save there.
        model: the wrapped model.
        optimizers: its optimizer, or several.
        step: the number of steps taken.
        sampler: an object with ``state_dict()``, such as a `LoadBalancingDistributedSampler`; if a
            DataLoader with workers draws ahead, what ``sampler.state_dict(samples=...)`` returned.
        extra: what else to keep, such as the state of a learning rate scheduler: whatever
            ``torch.load(weights_only=True)`` takes, and io.BytesIO.
        keep: the number of checkpoints to keep, this one included; those of lower steps are
            removed. None keeps all.

    Returns:
        The new checkpoint's own folder.

    Raises:
        ValueError: the model is not wrapped, steps differ between ranks, or an argument is out of
            range.
        TypeError: an argument, or what a state contains, is of the wrong type.
        CheckpointError: it failed on another rank; raised on all of them. Or another process, which
            is named, saves into ``folder``.
        OSError: the disk is full, for instance; what was written of this checkpoint is removed.
        CommunicationError: not all ranks have called this.

    >>> import tempfile
    >>> from bagua_ref.algorithms import GradientAllReduceAlgorithm
    >>> bagua_ref.init_process_group()
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model = model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = bagua_ref.checkpoint.save(folder, model, optimizer, step=10, keep=3)
    ...     bagua_ref.checkpoint.load(folder, model, optimizer).step
    10
    >>> bagua_ref.destroy_process_group()
    """
    step, folder = _checked_step(step), Path(folder)
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f"keep={keep!r} must be a number of checkpoints, 1 or more, or None")
    training = TrainingState(model, optimizers, sampler)
    if training.context is None:
        raise ValueError("model is not wrapped; wrap it with_bagua(...) before saving")
    if is_step_folder(folder):
        raise ValueError(
            f"folder={str(folder)!r} is that of one checkpoint; pass the folder that holds it"
        )
    try:
        with collective_call("bagua_ref.checkpoint.save"):
            return _save(training, folder, step, extra, keep)
    except CommunicationError as error:
        raise type(error)(
            f"bagua_ref.checkpoint.save, which all ranks must call together, failed: {error}"
        ) from error


def _save(training: TrainingState, folder: Path, step: int, extra: Any, keep: int | None) -> Path:
    assert training.context is not None
    comm = training.context.given_group.get_global_communicator()
    place = step_folder(folder, step)
    algorithm = training.algorithm.state_dict()
    resume = training.algorithm.suspend()  # the weights must not change while they are written
    try:
        state: State = {}

        def collect() -> tuple[int, str, set[_Key], dict[_Key, bytes]]:
            stored: set[int] = set()
            for component, entries in (*training.collect(algorithm), ("extra", {"extra": extra})):
                where = "" if component == "extra" else component
                state[component] = {
                    name: plain(value, f"{where}[{name!r}]" if where else name, stored)
                    for name, value in entries.items()
                }
                for name, value in state[component].items():
                    check_loadable(value, f"{where}[{name!r}]" if where else name)
            place.mkdir(parents=True, exist_ok=True)
            if comm.rank() == 0:
                lock(folder, training.context)
            digests = (
                {key: digest(value) for key, value in _entries(state)} if comm.nranks() > 1 else {}
            )
            return step, secrets.token_hex(4), training.replicated(state), digests

        steps, tokens, replicated, digests = zip(*_together(comm, step, collect), strict=True)
        if len(set(steps)) > 1:
            raise ValueError(
                f"step differs between ranks, which called save() with step={list(steps)}"
            )
        first = digests[0]
        drifted = {
            key
            for key in replicated[0]
            if any(found.get(key) != first.get(key) for found in digests)
        }
        if drifted:
            ranks = training.context.given_group.ranks
            others = [
                rank
                for rank, found in zip(ranks, digests, strict=True)
                if any(found.get(k) != first.get(k) for k in drifted)
            ]
            warnings.warn(
                f"{listed(_selected(state, drifted.__contains__))} of {format_ranks(others)} differ"
                f" from those of rank {ranks[0]}, though {type(training.algorithm).__name__} keeps"
                f" them equal; the checkpoint of step {step} has those of rank {ranks[0]} alone."
                " Call model.bagua_resynchronize() on every rank to train on with them",
                stacklevel=3,
            )

        def write() -> list[Part]:
            equal = {
                key
                for key, _ in _entries(state)
                if all(found.get(key) == first.get(key) for found in digests)
            } | drifted
            common, own = (
                _selected(state, equal.__contains__),
                _selected(state, lambda key: key not in equal),
            )
            return [
                write_part(place, owner, tokens[0], entries)
                for owner, entries in (
                    ("common", common if comm.rank() == 0 else {}),
                    (f"rank{comm.rank()}", own),
                )
                if entries
            ]

        def complete(parts: list[Part]) -> None:
            if comm.rank() == 0:
                saved = manifests(folder)
                last = saved[-1] if saved else None
                if last is not None and last.step > step:
                    warnings.warn(
                        f"{folder} holds the checkpoint of a later step, {last.step}, of an earlier"
                        f" run perhaps. From now on, load() continues from step {step}, which is"
                        " saved last",
                        stacklevel=5,
                    )
                number, name = 1 + (last.number if last else 0), type(training.algorithm).__name__
                manifest = Manifest(step, number, comm.nranks(), name, tokens[0], parts)
                commit(place, manifest)
                remove_old(folder, manifest, keep)

        try:
            parts = [part for of_rank in _together(comm, step, write) for part in of_rank]
            _together(comm, step, lambda: complete(parts))
        except CommunicationError:
            raise  # the other ranks may complete it
        except Exception:
            discard(place, tokens[0])
            raise
    finally:
        resume()
    return place


def _checked_step(step: Any) -> int:
    if not isinstance(step, int) or isinstance(step, bool):
        raise TypeError(f"step={step!r} must be an int")
    if not 0 <= step < 10**18:
        raise ValueError(f"step={step} must be a number of steps, 0 or more")
    return step


def _entries(state: State) -> Iterator[tuple[_Key, Any]]:
    for component, entries in state.items():
        for name, value in entries.items():
            yield (component, name), value


def _selected(state: State, chosen: Callable[[_Key], bool]) -> State:
    selected: State = {}
    for (component, name), value in _entries(state):
        if chosen((component, name)):
            selected.setdefault(component, {})[name] = value
    return selected


def _together(comm: Communicator, step: int, function: Callable[[], Any]) -> list[Any]:
    """Run ``function()`` on every rank and return all results in rank order, once all ranks have
    theirs.

    Raises:
        CheckpointError: it raised on another rank; if it raised here, that exception.
    """
    result = error = None
    try:
        result = function()
    except Exception as raised:
        error = raised
    mine = result, None if error is None else f"{type(error).__name__}: {error}"
    everyones = [comm.broadcast_object(mine, rank) for rank in range(comm.nranks())]
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(everyones):
        if failure is not None:
            raise CheckpointError(
                f"the checkpoint of step {step} was not saved, as rank {rank} failed: {failure}"
            )
    return [of_rank for of_rank, _ in everyones]


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
    """Continue from the complete checkpoint that was saved last; return its step and extra, or
    None, with a warning, if there is none yet.

    Each rank loads by itself, without communication, after wrapping: its own state, and what was
    equal on all ranks. It reads and compares the checksums of all ranks' files, so that all ranks
    come to the same conclusion: if any file is damaged, a warning names it, and all of them load
    the checkpoint before. A warning also says if there is one of a later step, which was saved
    earlier. Nothing in a file is executed, and if this raises, model, optimizers, algorithm and
    random generators are as they were. The state of optimizers follows the names that parameters
    have in the model, not their order.

    Args:
        folder: as passed to `save`; or what `save` returned, to load that checkpoint only.
        model: wrapped with the same algorithm as when it was saved. With drop_rank_state=True it
            may also be a plain module; then the first rank's model and optimizers are loaded, and
            nothing of the algorithm.
        optimizers: as many as were saved.
        sampler: has ``load_state_dict()``.
        step: load the checkpoint of this step only; None: the last one.
        drop_rank_state: if the number of ranks has changed, continue without what belonged to
            single ranks: all ranks take the first rank's model, optimizers and extra; the sampler
                and random states that differed between ranks stay as they are.

    Raises:
        ValueError: the checkpoint was saved by another number of ranks and some of it belongs to
            single ranks (the message lists what), with another algorithm, or for another model,
            other optimizers or another sampler; the message names the file. Or ``folder`` is a
            file.
        CheckpointError: there are checkpoints, but all of them are damaged; the checkpoint of
            ``step`` is damaged or missing.
        RuntimeError: the algorithm works in the background; the message says how to stop it.
    """
    training = TrainingState(model, optimizers, sampler)
    if isinstance(sampler, Mapping):
        raise TypeError("sampler is a state; it must be the sampler to load into")
    if training.context is None and not drop_rank_state:
        raise ValueError(
            "model is not wrapped, so the state of its algorithm cannot be loaded; wrap it"
            " with_bagua(...) first, or call bagua_ref.checkpoint.load(..., drop_rank_state=True)"
            " to load the first rank's model and optimizers alone"
        )
    found = _chosen(Path(folder), step)
    if found is None:
        return None
    place, manifest = found
    state = _to_load(training, place, manifest, drop_rank_state)
    try:
        training.restore(state)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return Checkpoint(manifest.step, state["extra"]["extra"], place)


def _chosen(folder: Path, step: int | None) -> tuple[Path, Manifest] | None:
    """Return the complete checkpoint that was saved last, or that of ``step``; None if there is
    none.

    Raises:
        CheckpointError: all are damaged, or that of ``step`` is damaged or missing.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder={str(folder)!r} is a file; pass the folder given to save()")
    places, one = step_folders(folder), step is not None
    if step is not None:
        places = [step_folder(folder, _checked_step(step))]
    if is_step_folder(folder.resolve()):  # a link such as "latest", too
        places, one = [folder.resolve()], True
    found: list[tuple[Path, Manifest]] = []
    unreadable: list[tuple[Path, str]] = []
    for place in places:
        try:
            manifest = read_manifest(place)
        except CheckpointError as damage:
            unreadable.append((place, str(damage)))
            continue
        if manifest is None and one:
            raise CheckpointError(f"{place} is not a complete checkpoint")
        if manifest is not None and step not in (None, manifest.step):
            raise ValueError(f"step={step}, but {folder} is the checkpoint of step {manifest.step}")
        if manifest is not None:
            found.append((place, manifest))
    found.sort(key=lambda entry: -entry[1].number)
    damages: list[str] = []
    for place, manifest in found:
        try:
            verify(place, manifest)
        except CheckpointError as damage:
            damages.append(str(damage))
            continue
        # It is unknown when one without a readable manifest was saved.
        damages += [text for other, text in unreadable if other.name > place.name]
        for text in damages:
            warnings.warn(
                f"{text}; continuing from the checkpoint of step {manifest.step}", stacklevel=3
            )
        later = [
            str(other.step)
            for _, other in found
            if other.step > manifest.step and other.number < manifest.number
        ]
        if later:
            warnings.warn(
                f"{folder} holds checkpoints of later steps ({', '.join(later)}), of an earlier run"
                f" perhaps; continuing from step {manifest.step}, which was saved last. Pass step="
                " to load another one",
                stacklevel=3,
            )
        return place, manifest
    if found or unreadable:
        raise CheckpointError("; ".join([*damages, *(text for _, text in unreadable)]))
    exists = "holds no complete checkpoint" if folder.exists() else "does not exist"
    warnings.warn(f"{folder} {exists}, so load() returns None: nothing was loaded", stacklevel=3)
    return None


def _to_load(training: TrainingState, place: Path, manifest: Manifest, drop: bool) -> State:
    """Return the state that this rank continues from."""
    rank, ranks = training.place()
    rank_state = training.algorithm.rank_state if training.context is not None else frozenset()
    resized = training.context is None or ranks != manifest.ranks
    common, own = (
        {} if part is None else read(place / part.name)
        for part in (manifest.part("common"), manifest.part("rank0" if resized else f"rank{rank}"))
    )
    state = {
        component: common.get(component, {}) | own.get(component, {})
        for component in {**common, **own}
    }
    _check_fit(training, place, manifest, state, drop)
    if resized:
        bound = {
            **own,
            "algorithm": {
                **own.get("algorithm", {}),
                **dict.fromkeys(rank_state & state["algorithm"].keys()),
            },
        }
        bound["algorithm"].pop("rank", None)  # it says who saved this, for whoever reads it
        if not drop and any(bound.values()):
            raise ValueError(
                f"{place} was saved by {manifest.ranks} ranks and this training has {ranks}, but"
                f" part of it belongs to single ranks: {listed(bound)}. Load it with"
                f" {manifest.ranks} ranks, or call bagua_ref.checkpoint.load(...,"
                " drop_rank_state=True) to continue with the first rank's model and optimizers and"
                " without the rest of this"
            )
    if resized and drop:
        if own.get("sampler"):
            del state["sampler"]
        state["rng"] = common.get("rng", {})
        state["algorithm"] = {
            name: value for name, value in state["algorithm"].items() if name not in rank_state
        }
    return state


def _check_fit(
    training: TrainingState, place: Path, manifest: Manifest, state: State, drop: bool
) -> None:
    """Raise ValueError if ``state`` is of another kind of training."""
    wrapped = training.context is not None
    if wrapped and type(training.algorithm).__name__ != manifest.algorithm:
        saved_with, here = manifest.algorithm, type(training.algorithm).__name__
        raise ValueError(
            f"{place} was saved with {saved_with}, and the model is wrapped with {here}; to"
            " continue with another algorithm, call bagua_ref.checkpoint.load(...,"
            " drop_rank_state=True) before wrapping"
        )
    saved, given = len(state.get("optimizers", ())), len(training.optimizers)
    if saved != given and (wrapped or given):
        raise ValueError(f"{place} was saved with {saved} optimizers, and load() was given {given}")
    if training.sampler is not None and "sampler" not in state:
        raise ValueError(
            f"{place} was saved without a sampler, and load() was given"
            f" sampler={training.sampler!r}"
        )
    if training.sampler is None and "sampler" in state and wrapped and not drop:
        raise ValueError(f"{place} was saved with a sampler; pass sampler= to load its position")

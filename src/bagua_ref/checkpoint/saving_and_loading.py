"""Saving of checkpoints, collectively, and loading of them, by each rank on its own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from bagua_ref.base.runtime import current_world
from bagua_ref.checkpoint.contents import digest, plain, read
from bagua_ref.checkpoint.folder import (
    Manifest,
    commit,
    is_step_folder,
    lock,
    read_manifests,
    remove_old,
    step_folder,
    step_folders,
    verify,
    write_part,
)
from bagua_ref.checkpoint.training_state import State, TrainingState, entries_of
from bagua_ref.communicators.base import Communicator
from bagua_ref.communicators.missing import collective_call
from bagua_ref.errors import CheckpointError, CommunicationError

__all__ = ["Checkpoint", "load", "save"]


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
    """Save everything needed to continue training bit for bit; collective: every rank of the
    model's group calls this.

    It saves the states of the model, the optimizers, the algorithm and the sampler, the random
    states of Python, NumPy and torch (with CUDA, of the current device), and ``extra``. What is
    equal on all ranks is written once. A checkpoint counts once its manifest is written, which the
    first rank does after all parts are durable; a crash at any moment before leaves the earlier
    checkpoints as they were. Saving a step again replaces it.

    Args:
        folder: folder of one training's checkpoints, shared by all ranks. Until this process ends,
            no other process can save there.
        model: the wrapped model.
        optimizers: its optimizer, or several.
        step: the number of steps taken.
        sampler: an object with ``state_dict()``, such as a `LoadBalancingDistributedSampler`; if a
            DataLoader with workers draws ahead, what ``sampler.state_dict(samples=...)`` returned.
        extra: additional state, such as that of a learning rate scheduler: anything that
            ``torch.load(weights_only=True)`` accepts, and io.BytesIO.
        keep: number of checkpoints to keep, including this one; others of lower steps are removed.
            None keeps all.

    Returns:
        The new checkpoint's own folder.

    Raises:
        ValueError: the model is not wrapped, steps differ between ranks, or an argument is out of
            range. Or the ranks' balanced samplers, or their states in ``sampler`` or ``extra``, are
            of different settings or epochs.
        TypeError: an argument, or what a state contains, is of the wrong type.
        CheckpointError: saving failed on a rank; raised on all ranks. Or another process, which the
            message names, saves into ``folder``.
        OSError: writing failed, for example because the disk is full; the incomplete checkpoint is
            removed.
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
    folder = Path(folder)
    if not isinstance(step, int) or not 0 <= step < 10**18:
        raise ValueError(f"step={step!r} must be a number of steps, an int of 0 or more")
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep!r} must be a number of checkpoints, 1 or more, or None")
    training = TrainingState(model, optimizers, sampler)
    if training.context is None:
        raise ValueError("model is not wrapped; wrap it with_bagua(...) before saving")
    if is_step_folder(folder):
        raise ValueError(
            f"folder={str(folder)!r} is that of one checkpoint; pass the folder that holds it"
        )
    with collective_call("bagua_ref.checkpoint.save"):
        return _save(training, folder, step, extra, keep)


def _save(training: TrainingState, folder: Path, step: int, extra: Any, keep: int | None) -> Path:
    assert training.context is not None
    comm = training.context.given_group.get_global_communicator()
    place = step_folder(folder, step)
    algorithm = training.algorithm.state_dict()
    resume = training.algorithm.suspend()  # the weights must not change while they are written
    try:
        state: State = {}

        def collect() -> tuple[int, int, dict[str, bytes], dict[str, dict[str, Any]]]:
            for key, value in training.collect(algorithm, extra).items():
                state[key] = plain(value, key)
            place.mkdir(parents=True, exist_ok=True)
            number = 1
            if comm.rank() == 0:
                lock(folder)
                saved, _ = read_manifests(step_folders(folder))
                number += saved[0][1].number if saved else 0
            alone = comm.nranks() == 1
            digests = {} if alone else {key: digest(value) for key, value in state.items()}
            samplers = dict(_sampler_states({k: state.get(k) for k in ("sampler", "extra")}))
            for where, each in samplers.items():
                each["rank"] = getattr(
                    where == "/sampler" and training.sampler, "rank", comm.rank()
                )
            return step, number, digests, samplers

        steps, (number, *_), digests, samplers = zip(*_together(comm, step, collect), strict=True)
        if len(set(steps)) > 1:
            raise ValueError(
                f"step differs between ranks, which called save() with step={list(steps)}"
            )
        _check_samplers(training.context.given_group.ranks, samplers)

        def write() -> dict[str, tuple[int, str]]:
            common: State = {}
            own: State = {}
            for key, value in state.items():
                equal = all(of_rank.get(key) == digests[0].get(key) for of_rank in digests)
                (common if equal else own)[key] = value
            parts = {f"common-{number}.pt": common if comm.rank() == 0 else {}}
            parts[f"rank{comm.rank()}-{number}.pt"] = own
            return {name: write_part(place, name, part) for name, part in parts.items() if part}

        def complete() -> None:
            if comm.rank() == 0:
                name = type(training.algorithm).__name__
                manifest = Manifest(step, number, comm.nranks(), name, files)
                commit(place, manifest)
                remove_old(folder, manifest, keep)

        try:
            written = _together(comm, step, write)
        except CommunicationError:
            raise  # the other ranks may complete it
        except Exception:
            for path in place.glob(f"*-{number}.pt"):  # so that they do not fill the disk
                path.unlink(missing_ok=True)  # other ranks remove them, too
            raise
        files = {name: entry for of_rank in written for name, entry in of_rank.items()}
        _together(comm, step, complete)
    finally:
        resume()
    return place


def _sampler_states(value: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the states of balanced samplers in a tree, such as the state of a DataLoader, without
    the numbers of items drawn on this rank.
    """
    if isinstance(value, Mapping) and value.keys() >= {"num_replicas", "epoch", "stretches"}:
        yield where, {k: v for k, v in value.items() if k not in ("samples", "batches")}
    elif isinstance(value, Mapping | list | tuple):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, entry in entries:
            yield from _sampler_states(entry, f"{where}/{name}")


def _check_samplers(ranks: Sequence[int], found: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Raise ValueError if the ranks' samplers differ, or if two of them draw the same share."""
    for where in found[0]:
        from bagua_ref.contrib.sampler_agreement import difference, same_share

        states = {rank: of[where] for rank, of in zip(ranks, found, strict=True) if where in of}
        # Samplers of fewer replicas may be each rank's own.
        if any(state["num_replicas"] == len(ranks) for state in states.values()) and (
            said := difference(states) or same_share(states)
        ):
            raise ValueError(f"{where[1:]}: {said}")


def _together(comm: Communicator, step: int, function: Callable[[], Any]) -> list[Any]:
    """Run ``function()`` on every rank; return the results of all ranks, in rank order.

    Raises:
        CheckpointError: ``function`` raised on another rank. If it raised on this rank, its
            exception is raised instead.
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
    """A loaded checkpoint.

    Attributes:
        step: the number of steps taken, as saved.
        extra: the saved ``extra``, with tensors on the CPU.
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
    """Load the most recently saved complete checkpoint; return its step and extra, or None, with a
    warning, if there is none yet.

    Each rank loads on its own, without communication, after wrapping: its own state, and the state
    that was equal on all ranks. It reads and compares the checksums of all ranks' files, so that
    all ranks come to the same conclusion: if any file is damaged, a warning names it, and all of
    them load the checkpoint before. A warning also says if there is one of a later step, which was
    saved earlier. Nothing in a file is executed, and if this raises, model, optimizers, algorithm
    and random generators are as they were. The state of optimizers follows the names that
    parameters have in the model, not their order.

    Args:
        folder: the folder passed to `save`; or the result of `save`, to load only that checkpoint.
        model: wrapped with the same algorithm as when it was saved. With drop_rank_state=True it
            may also be a plain module; then the first rank's model and optimizers are loaded, and
            nothing of the algorithm.
        optimizers: the optimizers, as many as were saved, or a single one.
        sampler: an object with ``load_state_dict()``.
        step: load the checkpoint of this step only; None: the last one.
        drop_rank_state: if the number of ranks has changed, continue without the state of single
            ranks: all ranks take the first rank's model, optimizers and extra; the sampler and
            random states that differed between ranks stay as they are.

    Raises:
        ValueError: the checkpoint was saved by another number of ranks and some of it belongs to
            single ranks (the message lists what), with another algorithm, or for another model,
            other optimizers or another sampler; the message names the file. Or ``folder`` is a
            file.
        CheckpointError: there are checkpoints, but all of them are damaged; the checkpoint of
            ``step`` is damaged or missing.
        RuntimeError: background averaging is running; the message says how to stop it.
    """
    training = TrainingState(model, optimizers, sampler)
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
    training.restore(place, state)
    return Checkpoint(manifest.step, state["extra"], place)


def _chosen(folder: Path, step: int | None) -> tuple[Path, Manifest] | None:
    """Return the most recently saved complete checkpoint, or that of ``step``; None if there is
    none.

    Raises:
        CheckpointError: all checkpoints are damaged, or that of ``step`` is damaged or missing.
    """
    if folder.is_file():
        raise ValueError(f"folder={str(folder)!r} is a file; pass the folder given to save()")
    alone = is_step_folder(folder.resolve())  # a link such as "latest", too
    places = step_folders(folder) if step is None else [step_folder(folder, step)]
    found, damages = read_manifests([folder.resolve()] if alone else places)
    for place, manifest in found:
        if step not in (None, manifest.step):
            continue
        try:
            verify(place, manifest)
        except CheckpointError as damage:
            damages.append(str(damage))
            continue
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
    if damages:
        raise CheckpointError("; ".join(damages))
    nothing = f"{folder} holds no complete checkpoint" + (
        "" if step is None else f" of step {step}"
    )
    if alone or step is not None:
        raise CheckpointError(nothing)
    warnings.warn(f"{nothing}, so load() returns None: nothing was loaded", stacklevel=3)
    return None


def _to_load(training: TrainingState, place: Path, manifest: Manifest, drop: bool) -> State:
    """Return the state for this rank to continue from."""
    ranks = [] if training.context is None else training.context.given_group.ranks
    resized = len(ranks) != manifest.ranks
    rank = 0 if resized else ranks.index(current_world().identity.rank)
    common, own = (
        read(place / name) if name in manifest.files else {}
        for name in (f"{owner}-{manifest.number}.pt" for owner in ("common", f"rank{rank}"))
    )
    state: State = common | own
    _check_fit(training, place, manifest, state, drop)
    if not resized:
        return state
    rank_state = set[str]()
    if training.context is not None:
        rank_state = state.keys() & {f"algorithm/{name}" for name in training.algorithm.rank_state}
    # "rank" says who saved this, for whoever reads it
    bound = (own.keys() | rank_state) - {"algorithm/rank"}
    if bound and not drop:
        raise ValueError(
            f"{place} was saved by {manifest.ranks} ranks and this training has {len(ranks)}, but"
            f" part of it belongs to single ranks: {shorten(', '.join(sorted(bound)), 500)}. Load it"
            f" with {manifest.ranks} ranks, or call bagua_ref.checkpoint.load(...,"
            " drop_rank_state=True) to continue with the first rank's model and optimizers and"
            " without the rest of this"
        )
    dropped = {key for key in bound if key == "sampler" or key.startswith("rng/")} | rank_state
    return {key: value for key, value in state.items() if key not in dropped}


def _check_fit(
    training: TrainingState, place: Path, manifest: Manifest, state: State, drop: bool
) -> None:
    """Raise ValueError if ``state`` belongs to another kind of training: another algorithm, number
    of optimizers or sampler.
    """
    wrapped = training.context is not None
    if wrapped and type(training.algorithm).__name__ != manifest.algorithm:
        saved_with, here = manifest.algorithm, type(training.algorithm).__name__
        raise ValueError(
            f"{place} was saved with {saved_with}, and the model is wrapped with {here}; to"
            " continue with another algorithm, call bagua_ref.checkpoint.load(...,"
            " drop_rank_state=True) before wrapping"
        )
    saved, given = len(entries_of(state, "optimizers")), len(training.optimizers)
    if saved != given and (wrapped or given):
        raise ValueError(f"{place} was saved with {saved} optimizers, and load() was given {given}")
    unneeded = training.sampler is None and (drop or not wrapped)
    if (training.sampler is not None) != ("sampler" in state) and not unneeded:
        kept = "with" if "sampler" in state else "without"
        raise ValueError(
            f"{place} was saved {kept} a sampler, and load() was given sampler={training.sampler!r}"
        )

"""Saving of checkpoints, collectively."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bagua_ref.checkpoint.folder import Manifest, Part, checked_step, commit, discard, remove_old, step_folder, write_part
from bagua_ref.checkpoint.plain import digest, plain
from bagua_ref.checkpoint.training_state import State, TrainingState, listed
from bagua_ref.communicators.base import Communicator
from bagua_ref.communicators.tasks import format_ranks
from bagua_ref.errors import CheckpointError, CommunicationError

__all__ = ["save"]

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
    """Save everything that training needs to continue bit for bit; collective: every rank of the model's group calls this.

    Saved are the states of the model, the optimizers, the algorithm and the sampler, the random states of Python, NumPy and torch
    (with CUDA, of the current device), and ``extra``. What is equal on all ranks is written once. A checkpoint counts once its
    manifest is written, which the first rank does after all parts are durable; a crash at any moment before leaves the earlier
    checkpoints as they were. Saving a step again replaces it.

    Weights and optimizer state that the algorithm keeps equal on all ranks, but that have drifted apart because ranks have other
    versions of torch or other CPU kernels, are saved as the first rank has them, so that the checkpoint can be loaded; a warning
    on every rank says so.

    Args:
        folder: holds the checkpoints of one training, and is shared by all ranks.
        model: the wrapped model.
        optimizers: its optimizer, or several.
        step: the number of steps taken; the checkpoint with the highest is the newest.
        sampler: an object with ``state_dict()``, such as a `LoadBalancingDistributedSampler`; if a DataLoader with workers draws
            ahead, what ``sampler.state_dict(samples=...)`` returned.
        extra: what else to keep, such as the state of a learning rate scheduler: tensors, numbers, strings, None, and lists,
            tuples and dicts of them.
        keep: the number of checkpoints to keep, this one included; older ones are removed. None keeps all.

    Returns:
        The new checkpoint's own folder.

    Raises:
        ValueError: the model is not wrapped, steps differ between ranks, or an argument is out of range.
        TypeError: an argument, or what a state contains, is of the wrong type.
        CheckpointError: it failed on another rank; raised on all of them.
        OSError: the disk is full, for instance; what was written of this checkpoint is removed.

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
    step = checked_step(step)
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f"keep={keep!r} must be a number of checkpoints, 1 or more, or None")
    training = TrainingState(model, optimizers, sampler)
    if training.context is None:
        raise ValueError("model is not wrapped; wrap it with_bagua(...) before saving")
    comm = training.context.given_group.get_global_communicator()
    place = step_folder(Path(folder), step)
    algorithm = training.algorithm.state_dict()
    resume = training.algorithm.suspend()  # the weights must not change while they are written
    try:
        state: State = {}

        def collect() -> tuple[int, str, set[_Key], dict[_Key, bytes]]:
            state.update(training.collect(algorithm), extra={"extra": plain(extra, "extra")})
            place.mkdir(parents=True, exist_ok=True)
            digests = {key: digest(value) for key, value in _entries(state)} if comm.nranks() > 1 else {}
            return step, secrets.token_hex(4), training.replicated(state), digests

        steps, tokens, replicated, digests = zip(*_together(comm, step, collect), strict=True)
        if len(set(steps)) > 1:
            raise ValueError(f"step differs between ranks, which called save() with step={list(steps)}")
        first = digests[0]
        drifted = {key for key in replicated[0] if any(found.get(key) != first.get(key) for found in digests)}
        if drifted:
            ranks = training.context.given_group.ranks
            others = [
                rank for rank, found in zip(ranks, digests, strict=True) if any(found.get(k) != first.get(k) for k in drifted)
            ]
            warnings.warn(
                f"{listed(_selected(state, drifted.__contains__))} of {format_ranks(others)} differ from those of rank {ranks[0]}, "
                f"though {type(training.algorithm).__name__} keeps them equal; the checkpoint of step {step} has those of rank "
                f"{ranks[0]} alone. Call model.bagua_resynchronize() on every rank to train on with them",
                stacklevel=2,
            )

        def write() -> list[Part]:
            equal = {key for key, _ in _entries(state) if all(found.get(key) == first.get(key) for found in digests)} | drifted
            common, own = _selected(state, equal.__contains__), _selected(state, lambda key: key not in equal)
            return [
                write_part(place, owner, tokens[0], entries)
                for owner, entries in (("common", common if comm.rank() == 0 else {}), (f"rank{comm.rank()}", own))
                if entries
            ]

        def complete(parts: list[Part]) -> None:
            if comm.rank() == 0:
                manifest = Manifest(step, comm.nranks(), type(training.algorithm).__name__, tokens[0], parts)
                commit(place, manifest)
                remove_old(place.parent, manifest, keep)

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
    """Run ``function()`` on every rank and return all results in rank order, once all ranks have theirs.

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
            raise CheckpointError(f"the checkpoint of step {step} was not saved, as rank {rank} failed: {failure}")
    return [of_rank for of_rank, _ in everyones]

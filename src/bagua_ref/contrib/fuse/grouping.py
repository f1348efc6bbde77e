"""Grouping of parameters into runs that can be updated as one: neighbours with matching state and buckets (S6)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.contrib.fuse.layout import adjacent, chains, held_by_bucket, is_plain
from bagua_ref.contrib.fuse.run import NUMBERS, Run, getter_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from bagua_ref.contrib.fuse.sizes import Sizes

__all__ = ["find_runs", "is_cut"]


def find_runs(parameters: Sequence[Tensor], store: dict[Any, Any], sizes: Sizes) -> Iterator[Run]:
    """Yield the runs among ``parameters`` of one group, which have gradients, and maybe state in ``store``: small ones first."""
    kinds = _kinds(parameters, store)
    small = [parameter for parameter in parameters if parameter.numel() <= sizes.small]
    for chain in chains(small):
        links = [small[place] for place in chain]
        if len(links) == 1:
            continue
        signatures = [_signature(parameter, store.get(parameter), kinds) for parameter in links]
        parted = _parted_by_buckets(links, store)
        cuts = [place for place in range(1, len(links)) if signatures[place - 1] != signatures[place] or place in parted]
        for start, end in itertools.pairwise([0, *cuts, len(links)]):
            signature = signatures[start]
            if signature is not None and end - start > 1:
                for parts in _of_good_length(links[start:end], sizes.run):
                    yield _make_run(parts, store, signature, sizes.block)
    for parameter in parameters:
        # The first step creates state of the parameter itself, so that it need not be put together from that of blocks.
        if is_cut(parameter, sizes) and store.get(parameter):
            signature = _signature(parameter, store[parameter], kinds)
            if signature is not None:
                yield _make_run([parameter], store, signature, sizes.block)


def is_cut(parameter: Tensor, sizes: Sizes) -> bool:
    """Return whether to step a parameter in blocks, without moving it or its gradient, once it has state."""
    grad = parameter.grad
    return parameter.numel() > max(sizes.small, sizes.block) and grad is not None and grad.is_contiguous()


def _of_good_length(parameters: list[Tensor], long: int) -> Iterator[list[Tensor]]:
    """Yield consecutive parts of ``parameters``, each of at least two and all of similar length, ``long`` at most."""
    total = sum(p.numel() for p in parameters)
    length = total / -(-total // long)
    parts: list[list[Tensor]] = [[]]
    size = 0
    for parameter in parameters:
        if len(parts[-1]) > 1 and size >= length * len(parts):
            parts.append([])
        parts[-1].append(parameter)
        size += parameter.numel()
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2] += parts.pop()
    for part in parts:
        # For a single element, the state does not show which entries are per element.
        if len(part) > 1 and any(p.numel() > 1 for p in part):
            yield part


def _make_run(parameters: list[Tensor], store: dict[Any, Any], signature: Any, block: int) -> Run:
    if store.get(parameters[0]) is None:
        return Run(parameters, None, block=block)
    per_element = [key for key, kind, *_ in signature[-1] if kind == ELEMENTS]
    role, _ = _held(parameters[0], store)
    return Run(parameters, [store[p] for p in parameters], per_element, role if role in per_element else None, block)


ELEMENTS, ONE, NUMBER = "a number per element", "a tensor of one number", "a number"


def _kind(value: Any, shape: torch.Size) -> str | None:
    """Return the kind of the state ``value`` for a parameter of this shape, None if it cannot be part of a run."""
    if not isinstance(value, torch.Tensor):
        return NUMBER if type(value) in NUMBERS else None
    if value.requires_grad or not is_plain(value):
        return None
    return ELEMENTS if value.shape == shape else ONE if value.numel() == 1 else None


def _kinds(parameters: Sequence[Tensor], store: dict[Any, Any]) -> dict[Any, str | None]:
    """Return the kind of state for each key. Parameters of one element are ambiguous; all others must agree."""
    found: dict[Any, str | None] = {}
    for parameter in parameters:
        if parameter.numel() > 1 and type(state := store.get(parameter)) is dict:
            for key, value in state.items():
                kind = _kind(value, parameter.shape)
                if found.setdefault(key, kind) != kind:
                    found[key] = None
    return found


def _signature(parameter: Tensor, state: Any, kinds: dict[Any, str | None]) -> tuple[Any, ...] | None:
    """Return the properties that parameters of a run have in common, None if the parameter cannot be in a run."""
    entries: list[tuple[Any, ...]] = []
    if state is not None and type(state) is not dict:
        return None
    for key, value in (state or {}).items():
        kind = kinds.get(key)
        if kind == NUMBER and type(value) in NUMBERS:
            entries.append((key, kind, type(value), value))
        elif kind == ELEMENTS and _kind(value, parameter.shape) == ELEMENTS:
            entries.append((key, kind, value.dtype, value.device))
        elif kind == ONE and isinstance(value, torch.Tensor) and value.numel() == 1 and is_plain(value):
            entries.append((key, kind, value.dtype, value.device, value.shape, value.item()))
        else:
            return None
    return parameter.dtype, parameter.device, parameter.requires_grad, state is None, entries


def _parted_by_buckets(links: list[Tensor], store: dict[Any, Any]) -> set[int]:
    """Return the places of parameters that must not join the one before, as that would move or needlessly copy bucket memory."""
    if not any(map(getter_of, links)):
        return set()
    held = [_held(parameter, store) for parameter in links]
    fitting = [adjacent(before[1], after[1]) for before, after in itertools.pairwise(held)]
    roles = [(before[0], after[0]) for before, after in itertools.pairwise(held)]
    # Gradients in buckets that are not flat, or in another order, are copied, unless some are laid out as the weights are.
    in_place = any(fit and two == ("gradient", "gradient") for two, fit in zip(roles, fitting, strict=True))
    copied = {None} if in_place else {None, "gradient"}
    return {
        place
        for place, (two, fit) in enumerate(zip(roles, fitting, strict=True), start=1)
        if not ({*two} <= copied or (fit and two[0] == two[1]))
    }


def _held(parameter: Tensor, store: dict[Any, Any]) -> tuple[Any, Tensor]:
    """Return what a bucket holds of a parameter ("gradient", a key of its state, None: its weight or nothing), and the tensor."""
    held = held_by_bucket(parameter)
    if held is None or held is parameter:
        return None, parameter
    if held is parameter.grad:
        return "gradient", held
    return next(((key, value) for key, value in store.get(parameter, {}).items() if value is held), (None, parameter))

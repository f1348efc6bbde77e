"""Memory layout of an optimizer's tensors: neighbours, overlaps, and moving tensors into one storage (S6)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from bagua_ref.memory import by_dtype_and_device, memory_span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

__all__ = [
    "adjacent",
    "chains",
    "find_overlapping",
    "flat_view",
    "flatten_weights",
    "held_by_bucket",
    "is_plain",
    "lay_out",
    "owns_storage",
]

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` contains exactly its elements, in row-major order."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_complex()
    )


def owns_storage(tensor: Tensor) -> bool:
    """Return whether the storage of ``tensor`` contains nothing else."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def held_by_bucket(parameter: Tensor) -> Tensor | None:
    """Return the effective tensor of ``parameter`` - weight, gradient or momentum - that a live Bagua bucket holds, if any."""
    known = getattr(parameter, "_bagua_registration", None)
    if known is None or known.sink is None or known.sink() is None:
        return None
    held: Tensor | None = known.getter(parameter)
    return held


def adjacent(before: Tensor, after: Tensor) -> bool:
    """Return whether ``after`` begins where ``before`` ends, in one storage."""
    return (
        before.data_ptr() + before.numel() * before.element_size() == after.data_ptr()
        and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    )


def chains(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield, by address, the places of tensors that are adjacent in one storage; a tensor without neighbours is its own chain."""
    order = sorted(range(len(tensors)), key=lambda place: tensors[place].data_ptr())
    chain: list[int] = []
    for place in order:
        if chain and not adjacent(tensors[chain[-1]], tensors[place]):
            yield chain
            chain = []
        chain.append(place)
    if chain:
        yield chain


def find_overlapping(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of plain tensors that share memory with another one, or occur twice."""
    spans = []
    for tensor in tensors:
        if type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and tensor.numel():
            spans.append((*memory_span(tensor), id(tensor)))
    spans.sort()
    found: set[int] = set()
    furthest = (0, 0)  # the end of the memory seen so far, and the tensor that ends there
    for start, end, name in spans:
        if start < furthest[0]:
            found |= {furthest[1], name}
        furthest = max(furthest, (end, name))
    return found


def flat_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the flat tensor of which row-major, non-empty ``tensors`` are the consecutive parts, None if there is none."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    start = tensors[0].data_ptr()
    if list(map(torch.Tensor.data_ptr, tensors)) != list(itertools.accumulate(sizes[:-1], initial=start)):
        return None
    try:
        return tensors[0].detach().as_strided((sum(sizes) // tensors[0].element_size(),), (1,))
    except RuntimeError:  # neighbours by chance: the first one's storage ends before the last one
        return None


def lay_out(tensors: Sequence[Tensor]) -> Tensor:
    """Return the flat tensor of which row-major, non-empty ``tensors`` are the parts, after moving them into one if needed.

    Values, shapes and identities are kept. Tensors that move have the same dtype and device.
    """
    flat = flat_view(tensors)
    if flat is None:
        flat = tensors[0].new_empty(sum(t.numel() for t in tensors))
        offset = 0
        for tensor in tensors:
            view = flat[offset : offset + tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            tensor.data = view  # one by one, so that memory is freed along the way
            offset += tensor.numel()
    return flat.detach()


def flatten_weights(parameters: Sequence[Tensor], most: int) -> list[Tensor]:
    """Move the weights of one group into one storage per dtype and device, last first; return those that moved.

    Weights of more than ``most`` elements stay where they are.

    The order is that of buckets (S2.1), so that gradients and weights match. Weights are not moved if a bucket holds them, if they
    are not row-major, overlap, are shared between processes, or already have a neighbour.
    """
    overlap = find_overlapping(parameters)
    movable = [
        parameter
        for parameter in reversed(parameters)
        if id(parameter) not in overlap
        and is_plain(parameter)
        and parameter.is_leaf
        and 0 < parameter.numel() <= most
        and held_by_bucket(parameter) is not parameter
        and not (parameter.device.type == "cpu" and parameter.is_shared())
    ]
    # Frozen weights are separate, as one between two others would split a run.
    trained, frozen = ([p for p in movable if p.requires_grad is value] for value in (True, False))
    moved = []
    for candidates in by_dtype_and_device(trained) + by_dtype_and_device(frozen):
        lonely = sorted(itertools.chain.from_iterable(chain for chain in chains(candidates) if len(chain) == 1))
        if len(lonely) > 1:
            moving = [candidates[place] for place in lonely]
            lay_out(moving)
            moved += moving
    return moved

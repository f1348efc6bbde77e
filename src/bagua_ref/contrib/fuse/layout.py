"""Where an optimizer's tensors lie in memory, which of them may be moved, and how they are put beside each other (S6)."""

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
    """Return whether the elements of ``tensor`` lie in its memory one after the other, row-major, as they are."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_complex()
    )


def owns_storage(tensor: Tensor) -> bool:
    """Return whether the storage of ``tensor`` holds nothing else."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def held_by_bucket(parameter: Tensor) -> Tensor | None:
    """Return the effective tensor of ``parameter`` - weight, gradient or momentum - that a live Bagua bucket holds, if any."""
    known = getattr(parameter, "_bagua_registration", None)
    if known is None or known.sink is None or known.sink() is None:
        return None
    held: Tensor | None = known.effective(parameter)
    return held


def adjacent(before: Tensor, after: Tensor) -> bool:
    """Return whether ``after`` begins where ``before`` ends, in one storage."""
    return (
        before.data_ptr() + before.numel() * before.element_size() == after.data_ptr()
        and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    )


def chains(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield, by address, the places of tensors that lie beside each other in one storage; a lonely one is a chain of its own."""
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
    """Return the ids of plain tensors that share memory with another one, or stand there twice."""
    spans = []
    for tensor in tensors:
        if type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and tensor.numel():
            spans.append((*memory_span(tensor), id(tensor)))
    spans.sort()
    found: set[int] = set()
    furthest = (0, 0)  # where the memory seen so far ends, and whose end that is
    for start, end, name in spans:
        if start < furthest[0]:
            found |= {furthest[1], name}
        furthest = max(furthest, (end, name))
    return found


def flat_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the flat tensor that row-major, not empty ``tensors`` are parts of, None if they do not lie so."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    start = tensors[0].data_ptr()
    if list(map(torch.Tensor.data_ptr, tensors)) != list(itertools.accumulate(sizes[:-1], initial=start)):
        return None
    try:
        return tensors[0].detach().as_strided((sum(sizes) // tensors[0].element_size(),), (1,))
    except RuntimeError:  # they only happen to be neighbours: the first one's storage ends before the last one
        return None


def lay_out(tensors: Sequence[Tensor]) -> Tensor:
    """Return the flat tensor that row-major, not empty ``tensors`` are parts of; unless they lie so already, they move into one.

    Values, shapes and identity stay. Tensors that move share one dtype and device.
    """
    flat = flat_view(tensors)
    if flat is None:
        flat = tensors[0].new_empty(sum(t.numel() for t in tensors))
        offset = 0
        for tensor in tensors:
            view = flat[offset : offset + tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            tensor.data = view  # one by one, so that memory is given back on the way
            offset += tensor.numel()
    return flat.detach()


def flatten_weights(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Move weights of one group beside each other, last first, one storage per dtype and device; return those that moved.

    Last first, because that is how buckets lie (S2.1): gradients and weights then fit each other. Left where they are: what a
    bucket holds, what is not row-major, what overlaps or is shared between processes, and what lies beside another one already.
    """
    overlap = find_overlapping(parameters)
    movable = [
        parameter
        for parameter in reversed(parameters)
        if id(parameter) not in overlap
        and is_plain(parameter)
        and parameter.is_leaf
        and parameter.numel()
        and held_by_bucket(parameter) is not parameter
        and not (parameter.device.type == "cpu" and parameter.is_shared())
    ]
    # Frozen ones lie apart: one between two others would part them.
    trained, frozen = ([p for p in movable if p.requires_grad is value] for value in (True, False))
    moved = []
    for candidates in by_dtype_and_device(trained) + by_dtype_and_device(frozen):
        lonely = sorted(itertools.chain.from_iterable(chain for chain in chains(candidates) if len(chain) == 1))
        if len(lonely) > 1:
            moving = [candidates[place] for place in lonely]
            lay_out(moving)
            moved += moving
    return moved

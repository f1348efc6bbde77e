"""Messages over gloo, cut into pieces that are sent and received in step with the peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["ComputingError", "OtherCallError", "compute", "move_in_pieces"]

PIECE = 2**19
"""Bytes per message: each costs a wait, and the link is idle until the first is computed and while the last is read."""

_UNDER_WAY = 4
"""Pieces in flight to and from each peer."""


class ComputingError(Exception):
    """What this rank computes during a collective has failed.

    Args:
        error: with which it failed.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class OtherCallError(ComputingError):
    """Another rank has made another call than this one."""


def move_in_pieces(
    group: Any,
    sends: Sequence[tuple[Tensor, int]],
    recvs: Sequence[tuple[Tensor, int]],
    tags: tuple[list[int], list[int]],
    before: Callable[[slice], object] | None = None,
    after: Callable[[slice], object] | None = None,
) -> Iterator[Any]:
    """Send and receive tensors over gloo, and yield works, each to be waited for before the next one is asked for.

    On a slow link, acknowledgements wait behind the data that their sender has queued. If one side queued all of its data at once,
    the other could send little until then: it would take twice the time. So only a few pieces are under way.

    Args:
        group: gloo's process group.
        sends: (tensor, peer) pairs.
        recvs: likewise.
        tags: how many pieces have been sent to each peer and received from it so far; counted on.
        before: called with the bytes of each tensor that are sent next, which it may still change.
        after: called with the bytes of each tensor that have just been received.

    Raises:
        ComputingError: ``before`` or ``after`` has failed.
    """
    outgoing, incoming = (
        [(peer, tensor.detach().view(-1).view(torch.uint8).split(PIECE)) for tensor, peer in part] for part in (sends, recvs)
    )
    number = max(len(pieces) for _, pieces in outgoing + incoming)
    works: dict[int, list[Any]] = {}
    for place in range(number + _UNDER_WAY):
        if (ended := place - _UNDER_WAY) in works:
            yield from works.pop(ended)
            compute(after, ended, PIECE)
        if place < number:
            # The k-th piece to a peer has tag k, which keeps the order whichever thread handles it.
            works[place] = [
                group.recv([pieces[place]], peer, _next_tag(tags[1], peer)) for peer, pieces in incoming if place < len(pieces)
            ]
            compute(before, place, PIECE)
            works[place] += [
                group.send([pieces[place]], peer, _next_tag(tags[0], peer)) for peer, pieces in outgoing if place < len(pieces)
            ]


def _next_tag(count: list[int], peer: int) -> int:
    """Return the tag of the next message between this rank and ``peer``."""
    count[peer] += 1
    return count[peer] % 2**30


def compute(step: Callable[[slice], object] | None, place: int, size: int) -> None:
    """Call ``step`` with the bytes of piece ``place``, if pieces have ``size`` bytes.

    Raises:
        ComputingError: it has failed.
    """
    if step is None:
        return
    try:
        step(slice(place * size, (place + 1) * size))
    except Exception as error:
        raise ComputingError(error) from error

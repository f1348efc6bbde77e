"""Pipelined messages: pieces are sent and received while this rank computes the next ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from bagua_ref.base.memory import bytes_of

PIECE = 2**19
"""Bytes per message: each costs a wait, and the link is idle while the first is computed and the
last is read.
"""

_UNDER_WAY = 4
"""Number of pieces in flight to and from each peer."""


class ComputingError(Exception):
    """Raised if a computation of this rank during a collective failed.

    Args:
        error: the exception that it raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class OtherCallError(ComputingError):
    """Raised if another rank called a different collective."""


def exchange_pipelined(
    group: Any,
    sends: Sequence[tuple[Tensor, int]],
    recvs: Sequence[tuple[Tensor, int]],
    tags: tuple[list[int], list[int]],
    before: Callable[[slice], object] | None = None,
    after: Callable[[slice], object] | None = None,
) -> Iterator[Any]:
    """Send and receive tensors over gloo in pieces; yield works, each of which must be waited for
    before requesting the next.

    On a slow link, acknowledgements wait behind the data that their sender has queued. If one side
    queued all of its data at once, the other could send little meanwhile, and the exchange would
    take twice the time. So only a few pieces are in flight.

    Args:
        group: gloo's process group.
        sends: (tensor, peer) pairs.
        recvs: (tensor, peer) pairs.
        tags: the numbers of pieces sent to each peer and received from it so far; updated.
        before: called with the byte range to send next of each tensor, which it may still change.
        after: called with the byte range just received of each tensor.

    Raises:
        ComputingError: ``before`` or ``after`` has failed.
    """
    outgoing, incoming = (
        [(peer, bytes_of(tensor).split(PIECE)) for tensor, peer in part] for part in (sends, recvs)
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
                group.recv([pieces[place]], peer, _next_tag(tags[1], peer))
                for peer, pieces in incoming
                if place < len(pieces)
            ]
            compute(before, place, PIECE)
            works[place] += [
                group.send([pieces[place]], peer, _next_tag(tags[0], peer))
                for peer, pieces in outgoing
                if place < len(pieces)
            ]


def _next_tag(count: list[int], peer: int) -> int:
    """Return the tag of the next message to or from ``peer``, and increment its count."""
    count[peer] += 1
    return count[peer] % 2**30


def compute(step: Callable[[slice], object] | None, place: int, size: int) -> None:
    """Call ``step`` with the byte range of piece ``place``, for pieces of ``size`` bytes.

    Raises:
        ComputingError: ``step`` raised an exception.
    """
    if step is None:
        return
    try:
        step(slice(place * size, (place + 1) * size))
    except Exception as error:
        raise ComputingError(error) from error


_ENDED = math.nan
"""NaN: neither below nor above any position."""


class Overlap:
    """Computation that overlaps with a collective: chunks to send are filled, and received chunks
    read, during the transfer.

    Both advance step by step, on the thread that calls the collective, and reading never gets ahead
    of filling. The transport chooses how far they advance before bytes move; other ranks see
    nothing of it. Bytes are counted from a chunk's beginning.

    Args:
        fill: iterator that computes the bytes to send, and yields the number of final ones.
        read: iterator that uses received bytes, and yields the number that must have arrived before
            its next step.

    >>> def fill():
    ...     print("first half"); yield 2
    ...     print("second half"); yield 4
    >>> def read():
    ...     yield 3
    ...     print("the first three have come")
    >>> overlap = Overlap(fill(), read())
    >>> overlap.fill(1); overlap.read(1); overlap.fill(4); overlap.read(4)
    first half
    second half
    the first three have come
    """

    def __init__(self, fill: Iterator[int], read: Iterator[int]) -> None:
        self._fill, self._read = fill, read
        self._filled = self._needed = -1.0

    def fill(self, size: int) -> None:
        """Compute until the first ``size`` bytes of every chunk to send are final."""
        while self._filled < size:
            self._filled = next(self._fill, _ENDED)

    def read(self, size: int) -> None:
        """Process received chunks as far as their first ``size`` bytes allow."""
        while self._needed <= size:
            self._needed = next(self._read, _ENDED)

    def finish(self) -> None:
        """Run all remaining steps, after all bytes have been transferred."""
        self.fill(sys.maxsize)
        self.read(sys.maxsize)

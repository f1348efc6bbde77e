"""Messages between processes on one machine, through shared memory.

Between two processes, gloo copies every byte into the operating system and out again, and wakes a
thread at both ends for each message: an all-reduce takes three to five times as long as here.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bagua_ref.base.memory import bytes_of
from bagua_ref.communicators.collectives import combine
from bagua_ref.communicators.pipelining import OtherCallError, compute
from bagua_ref.communicators.processes import machine
from bagua_ref.communicators.sockets import TAKEN, Mesh, Peer, Until
from bagua_ref.env import shares_memory
from bagua_ref.errors import CommunicationError
from bagua_ref.types import ReduceOp

_SLOTS = 4
"""Number of pieces that a rank may send to another before the first one is taken; an all-reduce
needs this many.
"""
_LARGEST = 2**19
"""Maximum bytes of a slot: two slots and their reduction should fit into a core's cache."""
_BUDGET = 2**23
"""Bytes of memory that a rank shares with all other ranks of a group."""
_LIMIT = 5.0
"""Seconds within which every rank must have shared its memory, at most half of the group's
timeout.
"""

_NOTHING = torch.empty(0, dtype=torch.uint8)
_logger = logging.getLogger(__name__)


class _Pipe:
    """Slots in shared memory for the messages to and from one peer."""

    def __init__(self, peer: Peer, own: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        self.peer, self._own, self._theirs = peer, own, theirs
        self._put = self._taken = 0

    def has_room(self) -> bool:
        return self._put - self.peer.taken < _SLOTS

    def has_piece(self) -> bool:
        return bool(self.peer.filled)

    def put(self, piece: Tensor, call: tuple[int, int]) -> None:
        """Copy ``piece``, bytes of a message, into a free slot, and notify the peer."""
        self._own[self._put % _SLOTS][: piece.numel()].copy_(piece)
        self._put += 1
        self.peer.send(*call)

    def peek(self, size: int, call: tuple[int, int]) -> Tensor:
        """Return the first ``size`` bytes in the oldest filled slot, after checking that they
        belong to ``call``.

        Raises:
            OtherCallError: the peer sent the piece in another collective, or with another size.
        """
        if (theirs := self.peer.filled[0]) != call:
            what = f"{theirs[1]} bytes" if theirs[0] == call[0] else "data of another collective"
            raise OtherCallError(
                CommunicationError(
                    f"rank {self.peer.rank} of the group has sent {what}, where this rank expects"
                    f" {call[1]} bytes"
                )
            )
        return self._theirs[self._taken % _SLOTS][:size]

    def release(self) -> None:
        """Free the oldest filled slot, so that the peer can reuse it."""
        self.peer.filled.popleft()
        self._taken += 1
        self.peer.send(TAKEN, 0)


class SharedMemory:
    """Collectives among the ranks of a group through shared memory.

    A tensor moves in pieces. The sender copies a piece into a free slot of its memory, and notifies
    the receiver through a socket, which notifies the sender when the slot is free again. So neither
    uses the other's own tensors, and a rank that dies or gives up closes its sockets, which the
    others notice as they would over a network.

    Args:
        mesh: the sockets to the other ranks.
        slots: by rank, the slots that this rank fills, and the slots that the other rank fills.
    """

    def __init__(self, mesh: Mesh, slots: Mapping[int, tuple[list[Tensor], list[Tensor]]]) -> None:
        self._mesh, self._rank, self._nranks = mesh, mesh.rank, len(slots) + 1
        self._piece = next(iter(slots.values()))[0][0].numel()
        self._pipes = {peer: _Pipe(one, *slots[peer]) for peer, one in mesh.peers.items()}

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        recvs: Sequence[tuple[Tensor, int]],
        name: str,
        before: Callable[[slice], object] | None = None,
        after: Callable[[slice], object] | None = None,
        everyone: bool = False,
    ) -> Iterator[Until]:
        """Exchange tensors, as `exchange_pipelined` does; participating ranks must pass the same
        ``name`` ("": derived from the dtypes).

        With ``everyone``, ranks without data for each other send the name, so that all ranks detect
        a different name.
        """
        outgoing, incoming = self._pieces_by_peer(sends, name), self._pieces_by_peer(recvs, name)
        for pipe in self._pipes.values() if everyone else ():
            for by_peer in (outgoing, incoming):
                by_peer.setdefault(pipe, [(_NOTHING, _call(name, _NOTHING))])
        number = max(len(pieces) for pieces in (*outgoing.values(), *incoming.values()))
        for place in range(number + 1):
            if place < number:
                compute(before, place, self._piece)
                for pipe, pieces in outgoing.items():
                    if place < len(pieces):
                        yield from self._put(pipe, *pieces[place])
            if place > 0:
                for pipe, pieces in incoming.items():
                    if place <= len(pieces):
                        piece, call = pieces[place - 1]
                        yield from self._take(pipe, piece, call)
                compute(after, place - 1, self._piece)

    def allreduce(self, flat: Tensor, op: ReduceOp) -> Iterator[Until]:
        """Reduce ``flat`` over ranks, in place: each rank reduces one chunk, piece by piece, and
        sends it to all others.

        The stages are pipelined: while one piece is sent to the rank that reduces it, the piece
        before is reduced, and the result of the one before that is received.
        """
        call = _call(f"allreduce {op.name} {flat.dtype}", flat)
        chunk = -(-flat.numel() // self._nranks)
        chunks = [
            _in_pieces(flat[r * chunk : (r + 1) * chunk], self._piece // flat.element_size())
            for r in range(self._nranks)
        ]
        own = chunks[self._rank]
        number = len(chunks[0])
        for place in range(number + 2):
            for pipe in self._pipes.values():
                if place < len(chunks[pipe.peer.rank]):
                    yield from self._put(pipe, chunks[pipe.peer.rank][place], call)
            if 0 <= place - 1 < len(own):
                piece = own[place - 1]
                theirs = {self._rank: piece}
                for peer, pipe in self._pipes.items():
                    yield from self._mesh.until(pipe.peer, pipe.has_piece)
                    theirs[peer] = pipe.peek(piece.nbytes, call).view(piece.dtype)
                combined = combine(
                    [theirs[r] for r in range(self._nranks)],
                    op,
                    out=piece if self._rank < 2 else None,
                )
                if self._rank >= 2:
                    piece.copy_(combined)
                for pipe in self._pipes.values():
                    pipe.release()
                for pipe in self._pipes.values():
                    yield from self._put(pipe, piece, call)
            if place >= 2:
                for peer, pipe in self._pipes.items():
                    if place - 2 < len(chunks[peer]):
                        yield from self._take(pipe, chunks[peer][place - 2], call)

    def _pieces_by_peer(
        self, tensors: Sequence[tuple[Tensor, int]], name: str
    ) -> dict[_Pipe, list[tuple[Tensor, tuple[int, int]]]]:
        found: dict[_Pipe, list[tuple[Tensor, tuple[int, int]]]] = {}
        for tensor, peer in tensors:
            call = _call(name or f"exchange of {tensor.dtype}", tensor)
            pieces = found.setdefault(self._pipes[peer], [])
            pieces += [(piece, call) for piece in _in_pieces(bytes_of(tensor), self._piece)]
        return found

    def _put(self, pipe: _Pipe, piece: Tensor, call: tuple[int, int]) -> Iterator[Until]:
        yield from self._mesh.until(pipe.peer, pipe.has_room)
        pipe.put(piece.view(torch.uint8), call)
        if pipe.peer.end_reason:
            raise RuntimeError(pipe.peer.end_reason)

    def _take(self, pipe: _Pipe, piece: Tensor, call: tuple[int, int]) -> Iterator[Until]:
        yield from self._mesh.until(pipe.peer, pipe.has_piece)
        piece.view(torch.uint8).copy_(pipe.peek(piece.nbytes, call))
        pipe.release()


def shared_by() -> str:
    """Return a name that is equal in processes that may share memory; "" if this process may
    not.
    """
    # Whoever puts ranks of one machine into different network namespaces wants them to use the
    # network.
    return machine("net") if hasattr(os, "memfd_create") and shares_memory() else ""


def connect(mesh: Mesh, share: Callable[[Sequence[int]], list[list[int]]]) -> SharedMemory | None:
    """Set up shared memory among all ranks of ``mesh``, two or more on this machine; if that fails
    on any rank, close the mesh and return None on every rank.

    Args:
        mesh: Unix sockets to all other ranks.
        share: function that exchanges int64 in another way; its exceptions are propagated.
    """
    slots, why = {}, ""
    try:
        slots = _share_slots(mesh, min(_LIMIT, mesh.timeout / 2))
    except OSError as error:
        why = f": {error}"
        mesh.close()  # or the others would wait for this rank's memory
    if all(has_slots for (has_slots,) in share([int(bool(slots))])):
        return SharedMemory(mesh, slots)
    mesh.close()
    _logger.info(
        "ranks of one machine communicate over gloo alone, which takes longer, as they cannot share"
        " memory%s",
        why,
    )
    return None


def _share_slots(mesh: Mesh, limit: float) -> dict[int, tuple[list[Tensor], list[Tensor]]]:
    """Create the slots for messages to each peer in this rank's own memory, and map the slots that
    peers fill.
    """
    rank, sockets = mesh.rank, {rank: peer.socket for rank, peer in mesh.peers.items()}
    nranks = len(sockets) + 1
    piece = (
        min(_LARGEST, _BUDGET // (_SLOTS * (nranks - 1))) // mmap.PAGESIZE * mmap.PAGESIZE
        or mmap.PAGESIZE
    )
    size = _SLOTS * piece

    def mapped(file: int, owner: int, reader: int) -> list[Tensor]:
        memory = mmap.mmap(file, size, offset=size * (reader - (reader > owner)))
        return list(torch.frombuffer(memory, dtype=torch.uint8).split(piece))

    own = os.memfd_create(f"bagua_ref of rank {rank}")
    files = {rank: own}
    try:
        # otherwise, writing would kill the process where memory is short
        os.posix_fallocate(own, 0, size * (nranks - 1))
        for connected in sockets.values():
            socket.send_fds(connected, [b"m"], [own])
        deadline = time.monotonic() + limit
        for peer, connected in sockets.items():
            connected.settimeout(max(0.001, deadline - time.monotonic()))
            received, found, _, _ = socket.recv_fds(connected, 1, 1)
            connected.setblocking(False)
            if len(found) != 1:
                raise OSError(f"rank {peer} of the group sent {received!r} instead of its memory")
            files[peer] = found[0]
        return {
            peer: (mapped(own, rank, peer), mapped(files[peer], peer, rank)) for peer in sockets
        }
    finally:
        for file in files.values():
            os.close(file)


def _in_pieces(flat: Tensor, size: int) -> Sequence[Tensor]:
    return flat.split(size) if flat.numel() else ()


def _call(name: str, tensor: Tensor) -> tuple[int, int]:
    """Return the header of each piece of a collective: its checksum and the tensor's size."""
    return zlib.crc32(name.encode()) | 2**32, tensor.nbytes

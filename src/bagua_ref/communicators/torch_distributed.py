"""Communicator of processes, over torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors
(S3.9).

Each communicator builds its own process groups from the job's store, so that threads never share
one by accident and torch's registry of groups is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua_ref.base.memory import bytes_of
from bagua_ref.communicators.base import Communicator
from bagua_ref.communicators.collectives import combine, describe, divide_
from bagua_ref.communicators.connection import Connection
from bagua_ref.communicators.pipelining import Overlap, exchange_pipelined
from bagua_ref.communicators.shared_memory import SharedMemory
from bagua_ref.errors import CommunicationError
from bagua_ref.types import ReduceOp

_BETWEEN_TWO = ("send", "recv", "exchange")
"""Operations between two ranks, in which no other rank takes part."""
_LABEL = 64
"""Bytes of the description of a message's size and dtype."""


class TorchDistributedCommunicator(Communicator):
    """A `Communicator` over gloo, shared memory between processes of one machine and, from the
    first CUDA tensor on, NCCL.

    Data movement without arithmetic transfers bytes, so it supports any dtype. Sums of 16-bit
    floats are computed in float32 and rounded once, while gloo would round, and overflow, at every
    rank; sums over NCCL are NCCL's. With NCCL, the calling thread's current stream waits for a
    collective, not the host. If a rank dies or does not arrive within the timeout, the other ranks
    raise, and the communicator can no longer be used.

    Args:
        connection: the connection of its ranks.
        uses_nccl: whether CUDA tensors go through NCCL.
    """

    def __init__(self, connection: Connection, uses_nccl: bool) -> None:
        super().__init__(connection.rank, len(connection.ranks), connection.name)
        self.ranks, self._uses_nccl = connection.ranks, uses_nccl
        self._sent_to, self._received_from = [0] * self._nranks, [0] * self._nranks
        self._connection = connection

    def leave_to_parent(self) -> None:
        """Close a forked child's copies of the connection."""
        self._connection.close_in_child()

    def abort(self, reason: str = "") -> None:
        """Abort the connection; current and later operations raise CommunicationError, with
        ``reason`` if given.
        """
        self._connection.abort(reason)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self._agree("barrier()", None)
        self._connection.run("barrier", lambda group: [group.barrier()])

    def exchange_ints(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Send ``values`` to every rank, over dedicated sockets or gloo; return a function that
        waits for all ranks' values.
        """
        return self._connection.exchange_ints(values)

    # Movement.

    def _send(self, tensor: Tensor, dst: int) -> None:
        self._exchange([(tensor, dst)], [], "send")

    def _recv(self, tensor: Tensor, src: int) -> None:
        self._exchange([], [(tensor, src)], "recv")

    def _exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        recvs: Sequence[tuple[Tensor, int]],
        call: str = "exchange",
        before: Callable[[slice], object] | None = None,
        after: Callable[[slice], object] | None = None,
    ) -> None:
        """Send and receive tensors as part of ``call``; on the host, ``before`` and ``after`` are
        called with the byte range of each piece.
        """
        if (
            call in _BETWEEN_TWO
            and (sends or recvs)
            and not self._over_nccl((*sends, *recvs)[0][0])
        ):
            self._compare_messages(sends, recvs, call)
        sends = [(self._reachable(tensor), peer) for tensor, peer in sends if tensor.numel()]
        recvs = [(tensor, peer) for tensor, peer in recvs if tensor.numel()]
        landings = [(self._reachable(tensor, copied=False), peer) for tensor, peer in recvs]
        if not sends and not recvs:
            return
        peers = {peer for _, peer in (*sends, *recvs)}
        collective = _name(call)
        if self._over_nccl((sends or landings)[0][0]):
            self._connection.run(
                collective, lambda group: self._start_on_nccl(group, sends, landings), True, peers
            )
        elif (memory := self._connection.memory) is not None:
            name = "" if call in _BETWEEN_TWO else call
            everyone = self.compares_calls and name != ""
            self._connection.run(
                collective,
                lambda _: memory.exchange(sends, landings, name, before, after, everyone),
                peers=None if everyone else peers,
                call=name,
            )
        else:
            tags = self._sent_to, self._received_from
            move = lambda group: exchange_pipelined(group, sends, landings, tags, before, after)  # noqa: E731
            self._connection.run(collective, move, peers=peers)
        for (tensor, _), (landing, _) in zip(recvs, landings, strict=True):
            _bring_back(tensor, landing)

    def _compare_messages(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]], call: str
    ) -> None:
        """Send each receiver the sizes and dtypes of its messages, which gloo does not check.

        Raises:
            CommunicationError: this rank expects messages of other sizes or dtypes.
        """
        if not self.compares_calls or self._connection.memory is not None:
            return
        labels = [
            (torch.tensor(list(describe(tensor).encode().ljust(_LABEL)), dtype=torch.uint8), peer)
            for tensor, peer in sends
        ]
        landings = [(torch.empty(_LABEL, dtype=torch.uint8), peer) for _, peer in recvs]
        self._exchange(labels, landings, f"{call}()")
        for (tensor, peer), (landing, _) in zip(recvs, landings, strict=True):
            sent = bytes(landing.tolist()).decode(errors="replace").rstrip()
            if sent != (expected := describe(tensor)):
                sender, receiver = self.ranks[peer], self.ranks[self._rank]
                why = (
                    f"rank {sender} sent {sent}, but rank {receiver} receives {expected}; they must"
                    " be equal"
                )
                self._connection.abort(why)
                raise CommunicationError(f"in group {self.name!r} {why}")

    def _start_on_nccl(
        self, group: Any, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]
    ) -> list[Any]:
        group._start_coalescing()
        for tensor, peer in recvs:
            group.recv([bytes_of(tensor)], peer, 0)
        for tensor, peer in sends:
            group.send([bytes_of(tensor)], peer, 0)
        return [group._end_coalescing()]

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        call = self._agree(f"broadcast(src={src})", tensor)
        if not tensor.numel():
            return
        if self._shared_memory(tensor) is not None:
            is_src = self._rank == src
            self._trade([tensor if is_src else None] * self._nranks, self._only(src, tensor), call)
            return
        here = self._reachable(tensor)
        self._run("broadcast", here, lambda group: [group.broadcast(bytes_of(here), src)])
        _bring_back(tensor, here)

    def _gather(self, send_tensor: Tensor, recv_tensor: Tensor, dst: int, call: str = "") -> None:
        call = call or self._agree(f"gather(dst={dst})", send_tensor)
        incoming = self._chunks(recv_tensor) if self._rank == dst else [None] * self._nranks
        self._trade(self._only(dst, send_tensor), incoming, call)

    def _scatter(self, send_tensor: Tensor, recv_tensor: Tensor, src: int) -> None:
        call = self._agree(f"scatter(src={src})", recv_tensor)
        outgoing = self._chunks(send_tensor) if self._rank == src else [None] * self._nranks
        self._trade(outgoing, self._only(src, recv_tensor), call)

    def _overlapping(
        self, collective: str, send_tensor: Tensor, recv_tensor: Tensor, overlap: Overlap
    ) -> None:
        if recv_tensor.device.type != "cpu" or self._nranks == 1 or not recv_tensor.numel():
            super()._overlapping(collective, send_tensor, recv_tensor, overlap)
            return
        call = self._agree(f"{collective}()", send_tensor)
        moves_own = collective == "alltoall"
        outgoing = self._chunks(send_tensor) if moves_own else [send_tensor] * self._nranks
        incoming = self._chunks(recv_tensor)
        sent, received = outgoing[self._rank], incoming[self._rank]

        def fill(piece: slice) -> None:
            overlap.fill(piece.stop)
            if moves_own:
                received[piece].copy_(sent[piece])

        others = [None if peer == self._rank else tensor for peer, tensor in enumerate(outgoing)]
        self._trade(others, incoming, call, fill, lambda piece: overlap.read(piece.stop))

    def _only(self, peer: int, tensor: Tensor) -> list[Tensor | None]:
        """Return a list with ``tensor`` for rank ``peer`` and None for all others."""
        return [tensor if rank == peer else None for rank in range(self._nranks)]

    def _trade(
        self,
        outgoing: Sequence[Tensor | None],
        incoming: Sequence[Tensor | None],
        call: str,
        *how: Any,
    ) -> None:
        """Send and receive one tensor or None (nothing) per rank, in rank order, including this
        rank; ``how`` as for `_exchange`.
        """
        sent, received = outgoing[self._rank], incoming[self._rank]
        if sent is not None and received is not None and sent is not received:
            bytes_of(received).copy_(bytes_of(sent))
        sends, recvs = (
            [(x, peer) for peer, x in enumerate(part) if x is not None and peer != self._rank]
            for part in (outgoing, incoming)
        )
        self._exchange(sends, recvs, call, *how)

    def _allgather(self, send_tensor: Tensor, recv_tensor: Tensor, call: str = "") -> None:
        call = call or self._agree("allgather()", send_tensor)
        if self._over_nccl(send_tensor):
            self._run(
                _name(call),
                send_tensor,
                lambda group: [group._allgather_base(bytes_of(recv_tensor), bytes_of(send_tensor))],
            )
            return
        # Receive in place: gloo's all-gather uses a buffer and takes twice the time.
        self._trade([send_tensor] * self._nranks, self._chunks(recv_tensor), call)

    def _alltoall(self, send_tensor: Tensor, recv_tensor: Tensor, call: str = "") -> None:
        call = call or self._agree("alltoall()", send_tensor)
        if self._over_nccl(send_tensor):
            self._run(
                _name(call),
                send_tensor,
                lambda group: [
                    group.alltoall_base(bytes_of(recv_tensor), bytes_of(send_tensor), [], [])
                ],
            )
            return
        self._trade(self._chunks(send_tensor), self._chunks(recv_tensor), call)

    # Reduction: the library's where possible; otherwise chunks are exchanged and `combine` reduces
    # them.

    def _reduce_inplace(self, tensor: Tensor, dst: int, op: ReduceOp) -> None:
        call = self._agree(f"reduce(dst={dst}, op={op.name})", tensor)
        if not tensor.numel():
            return
        if self._shared_memory(tensor) is not None or not self._library_reduces(tensor, op):
            inputs = tensor.new_empty(self._nranks * tensor.numel() if self._rank == dst else 0)
            self._gather(tensor, inputs, dst, call)
            if self._rank == dst:
                _flat(tensor).copy_(combine(inputs.chunk(self._nranks), op))
            return
        self._combine_natively(
            "reduce",
            tensor,
            op,
            lambda group, here, native: group.reduce(here, dst, native),
            self._rank == dst,
        )

    def _allreduce_inplace(self, tensor: Tensor, op: ReduceOp) -> None:
        call = self._agree(f"allreduce(op={op.name})", tensor)
        if not tensor.numel():
            return
        if (memory := self._shared_memory(tensor)) is not None:
            here = self._reachable(tensor.detach())
            self._connection.run(
                "allreduce", lambda _: memory.allreduce(_flat(here), op), call=call
            )
            _bring_back(tensor, here)
            return
        if not self._library_reduces(tensor, op):
            self._allreduce_by_chunks(_flat(tensor), op, call)
            return
        self._combine_natively(
            "allreduce", tensor, op, lambda group, here, native: group.allreduce([here], native)
        )

    def _combine_natively(
        self,
        collective: str,
        tensor: Tensor,
        op: ReduceOp,
        start: Callable[[Any, Tensor, Any], Any],
        receives: bool = True,
    ) -> None:
        """Reduce ``tensor`` with the library, and store the result on ranks that ``receives``; for
        gloo, which has no mean, divide the sum.
        """
        here = self._reachable(tensor.detach())
        sums = op is ReduceOp.AVG and not self._over_nccl(here)
        native = getattr(dist.ReduceOp, "SUM" if sums else op.name)
        self._run(collective, here, lambda group: [start(group, here, native)])
        if receives:
            if sums:
                divide_(here, self._nranks)
            _bring_back(tensor, here)

    def _allreduce_by_chunks(self, flat: Tensor, op: ReduceOp, call: str) -> None:
        """All-reduce by a reduce-scatter and an all-gather: the traffic of an all-reduce, with our
        arithmetic.
        """
        missing = -flat.numel() % self._nranks
        padded = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
        own = padded.new_empty(padded.numel() // self._nranks)
        self._reduce_scatter(padded, own, op, call)
        self._allgather(own, padded, call)
        if missing:
            flat.copy_(padded[: flat.numel()])

    def _reduce_scatter(
        self, send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp, call: str = ""
    ) -> None:
        call = call or self._agree(f"reduce_scatter(op={op.name})", send_tensor)
        if not send_tensor.numel():
            return
        if self._over_nccl(send_tensor) and self._library_reduces(send_tensor, op):
            options = dist.ReduceScatterOptions()
            options.reduceOp = getattr(dist.ReduceOp, op.name)
            self._run(
                _name(call),
                send_tensor,
                lambda group: [group._reduce_scatter_base(recv_tensor, send_tensor, options)],
            )
            return
        # gloo's reduce-scatter takes five times as long.
        inputs = torch.empty_like(send_tensor)
        self._alltoall(send_tensor, inputs, call)
        _flat(recv_tensor).copy_(combine(_flat(inputs).chunk(self._nranks), op))

    def _agree(self, call: str, tensor: Tensor | None) -> str:
        """Compare ``call``, and the size and dtype of ``tensor``, with the calls of the other
        ranks; return its full text. Collective.

        With shared memory, ranks compare calls by the headers of received pieces; an extra message
        is needed only if a tensor has no piece for some rank.

        Raises:
            CommunicationError: the calls differ; raised on every rank.
        """
        call = call if tensor is None else f"{call} of {describe(tensor)}"
        if (
            self.compares_calls
            and self._nranks > 1
            and (tensor is None or not self._over_nccl(tensor))
        ):
            if (memory := self._connection.memory) is None:
                self._connection.compare(_name(call), call)
            elif tensor is None or tensor.numel() < self._nranks**2:
                self._connection.run(
                    _name(call), lambda _: memory.exchange([], [], call, everyone=True), call=call
                )
        return call

    def _shared_memory(self, tensor: Tensor) -> SharedMemory | None:
        """Return the shared memory that transfers ``tensor``, or None."""
        return None if self._over_nccl(tensor) else self._connection.memory

    def _library_reduces(self, tensor: Tensor, op: ReduceOp) -> bool:
        if self._over_nccl(tensor):
            return op not in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
        # gloo rounds 16-bit floats at every rank, and its MIN and MAX of a NaN depend on which rank
        # has it.
        return tensor.element_size() != 2 and not (
            op in (ReduceOp.MIN, ReduceOp.MAX) and tensor.is_floating_point()
        )

    def _over_nccl(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and self._uses_nccl

    def _reachable(self, tensor: Tensor, copied: bool = True) -> Tensor:
        """Return ``tensor``, or for a device tensor that must go through gloo, pinned host memory;
        ``copied``: with its values.
        """
        if tensor.device.type == "cpu" or self._over_nccl(tensor):
            return tensor
        # torch keeps it, and copies to other memory take far longer
        here = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return here.copy_(tensor) if copied else here

    def _chunks(self, tensor: Tensor) -> list[Tensor]:
        flat = bytes_of(tensor)
        count = flat.numel() // self._nranks
        return [flat[i * count : (i + 1) * count] for i in range(self._nranks)]

    def _run(self, collective: str, tensor: Tensor, start: Callable[[Any], list[Any]]) -> None:
        self._connection.run(collective, start, over_nccl=self._over_nccl(tensor))


def _name(call: str) -> str:
    return call.partition("(")[0]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _bring_back(tensor: Tensor, here: Tensor) -> None:
    if here.data_ptr() != tensor.data_ptr():
        # torch keeps pinned memory until the copy is done
        tensor.detach().copy_(here, non_blocking=True)

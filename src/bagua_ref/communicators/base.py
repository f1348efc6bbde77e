"""The contract of communicators: collectives among the ranks of a group, validated here for every
transport (S3.9).

A transport (torch.distributed, the simulation) implements the methods with a leading underscore,
which get only valid arguments. Invalid ones raise ValueError or TypeError before anything is sent.
"""

from __future__ import annotations

import functools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from bagua_ref.communicators.pipelining import Overlap
from bagua_ref.observe.meter import profiled
from bagua_ref.types import BackendTensor, ReduceOp

__all__ = ["Communicator", "NonMember"]

REDUCIBLE = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _collective(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator of a collective: accept ``tensor.bagua_backend_tensor()`` in place of any tensor,
    and disable autograd.

    Profiles show the method under its name.
    """
    label = f"bagua_ref::wire/{method.__name__}"

    def effective(argument: Any) -> Any:
        return argument.effective_tensor() if isinstance(argument, BackendTensor) else argument

    @functools.wraps(method)
    def taking_backend_tensors(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch.no_grad(), profiled(label):
            return method(
                *map(effective, args),
                **{name: effective(argument) for name, argument in kwargs.items()},
            )

    return taking_backend_tensors


class Communicator(ABC):
    """Collectives among the ``nranks()`` ranks of a group; this rank is ``rank()`` (S3.9).

    All ranks call the same collectives in the same order, from one thread at a time. Tensors are
    contiguous. Data movement supports any dtype; reduction supports the float and integer types of
    both gloo and NCCL. The result of ``tensor.bagua_backend_tensor()`` can be passed in place of a
    tensor and stands for the effective tensor. ``src`` and ``dst`` are ranks within this
    communicator.

    Attributes:
        name: the group's name, for messages.
        bytes_sent: the bytes that this rank has sent so far, by formula: 2(n-1)/n of the tensor for
            all-reduce; (n-1)/n of the full buffer for all-gather, reduce-scatter and all-to-all;
            (n-1)/n for reduce and broadcast (the mean over ranks of n-1 copies); the bytes that
            leave this rank for send, gather and scatter.
        unrounded_bytes: `bytes_sent` before rounding, for sums.
        compares_calls: whether ranks compare their collectives and arguments before data are sent;
            equal on all ranks. False where they have already been compared.
    """

    compares_calls = True

    def __init__(self, rank: int, nranks: int, name: str) -> None:
        self._rank, self._nranks, self.name = rank, nranks, name
        self.unrounded_bytes = 0.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, rank {self._rank} of {self._nranks})"

    def rank(self) -> int:
        """Return this rank's index within the communicator."""
        return self._rank

    def nranks(self) -> int:
        """Return the number of ranks."""
        return self._nranks

    @property
    def bytes_sent(self) -> int:
        """Return the number of bytes sent by this rank, as computed by formula."""
        return round(self.unrounded_bytes)

    @abstractmethod
    def abort(self, reason: str = "") -> None:
        """Abort the connection; current and later operations raise CommunicationError, with
        ``reason`` if given.
        """

    def exchange_ints(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Send ``values``, a few int64, to every rank; their bytes are not counted in `bytes_sent`.

        Args:
            values: the same number of integers on all ranks.

        Returns:
            A function that waits for every rank's values and returns them, for reading only:
            simulated ranks share them.
        """

        def receive() -> list[list[int]]:
            gathered = torch.empty(self._nranks, len(values), dtype=torch.int64)
            self._allgather(torch.tensor(values, dtype=torch.int64), gathered)
            received: list[list[int]] = gathered.tolist()
            return received

        return receive

    def close(self) -> None:
        """Close the communicator on this rank: later operations raise CommunicationError."""
        self.abort()

    # Point to point.

    @_collective
    def send(self, tensor: Tensor, dst: int) -> None:
        """Send ``tensor`` to rank ``dst``, which must call `recv` with a tensor of the same size
        and dtype.
        """
        self._check_peer("dst", dst)
        self._check("tensor", tensor)
        self.unrounded_bytes += tensor.nbytes
        self._send(tensor, dst)

    @_collective
    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive ``tensor`` from rank ``src``."""
        self._check_peer("src", src)
        self._check("tensor", tensor)
        self._recv(tensor, src)

    @_collective
    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Send and receive several tensors at once, so that rings and pairs cannot deadlock; a rank
        can be its own peer.

        Args:
            sends: (tensor, dst) pairs; tensors for the same peer arrive in this order.
            recvs: (tensor, src) pairs.
        """
        for argument, root, part in (("sends", "dst", sends), ("recvs", "src", recvs)):
            for tensor, peer in part:
                self._check_rank(root, peer)
                self._check(argument, tensor)
        own_sends, own_recvs = (
            [tensor for tensor, peer in part if peer == self._rank] for part in (sends, recvs)
        )
        if [t.numel() for t in own_sends] != [t.numel() for t in own_recvs]:
            raise ValueError(
                f"exchange of rank {self._rank} with itself must receive what it sends"
            )
        for sent, received in zip(own_sends, own_recvs, strict=True):
            received.view(-1).copy_(sent.view(-1))
        outgoing, incoming = (
            [(tensor, peer) for tensor, peer in part if peer != self._rank]
            for part in (sends, recvs)
        )
        self.unrounded_bytes += sum(tensor.nbytes for tensor, _ in outgoing)
        self._exchange(outgoing, incoming)

    # One to all, all to one.

    @_collective
    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Broadcast rank ``src``'s ``tensor`` into every rank's ``tensor``."""
        self._check_rank("src", src)
        self._check("tensor", tensor)
        self.unrounded_bytes += tensor.nbytes * self._others
        self._broadcast(tensor, src)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Broadcast rank ``src``'s ``obj``; return it on every rank. It is pickled, so only use
        this in groups whose members trust each other.
        """
        self._check_rank("src", src)
        is_src = self._rank == src
        pickled = bytearray(pickle.dumps(obj) if is_src else b"")
        length = torch.tensor([len(pickled)])
        self.broadcast(length, src)
        payload = torch.empty(int(length.item()), dtype=torch.uint8)
        if is_src:
            payload.copy_(torch.frombuffer(pickled, dtype=torch.uint8))
        self.broadcast(payload, src)
        return obj if is_src else pickle.loads(payload.numpy().tobytes())  # noqa: S301 # ranks trust each other: SECURITY.md

    @_collective
    def reduce(
        self, send_tensor: Tensor, recv_tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """Reduce ``send_tensor`` over ranks into ``recv_tensor`` of rank ``dst``, which is
        unchanged on other ranks.
        """
        self._check_rank("dst", dst)
        op = self._check_reduction(op, send_tensor, recv_tensor)
        self.unrounded_bytes += send_tensor.nbytes * self._others
        self._reduce_inplace(
            recv_tensor.copy_(send_tensor) if self._rank == dst else send_tensor.clone(), dst, op
        )

    @_collective
    def reduce_inplace(self, tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduce ``tensor`` over ranks into ``tensor`` of rank ``dst``, which is unchanged on other
        ranks.
        """
        self._check_rank("dst", dst)
        op = self._check_reduction(op, tensor, tensor)
        self.unrounded_bytes += tensor.nbytes * self._others
        # A library may use the senders' tensors as scratch space.
        self._reduce_inplace(tensor if self._rank == dst else tensor.clone(), dst, op)

    @_collective
    def gather(self, send_tensor: Tensor, recv_tensor: Tensor, dst: int) -> None:
        """Gather every rank's ``send_tensor``, in rank order, into ``recv_tensor`` of rank ``dst``,
        which is n times as large.
        """
        self._check_rank("dst", dst)
        self._check("send_tensor", send_tensor)
        if self._rank == dst:
            self._check_pair(send_tensor, recv_tensor, self._nranks, 1)
        else:
            self.unrounded_bytes += send_tensor.nbytes
        self._gather(send_tensor, recv_tensor, dst)

    @_collective
    def gather_inplace(self, tensor: Tensor, count: int, dst: int) -> None:
        """In-place `gather`: rank ``dst``'s tensor has n*count elements, with its own in chunk dst;
        other ranks send ``count`` elements.
        """
        own = self._check_inplace_chunk(tensor, count, "dst", dst)
        self.unrounded_bytes += own.nbytes if self._rank != dst else 0
        self._gather(own.clone() if self._rank == dst else own, tensor, dst)

    @_collective
    def scatter(self, send_tensor: Tensor, recv_tensor: Tensor, src: int) -> None:
        """Scatter the n chunks of rank ``src``'s ``send_tensor``, which is n times as large as
        ``recv_tensor``, to the ranks.
        """
        self._check_rank("src", src)
        self._check("recv_tensor", recv_tensor)
        if self._rank == src:
            self._check_pair(send_tensor, recv_tensor, 1, self._nranks)
            self.unrounded_bytes += recv_tensor.nbytes * (self._nranks - 1)
        self._scatter(send_tensor, recv_tensor, src)

    @_collective
    def scatter_inplace(self, tensor: Tensor, count: int, src: int) -> None:
        """In-place `scatter`: rank ``src``'s tensor has n*count elements and is unchanged; other
        ranks receive ``count`` elements.
        """
        own = self._check_inplace_chunk(tensor, count, "src", src)
        self.unrounded_bytes += own.nbytes * (self._nranks - 1) if self._rank == src else 0
        self._scatter(tensor, own.clone() if self._rank == src else own, src)

    # All to all.

    @_collective
    def allreduce(
        self, send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """Reduce ``send_tensor`` over ranks into every rank's ``recv_tensor``."""
        op = self._check_reduction(op, send_tensor, recv_tensor)
        self.unrounded_bytes += 2 * send_tensor.nbytes * self._others
        recv_tensor.copy_(send_tensor)
        self._allreduce_inplace(recv_tensor, op)

    @_collective
    def allreduce_inplace(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduce ``tensor`` over ranks, in place on every rank."""
        op = self._check_reduction(op, tensor, tensor)
        self.unrounded_bytes += 2 * tensor.nbytes * self._others
        self._allreduce_inplace(tensor, op)

    @_collective
    def allgather(self, send_tensor: Tensor, recv_tensor: Tensor) -> None:
        """Gather every rank's ``send_tensor``, in rank order, into every rank's ``recv_tensor``,
        which is n times as large.
        """
        self._check_pair(send_tensor, recv_tensor, self._nranks, 1)
        self.unrounded_bytes += recv_tensor.nbytes * self._others
        self._allgather(send_tensor, recv_tensor)

    @_collective
    def allgather_inplace(self, tensor: Tensor, overlap: Overlap | None = None) -> None:
        """In-place `allgather`: this rank sends chunk ``rank()`` of its tensor. ``overlap`` fills
        this chunk and reads the others.
        """
        own = self._own_chunk(tensor)
        self.unrounded_bytes += tensor.nbytes * self._others
        if overlap is not None:
            self._overlapping("allgather", own, tensor, overlap)
            overlap.finish()
        else:
            self._allgather(own.clone(), tensor)

    @_collective
    def reduce_scatter(
        self, send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """Reduce ``send_tensor``, n times as large as ``recv_tensor``, over ranks; rank r receives
        chunk r of the result.
        """
        op = self._check_reduction(op, send_tensor, recv_tensor, self._nranks)
        self.unrounded_bytes += send_tensor.nbytes * self._others
        self._reduce_scatter(send_tensor, recv_tensor, op)

    @_collective
    def reduce_scatter_inplace(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """In-place `reduce_scatter`: the result is chunk ``rank()`` of the tensor; other chunks are
        unchanged.
        """
        op = self._check_reduction(op, tensor, tensor)
        own = self._own_chunk(tensor)
        self.unrounded_bytes += tensor.nbytes * self._others
        result = torch.empty_like(own)
        self._reduce_scatter(tensor, result, op)
        own.copy_(result)

    @_collective
    def alltoall(
        self, send_tensor: Tensor, recv_tensor: Tensor, overlap: Overlap | None = None
    ) -> None:
        """Send chunk d of ``send_tensor`` to rank d, for all d; chunk s of ``recv_tensor`` comes
        from rank s.

        Args:
            send_tensor: n chunks.
            recv_tensor: a tensor of the same size, which must not overlap send_tensor.
            overlap: fills the chunks to send and reads those received, meanwhile; None: the caller
                does so before and after.
        """
        self._check_pair(send_tensor, recv_tensor, 1, 1)
        self._own_chunk(send_tensor)
        self.unrounded_bytes += send_tensor.nbytes * self._others
        if overlap is not None:
            self._overlapping("alltoall", send_tensor, recv_tensor, overlap)
            overlap.finish()
        else:
            self._alltoall(send_tensor, recv_tensor)

    @_collective
    def alltoall_inplace(self, tensor: Tensor) -> None:
        """In-place `alltoall`: send from and receive into one tensor."""
        self._own_chunk(tensor)
        self.unrounded_bytes += tensor.nbytes * self._others
        self._alltoall(tensor.clone(), tensor)

    @_collective
    def alltoall_v(
        self,
        send_tensor: Tensor,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv_tensor: Tensor,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        """All-to-all with variable counts, like MPI_Alltoallv: rank d gets ``send_counts[d]``
        elements, starting at ``send_displs[d]``; receiving is likewise.
        """
        self._check("send_tensor", send_tensor)
        self._check("recv_tensor", recv_tensor)
        self._check_same_kind(send_tensor, recv_tensor)
        sends = self._slices("send", send_tensor, send_counts, send_displs)
        recvs = self._slices("recv", recv_tensor, recv_counts, recv_displs)
        r = self._rank
        if sends[r].numel() != recvs[r].numel():
            raise ValueError(
                f"send_counts[{r}]={sends[r].numel()} and recv_counts[{r}]={recvs[r].numel()} must"
                f" be equal, as rank {r} sends these elements to itself"
            )
        self.exchange(
            list(zip(sends, range(self._nranks), strict=True)),
            list(zip(recvs, range(self._nranks), strict=True)),
        )

    @_collective
    def alltoall_v_inplace(
        self, tensor: Tensor, counts: Sequence[int], displs: Sequence[int]
    ) -> None:
        """In-place `alltoall_v`, with the same counts and displacements in both directions."""
        self._check("tensor", tensor)
        self._slices("", tensor, counts, displs)
        self.alltoall_v(tensor.clone(), counts, displs, tensor, counts, displs)

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this."""

    # For a transport to implement. Arguments are valid: tensors contiguous, `op` never AVG on
    # integers nor bitwise on floats.

    @abstractmethod
    def _exchange(
        self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]
    ) -> None: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, src: int) -> None: ...

    @abstractmethod
    def _reduce_inplace(self, tensor: Tensor, dst: int, op: ReduceOp) -> None:
        """Implement `reduce_inplace`; tensors of other ranks may be overwritten."""

    @abstractmethod
    def _gather(self, send_tensor: Tensor, recv_tensor: Tensor, dst: int) -> None: ...

    @abstractmethod
    def _scatter(self, send_tensor: Tensor, recv_tensor: Tensor, src: int) -> None: ...

    @abstractmethod
    def _allreduce_inplace(self, tensor: Tensor, op: ReduceOp) -> None: ...

    @abstractmethod
    def _allgather(self, send_tensor: Tensor, recv_tensor: Tensor) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp) -> None: ...

    @abstractmethod
    def _alltoall(self, send_tensor: Tensor, recv_tensor: Tensor) -> None: ...

    # A transport may override these: messages of their own, and computation that overlaps with
    # communication.

    def _send(self, tensor: Tensor, dst: int) -> None:
        self._exchange([(tensor, dst)], [])

    def _recv(self, tensor: Tensor, src: int) -> None:
        self._exchange([], [(tensor, src)])

    def _overlapping(
        self, collective: str, send_tensor: Tensor, recv_tensor: Tensor, overlap: Overlap
    ) -> None:
        """Run `_alltoall` with ``overlap``; or `_allgather`, with ``send_tensor`` as this rank's
        chunk of ``recv_tensor``.
        """
        size = recv_tensor.nbytes // self._nranks
        overlap.fill(size)
        if collective == "alltoall":
            self._alltoall(send_tensor, recv_tensor)
        else:
            self._allgather(send_tensor.clone(), recv_tensor)
        overlap.read(size)

    # Validation.

    @property
    def _others(self) -> float:
        return (self._nranks - 1) / self._nranks

    def _check_rank(self, argument: str, rank: int) -> None:
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"{argument}={rank!r} must be an int, a rank of {self!r}")
        if not 0 <= rank < self._nranks:
            raise ValueError(
                f"{argument}={rank} must be a rank of {self!r}, 0 to {self._nranks - 1}"
            )

    def _check_peer(self, argument: str, rank: int) -> None:
        self._check_rank(argument, rank)
        if rank == self._rank:
            raise ValueError(
                f"{argument}={rank} is this rank itself; it must be another one of {self!r}"
            )

    def _check(self, argument: str, tensor: Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{argument} must be a torch.Tensor, not {type(tensor).__name__}")
        if tensor.is_meta:
            raise ValueError(
                f"{argument} is on device 'meta', which holds no values; it must be on a CPU or"
                " CUDA device"
            )
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"{argument} is a lazily conjugated or negated view; pass"
                " tensor.resolve_conj().resolve_neg()"
            )
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
            raise ValueError(
                f"{argument} of shape {tuple(tensor.shape)} and strides {strides} must be"
                " contiguous; pass tensor.contiguous() and copy the result back"
            )

    def _check_same_kind(self, send_tensor: Tensor, recv_tensor: Tensor) -> None:
        if send_tensor.dtype != recv_tensor.dtype:
            raise TypeError(
                f"send_tensor is {send_tensor.dtype}, recv_tensor {recv_tensor.dtype}; they must be"
                " equal"
            )
        if send_tensor.device != recv_tensor.device:
            raise ValueError(
                f"send_tensor is on {send_tensor.device}, recv_tensor on {recv_tensor.device}; they"
                " must be equal"
            )

    def _check_pair(
        self, send_tensor: Tensor, recv_tensor: Tensor, send_times: int, recv_times: int
    ) -> None:
        """Raise ValueError unless send_tensor's size times ``send_times`` is recv_tensor's size
        times ``recv_times``.
        """
        self._check("send_tensor", send_tensor)
        self._check("recv_tensor", recv_tensor)
        self._check_same_kind(send_tensor, recv_tensor)
        if send_tensor.numel() * send_times != recv_tensor.numel() * recv_times:
            larger = f"{send_times} x " if send_times > 1 else ""
            divided = f"/ {recv_times} " if recv_times > 1 else ""
            raise ValueError(
                f"recv_tensor has {recv_tensor.numel()} elements; with send_tensor's"
                f" {send_tensor.numel()} on {self!r} it must have {larger}{send_tensor.numel()}"
                f" {divided}".rstrip()
            )

    def _check_reduction(
        self, op: ReduceOp, send_tensor: Tensor, recv_tensor: Tensor, recv_times: int = 1
    ) -> ReduceOp:
        try:
            op = ReduceOp(op)
        except ValueError:
            raise ValueError(
                f"op={op!r} must be one of {', '.join(f'{o.name}={o.value}' for o in ReduceOp)}"
            ) from None
        self._check_pair(send_tensor, recv_tensor, 1, recv_times)
        if send_tensor.dtype not in REDUCIBLE:
            raise TypeError(
                f"a {send_tensor.dtype} tensor cannot be reduced; allowed are"
                f" {', '.join(map(str, REDUCIBLE))}"
            )
        if op is ReduceOp.AVG and not send_tensor.is_floating_point():
            raise TypeError(
                f"op=AVG needs a floating-point tensor, not {send_tensor.dtype}; use SUM and divide"
                " as you need"
            )
        if op in _BITWISE and send_tensor.is_floating_point():
            raise TypeError(f"op={op.name} needs an integer tensor, not {send_tensor.dtype}")
        return op

    def _own_chunk(self, tensor: Tensor) -> Tensor:
        self._check("tensor", tensor)
        if tensor.numel() % self._nranks:
            raise ValueError(
                f"a tensor of {tensor.numel()} elements does not divide into {self._nranks} equal"
                f" chunks for {self!r}"
            )
        count = tensor.numel() // self._nranks
        return tensor.view(-1)[self._rank * count : (self._rank + 1) * count]

    def _check_inplace_chunk(self, tensor: Tensor, count: int, argument: str, root: int) -> Tensor:
        """Return this rank's ``count`` elements; the root's tensor must have n * count elements,
        other ranks' count.
        """
        self._check_rank(argument, root)
        self._check("tensor", tensor)
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"count={count!r} must be an int, 0 or more")
        needed = count * self._nranks if self._rank == root else count
        if tensor.numel() != needed:
            raise ValueError(
                f"tensor has {tensor.numel()} elements; with count={count} on {self!r} and"
                f" {argument}={root} it must have {needed}"
            )
        return self._own_chunk(tensor) if self._rank == root else tensor.view(-1)

    def _slices(
        self, what: str, tensor: Tensor, counts: Sequence[int], displs: Sequence[int]
    ) -> list[Tensor]:
        prefix = f"{what}_" if what else ""
        for argument, values in (("counts", counts), ("displs", displs)):
            if len(values) != self._nranks or any(v < 0 for v in values):
                raise ValueError(
                    f"{prefix}{argument}={list(values)} must be {self._nranks} non-negative ints,"
                    " one per rank"
                )
        for count, displ in zip(counts, displs, strict=True):
            if displ + count > tensor.numel():
                raise ValueError(
                    f"{prefix}displs={list(displs)} and {prefix}counts={list(counts)} reach beyond"
                    f" the tensor's {tensor.numel()} elements"
                )
        flat = tensor.view(-1)
        return [flat[displ : displ + count] for count, displ in zip(counts, displs, strict=True)]


class NonMember:
    """Placeholder for a communicator that does not include this rank: every collective returns at
    once, without effect (S3.9).
    """

    bytes_sent = 0
    unrounded_bytes = 0.0

    def __init__(self, nranks: int, name: str) -> None:
        self._nranks, self.name = nranks, name

    def __repr__(self) -> str:
        return f"NonMember({self.name!r} of {self._nranks} ranks)"

    def rank(self) -> int:
        """Return -1."""
        return -1

    def nranks(self) -> int:
        """Return the number of ranks of the group."""
        return self._nranks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Communicator, name):
            raise AttributeError(name)
        if name == "broadcast_object":
            return lambda obj, src=0: obj
        return lambda *args, **kwargs: None

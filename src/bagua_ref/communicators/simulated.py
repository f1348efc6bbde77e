"""A communicator between simulated ranks of one process: the last rank to arrive runs a collective's plain function for all."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bagua_ref.communicators import collectives
from bagua_ref.communicators.base import Communicator
from bagua_ref.communicators.scheduler import Scheduler, Ticket, format_ranks
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError, SimulationError
from bagua_ref.types import ReduceOp

__all__ = ["SimulatedCommunicator", "SimulatedNetwork", "SimulatedTransport"]


class _Call:
    """One rank's part in a collective: the call and its tensors."""

    def __init__(self, ticket: Ticket, what: str, send: Tensor | None, recv: Tensor | None, alike: Tensor | None) -> None:
        self.ticket, self.what, self.send, self.recv, self.alike = ticket, what, send, recv, alike
        self.error: Exception | None = None

    def __str__(self) -> str:
        return self.what if self.alike is None else f"{self.what} of {collectives.describe(self.alike)}"


class _Board:
    """The integers of one exchange, and the ranks that wait for the others'."""

    def __init__(self) -> None:
        self.values: dict[int, list[int]] = {}
        self.waiting: list[Ticket] = []


class _Group:
    """State shared by the communicators of one group: arrivals at the next collective, and messages in flight."""

    def __init__(self, network: SimulatedNetwork, name: str, ranks: tuple[int, ...], timeout: float) -> None:
        self.scheduler, self.name, self.ranks, self.timeout = network.scheduler, name, ranks, timeout
        self.messages_sent = network.messages_sent
        self.calls: dict[int, _Call] = {}
        self.messages: dict[tuple[int, int], deque[Tensor]] = {}
        self.receiving: dict[tuple[int, int], Ticket] = {}
        self.boards: dict[int, _Board] = {}
        self.broken: str | None = None

    def give_up(self, reason: str) -> None:
        """Make all operations raise, including those in progress."""
        self.broken = self.broken or reason
        tickets = [ticket for board in self.boards.values() for ticket in board.waiting]
        for ticket in [*(call.ticket for call in self.calls.values()), *self.receiving.values(), *tickets]:
            self.scheduler.grant(ticket, self.broken)
        self.calls, self.receiving, self.boards = {}, {}, {}

    def check(self) -> None:
        """Raise if the group has been given up."""
        if self.broken is not None:
            raise CommunicationError(self.broken)

    def wait(self, ticket: Ticket, rank: int) -> None:
        """Wait for other ranks. What they complete counts even if the group is aborted before this rank runs again."""
        if not self.scheduler.wait(ticket, None if self.timeout == math.inf else self.timeout):
            why = f"rank {self.ranks[rank]} timed out after {self.timeout} s waiting {ticket.what}"
            self.give_up(f"group {self.name!r} was given up: {why}")
            raise CommunicationTimeoutError(why)
        if ticket.value is not None:
            raise CommunicationError(ticket.value)


class SimulatedCommunicator(Communicator):
    """A communicator between threads of one process (S3.9).

    Each rank deposits its tensors, and the last one to arrive computes for all. Reductions run in rank order. If ranks call
    different collectives, or pass arguments that do not match, all of them get the same error, and the communicator stays
    usable. Messages are buffered: `send` never waits.
    """

    def __init__(self, group: _Group, rank: int) -> None:
        super().__init__(rank, len(group.ranks), group.name)
        self._group = group
        self._exchanges = 0
        self._closed = False

    def abort(self, reason: str = "") -> None:
        """Abort the whole group: operations in progress and later ones raise CommunicationError on every rank."""
        rank = self._group.ranks[self._rank]
        self._group.give_up(f"rank {rank} gave up: {reason}" if reason else f"rank {rank} aborted group {self.name!r}")

    def close(self) -> None:
        """Make this rank's later operations raise; other ranks are not affected."""
        self._closed = True

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self._run("barrier()", None, None, lambda sends, recvs: None)

    def exchange_ints(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Send ``values`` to every rank; return a function that waits for all ranks' values."""
        self._check_open()
        group, self._exchanges = self._group, self._exchanges + 1
        serial, board = self._exchanges, group.boards.setdefault(self._exchanges, _Board())
        board.values[self._rank] = list(values)
        if len(board.values) == self._nranks:
            for ticket in board.waiting:
                group.scheduler.grant(ticket)
        group.scheduler.yield_()

        def receive() -> list[list[int]]:
            if len(board.values) < self._nranks:
                group.check()
                board.waiting.append(group.scheduler.ticket(f"in agreement of group {self.name!r}", collective=True))
                group.wait(board.waiting[-1], self._rank)
            group.boards.pop(serial, None)
            return [board.values[rank] for rank in range(self._nranks)]

        return receive

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        self._run(f"broadcast(src={src})", tensor, tensor, lambda sends, recvs: collectives.broadcast(recvs, src))

    def _reduce_inplace(self, tensor: Tensor, dst: int, op: ReduceOp) -> None:
        what = f"reduce(dst={dst}, op={op.name})"
        self._run(what, tensor, tensor, lambda sends, recvs: collectives.reduce_inplace(recvs, dst, op))

    def _gather(self, send_tensor: Tensor, recv_tensor: Tensor, dst: int) -> None:
        self._run(f"gather(dst={dst})", send_tensor, recv_tensor, lambda sends, recvs: collectives.gather(sends, recvs[dst]))

    def _scatter(self, send_tensor: Tensor, recv_tensor: Tensor, src: int) -> None:
        scatter = lambda sends, recvs: collectives.scatter(sends[src], recvs)  # noqa: E731
        self._run(f"scatter(src={src})", send_tensor, recv_tensor, scatter, alike=recv_tensor)

    def _allreduce_inplace(self, tensor: Tensor, op: ReduceOp) -> None:
        self._run(f"allreduce(op={op.name})", tensor, tensor, lambda sends, recvs: collectives.allreduce_inplace(recvs, op))

    def _allgather(self, send_tensor: Tensor, recv_tensor: Tensor) -> None:
        self._run("allgather()", send_tensor, recv_tensor, collectives.allgather)

    def _reduce_scatter(self, send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp) -> None:
        reduce_scatter = lambda sends, recvs: collectives.reduce_scatter(sends, recvs, op)  # noqa: E731
        self._run(f"reduce_scatter(op={op.name})", send_tensor, recv_tensor, reduce_scatter)

    def _alltoall(self, send_tensor: Tensor, recv_tensor: Tensor) -> None:
        self._run("alltoall()", send_tensor, recv_tensor, collectives.alltoall)

    def _run(
        self,
        what: str,
        send: Tensor | None,
        recv: Tensor | None,
        function: Callable[[list[Any], list[Any]], None],
        *,
        alike: Tensor | None = None,
    ) -> None:
        """Deposit this rank's tensors; once all ranks have, ``function(sends, recvs)`` moves the data for all of them.

        Args:
            what: the collective and the arguments on which all ranks must agree.
            send: what this rank sends; None for a barrier.
            recv: receives the result.
            function: one of `collectives`.
            alike: the tensor that must have the same size and dtype on all ranks; None for ``send``.
        """
        group = self._group
        self._check_open()
        group.scheduler.yield_()
        group.check()
        ticket = group.scheduler.ticket("", collective=True)
        # Bypass autograd, as a communication library does: leaves that require grad are written, too, and versions stay.
        sent, received = (None if t is None else t.data for t in (send, recv))
        call = _Call(ticket, what, sent, received, send if alike is None else alike)
        ticket.what = f"in {call} of group {self.name!r}"
        if self._rank in group.calls:
            raise SimulationError(
                f"two threads of rank {group.ranks[self._rank]} use group {self.name!r} at once: "
                f"one is in {group.calls[self._rank]}, one calls {call}"
            )
        group.calls[self._rank] = call
        if len(group.calls) < self._nranks:
            group.wait(ticket, self._rank)
        else:
            calls = [group.calls[rank] for rank in range(self._nranks)]
            group.calls = {}
            error = self._disagreement(calls)
            if error is None:
                if group.messages_sent is not None and sent is not None:
                    group.messages_sent.append((what, [c.send.clone() for c in calls if c.send is not None]))
                function([c.send for c in calls], [c.recv for c in calls])
            for other in calls:
                other.error = copy.copy(error)
                group.scheduler.grant(other.ticket)
            group.scheduler.yield_()
        if call.error is not None:
            raise call.error

    def _disagreement(self, calls: list[_Call]) -> Exception | None:
        first = calls[0]
        for rank, call in enumerate(calls):
            if call.what == first.what and call.alike is not None and first.alike is not None:
                if call.alike.dtype != first.alike.dtype:
                    return TypeError(self._both(calls, rank, "use the same dtype"))
                if call.alike.numel() != first.alike.numel():
                    return ValueError(self._both(calls, rank, "pass equally many elements"))
            elif call.what != first.what:
                return SimulationError(self._both(calls, rank, "call the same collective with the same arguments"))
        return None

    def _both(self, calls: list[_Call], rank: int, rule: str) -> str:
        who, other = self._group.ranks[0], self._group.ranks[rank]
        return f"in group {self.name!r} rank {who} calls {calls[0]}, but rank {other} calls {calls[rank]}; all ranks must {rule}"

    def _send(self, tensor: Tensor, dst: int) -> None:
        self._exchange([(tensor, dst)], [])

    def _recv(self, tensor: Tensor, src: int) -> None:
        self._exchange([], [(tensor, src)])

    def _exchange(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> None:
        self._check_open()
        for tensor, dst in sends:
            self._post(tensor, dst)
        self._group.scheduler.yield_()
        for tensor, src in recvs:
            self._take(tensor, src)

    def _post(self, tensor: Tensor, dst: int) -> None:
        group, path = self._group, (self._rank, dst)
        group.messages.setdefault(path, deque()).append(tensor.detach().clone())
        ticket = group.receiving.pop(path, None)
        if ticket is not None:
            group.scheduler.grant(ticket)

    def _take(self, tensor: Tensor, src: int) -> None:
        group, path = self._group, (src, self._rank)
        group.check()
        messages = group.messages.setdefault(path, deque())
        receiver = f"rank {group.ranks[self._rank]}"
        while not messages:
            if path in group.receiving:
                raise SimulationError(f"two threads of {receiver} receive from {src} of group {self.name!r} at once")
            what = f"in recv(src={src}) of {collectives.describe(tensor)} of group {self.name!r}"
            group.receiving[path] = group.scheduler.ticket(what, collective=True)
            group.wait(group.receiving[path], self._rank)
        message = messages.popleft()
        sent, received = collectives.describe(message), collectives.describe(tensor)
        sentence = f"in group {self.name!r} rank {group.ranks[src]} sent {sent}, but {receiver} receives {received}"
        if message.dtype != tensor.dtype:
            raise TypeError(f"{sentence}; the dtypes must be equal")
        if message.numel() != tensor.numel():
            raise ValueError(f"{sentence}; the numbers of elements must be equal")
        tensor.data.copy_(message.view(tensor.shape))

    def _check_open(self) -> None:
        self._group.check()
        if self._closed:
            raise CommunicationError(f"rank {self._group.ranks[self._rank]} has closed its communicator of group {self.name!r}")


class SimulatedNetwork:
    """State shared by the ranks of one run: their nodes, the group of all ranks, and groups that are being connected.

    Args:
        scheduler: of the ranks' threads.
        node_of: each rank's node.
        messages_sent: each collective is appended to it: its name, and what each rank of the group sends.
    """

    def __init__(
        self, scheduler: Scheduler, node_of: tuple[int, ...], messages_sent: list[tuple[str, list[Tensor]]] | None = None
    ) -> None:
        self.scheduler, self.node_of, self.messages_sent = scheduler, node_of, messages_sent
        self.everyone = _Group(self, "simulated", tuple(range(len(node_of))), math.inf)
        self.connecting: dict[str, tuple[_Group, dict[int, Ticket]]] = {}


class SimulatedTransport:
    """The connections of one simulated rank to the others (`bagua_ref.types.Transport`)."""

    has_streams = False

    def __init__(self, network: SimulatedNetwork, rank: int) -> None:
        self._network, self._rank = network, rank
        self._communicators: list[SimulatedCommunicator] = []
        self.node_of: tuple[int, ...] = network.node_of

    def __repr__(self) -> str:
        return f"SimulatedTransport(rank {self._rank} of {len(self.node_of)})"

    def everyone(self) -> SimulatedCommunicator:
        """Return this rank's communicator of all ranks of the run; it has no timeout."""
        return SimulatedCommunicator(self._network.everyone, self._rank)

    def connect(self, name: str, ranks: Sequence[int], timeout: float) -> SimulatedCommunicator:
        """Return this rank's communicator for the global ``ranks``; wait until all of them have called this.

        Args:
            name: the group's, equal on all of its ranks.
            ranks: global ranks, in group order; this rank is one of them.
            timeout: virtual seconds that an operation of the group waits for other ranks.

        Raises:
            ValueError: ranks are not distinct ranks of this world, or this rank is not among them.
            SimulationError: the ranks disagree about ``ranks``.
        """
        ranks, scheduler = tuple(ranks), self._network.scheduler
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(len(self.node_of))):
            raise ValueError(f"ranks={ranks} must be distinct ranks of this world, 0 to {len(self.node_of) - 1}")
        if self._rank not in ranks:
            raise ValueError(f"ranks={ranks} must contain the calling rank {self._rank}")
        scheduler.yield_()
        group, waiting = self._network.connecting.setdefault(name, (_Group(self._network, name, ranks, timeout), {}))
        if group.ranks != ranks:
            raise SimulationError(
                f"group {name!r} is being connected by {format_ranks(sorted(waiting))} for ranks {group.ranks}, "
                f"but rank {self._rank} connects it for ranks {ranks}"
            )
        group.check()
        ticket = scheduler.ticket(f"in connect({name!r}, ranks={ranks})", collective=True)
        waiting[self._rank] = ticket
        if len(waiting) == len(ranks):
            del self._network.connecting[name]
            for other in waiting.values():
                scheduler.grant(other)
            scheduler.yield_()
        else:
            group.wait(ticket, ranks.index(self._rank))
        self._communicators.append(SimulatedCommunicator(group, ranks.index(self._rank)))
        return self._communicators[-1]

    def close(self) -> None:
        """Close all of this rank's connections; it may connect again."""
        for communicator in self._communicators:
            communicator.close()
        self._communicators.clear()

"""A communicator between simulated ranks of one process: the last rank to arrive runs a collective's plain function for all."""

from __future__ import annotations

import copy
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bagua_ref.communicators import collectives
from bagua_ref.communicators.base import Communicator
from bagua_ref.communicators.call_sites import call_site
from bagua_ref.communicators.scheduler import Scheduler, Ticket, format_ranks
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError, RankCall, SimulationError
from bagua_ref.types import ReduceOp

__all__ = ["Call", "Function", "SimulatedCommunicator", "SimulatedGroup", "SimulatedNetwork", "SimulatedTransport"]


class Call:
    """One rank's part in a collective, or one side of a message.

    Args:
        group: the group.
        rank: the calling rank, in the group.
        operation: the call and the arguments on which all ranks must agree.
        send: what this rank sends, as its function expects it; None for nothing.
        recv: receives the result.
        alike: the tensor that must have the same size and dtype on all ranks, or None.
    """

    def __init__(self, group: SimulatedGroup, rank: int, operation: str, send: Any, recv: Any, alike: Tensor | None = None) -> None:
        group.scheduler.calling()  # raises outside of the run
        self.group, self.rank, self.operation, self.send, self.recv, self.alike = group, rank, operation, send, recv, alike
        self.file, self.line = call_site(sys._getframe(1))
        self.error: Exception | None = None
        self.done = self.awaited = False
        self.source: int | None = None
        """The rank of the group from which a message is received; None for any."""
        self.missing: Callable[[], list[int]] = list
        self._waiting: list[Ticket] = []

    def __str__(self) -> str:
        return self.operation if self.alike is None else f"{self.operation} of {collectives.describe(self.alike)}"

    @property
    def group_name(self) -> str:
        """The group's name."""
        return self.group.name

    def finish(self, error: Exception | None = None) -> None:
        """Let those who wait for this call go on, as its result is there or ``error`` occurred."""
        self.done, self.error = True, error
        for ticket in self._waiting:
            self.group.scheduler.grant(ticket)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the call is finished; raise its error.

        What other ranks have completed counts even if the group is aborted before this rank runs again.
        """
        self.awaited = True
        if not self.done:
            ticket = self.group.scheduler.ticket(f"in {self} of group {self.group.name!r}", collective=True, call=self)
            self._waiting.append(ticket)
            self.group.wait(ticket, self.rank, timeout)
        if self.error is not None:
            raise self.error

    def wait_until(self, timeout: float) -> bool:
        """Wait at most ``timeout`` virtual seconds; return whether the call is finished."""
        if not self.done:
            ticket = self.group.scheduler.ticket(f"in {self} of group {self.group.name!r}", call=self)
            self._waiting.append(ticket)
            self.group.scheduler.wait(ticket, timeout, passes=True)
        if self.error is not None:
            raise self.error
        return self.done

    def facts(self) -> RankCall:
        """Return the call for an error's report."""
        rank = self.group.ranks[self.rank]
        return RankCall(rank, "", str(self), self.group.name, self.file, self.line, tuple(self.missing()))


Function = Callable[[list[Any], list[Any]], None]
"""A collective: takes what each rank sends, and each rank's receiver, in rank order."""


class SimulatedGroup:
    """State shared by a group's ranks: calls of collectives that are not complete, and messages in flight.

    Args:
        network: of the run.
        name: the group's.
        ranks: the global rank of each rank of the group.
        timeout: virtual seconds that a call waits for other ranks.
    """

    def __init__(self, network: SimulatedNetwork, name: str, ranks: Sequence[int], timeout: float) -> None:
        self.scheduler, self.name, self.ranks, self.timeout = network.scheduler, name, ranks, timeout
        self.messages_sent, self._observe = network.messages_sent, network.observe
        self.under_way: dict[tuple[str, int], dict[int, Call]] = {}
        """The calls of each incomplete collective, by its stream and number in it, and by rank."""
        self._numbers: dict[tuple[str, int], int] = {}
        self.sends: dict[tuple[int, int], deque[Call]] = {}
        """Messages that have not been received, by receiver and tag, in the order of sending."""
        self.recvs: dict[tuple[int, int], deque[Call]] = {}
        self.broken: str | None = None

    def give_up(self, reason: str) -> None:
        """Make all operations raise, including those in progress."""
        self.broken = self.broken or reason
        waiting = [call for calls in self.under_way.values() for call in calls.values()]
        waiting += [call for calls in self.recvs.values() for call in calls] + [c for calls in self.sends.values() for c in calls]
        self.under_way, self.sends, self.recvs = {}, {}, {}
        for call in waiting:
            call.finish(CommunicationError(self.broken))

    def check(self) -> None:
        """Raise if the group has been given up."""
        if self.broken is not None:
            raise CommunicationError(self.broken)

    def wait(self, ticket: Ticket, rank: int, timeout: float | None = None) -> None:
        """Wait for other ranks; give the group up after ``timeout`` virtual seconds, or the group's timeout if it is None."""
        limit = self.timeout if timeout is None else timeout
        if not self.scheduler.wait(ticket, None if limit == math.inf else limit):
            why = f"rank {self.ranks[rank]} timed out after {limit} s waiting {ticket.what}"
            self.give_up(f"group {self.name!r} was given up: {why}")
            raise CommunicationTimeoutError(why)

    def post(self, call: Call, function: Function, stream: str = "", strict: bool = False) -> None:
        """Take a rank's part in its next collective; the last one runs ``function`` for all of them.

        If ranks call different collectives, or pass arguments that do not match, all of them get the same error.

        Args:
            call: the rank's part.
            function: one of `collectives`, or the like.
            stream: collectives of different streams do not wait for each other.
            strict: whether the first call that does not match raises the error here, before all ranks have called.
        """
        self._observe(call)
        self.check()
        number = self._numbers.get((stream, call.rank), 0)
        self._numbers[stream, call.rank] = number + 1
        calls = self.under_way.setdefault((stream, number), {})
        first = next(iter(calls.values()), call)
        if strict and first.operation != call.operation:
            raise self.mismatch(first, call)
        calls[call.rank] = call
        call.missing = lambda: [rank for r, rank in enumerate(self.ranks) if r not in calls]
        if len(calls) == len(self.ranks):
            del self.under_way[stream, number]
            self._complete([calls[rank] for rank in range(len(self.ranks))], function)

    def post_send(self, call: Call, dst: int, tag: int = 0) -> None:
        """Take a message to rank ``dst`` of the group; ``call.send`` is read when the receiver is there."""
        self._observe(call)
        self.check()
        waiting = self.recvs.get((dst, tag), ())
        for receiver in waiting:
            if receiver.source in (None, call.rank):
                waiting.remove(receiver)
                self._deliver(call, receiver)
                return
        self.sends.setdefault((dst, tag), deque()).append(call)
        call.missing = lambda: [self.ranks[dst]]

    def post_recv(self, call: Call, src: int | None, tag: int = 0) -> None:
        """Take a rank's wish for a message of rank ``src`` of the group, or of any rank if that is None."""
        self._observe(call)
        self.check()
        call.source = src
        call.missing = lambda: [rank for r, rank in enumerate(self.ranks) if r == src or (src is None and r != call.rank)]
        waiting = self.sends.get((call.rank, tag), ())
        for sender in waiting:
            if src in (None, sender.rank):
                waiting.remove(sender)
                self._deliver(sender, call)
                return
        self.recvs.setdefault((call.rank, tag), deque()).append(call)

    def _complete(self, calls: list[Call], function: Function) -> None:
        error = self._disagreement(calls)
        if error is None:
            sends = [call.send for call in calls]
            if self.messages_sent is not None and all(isinstance(send, Tensor) for send in sends):
                self.messages_sent.append((calls[0].operation, [send.clone() for send in sends]))
            try:
                function(sends, [call.recv for call in calls])
            except (RuntimeError, ValueError, TypeError) as raised:
                error = raised
        for call in calls:
            call.finish(copy.copy(error))

    def _disagreement(self, calls: list[Call]) -> Exception | None:
        first = calls[0]
        for call in calls:
            if call.operation != first.operation:
                return self.mismatch(first, call)
            if call.alike is not None and first.alike is not None:
                if call.alike.dtype != first.alike.dtype:
                    return TypeError(self._both(first, call, "use the same dtype"))
                if call.alike.numel() != first.alike.numel():
                    return ValueError(self._both(first, call, "pass equally many elements"))
        return None

    def mismatch(
        self, first: Call, second: Call, rule: str = "call the same collective with the same arguments"
    ) -> SimulationError:
        """Return the error of two calls that do not fit together."""
        return SimulationError(self._both(first, second, rule), kind="mismatch", calls=(first.facts(), second.facts()))

    def _both(self, first: Call, second: Call, rule: str) -> str:
        who, other = self.ranks[first.rank], self.ranks[second.rank]
        return f"in group {self.name!r} rank {who} calls {first}, but rank {other} calls {second}; all ranks must {rule}"

    def _deliver(self, sender: Call, receiver: Call) -> None:
        message, tensor = sender.send, receiver.recv
        sent, received = collectives.describe(message), collectives.describe(tensor)
        source, target = self.ranks[sender.rank], self.ranks[receiver.rank]
        receiver.source = sender.rank
        sentence = f"in group {self.name!r} rank {source} sent {sent}, but rank {target} receives {received}"
        error: Exception | None = None
        if message.dtype != tensor.dtype:
            error = TypeError(f"{sentence}; the dtypes must be equal")
        elif message.numel() != tensor.numel():
            error = ValueError(f"{sentence}; the numbers of elements must be equal")
        else:
            tensor.data.copy_(message.detach().reshape(tensor.shape))
        sender.finish()
        receiver.finish(error)


class SimulatedCommunicator(Communicator):
    """A communicator between threads of one process (S3.9).

    Each rank deposits its tensors, and the last one to arrive computes for all. Reductions run in rank order. If ranks call
    different collectives, or pass arguments that do not match, all of them get the same error, and the communicator stays
    usable. Messages are buffered: `send` never waits.
    """

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        super().__init__(rank, len(group.ranks), group.name)
        self._group = group
        self._running: Call | None = None
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
        received: list[list[int]] = []
        call = Call(self._group, self._rank, "agreement", list(values), received)
        self._group.post(call, lambda sends, recvs: [recv.extend(map(list, sends)) for recv in recvs], stream="agreement")
        self._group.scheduler.yield_()

        def receive() -> list[list[int]]:
            call.wait()
            return received

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
        function: Function,
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
        # Bypass autograd, as a communication library does: leaves that require grad are written, too, and versions stay.
        sent, received = (None if t is None else t.data for t in (send, recv))
        call = Call(group, self._rank, what, sent, received, send if alike is None else alike)
        if self._running is not None:
            raise SimulationError(
                f"two threads of rank {group.ranks[self._rank]} use group {self.name!r} at once: "
                f"one is in {self._running}, one calls {call}"
            )
        self._running = call
        try:
            group.post(call, function)
            if call.done:
                group.scheduler.yield_()
            call.wait()
        finally:
            self._running = None

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
        self._group.post_send(Call(self._group, self._rank, f"send(dst={dst})", tensor.detach().clone(), None), dst)

    def _take(self, tensor: Tensor, src: int) -> None:
        group = self._group
        if any(other.source == src for other in group.recvs.get((self._rank, 0), ())):
            raise SimulationError(
                f"two threads of rank {group.ranks[self._rank]} receive from {src} of group {self.name!r} at once"
            )
        call = Call(group, self._rank, f"recv(src={src})", None, tensor, tensor)
        group.post_recv(call, src)
        call.wait()

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
        observe: called with each communication of a rank, before it takes place; None: nothing is.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        node_of: tuple[int, ...],
        messages_sent: list[tuple[str, list[Tensor]]] | None = None,
        observe: Callable[[Call], None] | None = None,
    ) -> None:
        self.observe: Callable[[Call], None] = observe or (lambda call: None)
        self.scheduler, self.node_of, self.messages_sent = scheduler, node_of, messages_sent
        self.everyone = SimulatedGroup(self, "simulated", tuple(range(len(node_of))), math.inf)
        self._connecting: dict[str, SimulatedGroup] = {}

    def connect(
        self, key: str, rank: int, place: int, ranks: Sequence[int], timeout: float, what: str = "", name: str = ""
    ) -> SimulatedGroup:
        """Return the group that the ranks make by calling this; wait until all of them have.

        Args:
            key: equal on all of the group's ranks.
            rank: the calling rank.
            place: its rank in the group.
            ranks: global ranks, in group order; -1: the one that comes.
            timeout: of the group.
            what: the call, for messages.
            name: the group's; empty: ``key``.

        Raises:
            SimulationError: the ranks disagree about ``ranks``.
        """
        self.scheduler.yield_()
        name = name or key
        group = self._connecting.setdefault(key, SimulatedGroup(self, name, tuple(ranks), timeout))
        group.check()
        if group.ranks != tuple(ranks):
            others = [call.facts() for calls in group.under_way.values() for call in calls.values()]
            mine = RankCall(rank, "", what, name, *call_site(sys._getframe(1)))
            raise SimulationError(
                f"group {name!r} is being connected by {format_ranks(sorted(other.rank for other in others))} for ranks {group.ranks}, "
                f"but rank {rank} connects it for ranks {tuple(ranks)}",
                kind="mismatch",
                calls=(*others, mine),
            )
        call = Call(group, place, what or f"connect(ranks={tuple(ranks)})", rank, None)

        def set_ranks(sends: list[Any], recvs: list[Any]) -> None:
            group.ranks = tuple(sends)

        group.post(call, set_ranks, stream="connect")
        if call.done:
            del self._connecting[key]
            self.scheduler.yield_()
        call.wait()
        return group


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
        ranks = tuple(ranks)
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(len(self.node_of))):
            raise ValueError(f"ranks={ranks} must be distinct ranks of this world, 0 to {len(self.node_of) - 1}")
        if self._rank not in ranks:
            raise ValueError(f"ranks={ranks} must contain the calling rank {self._rank}")
        group = self._network.connect(name, self._rank, ranks.index(self._rank), ranks, timeout)
        self._communicators.append(SimulatedCommunicator(group, ranks.index(self._rank)))
        return self._communicators[-1]

    def close(self) -> None:
        """Close all of this rank's connections; it may connect again."""
        for communicator in self._communicators:
            communicator.close()
        self._communicators.clear()

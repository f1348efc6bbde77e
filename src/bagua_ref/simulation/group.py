"""A group of simulated ranks: the rendezvous of their calls of collectives, and messages in
flight.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bagua_ref.base.ranks import format_ranks
from bagua_ref.communicators import collectives
from bagua_ref.errors import (
    CommunicationError,
    CommunicationTimeoutError,
    RankCall,
    SimulationError,
)
from bagua_ref.simulation.scheduler import Scheduler
from bagua_ref.simulation.tasks import Ticket, call_site


@dataclass(eq=False, repr=False)
class Call:
    """One rank's participation in a collective, or one side of a message.

    Args:
        group: the group.
        rank: the calling rank, in the group.
        operation: the call and the arguments on which all ranks must agree.
        send: data sent by this rank, in the form expected by the collective's function; None for
            nothing.
        recv: receiver of the result.
        alike: the tensor that must have the same size and dtype on all ranks, or None.

    Attributes:
        file: file of the user's calling line.
        line: line in that file.
        module: module for which FSDP2 calls, or empty.
        done: whether the call is finished.
        error: error that ended the call, or None.
        awaited: whether something waits for the call.
        source: the rank of the group from which a message is received; None for any.
        partners: candidate peers of a message: the ranks of the group of which one must receive it,
            or send it.
        concerned: if arguments do not match, the calls of all ranks concerned.
    """

    group: SimulatedGroup
    rank: int
    operation: str
    send: Any
    recv: Any
    alike: Tensor | None = None
    file: str = ""
    line: int = 0
    module: str = ""
    done: bool = False
    error: Exception | None = None
    awaited: bool = False
    source: int | None = None
    partners: Sequence[int] = ()
    concerned: tuple[RankCall, ...] = ()
    _waiting: list[Ticket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.group.scheduler.calling()  # raises outside of the run

    def __str__(self) -> str:
        return (
            self.operation
            if self.alike is None
            else f"{self.operation} of {collectives.describe(self.alike)}"
        )

    def locate(self) -> None:
        """Record the line of the user's code that is calling."""
        self.file, self.line = call_site(sys._getframe(1))

    def finish(self, error: Exception | None = None) -> None:
        """Wake the threads waiting for this call, with its result or ``error``."""
        self.done, self.error = True, error
        # may be large, and who keeps the call needs them no more
        self.send = self.recv = self.alike = None
        # emptied: a ticket refers to its call, and a cycle would live until the next garbage
        # collection
        while self._waiting:
            self.group.scheduler.grant(self._waiting.pop(0))

    def wait(self, timeout: float | None = None, passes: bool = False) -> None:
        """Wait until the call is finished; raise its error, or abort the group after the timeout.

        A call completed by other ranks counts even if the group is aborted before this rank runs
        again.

        Args:
            timeout: virtual seconds; None: the group's.
            passes: whether this wait ends by itself, so that it does not count as part of a
                deadlock.
        """
        self.awaited = True
        group = self.group
        if not self.done:
            ticket = group.scheduler.ticket(
                f"in {self} of group {group.name!r}", collective=True, call=self
            )
            self._waiting.append(ticket)
            limit = group.timeout if timeout is None else timeout
            if not group.scheduler.wait(ticket, None if limit == math.inf else limit, passes):
                whom = f" for {format_ranks(sorted(self.missing()))}"
                why = (
                    f"rank {group.ranks[self.rank]} timed out after {limit} s waiting"
                    f" {ticket.what}{whom}"
                )
                group.give_up(f"group {group.name!r} was given up: {why}")
                raise CommunicationTimeoutError(why)
        if self.error is not None:
            raise self.error

    def missing(self) -> list[int]:
        """Return the global ranks that have not joined this call yet."""
        ranks = self.group.ranks
        for calls in self.group.under_way.values():
            if calls.get(self.rank) is self:
                return [rank for r, rank in enumerate(ranks) if r not in calls]
        return [] if self.done else [ranks[r] for r in self.partners]

    def facts(self) -> RankCall:
        """Return the call as a `RankCall`, for error reports."""
        rank = self.group.ranks[self.rank]
        return RankCall(
            rank,
            "",
            str(self),
            self.group.name,
            self.file,
            self.line,
            tuple(self.missing()),
            self.module,
        )


Function = Callable[[list[Any], list[Any]], object]
"""Function of a collective: takes the data that each rank sends, and each rank's receiver, in rank
order.
"""


@dataclass(eq=False, repr=False)
class SimulatedGroup:
    """State shared by a group's ranks: incomplete collectives and messages in flight.

    Args:
        scheduler: scheduler of the ranks' threads.
        name: name of the group.
        ranks: the global rank of each rank of the group.
        timeout: virtual seconds that a call waits for other ranks.

    Attributes:
        under_way: the calls of each incomplete collective, by stream and number in the stream, and
            by rank.
        sends: messages not yet received, by receiver and tag, in the order of sending.
        recvs: receive calls whose messages have not been sent.
        broken: reason why the group was aborted, or None.
    """

    scheduler: Scheduler
    name: str
    ranks: Sequence[int]
    timeout: float
    under_way: dict[tuple[str, int], dict[int, Call]] = field(default_factory=dict)
    sends: dict[tuple[int, int], deque[Call]] = field(default_factory=dict)
    recvs: dict[tuple[int, int], deque[Call]] = field(default_factory=dict)
    broken: str | None = None
    _numbers: dict[tuple[str, int], int] = field(default_factory=dict)

    def give_up(self, reason: str) -> None:
        """Abort the group: all operations raise, including those in progress."""
        self.broken = self.broken or reason
        waiting = [call for calls in self.under_way.values() for call in calls.values()]
        waiting += [call for calls in self.recvs.values() for call in calls] + [
            c for calls in self.sends.values() for c in calls
        ]
        self.under_way, self.sends, self.recvs = {}, {}, {}
        for call in waiting:
            call.finish(CommunicationError(self.broken))

    def check(self) -> None:
        """Raise CommunicationError if the group has been aborted."""
        if self.broken is not None:
            raise CommunicationError(self.broken)

    def post(self, call: Call, function: Function, stream: str = "", strict: bool = False) -> None:
        """Register a rank's call of its next collective; the last rank's call runs ``function`` for
        all of them.

        If ranks call different collectives, or pass arguments that do not match, all of them get
        the same error.

        Args:
            call: this rank's call.
            function: a function such as those of `collectives`.
            stream: collectives of different streams do not wait for each other.
            strict: whether the first call that does not match ends the run, before all ranks have
                called.
        """
        self.scheduler.on_communication(call)
        self.check()
        number = self._numbers.get((stream, call.rank), 0)
        self._numbers[stream, call.rank] = number + 1
        calls = self.under_way.setdefault((stream, number), {})
        if strict:
            call.locate()
            first = next(iter(calls.values()), call)
            if first.operation != call.operation:
                self.scheduler.end(self._mismatch(first, call))
        calls[call.rank] = call
        if len(calls) == len(self.ranks):
            del self.under_way[stream, number]
            self._complete([calls[rank] for rank in range(len(self.ranks))], function)

    def post_message(self, call: Call, peer: int | None, tag: int = 0) -> None:
        """Send a message to rank ``peer`` of the group, which the receiver reads when it arrives
        there, or receive one from it; None: from any rank.
        """
        self.scheduler.on_communication(call)
        self.check()
        call.locate()
        n, is_send = len(self.ranks), call.recv is None
        call.partners = [r for r in range(n) if r != call.rank] if peer is None else [peer]
        call.source = None if is_send else peer
        own, others = (self.sends, self.recvs) if is_send else (self.recvs, self.sends)
        key = (peer if is_send and peer is not None else call.rank), tag
        waiting = others.get(key, deque())
        for other in waiting:
            sender, receiver = (call, other) if is_send else (other, call)
            if receiver.source in (None, sender.rank):
                waiting.remove(other)
                self._deliver(sender, receiver)
                return
        own.setdefault(key, deque()).append(call)

    def _complete(self, calls: list[Call], function: Function) -> None:
        error = self._disagreement(calls)
        if error is None:
            sends = [call.send for call in calls]
            messages = self.scheduler.messages
            if messages is not None and all(isinstance(send, Tensor) for send in sends):
                messages.append((calls[0].operation, [send.clone() for send in sends]))
            try:
                function(sends, [call.recv for call in calls])
            except (RuntimeError, ValueError, TypeError) as raised:
                error = raised

        if error is not None:
            concerned = tuple(call.facts() for call in calls)
            for call in calls:
                call.concerned = concerned

        def finish() -> None:
            for call in calls:
                call.finish(copy.copy(error))

        if error is None:
            self.scheduler.on_transfer(calls, finish)
        else:
            finish()

    def _disagreement(self, calls: list[Call]) -> Exception | None:
        first = calls[0]
        for call in calls:
            if call.operation != first.operation:
                return self._mismatch(first, call)
            if call.alike is not None and first.alike is not None:
                if call.alike.dtype != first.alike.dtype:
                    return TypeError(self._both(first, call, "use the same dtype"))
                if call.alike.numel() != first.alike.numel():
                    return ValueError(self._both(first, call, "pass equally many elements"))
        return None

    def _mismatch(self, first: Call, second: Call) -> SimulationError:
        text = self._both(first, second, "call the same collective with the same arguments")
        return SimulationError(text, kind="mismatch", calls=(first.facts(), second.facts()))

    def _both(self, first: Call, second: Call, rule: str) -> str:
        who, other = self.ranks[first.rank], self.ranks[second.rank]
        return (
            f"in group {self.name!r} rank {who} calls {first}, but rank {other} calls {second}; all"
            f" ranks must {rule}"
        )

    def _deliver(self, sender: Call, receiver: Call) -> None:
        message, tensor = sender.send, receiver.recv
        receiver.source = sender.rank
        error: Exception | None = None
        if message.dtype == tensor.dtype and message.numel() == tensor.numel():
            tensor.data.copy_(message.reshape(tensor.shape))
        else:
            sent, received = collectives.describe(message), collectives.describe(tensor)
            source, target = self.ranks[sender.rank], self.ranks[receiver.rank]
            sentence = (
                f"in group {self.name!r} rank {source} sent {sent}, but rank {target} receives"
                f" {received}"
            )
            if message.dtype != tensor.dtype:
                error = TypeError(f"{sentence}; the dtypes must be equal")
            else:
                error = ValueError(f"{sentence}; the numbers of elements must be equal")
            receiver.concerned = (sender.facts(), receiver.facts())

        def finish() -> None:
            sender.finish()
            receiver.finish(error)

        self.scheduler.on_transfer([sender, receiver], finish)

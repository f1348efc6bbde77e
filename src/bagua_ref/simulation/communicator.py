"""A communicator between simulated ranks of one process: the last rank to arrive runs a
collective's plain function for all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bagua_ref.base.ranks import format_ranks
from bagua_ref.communicators import collectives
from bagua_ref.communicators.base import Communicator
from bagua_ref.errors import CommunicationError, RankCall, SimulationError
from bagua_ref.simulation.group import Call, Function, SimulatedGroup
from bagua_ref.simulation.scheduler import Scheduler
from bagua_ref.simulation.tasks import call_site
from bagua_ref.types import ReduceOp


class SimulatedCommunicator(Communicator):
    """A communicator between threads of one process (S3.9).

    Each rank submits its tensors, and the last one to arrive computes for all. Reductions run in
    rank order. If ranks call different collectives, or pass arguments that do not match, all of
    them get the same error, and the communicator stays usable. Messages are buffered: `send` never
    waits.
    """

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        super().__init__(rank, len(group.ranks), group.name)
        self._group = group
        self._running: Call | None = None
        self._closed = False

    def abort(self, reason: str = "") -> None:
        """Abort the whole group: operations in progress and later ones raise CommunicationError on
        every rank.
        """
        rank = self._group.ranks[self._rank]
        self._group.give_up(
            f"rank {rank} gave up: {reason}"
            if reason
            else f"rank {rank} aborted group {self.name!r}"
        )

    def close(self) -> None:
        """Close this rank's end: its later operations raise; other ranks are not affected."""
        self._closed = True

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self._run("barrier()", None, None, lambda sends, recvs: None)

    def exchange_ints(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Send ``values`` to every rank; return a function that waits for all ranks' values."""
        self._check_open()
        received: list[list[int]] = []

        def share(sends: list[list[int]], recvs: list[list[list[int]]]) -> None:
            known: dict[tuple[int, ...], list[int]] = {}
            # equal ones are one list: fast to compare
            rows = [known.setdefault(tuple(row), row) for row in sends]
            for recv in recvs:
                recv.extend(rows)

        call = Call(self._group, self._rank, "agreement", list(values), received)
        self._group.post(call, share, stream="agreement")
        self._group.scheduler.yield_()

        def receive() -> list[list[int]]:
            call.wait()
            return received

        return receive

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        self._run(
            f"broadcast(src={src})",
            tensor,
            tensor,
            lambda sends, recvs: collectives.broadcast(recvs, src),
        )

    def _reduce_inplace(self, tensor: Tensor, dst: int, op: ReduceOp) -> None:
        what = f"reduce(dst={dst}, op={op.name})"
        self._run(
            what, tensor, tensor, lambda sends, recvs: collectives.reduce_inplace(recvs, dst, op)
        )

    def _gather(self, send_tensor: Tensor, recv_tensor: Tensor, dst: int) -> None:
        self._run(
            f"gather(dst={dst})",
            send_tensor,
            recv_tensor,
            lambda sends, recvs: collectives.allgather(sends, [recvs[dst]]),
        )

    def _scatter(self, send_tensor: Tensor, recv_tensor: Tensor, src: int) -> None:
        scatter = lambda sends, recvs: collectives.scatter(sends[src], recvs)  # noqa: E731
        self._run(f"scatter(src={src})", send_tensor, recv_tensor, scatter, alike=recv_tensor)

    def _allreduce_inplace(self, tensor: Tensor, op: ReduceOp) -> None:
        self._run(
            f"allreduce(op={op.name})",
            tensor,
            tensor,
            lambda sends, recvs: collectives.allreduce_inplace(recvs, op),
        )

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
        """Submit this rank's tensors; once all ranks have, ``function(sends, recvs)`` moves the
        data for all of them.

        Args:
            what: the collective and the arguments on which all ranks must agree.
            send: tensor to send; None for a barrier.
            recv: tensor for the result.
            function: one of `collectives`.
            alike: the tensor that must have the same size and dtype on all ranks; None for
                ``send``.
        """
        group = self._group
        self._check_open()
        group.scheduler.yield_()
        # Bypass autograd, as a communication library does: leaves that require grad are written,
        # too, and versions stay.
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

    def _exchange(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> None:
        self._check_open()
        # one, however many receive it
        copies = {id(tensor): tensor.detach().clone() for tensor, _ in sends}
        for tensor, dst in sends:
            self._group.post_message(
                Call(self._group, self._rank, f"send(dst={dst})", copies[id(tensor)], None), dst
            )
        self._group.scheduler.yield_()
        group = self._group
        for other in group.recvs.get((self._rank, 0), ()):
            if other.source in [src for _, src in recvs]:
                rank = group.ranks[self._rank]
                raise SimulationError(
                    f"two threads of rank {rank} receive from {other.source} of group {self.name!r}"
                    " at once"
                )
        for call in [self._take(tensor, src) for tensor, src in recvs]:
            call.wait()

    def _take(self, tensor: Tensor, src: int) -> Call:
        call = Call(self._group, self._rank, f"recv(src={src})", None, tensor, tensor)
        self._group.post_message(call, src)
        return call

    def _check_open(self) -> None:
        self._group.check()
        if self._closed:
            raise CommunicationError(
                f"rank {self._group.ranks[self._rank]} has closed its communicator of group"
                f" {self.name!r}"
            )


class SimulatedNetwork:
    """State shared by the ranks of one run: their nodes, the group of all ranks, and groups that
    are still connecting.

    Args:
        scheduler: scheduler of the ranks' threads.
        node_of: each rank's node.
    """

    def __init__(self, scheduler: Scheduler, node_of: tuple[int, ...]) -> None:
        self.scheduler, self.node_of = scheduler, node_of
        self.everyone = SimulatedGroup(scheduler, "simulated", tuple(range(len(node_of))), math.inf)
        self._connecting: dict[str, SimulatedGroup] = {}

    def connect(
        self,
        key: str,
        rank: int,
        place: int,
        ranks: Sequence[int],
        timeout: float,
        what: str = "",
        name: str = "",
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
        group = self._connecting.setdefault(
            key, SimulatedGroup(self.scheduler, name, tuple(ranks), timeout)
        )
        group.check()
        if group.ranks != tuple(ranks):
            others = [call.facts() for calls in group.under_way.values() for call in calls.values()]
            mine = RankCall(rank, "", what, name, *call_site(sys._getframe(1)))
            raise SimulationError(
                f"group {name!r} is being connected by"
                f" {format_ranks(sorted(o.rank for o in others))} for ranks {group.ranks}, but rank"
                f" {rank} connects it for ranks {tuple(ranks)}",
                kind="mismatch",
                calls=(*others, mine),
            )
        call = Call(group, place, what or f"connect(ranks={tuple(ranks)})", rank, None)
        call.locate()

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
        """Return this rank's communicator for the global ``ranks``; wait until all of them have
        called this.

        Args:
            name: the group's, equal on all of its ranks.
            ranks: distinct global ranks, in group order; this rank is one of them.
            timeout: virtual seconds that an operation of the group waits for other ranks.

        Raises:
            ValueError: this rank is not among them.
            SimulationError: the ranks disagree about ``ranks``.
        """
        ranks = tuple(ranks)
        group = self._network.connect(name, self._rank, ranks.index(self._rank), ranks, timeout)
        self._communicators.append(SimulatedCommunicator(group, ranks.index(self._rank)))
        return self._communicators[-1]

    def close(self) -> None:
        """Close all of this rank's connections; it may reconnect."""
        for communicator in self._communicators:
            communicator.close()
        self._communicators.clear()

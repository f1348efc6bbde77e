"""Time on simulated ranks: operations take that of S14 on the virtual clock, and compute times are
specified or measured.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from bagua_ref.base.runtime import current_world
from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import (
    FORWARD,
    LinkCosts,
    Message,
    Operation,
    Round,
    Wire,
    loads_of,
    round_seconds,
)
from bagua_ref.simulation.group import Call
from bagua_ref.simulation.scheduler import Scheduler
from bagua_ref.simulation.tasks import Ticket
from bagua_ref.simulation.torch_distributed.torch_hooks import current_backward


class Span(NamedTuple):
    """One interval of a rank's timeline, in virtual seconds; ``thread`` is "" for the main thread.

    Its ``kind`` is ``"compute"``, ``"wait"``, ``"sleep"``, or ``"communication"``, which runs in
    parallel with the others.
    """

    rank: int
    thread: str
    kind: str
    name: str
    began: float
    ended: float


@dataclass
class Timeline:
    """Times of a run.

    Attributes:
        spans: intervals of all ranks.
        steps: for each rank, the end times of its optimizer steps.
        seconds: virtual seconds from start to end.
        messages: counts of all messages sent (S14.1).
    """

    spans: list[Span] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    messages: Counter[Message] = field(default_factory=Counter)

    def exposed_seconds(self, rank: int, began: float, ended: float) -> float:
        """Return the time that a rank's main thread spends waiting, between two times."""
        waits = (
            span
            for span in self.spans
            if span.rank == rank and span.kind == "wait" and not span.thread
        )
        return sum(max(0.0, min(span.ended, ended) - max(span.began, began)) for span in waits)

    def per_step(self) -> tuple[float, float]:
        """Return the seconds of an optimizer step on the slowest rank, and its exposed
        communication, averaged over ranks.

        Both are medians over steps, except the first, which includes the start. Without steps, both
        are of the whole run.
        """
        ends = [0.0, *(max(row) for row in zip(*self.steps, strict=False))]
        if len(ends) == 1:
            ends.append(self.seconds)
        pairs = list(pairwise(ends))[1:] or [(0.0, ends[1])]
        exposed = [
            fmean(self.exposed_seconds(rank, *pair) for rank in range(len(self.steps)))
            for pair in pairs
        ]
        return median(ended - began for began, ended in pairs), median(exposed)

    def chrome_trace(self) -> dict[str, Any]:
        """Return the run in the Trace Event Format of chrome://tracing and Perfetto, one lane per
        rank; JSON.
        """
        events: list[dict[str, Any]] = []
        for rank in range(len(self.steps)):
            name = {"name": f"rank {rank}"}
            events.append(
                {"ph": "M", "name": "process_name", "pid": rank, "tid": rank, "args": name}
            )
        for number, span in enumerate(self.spans):
            event = {
                "name": span.name,
                "cat": span.kind,
                "pid": span.rank,
                "tid": span.rank,
                "ts": span.began * 1e6,
            }
            if span.kind == "communication" or span.thread:  # may overlap with the lane
                events.append(event | {"ph": "b", "id": number})
                events.append(event | {"ph": "e", "id": number, "ts": span.ended * 1e6})
            else:
                events.append(event | {"ph": "X", "dur": (span.ended - span.began) * 1e6})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


@contextmanager
def after_steps(before: Callable[[Any], None], after: Callable[[Any], None]) -> Iterator[None]:
    """Call ``before(optimizer)`` and ``after(optimizer)`` around each rank's outermost optimizer
    steps; with a closure, ``before`` follows its computation of gradients.
    """
    stepping: dict[int, list[Any]] = {}

    def begin(optimizer: Any, args: Any, options: Any) -> Any:
        own = stepping.setdefault(current_world().identity.rank, [])
        own.append(optimizer)
        if len(own) > 1:
            return None
        # The hook is given the method's own arguments, the optimizer first.
        closure = options["closure"] if options.get("closure") else (*args, None, None)[1]
        if closure is None:
            before(optimizer)
            return None

        made = False

        def closed() -> Any:
            nonlocal made
            loss = closure()
            if not made:  # a line search calls it again
                before(optimizer)
            made = True
            return loss

        rest = {name: value for name, value in options.items() if name != "closure"}
        return (args[0], closed, *args[2:]), rest

    def end(optimizer: Any, args: Any, options: Any) -> None:
        own = stepping.get(current_world().identity.rank, [])
        while own and own.pop() is not optimizer:
            pass
        if not own:
            after(optimizer)

    with ExitStack() as stack:
        for handle in (
            register_optimizer_step_pre_hook(begin),
            register_optimizer_step_post_hook(end),
        ):
            stack.callback(handle.remove)
        yield


@dataclass(eq=False)
class _Transfer:
    """An operation in progress on the links.

    Attributes:
        rounds: rounds not yet started, in global ranks.
        finish: callback with the start and end time.
        queue: the operations executed in sequence with this one, itself included; or None.
        began: start time of the first round.
        loads: bytes of the current round by link.
        left: remaining fraction of that round at the time ``since``.
        seconds: duration of that round at its present speed.
        ends: end time of the round.
    """

    rounds: Iterator[Round]
    finish: Callable[[float, float], None]
    queue: deque[_Transfer] | None
    began: float | None = None
    loads: dict[Wire, int] = field(default_factory=dict)
    left: float = 1.0
    since: float = 0.0
    seconds: float = 1.0
    ends: float = 0.0


class _Wires:
    """The links, and the operations in progress on them.

    A round takes the time of S14.2 for the bytes of all rounds that share a link with it (S14.5).
    When another round starts or ends, the rest continues at the new speed.
    """

    def __init__(self, scheduler: Scheduler, node_of: Sequence[int], links: LinkCosts) -> None:
        self._scheduler, self._node_of, self._links = scheduler, node_of, links
        self._under_way: dict[_Transfer, None] = {}
        self._on: dict[Wire, dict[_Transfer, int]] = {}

    def start(self, transfer: _Transfer) -> None:
        """Start an operation, immediately or after its predecessors in its queue."""
        if transfer.queue is not None:
            transfer.queue.append(transfer)
        if transfer.queue is None or len(transfer.queue) == 1:
            self._proceed([transfer], self._scheduler.time, {})

    def _proceed(
        self, transfers: list[_Transfer], now: float, touched: dict[_Transfer, None]
    ) -> None:
        """Start the next round of each transfer, or finish it after its last one; ``touched``:
        transfers that shared links with finished rounds.
        """
        while transfers:
            transfer = transfers.pop(0)
            transfer.began = now if transfer.began is None else transfer.began
            messages = next(transfer.rounds, None)
            if messages is None:
                transfer.finish(transfer.began, now)
                if transfer.queue is not None:
                    transfer.queue.popleft()
                    transfers += list(transfer.queue)[:1]
                continue
            transfer.loads = loads_of(messages, self._node_of)
            transfer.left, transfer.since = 1.0, now
            self._under_way[transfer] = None
            for wire, nbytes in transfer.loads.items():
                self._on.setdefault(wire, {})[transfer] = nbytes
                touched |= dict.fromkeys(self._on[wire])
        for transfer in touched:
            if transfer in self._under_way:
                if transfer.since < now:
                    transfer.left = max(
                        0.0, transfer.left - (now - transfer.since) / transfer.seconds
                    )
                shared = {wire: sum(self._on[wire].values()) for wire in transfer.loads}
                transfer.since, transfer.seconds = now, round_seconds(shared, self._links)
                transfer.ends = now + transfer.left * transfer.seconds
        self._scheduler.timer = (
            min((transfer.ends for transfer in self._under_way), default=math.inf),
            self._advance,
        )

    def _advance(self) -> None:
        now = self._scheduler.timer[0]
        ended = [transfer for transfer in self._under_way if transfer.ends <= now]
        touched: dict[_Transfer, None] = {}
        for transfer in ended:
            del self._under_way[transfer]
            for wire in transfer.loads:
                del self._on[wire][transfer]
                touched |= dict.fromkeys(self._on[wire])
        self._proceed(ended, now, touched)


_COMPUTING = "to compute"
"""The ticket text of a sleep that represents compute."""


class Timing:
    """The clock of one run.

    Collectives of a group take place one after another, and begin when the last rank has called
    them; a message begins when both sides have [defined].

    Args:
        scheduler: scheduler of the ranks.
        node_of: the node of each rank.
        links: costs of the links.
        compute: the seconds of a forward and backward pass through a module that is in no other: a
            third is forward, and of backward each parameter has its part, by its elements (S14.4);
            "measured": the CPU time of the ranks' threads; None: 0.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        node_of: Sequence[int],
        links: LinkCosts,
        compute: float | str | None,
    ) -> None:
        self._scheduler, self._measures = scheduler, compute == "measured"
        self._compute = compute if isinstance(compute, float | int) else 0.0
        self.timeline = Timeline(steps=[[] for _ in node_of])
        self._wires = _Wires(scheduler, node_of, links)
        self._queues: dict[Any, deque[_Transfer]] = {}
        self._marks: dict[Any, float] = {}
        """For each thread, its CPU time already covered by compute spans."""
        self._waits: dict[Ticket, float] = {}
        self._depth, self._owed = [0] * len(node_of), [0.0] * len(node_of)
        self._hooked: dict[int, Tensor] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Timing:
        scheduler, observe = self._scheduler, self._scheduler.on_communication

        def communicates(call: Call) -> None:
            self._charge()
            observe(call)

        scheduler.on_communication, scheduler.on_transfer, scheduler.on_wait = (
            communicates,
            self._transfer,
            self._wait,
        )
        self._hooks.enter_context(
            after_steps(lambda optimizer: self._settle(), lambda optimizer: self._after_step())
        )
        if self._compute:
            for handle in (
                register_module_forward_pre_hook(self._before_forward),
                register_module_forward_hook(self._after_forward, always_call=True),
            ):
                self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.close()
        self.timeline.seconds = self._scheduler.time

    def _transfer(self, calls: Sequence[Call], finish: Callable[[], None]) -> None:
        group, text, places = calls[0].group, str(calls[0]), [call.rank for call in calls]
        ranks = group.ranks
        operation = [
            [(ranks[src], ranks[dst], nbytes) for src, dst, nbytes in messages]
            for messages in messages_of(calls)
        ]
        self.timeline.messages.update(message for messages in operation for message in messages)

        def end(began: float, ended: float) -> None:
            if ended > began:
                self.timeline.spans += [
                    Span(ranks[place], "", "communication", text, began, ended) for place in places
                ]
            finish()

        queues = operation and not text.startswith("send(")
        self._wires.start(
            _Transfer(
                iter(operation), end, self._queues.setdefault(group, deque()) if queues else None
            )
        )
        self._mark()  # moving the data is no compute of the rank

    def _wait(self, ticket: Ticket, over: bool) -> None:
        """Record the start and end of a thread's wait."""
        task = self._scheduler.calling()
        if not over:
            if ticket.what != _COMPUTING:
                self._charge()
            self._waits[ticket] = self._scheduler.time
            return
        self._mark()
        began, now = self._waits.pop(ticket), self._scheduler.time
        kind = {_COMPUTING: "compute", "to sleep": "sleep"}.get(ticket.what, "wait")
        if now > began:
            name = kind if ticket.call is None else str(ticket.call)
            self.timeline.spans.append(Span(task.rank, task.thread, kind, name, began, now))

    def _spend(self, seconds: float) -> None:
        if seconds > 0 and self._scheduler.is_calling():
            self._scheduler.sleep(seconds, _COMPUTING)

    def _charge(self) -> None:
        """Advance the virtual clock by the CPU time of the calling thread since the last call."""
        if self._measures and self._scheduler.is_calling():
            self._spend(time.thread_time() - self._marks.get(self._scheduler.calling(), 0.0))
            self._mark()

    def _mark(self) -> None:
        if self._measures and self._scheduler.is_calling():
            self._marks[self._scheduler.calling()] = time.thread_time()

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # which would compile this, too
            return
        rank = current_world().identity.rank
        self._depth[rank] += 1
        if self._depth[rank] > 1 or not torch.is_grad_enabled() or current_backward() is not None:
            return
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        backward = self._compute * (1 - FORWARD)
        elements = sum(parameter.numel() for parameter in trained)
        if trained:
            self._spend(self._compute * FORWARD)
            self._owed[rank] += backward
        for parameter in trained:
            if id(parameter) not in self._hooked:
                self._hooked[id(parameter)] = parameter
                handle = parameter.register_hook(
                    partial(self._reached, rank, backward * parameter.numel() / elements)
                )
                self._hooks.callback(handle.remove)

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth[current_world().identity.rank] -= 1

    def _reached(self, rank: int, seconds: float, gradient: Tensor) -> None:
        """Spend the backward time of a parameter whose gradient has been computed."""
        seconds = min(seconds, self._owed[rank])
        self._owed[rank] -= seconds
        self._spend(seconds)

    def _settle(self) -> None:
        """Spend the backward time of parameters without gradients, before an optimizer step."""
        self._charge()
        rank = current_world().identity.rank
        if self._owed[rank] > 1e-9 * self._compute:
            self._spend(self._owed[rank])
        self._owed[rank] = 0.0

    def _after_step(self) -> None:
        self._charge()
        self.timeline.steps[current_world().identity.rank].append(self._scheduler.time)


def messages_of(calls: Sequence[Call]) -> Operation:
    """Return the messages of a collective, or of a message's two sides, between ranks of the group
    (S14.1).

    A barrier is an all-reduce without bytes; operations that `bytes_sent` does not count take no
    time [defined].
    """
    name, n = calls[0].operation.partition("(")[0], len(calls)
    sends, recvs = [_nbytes(call.send) for call in calls], [_nbytes(call.recv) for call in calls]
    found = re.search(r"\b(?:src|dst)=(\d+)", calls[0].operation)
    root = int(found[1]) if found else 0
    match name:
        case "send":
            return costs.one_round([(calls[0].rank, calls[1].rank, sends[0])])
        case "all_reduce" | "allreduce":
            sizes = {tensor.element_size() for tensor in _listed(calls[0].send)}
            itemsize = sizes.pop() if len(sizes) == 1 else 1
            return costs.all_reduce(costs.chunk_bytes(sends[0] // itemsize, itemsize, n))
        case "barrier" | "monitored_barrier":
            return costs.all_reduce([0] * n)
        case "reduce_scatter" | "reduce_scatter_tensor":
            return costs.reduce_scatter(recvs)
        case "all_gather" | "all_gather_into_tensor" | "allgather":
            return costs.all_gather(sends)
        case "all_to_all" | "all_to_all_single":
            return costs.all_to_all([[_nbytes(part) for part in call.send] for call in calls])
        case "alltoall":
            return costs.all_to_all([[size // n] * n for size in sends])
        case "broadcast":
            return costs.broadcast(sends[root], n, root)
        case "reduce":
            return costs.reduce(sends[0], n, root)
        case "gather":
            return costs.gather(sends, root)
        case "scatter":
            return costs.scatter(recvs, root)
        case "agreement" | "connect" | "new_group":
            return []
    raise AssertionError(f"{calls[0].operation} has no cost")


def _listed(tensors: Any) -> list[Any]:
    return (
        [tensors] if isinstance(tensors, Tensor) else tensors if isinstance(tensors, list) else []
    )


def _nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in _listed(tensors) if isinstance(tensor, Tensor))

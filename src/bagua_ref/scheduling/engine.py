"""Scheduling of a module's buckets: rounds, readiness of tensors, and waiting for what was
scheduled (S2.4 to S2.6).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from bagua_ref.base import runtime
from bagua_ref.base.runtime import World
from bagua_ref.base.utils import overlapping
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.storage import Registration, registration
from bagua_ref.errors import CommunicationError
from bagua_ref.observe.meter import Meter
from bagua_ref.scheduling.worker import BucketRun, Errors, RoundCall, Worker

UNSAID = -(2**63)
"""Value of a fact on a rank that abstains; it counts as equal to every value."""


class Round:
    """Hooks at the start and end of a round of communication; in this base class they do nothing.

    Attributes:
        waits: whether `begin` waits for other ranks. If not, the marking thread calls it, unless
            the worker is busy.
    """

    waits = False

    def begin(self) -> None:
        """Called before the first bucket of the round. An exception cancels this round and all
        later ones, and is re-raised by waiting.
        """

    def end(self) -> None:
        """Called after the last bucket of the round unless one has failed; exceptions are treated
        as in `begin`.
        """


class Fact(NamedTuple):
    """A number that must be equal on all ranks.

    Attributes:
        sentence: about one or several ranks, with ``{has}`` or ``{is}`` for the verb and
            ``{value}`` for the number.
        value: the number on this rank, an int64.
        names: names of the values 0, 1, ...; empty for quantities.
        explain: for a checksum, returns the texts behind it by sentence, in the form above, and the
            text after the last one; None: not a checksum.
        adopt: sets the number on a rank without batches to that of the others, in `bagua_ref.join`;
            None: such a rank does not need it.

    >>> Fact("{is} in {value}", 1, ("warm-up", "the compressed phase")).about([1, 3], 0)
    'ranks 1, 3 are in warm-up'
    """

    sentence: str
    value: int
    names: tuple[str, ...] = ()
    explain: Callable[[], dict[tuple[str, str], str]] | None = None
    adopt: Callable[[int], object] | None = None

    def about(self, ranks: Sequence[int], value: int) -> str:
        """Return the sentence about ``ranks``, with ``value`` as their number."""
        several = len(ranks) > 1
        verbs = {"has": "have" if several else "has", "is": "are" if several else "is"}
        who = f"rank{'s' * several} {', '.join(map(str, ranks))}"
        return (
            f"{who}"
            f" {self.sentence.format(value=self.names[value] if self.names else value, **verbs)}"
        )


def describe_differences(
    facts: Sequence[Fact], values: Sequence[Sequence[int]], ranks: Sequence[int]
) -> str:
    """Describe the differences between ranks; "" if they agree.

    Args:
        facts: this rank's facts; those that explain a checksum are skipped.
        values: values of the facts on every rank.
        ranks: the numbers of the ranks, in the order of ``values``.

    >>> facts = [Fact("{has} taken {value} optimizer steps", 12)]
    >>> describe_differences(facts, [[12], [11], [12]], [0, 1, 2])
    'rank 1 has taken 11 optimizer steps, ranks 0, 2 have taken 12 optimizer steps'
    """
    sentences = []
    for place, fact in enumerate(facts):
        if fact.explain is not None:
            continue
        ranks_of: dict[int, list[int]] = {}
        for rank, theirs in zip(ranks, values, strict=True):
            if theirs[place] != UNSAID:
                ranks_of.setdefault(theirs[place], []).append(rank)
        if len(ranks_of) > 1:  # minorities come first
            rarest = sorted(ranks_of.items(), key=lambda item: len(item[1]))
            sentences.append(", ".join(fact.about(some, value) for value, some in rarest))
    return "; ".join(sentences)


Item = TypeVar("Item", bound="Hashable")
T = TypeVar("T")


class Readiness(Generic[Item]):
    """Tracks marked items and determines the buckets to schedule, always in order of registration
    (S2.4).

    A round begins with the first mark and ends when every bucket has been scheduled. While ``hold``
    is True a complete round does not end: any mark is then an error, as the item's bucket has
    already run.

    Args:
        buckets: the items of each bucket; items are unique.

    >>> readiness = Readiness([["a", "b"], ["c"]])
    >>> readiness.mark("c"), readiness.mark("a"), readiness.mark("b")
    ([], [], [0, 1])
    """

    def __init__(self, buckets: Sequence[Sequence[Item]]) -> None:
        self._bucket_of = {item: place for place, items in enumerate(buckets) for item in items}
        if len(self._bucket_of) != sum(map(len, buckets)):
            raise ValueError("an item is in two buckets, or twice in one")
        self._items = [tuple(items) for items in buckets]
        self.hold = False
        self.reset()

    def reset(self) -> None:
        """Clear all marks and begin a new round."""
        self._unmarked = self._bucket_of.copy()
        """Index of the bucket of each unmarked item. A mark is then a single dict lookup."""
        self._missing = [len(items) for items in self._items]
        self._next = 0
        """Index of the first bucket not scheduled in this round."""

    @property
    def complete(self) -> bool:
        """Whether every bucket was scheduled in this round."""
        return self._next == len(self._items)

    @property
    def idle(self) -> bool:
        """Whether nothing was marked in this round."""
        return len(self._unmarked) == len(self._bucket_of)

    def mark(self, item: Item) -> list[int]:
        """Mark ``item``; return the buckets that are now to be scheduled, in order.

        Marking an item again before its bucket is scheduled has no effect.

        Raises:
            ValueError: the item's bucket was already scheduled in this round.
            KeyError: the item belongs to no bucket.
        """
        place = self._unmarked.pop(item, None)
        if place is None:
            if self._bucket_of[item] < self._next:
                raise ValueError(
                    f"{item} was marked again in a round in which its bucket had already been"
                    " scheduled"
                )
            return []
        self._missing[place] -= 1
        if self._missing[place] or place > self._next:
            return []
        while self._next < len(self._items) and self._missing[self._next] == 0:
            self._next += 1
        scheduled = list(range(place, self._next))
        if not self.hold and self.complete:
            self.reset()
        return scheduled

    def unmarked(self) -> dict[int, list[Item]]:
        """Return the unmarked items of each bucket that has not been scheduled in this round."""
        return {
            place: [item for item in self._items[place] if item in self._unmarked]
            for place in range(self._next, len(self._items))
        }


class Engine:
    """Runs a module's buckets on one background worker, every rank in the same order.

    Args:
        world: the source of threads and of the clock.
        name: the module's name, for messages and the thread.
        timeout: seconds without progress after which waiting raises (S2.5).
        algorithm: the algorithm's name in profiles; "" uses ``name``.

    Attributes:
        new_round: called when a round's first tensor is ready; returns the round.
        half_done: whether a round was abandoned after its start.
        meter: counters of this training.
    """

    def __init__(
        self, world: World, name: str = "", timeout: float = 300.0, algorithm: str = ""
    ) -> None:
        self.name, self._algorithm = name, algorithm or name
        self.meter = Meter(world, name)
        self.new_round: Callable[[], Round] = Round
        self.half_done = False
        self._errors = Errors()
        self._round: Round | None = None
        """The round in progress, if any."""
        self._worker = Worker(world, f"bagua_ref worker {name}", timeout, self.meter)
        self._buckets: list[BaguaBucket] = []
        self._readiness: Readiness[Registration] = Readiness([])
        self._bucket_of: dict[Registration, BaguaBucket] = {}
        self._under_way: set[BaguaBucket] = set()
        """The buckets scheduled since the last wait: the worker may be using their flat storage."""
        self._marked_on: dict[BaguaBucket, set[Any]] = {}
        """For each bucket on a CUDA device, the streams that were current when its tensors were
        marked in this round.
        """

    def __repr__(self) -> str:
        return f"Engine({self.name!r}, {len(self._buckets)} buckets)"

    def register_ordered_buckets(self, buckets: Sequence[BaguaBucket]) -> None:
        """Set the order of ``buckets``; waits for pending operations and clears all marks (S2.4).

        Raises:
            ValueError: a name appears twice, or non-empty tensors overlap (S2.6); nothing is
                changed.
        """
        self.wait_pending_comm_ops()
        members = [[registration(tensor) for tensor in bucket.tensors] for bucket in buckets]
        names = [known.name for known in itertools.chain(*members)]
        for kind, listed in (("bucket", [bucket.name for bucket in buckets]), ("tensor", names)):
            if len(set(listed)) < len(listed):
                twice = next(name for place, name in enumerate(listed) if name in listed[:place])
                raise ValueError(
                    f"{kind} name {twice!r} is registered twice; names must be unique within a"
                    " module's buckets"
                )
        effective = [tensor for bucket in buckets for tensor in bucket.effective_tensors()]
        if (pair := overlapping(effective)) is not None:
            raise ValueError(
                f"tensors {names[pair[0]]!r} and {names[pair[1]]!r} overlap in memory; a tensor can"
                " be in one bucket only"
            )
        for known in self._bucket_of:
            known.sink = None
        self._buckets, self._readiness = list(buckets), Readiness(members)
        self._bucket_of = {
            known: bucket
            for bucket, registered in zip(buckets, members, strict=True)
            for known in registered
        }
        for known in self._bucket_of:
            known.sink = weakref.ref(self)
        self._marked_on = {
            bucket: set() for bucket in buckets if runtime.current_stream(bucket.device) is not None
        }

    def mark_ready(self, tensor: Tensor) -> None:
        """Mark ``tensor`` ready; its bucket runs when it is complete and all earlier ones are
        scheduled (S2.4).

        Raises:
            ValueError: its bucket has already been scheduled in this round, or a tensor has another
                shape or dtype than before.
            NotImplementedError: a tensor of the bucket is sparse.
        """
        self.gradient_ready("", tensor)

    def gradient_ready(self, name: str, parameter: Tensor) -> None:
        """Mark ``parameter`` ready, like `mark_ready`: the backward hook of an algorithm, called
        for every gradient.
        """
        known: Any = getattr(parameter, "_bagua_registration", None) or registration(parameter)
        begins = self._readiness.idle
        complete = self._readiness.mark(known)
        if begins:
            self.begin_round()
        if self._marked_on:
            bucket = self._bucket_of[known]
            if (marked_on := self._marked_on.get(bucket)) is not None:
                marked_on.add(runtime.current_stream(bucket.device))
        if complete:
            try:
                for place in complete:
                    self.schedule(self._buckets[place])
            except BaseException:  # such as Ctrl-C, before a bucket that counts as scheduled is
                self.half_done = True
                raise

    def begin_round(self) -> None:
        """Begin a round immediately, for buckets that are not registered; otherwise the first
        `mark_ready` of a round does so.
        """
        self._end_round()
        self.meter.rounds += 1
        self._round = self.new_round()
        self._worker.submit(
            RoundCall(self._round.begin, self._errors), may_run_here=not self._round.waits
        )

    def _end_round(self, may_run_here: bool = False) -> None:
        if self._round is not None:
            self._worker.submit(RoundCall(self._round.end, self._errors, ends=True), may_run_here)
            self._round = None

    def run_round(self, buckets: Sequence[BaguaBucket], is_open: bool = False) -> None:
        """Run ``buckets``, registered or not, immediately as a separate round;
        `wait_pending_comm_ops` includes them.

        No round of registered buckets may be under way.

        Args:
            buckets: in the order in which all ranks run them.
            is_open: whether the caller has already begun the round.
        """
        assert self._readiness.idle
        if not is_open:
            self.begin_round()
        for bucket in buckets:
            self.schedule(bucket)
        self._end_round()

    def schedule(self, bucket: BaguaBucket, kind: Callable[..., Any] = BucketRun) -> Any:
        """Load ``bucket`` on the current stream, after all work on its tensors, and submit it to
        the worker.

        If the worker may still be running it, scheduled in an earlier round, the worker loads it.

        Args:
            bucket: in the order in which all ranks run them.
            kind: factory of the job, called with the arguments of `BucketRun`.
        """
        if bucket in self._marked_on:
            self._order_after_marks(bucket)
        try:
            flat = None if bucket in self._under_way else bucket.load()
        except BaseException:
            self.half_done = True
            self.abandon_round()
            raise
        self._under_way.add(bucket)
        label = f"bagua_ref::{self._algorithm}/bucket{bucket.name}"
        run = kind(bucket, flat, runtime.record_event(bucket.device), label, self._errors)
        self._worker.submit(run)
        return run

    def _order_after_marks(self, bucket: BaguaBucket) -> None:
        """Make the current stream wait for the other streams on which tensors of ``bucket`` were
        marked.
        """
        for stream in self._marked_on[bucket] - {runtime.current_stream(bucket.device)}:
            runtime.order_after(stream.record_event(), bucket.device)
        self._marked_on[bucket].clear()

    def wait_pending_comm_ops(self) -> None:
        """Wait until all scheduled operations have finished (S2.5); on CUDA the current stream
        waits, not the host.

        An NCCL collective that does not finish within the timeout is aborted, and the next
        operation raises.

        Raises:
            CommunicationError: an operation failed; names the bucket and operation, with the first
                error as its cause.
            CommunicationTimeoutError: no progress within the timeout; names the bucket and
                operation.
        """
        with self.meter.timing("wait_seconds", f"bagua_ref::{self._algorithm}/wait"):
            runs = self._worker.wait()
            self._end_round(may_run_here=True)
        self._under_way.clear()
        if self._errors.fatal is not None:
            raise self._errors.fatal
        for run in runs:
            if isinstance(run, BucketRun):
                if run.error is not None:
                    raise run.error
                runtime.order_after(run.done, run.bucket.device)

    def run(self, function: Callable[[], T]) -> T:
        """Return the result of ``function()``, run on the worker after all scheduled operations;
        blocks until then.

        If it raises an error, no further bucket runs.
        """
        self._end_round()
        results: list[T] = []
        self._worker.submit(RoundCall(lambda: results.append(function()), self._errors))
        self.wait_pending_comm_ops()
        return results[0]

    @property
    def round_begun(self) -> bool:
        """Whether a tensor has been marked ready in the current round."""
        return not self._readiness.idle

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is in progress: between `begin_backward` and `end_backward`."""
        return self._readiness.hold

    @property
    def half_scheduled(self) -> bool:
        """Whether the current round has begun, but not all of its buckets have been scheduled."""
        return not (self._readiness.idle or self._readiness.complete)

    def begin_backward(self) -> None:
        """Begin a round that lasts until `end_backward`; marking a tensor again after its bucket
        was scheduled is an error.
        """
        self._readiness.hold = True

    def abandon_round(self) -> None:
        """Clear the marks of a backward pass that failed."""
        self.half_done = self.half_done or self.half_scheduled
        self._readiness.hold = False
        self._readiness.reset()
        for marked_on in self._marked_on.values():
            marked_on.clear()

    def end_backward(self, mark_unused: bool) -> None:
        """End the round; if anything was marked in it, all buckets must have been scheduled (S2.5).

        Args:
            mark_unused: mark the remaining tensors, with zero gradients, instead of raising.

        Raises:
            CommunicationError: buckets are incomplete; names the unmarked tensors.
        """
        self._readiness.hold = False
        if self._readiness.complete:
            self._readiness.reset()
        elif not self._readiness.idle:
            self._end_incomplete(mark_unused)

    def _end_incomplete(self, mark_unused: bool) -> None:
        missing = [
            (self._buckets[place], unmarked)
            for place, unmarked in self._readiness.unmarked().items()
        ]
        if mark_unused:
            for bucket, unmarked in missing:
                left = set(unmarked)
                for tensor in bucket.tensors:
                    if registration(tensor) in left:
                        self.mark_ready(tensor)
            return
        self._readiness.reset()
        listed = "; ".join(
            f"bucket {bucket.name!r}: {', '.join(repr(known.name) for known in unmarked) or 'none'}"
            for bucket, unmarked in missing
        )
        raise CommunicationError(
            f"backward ended while some tensors of module {self.name!r} had not been marked ready"
            f" ({listed}). If parameters may go unused in a step, pass find_unused_parameters=True,"
            " or freeze them before wrapping."
        )

    def close(self) -> None:
        """Stop the background thread after pending operations, or at the timeout."""
        for known in self._bucket_of:
            if known.sink is not None and known.sink() is self:
                known.sink = None
        self._worker.close()
        self._worker.join()

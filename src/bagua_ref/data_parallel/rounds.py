"""Rounds of communication, which begin only if all ranks agree; the only module that compares ranks
during training.

Before each action, every rank sends a small message about it to every other rank. After a round has
failed, no further round begins.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from bagua_ref.algorithms.base import TrainingContext
from bagua_ref.base.memory import Layout, bytes_of
from bagua_ref.communicators.base import Communicator
from bagua_ref.data_parallel.parameters import UnusedParameters
from bagua_ref.data_parallel.sharding import local, whole
from bagua_ref.data_parallel.steps import TakenSteps
from bagua_ref.errors import CommunicationError
from bagua_ref.observe.flight_recorder import explain
from bagua_ref.observe.meter import Meter, Operation
from bagua_ref.scheduling.engine import UNSAID, Fact, Round, describe_differences
from bagua_ref.types import Group

JOINED, ROUND, BUFFERS, STEP, PLAN = UNSAID, 0, 1, 2, 3
_ACTS = (
    "exchange buckets",
    "broadcast buffers",
    "decide whether to skip an optimizer step",
    "make new buckets",
)
_JOINS = tuple(
    f"inside join(divide_by_initial_world_size={divide}, throw_on_early_termination={throw})"
    for divide in (False, True)
    for throw in (False, True)
)
DIGEST = "{has} weights and optimizer state of checksum {value} after a state was loaded"

_REMEDY = (
    "Call model.bagua_resynchronize() on every rank to go on from the first rank's state, or start"
    " again from a checkpoint"
)

_SAME_STEPS = (
    "All ranks must take the same steps: pass the mean of the loss over ranks, for instance, to a"
    " learning rate scheduler that follows the loss"
)
COMMON = 3
"""Number of agreement fields that every message has, whatever the announced action."""
_SHOWN = 3
"""Maximum number of differences between texts in a message."""


class Announced(NamedTuple):
    """The announcements of all ranks of a training.

    Attributes:
        act: the next action of ranks with batches: `ROUND`, `BUFFERS`, `STEP` or `PLAN`; `JOINED`
            if no rank has batches.
        active: the ranks with batches, as indices within the group.
        joined: the ranks that have run out of batches, inside `bagua_ref.join`.
        flag: whether an active rank has set its flag.
        facts: if the active ranks begin a round, their values of the algorithm's and all further
            agreement fields, after the common ones.
    """

    act: int
    active: list[int]
    joined: list[int]
    flag: bool
    facts: list[int]

    @classmethod
    def of(cls, comparison: Comparison) -> Announced:
        """Wait for all ranks' announcements, and return them."""
        received = comparison.check()
        active = [rank for rank, theirs in enumerate(received) if theirs[1] != JOINED]
        joined = [rank for rank, theirs in enumerate(received) if theirs[1] == JOINED]
        _, act, _, _, *rest = received[active[0] if active else 0]
        return cls(act, active, joined, any(flag for flag, *_ in received), rest)


class Comparison:
    """A running comparison of agreement fields between ranks, which prevents rounds from being
    mixed up.

    Collective: every rank passes the same number of agreement fields, in the same order; creating a
    comparison sends them.

    Args:
        rounds: rounds of the ranks' training, for messages.
        comm: the communicator of the ranks, used only by the calling thread.
        ranks: their global ranks, for messages.
        facts: this rank's agreement fields, whose values must be equal on all ranks.
        flag: for a round, whether this rank has loaded a state since the last one.
    """

    def __init__(
        self,
        rounds: AgreedRounds,
        comm: Communicator,
        ranks: Sequence[int],
        facts: Sequence[Fact],
        flag: bool,
    ) -> None:
        self._rounds, self._comm, self._ranks, self._facts = rounds, comm, ranks, facts
        self._receive = comm.exchange_ints([int(flag), *(fact.value for fact in facts)])
        self._received: list[list[int]] | None = None
        self._same = True

    def check(self, digest: Callable[[], Fact | None] | None = None) -> list[list[int]]:
        """Wait for the agreement fields of all ranks and compare them, once; return each rank's
        flag and values.

        Args:
            digest: returns an agreement field with a checksum of all weights, or None if they may
                differ; called and compared if some rank has loaded a state. All ranks must pass it
                in the same call, in which unequal checksums are also explained. None: not in this
                call.

        Raises:
            CommunicationError: ranks differ; the message, equal on all ranks, lists the
                differences.
        """
        if self._received is None:
            received = self._receive()
            # Usually all are equal, and one stands for them: thousands of ranks would take longer
            # than the step.
            self._same = received.count(received[0]) == len(received)
            distinct = received[: 1 if self._same else None]
            self._compare(self._facts, [values for _, *values in distinct])
            self._received = received
        received = self._received
        if digest is not None and not self._same:
            for place, fact in enumerate(self._facts, start=1):
                if fact.explain is not None:
                    self._raise(self._explain(fact, [theirs[place] for theirs in received]))
        if (
            digest is not None
            and any(flag for flag, *_ in received[: 1 if self._same else None])
            and (weights := digest()) is not None
        ):
            self._compare([weights], self._comm.exchange_ints([weights.value])())
        return received

    def _compare(self, facts: Sequence[Fact], values: Sequence[Sequence[int]]) -> None:
        if any(theirs != values[0] for theirs in values):
            self._raise(describe_differences(facts, values, self._ranks))

    def _raise(self, differences: str) -> None:
        if differences:
            raise CommunicationError(
                f"the ranks that train module {self._rounds.name!r} disagree: {differences}."
                f" {self._rounds.remedy}"
            )

    def _explain(self, fact: Fact, checksums: Sequence[int]) -> str:
        """Return the differences behind unequal checksums. Collective unless they are equal."""
        if len({*checksums} - {UNSAID}) < 2:
            return ""
        assert fact.explain is not None
        mine = None if checksums[self._comm.rank()] == UNSAID else fact.explain()
        # what differed may have been an earlier step, of which only the checksum is left
        differences = describe_texts(mine, self._comm, self._ranks) or describe_differences(
            [fact._replace(explain=None)], [[checksum] for checksum in checksums], self._ranks
        )
        return f"{differences}. {_SAME_STEPS}"


def describe_texts(
    texts: Mapping[tuple[str, str], str] | None,
    comm: Communicator,
    ranks: Sequence[int],
    absent: str | None = None,
) -> str:
    """Return the first differences between the texts of the ranks; "" if there are none.
    Collective.

    Args:
        texts: this rank's texts by sentence, as in a `Fact`, and the ending after the last
            sentence; None: this rank is not compared.
        comm: the communicator of the ranks.
        ranks: their global ranks, for messages.
        absent: text for entries that a rank lacks; None: the rank is not compared there.
    """
    everyone = [
        comm.broadcast_object(texts if place == comm.rank() else None, place)
        for place in range(comm.nranks())
    ]
    sentences = []
    for sentence, end in dict.fromkeys(itertools.chain(*filter(None, everyone))):
        found = [
            None if theirs is None else theirs.get((sentence, end), absent) for theirs in everyone
        ]
        distinct = tuple(dict.fromkeys(text for text in found if text is not None))
        values = [[UNSAID if text is None else distinct.index(text)] for text in found]
        if difference := describe_differences([Fact(sentence, 0, distinct)], values, ranks):
            sentences.append(difference + end)
    return "; ".join([*sentences[:_SHOWN], *["and more"] * (len(sentences) > _SHOWN)])


class AgreedRounds:
    """The rounds of one training: their comparison between ranks, and the failure after which no
    more rounds can begin.

    Args:
        group: the ranks of the training.
        name: the training's name, for messages.
        meter: counters of the training.
        in_nodes: whether ranks compare inside their node first.
        remedy: the way out after a failure, for messages.

    Attributes:
        alone: whether there is only one rank, so that nothing is compared.
        groups: groups that are aborted together; the first one is ``group``.
        broken: the reason why no round can begin; "" if rounds can begin.
        loaded: whether a state was loaded since the last round.
        compared: the last round's comparison, when all ranks have agreed.
        in_nodes: whether ranks compare inside their node first; False with a single rank.
        joining: the `bagua_ref.data_parallel.joining.Joining` that the module is in; None outside
            of `bagua_ref.join`.
    """

    joining: Any = None

    def __init__(
        self, group: Group, name: str, meter: Meter, *, in_nodes: bool = False, remedy: str = ""
    ) -> None:
        self.group, self.name, self.meter, self.remedy = group, name, meter, remedy
        self.groups = [group]
        self._comm = group.get_global_communicator()
        self.alone = self._comm.nranks() == 1
        self.in_nodes = in_nodes and not self.alone
        if self.in_nodes:
            self._node = group.get_intra_node_communicator()
            rank = group.ranks[self._comm.rank()]
            self._node_ranks = [rank for (rank,) in self._node.exchange_ints([rank])()]
        self.broken, self.loaded = "", False
        self.compared: Comparison | None = None

    def compare(self, facts: Sequence[Fact], flag: bool = False) -> Comparison:
        """Start a comparison among all ranks."""
        return Comparison(self, self._comm, self.group.ranks, facts, flag)

    def compare_in_node(self, facts: Sequence[Fact], flag: bool) -> Comparison:
        """Start a comparison among the ranks of this node."""
        return Comparison(self, self._node, self._node_ranks, facts, flag)

    def digest(self) -> Fact | None:
        """Return a checksum of all values that must be equal on all ranks after a state was loaded,
        or None.
        """
        return None

    def note_load(self, *_: object) -> None:
        """Record that a state was loaded; a hook of the module and its optimizers."""
        self.loaded = True

    def abort(self, why: str) -> None:
        """Cancel all future rounds on all ranks; training with a single rank continues."""
        if not self.broken and not self.alone:
            self.broken = why
            for group in self.groups:
                group.abort(why)

    def fail(self, error: BaseException) -> None:
        """Abort because of ``error``, and have the flight recorder write an explanation."""
        if not self.broken:
            why = str(error)
            if not isinstance(error, RuntimeError):  # such as Ctrl-C
                why = f"{type(error).__name__}: {error}".removesuffix(": ")
            explain(error)  # while what this rank waits for is known
            self.abort(why)

    @contextmanager
    def aborting(self, kind: type[BaseException] = BaseException) -> Iterator[None]:
        """Context that aborts all rounds if an error of ``kind``, such as Ctrl-C, leaves it."""
        try:
            yield
        except kind as error:
            self.fail(error)
            raise

    def check_usable(self) -> None:
        """Raise CommunicationError if a round has failed.

        Raises:
            CommunicationError: a round has failed; the message says why, and how to continue.
        """
        if self.broken:
            why = self.broken.removesuffix(f". {self.remedy}")
            raise CommunicationError(f"module {self.name!r} cannot train on: {why}. {self.remedy}")


class AgreedRound(Round):
    """A round with a comparison of all ranks' next steps, before its first bucket or while its
    buckets run.

    Args:
        rounds: rounds of the training.
        facts: the agreement fields.
        alike: whether buckets may run during the comparison, because a wrong round changes nothing
            that matters.
        same_plan: whether buckets are those of the last round; if not, the fields are compared
            before they run: messages of another size than the receiver's would end its process
            inside gloo.
        stays_in_node: whether only the ranks of this node take part.
    """

    def __init__(
        self,
        rounds: AgreedRounds,
        facts: list[Fact],
        *,
        alike: bool = False,
        same_plan: bool = True,
        stays_in_node: bool = False,
    ) -> None:
        self._rounds, self._facts, self._steps = rounds, facts, rounds.meter.steps
        self._loaded, rounds.loaded = rounds.loaded, False
        self._alike, self._same_plan, self._stays_in_node = alike, same_plan, stays_in_node
        self.waits = rounds.in_nodes or not alike or not same_plan
        self._comparison: Comparison | None = None

    def begin(self) -> None:
        """Start the comparison; also wait for its result unless buckets may run meanwhile."""
        rounds = self._rounds
        with Operation("agreement", meter=rounds.meter):
            if rounds.in_nodes:
                rounds.compare_in_node(self._facts, self._loaded).check(rounds.digest)
                if self._stays_in_node:
                    return
            self._comparison = rounds.compare(self._facts, self._loaded)
            if not self._alike:
                self._check(self._comparison)
            elif not self._same_plan:
                self._comparison.check()

    def end(self) -> None:
        """Wait for the result of the comparison, unless `begin` already has."""
        if self._comparison is not None and self._alike:
            with Operation("end of round", meter=self._rounds.meter):
                self._check(self._comparison)

    def _check(self, comparison: Comparison) -> None:
        comparison.check(self._rounds.digest)
        self._rounds.compared, self._rounds.meter.steps_in_agreement = comparison, self._steps


class ModuleRounds(AgreedRounds):
    """The rounds of a wrapped module.

    Args:
        training: the training; held weakly.
        unused_group: a second group of the same ranks, to agree on unused parameters; None: unused
            parameters are errors.

    Attributes:
        unused: the record of unused parameters; None if they are errors.
        steps: the optimizer steps since the last round.
    """

    def __init__(self, training: TrainingContext, unused_group: Group | None) -> None:
        nodes = training.bagua_algorithm.traits.in_node is not None
        meter = training.engine.meter
        super().__init__(
            training.process_group,
            training.bagua_module_name,
            meter,
            in_nodes=nodes,
            remedy=_REMEDY,
        )
        self._training: TrainingContext = weakref.proxy(training)
        self.steps = TakenSteps()
        self._plan = 0
        self._plan_of_last_round: int | None = None
        self.unused = None
        if unused_group is not None:
            self.unused = UnusedParameters(training, unused_group)
            self.groups.append(unused_group)
        if not self.alone:
            training.engine.new_round = self.new_round

    def plan(self) -> None:
        """Compute a checksum of the buckets and the order of their elements, which must be equal on
        all ranks.
        """
        described = [
            (b.name, str(b.dtype), [list(t.shape) for t in b.tensors])
            for b in self._training.bagua_buckets
        ]
        named = self._training.bagua_build_params()
        layouts = {
            name: str(Layout.of(parameter))
            for name, parameter in named
            if not parameter.is_contiguous()
        }
        self._plan = zlib.crc32(repr((described, layouts)).encode())
        # what the first one depends on was compared when wrapping
        if self._plan_of_last_round is None:
            self._plan_of_last_round = self._plan

    def new_round(self) -> Round:
        """Return the next round."""
        traits = self._training.bagua_algorithm.traits
        same_plan, self._plan_of_last_round = self._plan == self._plan_of_last_round, self._plan
        facts = self.facts(ROUND)
        self.steps.clear()
        return AgreedRound(
            self,
            facts,
            alike=traits.alike_rounds,
            same_plan=same_plan,
            stays_in_node=bool(traits.in_node),
        )

    def add_step(self, optimizer: Optimizer, trained: Container[int], passed: bool) -> None:
        """Record an optimizer step for comparison in the next round, if ranks step alike; arguments
        as for `TakenSteps.add`.
        """
        if not self.alone and self._training.bagua_algorithm.traits.same_replicas:
            self.steps.add(optimizer, trained, passed)

    def announce(self, act: int, flag: bool = False) -> Announced:
        """Announce the next action ``act`` of this rank; return the announcements of all ranks.
        Collective.

        Args:
            act: an action other than a round: `BUFFERS`, `STEP` or `PLAN`.
            flag: a flag for the others.
        """
        facts = self.facts(act)

        def compare() -> Announced:
            if self.in_nodes:
                self.compare_in_node(facts, flag).check()
            return Announced.of(self.compare(facts, flag))

        with self.aborting():
            return self._training.engine.run(compare)

    def end_round(self) -> None:
        """Complete a round: notify `bagua_ref.join`, if active, and restore the gradients of unused
        parameters.
        """
        compared, self.compared = self.compared, None
        if self.joining is not None and compared is not None:
            self.joining.round_ended(Announced.of(compared))
        if self.unused is not None:
            self.unused.restore()

    def close(self) -> None:
        """Close the connections used only by rounds."""
        for group in self.groups[1:]:
            group.close()

    def facts(self, act: int) -> list[Fact]:
        """Return this rank's agreement fields before ``act``; if that is no round, all but the
        first few abstain.
        """
        training = self._training
        algorithm, optimizers = training.bagua_algorithm, training.bagua_optimizers
        traits = algorithm.traits
        facts = [
            Fact("{is} about to {value}", act, _ACTS),
            Fact(
                "{is} {value}",
                0 if self.joining is None else self.joining.number,
                ("outside join()", *_JOINS),
            ),
            Fact("{has} buckets of plan {value}", self._plan),
        ]
        facts += algorithm.facts()
        if traits.same_steps:
            several = len(optimizers) > 1
            for place, (optimizer, steps) in enumerate(
                zip(optimizers, training.steps_of_optimizers, strict=True)
            ):
                which = f" of optimizer {place}, {type(optimizer).__name__}" if several else ""
                sentence = f"{{has}} taken {{value}} optimizer steps{which}"
                adopt = partial(training.steps_of_optimizers.__setitem__, place)
                facts.append(Fact(sentence, steps, adopt=adopt))
        facts += self.steps.facts(act == ROUND and traits.same_replicas)
        # then the ranks agree on unused parameters before the round ends
        if self.unused is not None:
            facts.append(
                Fact(
                    "{is} {value}",
                    int(training.engine.in_backward),
                    ("outside a backward pass", "in a backward pass"),
                )
            )
        return (
            facts
            if act == ROUND
            else [*facts[:COMMON], *(fact._replace(value=UNSAID) for fact in facts[COMMON:])]
        )

    def digest(self) -> Fact | None:
        """Return a checksum of weights and optimizer state, if they must be equal on all ranks."""
        replicas = self._training.bagua_algorithm.replicas()
        if not replicas:
            return None
        checksum = 0
        for parameter, optimizers in replicas:
            held = whole(parameter)  # type: ignore[arg-type]
            tensors: list[Any] = [parameter]
            for optimizer in optimizers:
                state = optimizer.state.get(held, {})
                tensors += (state[name] for name in sorted(state, key=str))
            for tensor in map(local, tensors):
                # Others are numbers, or tensors whose bytes only their library knows.
                if (
                    isinstance(tensor, torch.Tensor)
                    and type(tensor.detach()) is torch.Tensor
                    and tensor.layout is torch.strided
                ):
                    data = bytes_of(tensor.detach().cpu().contiguous()).numpy()
                    checksum = zlib.crc32(data.data, checksum)
        return Fact(DIGEST, checksum)

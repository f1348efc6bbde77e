"""One module's rounds of communication, which begin only if all ranks agree, and end for good when one fails."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from bagua_ref.agreement import UNSAID, Agreement, Comparison, Fact
from bagua_ref.algorithms.base import TrainingContext
from bagua_ref.base.memory import Layout
from bagua_ref.data_parallel.sharding import local, whole
from bagua_ref.data_parallel.unused_parameters import UnusedParameters
from bagua_ref.errors import CommunicationError
from bagua_ref.observe.flight_recorder import explain
from bagua_ref.scheduling.engine import Beginning
from bagua_ref.types import Group

__all__ = ["BUFFERS", "JOINED", "PLAN", "ROUND", "STEP", "AgreedRounds", "Told"]

JOINED, ROUND, BUFFERS, STEP, PLAN = UNSAID, 0, 1, 2, 3
_ACTS = ("exchange buckets", "broadcast buffers", "decide whether to skip an optimizer step", "make new buckets")
_JOINS = tuple(
    f"inside join(divide_by_initial_world_size={divide}, throw_on_early_termination={throw})"
    for divide in (False, True)
    for throw in (False, True)
)
_DIGEST = "{has} weights and optimizer state of checksum {value} after a state was loaded"


class Told(NamedTuple):
    """What the ranks of a training have told each other.

    Attributes:
        act: what those with batches are about to do: `ROUND`, `BUFFERS`, `STEP` or `PLAN`; `JOINED` if all have run out of them.
        active: the ranks that have batches, as numbers within the group.
        joined: those that have run out of them, inside `bagua_ref.join`.
        flag: whether an active rank has set its flag.
        facts: if they begin a round, the values of the algorithm's facts on them, and of what else is compared.
    """

    act: int
    active: list[int]
    joined: list[int]
    flag: bool
    facts: list[int]


class JoinContext(Protocol):
    """The `bagua_ref.join` that a module is in."""

    others: Sequence[Any]
    """The joinables that are no modules."""

    @property
    def number(self) -> int:
        """The options as a number from 1 on, which must be equal on all ranks."""
        ...

    def round_ended(self, told: Told) -> None:
        """Complete a round in which this rank had a batch."""
        ...

    def follow(self) -> None:
        """Take part in the rounds of ranks that have batches until none has."""
        ...


class AgreedRounds:
    """What the ranks of one training compare before each round, and the failure after which no round begins any more.

    Args:
        training: the training; held weakly.
        unused_group: the same ranks once more, to agree on unused parameters; None: these are errors.

    Attributes:
        broken: why no round can begin; "" while all is well.
        steps_of_optimizers: the steps that each optimizer has taken.
        backward_passes: those begun outside `no_sync`.
        joining: the `bagua_ref.join` that the module is in.
    """

    joining: JoinContext | None = None

    def __init__(self, training: TrainingContext, unused_group: Group | None) -> None:
        self._training, self._group = weakref.ref(training), training.process_group
        self.broken = ""
        self._loaded = False
        """Whether a state was loaded since the last round."""
        self.steps_of_optimizers = [0] * len(training.bagua_optimizers)
        self.backward_passes = 0
        self._plan = 0
        self._plan_of_last_round: int | None = None
        self._told: Told | None = None
        """What came of the last round's comparison, if `end_round` has not been called since."""
        comm = self._group.get_global_communicator()
        self._agreement = Agreement(comm, self._group.ranks, training.bagua_module_name)
        self._in_node: Agreement | None = None
        """If ranks compare inside their node first."""
        self._alone = comm.nranks() == 1
        self._unused = None if unused_group is None else UnusedParameters(training, unused_group)
        if not self._alone:
            training._bagua_backend.before_round = self._open
            if training.bagua_algorithm.agrees_in_nodes:
                node = self._group.get_intra_node_communicator()
                ranks = [rank for (rank,) in node.exchange_ints([self._group.ranks[comm.rank()]])()]
                self._in_node = Agreement(node, ranks, training.bagua_module_name)

    def plan(self) -> None:
        """Note the buckets, and the order of elements in them and in those to come, which must be equal on all ranks."""
        buckets = self._trained.bagua_buckets
        described = [(b.name, str(b.dtype), [list(t.shape) for t in b.tensors]) for b in buckets]
        named = self._trained.bagua_build_params()
        layouts = {name: str(Layout.of(parameter)) for name, parameter in named if not parameter.is_contiguous()}
        self._plan = zlib.crc32(repr((described, layouts)).encode())
        if self._plan_of_last_round is None:  # what the first one depends on was compared when wrapping
            self._plan_of_last_round = self._plan

    def _open(self) -> Beginning:
        """Return what the engine does when a round begins, and what that returns for the round's end."""
        loaded, self._loaded = self._loaded, False
        alike, facts = self._trained.bagua_algorithm.rounds_are_alike, self._facts(ROUND)
        same_plan, self._plan_of_last_round = self._plan == self._plan_of_last_round, self._plan
        stays_in_node = self._trained.bagua_algorithm.round_stays_in_node
        meter = self._trained._bagua_backend.meter
        steps = meter.steps

        def begin() -> Callable[[], None] | None:
            if self._in_node is not None:
                self._in_node.begin(facts, loaded).check(self._digest)
                if stays_in_node:
                    return None
            comparison = self._agreement.begin(facts, loaded)

            def check() -> None:
                comparison.check(self._digest)
                self._told = _read(comparison)
                meter.steps_in_agreement = steps

            if not alike:
                check()
                return None
            if not same_plan:  # messages of another size than the receiver's would end its process inside gloo
                comparison.check_facts()
            return check

        return Beginning(begin, waits=self._in_node is not None or not alike or not same_plan)

    def tell(self, act: int, flag: bool = False) -> Told:
        """Tell the other ranks that this one is about to do ``act``; return what all have told. Collective.

        Args:
            act: what is not a round: `BUFFERS`, `STEP` or `PLAN`.
            flag: a flag for the others.
        """
        facts = self._facts(act)

        def tell() -> Told:
            if self._in_node is not None:
                self._in_node.begin(facts, flag).check_facts()
            return _read(self._agreement.begin(facts, flag))

        with self.giving_up():
            return self._trained._bagua_backend.run(tell)

    def shadow(self) -> Told:
        """Tell the other ranks that this one has no more batches, and take part in the round that they begin, if they do."""
        training = self._trained
        algorithm, facts = training.bagua_algorithm, self._facts(JOINED)
        alike = algorithm.rounds_are_alike

        def begin() -> Comparison:
            comparison = self._agreement.begin(facts, False)
            if _read(comparison).act == ROUND and not alike:
                comparison.check(self._no_digest)
            return comparison

        with self.giving_up():
            comparison = training._bagua_backend.run(begin)
            told = _read(comparison)
            if told.act == ROUND:
                if self._unused is not None and told.facts[-1]:
                    self._unused.agree_without_batch()
                algorithm.shadow(told.facts[: len(algorithm.facts())])
                if alike:
                    training._bagua_backend.run(lambda: comparison.check(self._no_digest))
        return told

    def noting_reached(self, hook: Callable[[str, torch.nn.Parameter], object]) -> Callable[[str, torch.nn.Parameter], object]:
        """Return ``hook``, or one that also notes which parameters it is called for, if unused ones are no errors."""
        return hook if self._unused is None else self._unused.noting(hook)

    def note_reached(self, name: str) -> None:
        """Note that a backward pass of any kind has reached a parameter."""
        if self._unused is not None:
            self._unused.reached.add(name)

    def agree_on_unused(self) -> None:
        """At the end of a backward pass that has marked gradients, agree on the parameters that no rank has reached. Collective."""
        if self._unused is not None and self._trained._bagua_backend.round_begun:
            self._unused.agree()

    def end_round(self) -> None:
        """Do what remains to be done after a round inside `bagua_ref.join`, and to parameters that no rank has reached."""
        told, self._told = self._told, None
        if self.joining is not None and told is not None:
            self.joining.round_ended(told)
        if self._unused is not None:
            self._unused.restore()

    def close(self) -> None:
        """Close the connections that only rounds use."""
        if self._unused is not None:
            self._unused.group.close()

    def _facts(self, act: int) -> list[Fact]:
        """Return what this rank says before ``act``: everything if it begins a round, else as many facts, but only the first."""
        training = self._trained
        algorithm, optimizers = training.bagua_algorithm, training.bagua_optimizers
        facts = [
            Fact("{is} about to {value}", act, _ACTS),
            Fact("{is} {value}", 0 if self.joining is None else self.joining.number, ("outside join()", *_JOINS)),
            Fact("{has} buckets of plan {value}", self._plan),
        ]
        common = len(facts)
        facts += algorithm.facts()
        if algorithm.steps_together:
            several = len(optimizers) > 1
            for place, (optimizer, steps) in enumerate(zip(optimizers, self.steps_of_optimizers, strict=True)):
                which = f" of optimizer {place}, {type(optimizer).__name__}" if several else ""
                facts.append(Fact(f"{{has}} taken {{value}} optimizer steps{which}", steps))
        if self._unused is not None:  # then the ranks agree on unused parameters before the round ends
            facts.append(
                Fact("{is} {value}", int(training._bagua_backend.in_backward), ("outside a backward pass", "in a backward pass"))
            )
        return facts if act == ROUND else [*facts[:common], *(fact._replace(value=UNSAID) for fact in facts[common:])]

    def note_load(self, *_: Any) -> None:
        """Note that a state was loaded: a hook of the module and its optimizers."""
        self._loaded = True

    def _no_digest(self) -> Fact | None:
        """As `_digest`, but say nothing."""
        return Fact(_DIGEST, UNSAID) if self._trained.bagua_algorithm.replicas_are_equal else None

    def _digest(self) -> Fact | None:
        """Return a checksum of weights and optimizer state, if they are equal on all ranks."""
        replicas = self._trained.bagua_algorithm.replicas()
        if not replicas:
            return None
        checksum = 0
        for parameter, optimizers in replicas:
            held = whole(parameter)  # type: ignore[arg-type]
            states = [optimizer.state[held] for optimizer in optimizers if held in optimizer.state]
            tensors = [parameter, *(value for state in states for _, value in sorted(state.items(), key=lambda item: str(item[0])))]
            for tensor in tensors:
                tensor = local(tensor)
                if (
                    not isinstance(tensor, torch.Tensor)
                    or type(tensor.detach()) is not torch.Tensor
                    or tensor.layout is not torch.strided
                ):
                    continue  # a number, or a tensor whose bytes only its library knows
                data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                checksum = zlib.crc32(data.data, checksum)
        return Fact(_DIGEST, checksum)

    def give_up(self, why: str) -> None:
        """Let no round begin any more, here and on the other ranks; a training alone can go on."""
        if not self.broken and not self._alone:
            self.broken = why
            self._group.abort(why)
            if self._unused is not None:
                self._unused.group.abort(why)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Give up if communication fails in this context, and let the flight recorder write why."""
        try:
            yield
        except CommunicationError as error:
            if not self.broken:
                why = str(error)
                explain(error)  # while what this rank waits for is known
                self.give_up(why)
            raise

    def check_usable(self) -> None:
        """Raise if a round has failed.

        Raises:
            CommunicationError: one has; says why, and how to go on.
        """
        if self.broken:
            raise CommunicationError(
                f"module {self._trained.bagua_module_name!r} cannot train on: {self.broken}. Call model.bagua_resynchronize() on "
                "every rank to go on from the first rank's state, or start again from a checkpoint"
            )

    @property
    def _trained(self) -> TrainingContext:
        training = self._training()
        assert training is not None, "it is under way"
        return training


def _read(comparison: Comparison) -> Told:
    """Return what the ranks have told, when all have."""
    notes = comparison.check_facts()
    active = [rank for rank, note in enumerate(notes) if note[1] != JOINED]
    joined = [rank for rank, note in enumerate(notes) if note[1] == JOINED]
    _, act, _, _, *rest = notes[active[0] if active else 0]
    return Told(act, active, joined, any(note[0] for note in notes), rest)

"""Rounds of a wrapped module: comparison before each, the part of ranks without batches, and parameters that no rank reaches."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bagua_ref.algorithms.base import TrainingContext
from bagua_ref.base.memory import Layout, bytes_of
from bagua_ref.communicators.base import Communicator
from bagua_ref.data_parallel.sharding import local, whole
from bagua_ref.errors import CommunicationError
from bagua_ref.rounds import UNSAID, AgreedRound, AgreedRounds, Comparison, Fact
from bagua_ref.scheduling.engine import Round
from bagua_ref.types import Group

__all__ = ["BUFFERS", "JOINED", "PLAN", "ROUND", "STEP", "Announced", "ModuleRounds", "UnusedParameters"]

_BITS = 63
"""Of each number of a note about unused parameters."""

JOINED, ROUND, BUFFERS, STEP, PLAN = UNSAID, 0, 1, 2, 3
_ACTS = ("exchange buckets", "broadcast buffers", "decide whether to skip an optimizer step", "make new buckets")
_JOINS = tuple(
    f"inside join(divide_by_initial_world_size={divide}, throw_on_early_termination={throw})"
    for divide in (False, True)
    for throw in (False, True)
)
_DIGEST = "{has} weights and optimizer state of checksum {value} after a state was loaded"

_REMEDY = "Call model.bagua_resynchronize() on every rank to go on from the first rank's state, or start again from a checkpoint"


class Announced(NamedTuple):
    """Announcements of the ranks of a training to each other.

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

    @classmethod
    def of(cls, comparison: Comparison) -> Announced:
        """Wait for the announcements of all ranks."""
        received = comparison.check_facts()
        active = [rank for rank, theirs in enumerate(received) if theirs[1] != JOINED]
        joined = [rank for rank, theirs in enumerate(received) if theirs[1] == JOINED]
        _, act, _, _, *rest = received[active[0] if active else 0]
        return cls(act, active, joined, any(flag for flag, *_ in received), rest)


class _OfTraining:
    """A part of a training, which it holds weakly."""

    _training: weakref.ref[TrainingContext]

    @property
    def _trained(self) -> TrainingContext:
        training = self._training()
        assert training is not None, "it is under way"
        return training


class UnusedParameters(_OfTraining):
    """The parameters that backward passes have reached since the last synchronized round, and what others had for a gradient.

    Args:
        training: the training; held weakly.
        group: its ranks, for these messages alone: when a rank's backward pass has ended, the worker's connections are busy with
            buckets, with other ones on each rank.

    Attributes:
        reached: the names of parameters that a backward pass of this rank has reached since the last synchronized round.
        group: as given.
    """

    def __init__(self, training: TrainingContext, group: Group) -> None:
        self._training, self.group = weakref.ref(training), group
        self.reached: set[str] = set()
        self._set_aside: list[tuple[Any, tuple[torch.Tensor, torch.Tensor] | None]] = []
        """Parameters that no rank reached, with the gradient of each and a copy of it; None where there is no gradient."""
        self._leave_alone: Callable[[], None] = _nothing
        group.get_global_communicator()  # all ranks connect now, in the same order
        if training.bagua_algorithm.agrees_in_nodes:
            group.get_intra_node_communicator()

    def noting(self, hook: Callable[[str, torch.nn.Parameter], object]) -> Callable[[str, torch.nn.Parameter], object]:
        """Return a backward hook that notes the parameter and calls ``hook``."""
        reached = self.reached

        def noted(name: str, parameter: torch.nn.Parameter) -> None:
            reached.add(name)
            hook(name, parameter)

        return noted

    def agree(self) -> None:
        """Set the gradients of parameters aside that no rank has reached, so that they count as zero in the round. Collective."""
        training = self._trained
        parameters = training.bagua_build_params()
        reached = self._on_any_rank([name in self.reached for name, _ in parameters])
        self.reached.clear()
        unused = [parameter for (_, parameter), is_reached in zip(parameters, reached, strict=True) if not is_reached]
        self._set_aside = [(p, None if p.grad is None else (p.grad, p.grad.detach().clone())) for p in unused]
        for parameter in unused:
            parameter.grad = None
        self._leave_alone = training.bagua_algorithm.leave_alone(unused) if unused else _nothing

    def agree_without_batch(self) -> None:
        """Tell the other ranks that this one has reached nothing. Collective."""
        self._on_any_rank([False] * len(self._trained.bagua_build_params()))

    @torch.no_grad()
    def restore(self) -> None:
        """After the round, put back what was set aside, except where an error memory has delivered something."""
        delivers = self._trained.bagua_algorithm.delivers_error_memory
        for parameter, before in self._set_aside:
            if delivers and parameter.grad.any():
                if before is not None:
                    parameter.grad.detach().add_(before[1])
            elif before is None:
                parameter.grad = None
            else:
                parameter.grad = before[0]
                before[0].detach().copy_(before[1])  # it may lie in the bucket, which the round has written to
        self._leave_alone()
        self._set_aside, self._leave_alone = [], _nothing

    def _on_any_rank(self, bits: Sequence[bool]) -> list[bool]:
        """Return for each place whether the bit is set on any rank."""
        algorithm = self._trained.bagua_algorithm
        group = self.group
        comm: Communicator = (
            group.get_intra_node_communicator() if algorithm.round_stays_in_node else group.get_global_communicator()
        )
        if comm.nranks() == 1:
            return list(bits)
        note = [sum(bit << place for place, bit in enumerate(bits[start : start + _BITS])) for start in range(0, len(bits), _BITS)]
        engine = self._trained.engine
        try:
            with engine.meter.waiting():
                notes = comm.exchange_ints(note)()
        except CommunicationError:
            engine.wait_pending_comm_ops()  # if the worker has failed, too, its error says more
            raise
        return [any(words[place // _BITS] >> place % _BITS & 1 for words in notes) for place in range(len(bits))]


class ModuleRounds(_OfTraining, AgreedRounds):
    """The rounds of a wrapped module.

    Args:
        training: the training; held weakly.
        unused_group: the same ranks once more, to agree on unused parameters; None: these are errors.

    Attributes:
        unused: the unused parameters; None if these are errors.
    """

    def __init__(self, training: TrainingContext, unused_group: Group | None) -> None:
        nodes, meter = training.bagua_algorithm.agrees_in_nodes, training.engine.meter
        super().__init__(training.process_group, training.bagua_module_name, meter, in_nodes=nodes, remedy=_REMEDY)
        self._training = weakref.ref(training)
        self._plan = 0
        self._plan_of_last_round: int | None = None
        self.unused = None if unused_group is None else UnusedParameters(training, unused_group)
        if not self.alone:
            training.engine.new_round = self.new_round

    def plan(self) -> None:
        """Note the buckets, and the order of elements in them and in those to come, which must be equal on all ranks."""
        described = [(b.name, str(b.dtype), [list(t.shape) for t in b.tensors]) for b in self._trained.bagua_buckets]
        named = self._trained.bagua_build_params()
        layouts = {name: str(Layout.of(parameter)) for name, parameter in named if not parameter.is_contiguous()}
        self._plan = zlib.crc32(repr((described, layouts)).encode())
        if self._plan_of_last_round is None:  # what the first one depends on was compared when wrapping
            self._plan_of_last_round = self._plan

    def new_round(self) -> Round:
        """Return the round that begins now."""
        algorithm = self._trained.bagua_algorithm
        same_plan, self._plan_of_last_round = self._plan == self._plan_of_last_round, self._plan
        alike, in_node = algorithm.rounds_are_alike, algorithm.round_stays_in_node
        return AgreedRound(self, self._facts(ROUND), alike=alike, same_plan=same_plan, stays_in_node=in_node)

    def announce(self, act: int, flag: bool = False) -> Announced:
        """Announce to the other ranks that this one is about to do ``act``; return what all have announced. Collective.

        Args:
            act: what is not a round: `BUFFERS`, `STEP` or `PLAN`.
            flag: a flag for the others.
        """
        facts = self._facts(act)

        def compare() -> Announced:
            if self.compare_in_node is not None:
                self.compare_in_node(facts, flag).check_facts()
            return Announced.of(self.compare(facts, flag))

        with self.aborting():
            return self._trained.engine.run(compare)

    def shadow(self) -> Announced:
        """Announce to the other ranks that this one has no more batches, and take part in the round that they begin, if they do."""
        training = self._trained
        algorithm, facts = training.bagua_algorithm, self._facts(JOINED)
        alike = algorithm.rounds_are_alike

        def begin() -> Comparison:
            comparison = self.compare(facts)
            if Announced.of(comparison).act == ROUND and not alike:
                comparison.check(self._no_digest)
            return comparison

        with self.aborting():
            comparison = training.engine.run(begin)
            announced = Announced.of(comparison)
            if announced.act == ROUND:
                if self.unused is not None and announced.facts[-1]:
                    self.unused.agree_without_batch()
                algorithm.shadow(announced.facts[: len(algorithm.facts())])
                if alike:
                    training.engine.run(lambda: comparison.check(self._no_digest))
        return announced

    def end_round(self) -> None:
        """Complete a round inside `bagua_ref.join`, and restore parameters that no rank has reached."""
        compared, self.compared = self.compared, None
        if self.joining is not None and compared is not None:
            self.joining.round_ended(Announced.of(compared))
        if self.unused is not None:
            self.unused.restore()

    def close(self) -> None:
        """Close the connections that only rounds use."""
        if self.unused is not None:
            self.unused.group.close()

    def abort(self, why: str) -> None:
        """Let no round begin any more, here and on the other ranks; a training alone can go on."""
        if self.unused is not None and not self.broken and not self.alone:
            self.unused.group.abort(why)
        super().abort(why)

    def _facts(self, act: int) -> list[Fact]:
        """Return this rank's facts before ``act``: all if it begins a round, else as many, of which only the first have a value."""
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
            for place, (optimizer, steps) in enumerate(zip(optimizers, training.steps_of_optimizers, strict=True)):
                which = f" of optimizer {place}, {type(optimizer).__name__}" if several else ""
                facts.append(Fact(f"{{has}} taken {{value}} optimizer steps{which}", steps))
        if self.unused is not None:  # then the ranks agree on unused parameters before the round ends
            facts.append(Fact("{is} {value}", int(training.engine.in_backward), ("outside a backward pass", "in a backward pass")))
        return facts if act == ROUND else [*facts[:common], *(fact._replace(value=UNSAID) for fact in facts[common:])]

    def digest(self) -> Fact | None:
        """Return a checksum of weights and optimizer state, if they are equal on all ranks."""
        replicas = self._trained.bagua_algorithm.replicas()
        if not replicas:
            return None
        checksum = 0
        for parameter, optimizers in replicas:
            held = whole(parameter)  # type: ignore[arg-type]
            states = [optimizer.state[held] for optimizer in optimizers if held in optimizer.state]
            tensors = [parameter, *(value for state in states for _, value in sorted(state.items(), key=lambda item: str(item[0])))]
            for tensor in map(local, tensors):
                # Others are numbers, or tensors whose bytes only their library knows.
                if isinstance(tensor, torch.Tensor) and type(tensor.detach()) is torch.Tensor and tensor.layout is torch.strided:
                    data = bytes_of(tensor.detach().cpu().contiguous()).numpy()
                    checksum = zlib.crc32(data.data, checksum)
        return Fact(_DIGEST, checksum)

    def _no_digest(self) -> Fact | None:
        """As `digest`, but say nothing."""
        return Fact(_DIGEST, UNSAID) if self._trained.bagua_algorithm.replicas_are_equal else None


def _nothing() -> None:
    """Do nothing."""

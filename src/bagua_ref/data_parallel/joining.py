"""Training on uneven data: ranks without batches take part in the rounds of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bagua_ref.algorithms.traits import WithoutBatch
from bagua_ref.base.ranks import format_ranks
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.data_parallel.rounds import (
    BUFFERS,
    COMMON,
    DIGEST,
    JOINED,
    PLAN,
    ROUND,
    Announced,
    Comparison,
)
from bagua_ref.data_parallel.state_broadcast import share_object, share_state
from bagua_ref.data_parallel.training import ModuleTraining
from bagua_ref.data_parallel.wrapping import context_of
from bagua_ref.scheduling.engine import UNSAID, Fact

__all__ = ["Joining", "join"]


@contextmanager
def join(
    joinables: Sequence[Any],
    enable: bool = True,
    throw_on_early_termination: bool = False,
    *,
    divide_by_initial_world_size: bool = True,
) -> Iterator[None]:
    """Context in which ranks may have different numbers of batches while they train wrapped
    modules.

    A rank that leaves the context takes part in the rounds of the others, without data, until all
    have left. Algorithms that keep replicas equal then load on every rank the weights, buffers (if
    they are broadcast), optimizer state and counters of a rank that left last; others only the
    counters. Every rank of the modules' groups enters and leaves. See the page "Uneven data" for
    each algorithm.

    Args:
        joinables: wrapped modules, in the same order on all ranks. Other objects with
            ``state_dict()`` and ``load_state_dict()``, such as a GradScaler, a learning rate
            scheduler, or an optimizer that was not passed when wrapping, are also loaded, from the
            last rank of the first module.
        enable: whether to enable the context; if False, it does nothing.
        throw_on_early_termination: as soon as one rank leaves before the others, raise a
            RuntimeError on all of them.
        divide_by_initial_world_size: means are over all ranks, of which those without batches
            contribute zeros; False: over those that have batches. Algorithms that average weights
            take True only, qadam takes False only.

    Raises:
        NotImplementedError: the algorithm, or a layer of the module, does not support ranks without
            batches; the message says why.
        ValueError: ``joinables`` has no wrapped module, or one twice; or the algorithm does not
            support this ``divide_by_initial_world_size``.
        TypeError: ``joinables`` contains an object of another type.
        RuntimeError: a module is in such a context already, or was wrapped again in this one; or,
            with ``throw_on_early_termination``, ranks have different numbers of batches.
        CommunicationError: ranks disagree, or one has failed or left the context by an exception.

    >>> import bagua_ref
    >>> bagua_ref.init_process_group()
    >>> model = torch.nn.Linear(4, 2).with_bagua([], bagua_ref.algorithms.GradientAllReduceAlgorithm())
    >>> with bagua_ref.join([model]):
    ...     for batch in torch.ones(3 + bagua_ref.get_rank(), 1, 4):
    ...         model(batch).sum().backward()
    >>> bagua_ref.destroy_process_group()

    Source: ``torch.distributed.algorithms.Join``.
    """
    if not enable:
        yield
        return
    trainings, others = _sorted(joinables)
    if any(training.shards for training in trainings):
        raise NotImplementedError(
            "what fully_shard (FSDP2) has sharded cannot train inside join(): its forward passes"
            " need all ranks of the node. Give all ranks equally many batches"
        )
    options = bool(divide_by_initial_world_size), bool(throw_on_early_termination)
    joinings = [
        Joining(training, *options, others)
        for training in trainings
        if _waits(training, all_count=options[0])
    ]
    for joining in joinings:
        joining.training.rounds.joining = joining
        joining.shares_others = joining is joinings[0]
    try:
        try:
            yield
        except RuntimeError:
            if any(joining.ended_early for joining in joinings):
                _follow(joinings)
            raise
        _follow(joinings)
    except BaseException as error:
        for joining in joinings:
            if joining.under_way:
                joining.end()
                why = f"an exception left join() there: {type(error).__name__}: {error}"
                joining.training.rounds.abort(why)
        raise
    for joining in joinings:
        joining.raise_if_early()


def _waits(training: ModuleTraining, all_count: bool) -> bool:
    """Return whether ranks wait for each other, so that ranks without batches must take part in the
    others' rounds.

    Raises:
        NotImplementedError: the algorithm cannot train inside `join`.
        ValueError: the algorithm does not support this value of ``all_count``, the argument
            ``divide_by_initial_world_size``.
    """
    algorithm = training.bagua_algorithm
    traits = algorithm.traits
    how, divides = traits.without_batch, f"divide_by_initial_world_size={all_count}"
    if isinstance(how, str):
        raise NotImplementedError(f"{type(algorithm).__name__} cannot train inside join(): {how}")
    if not {*training.bagua_optimizers}.issuperset(training.algorithm.optimizers()):
        raise NotImplementedError(
            f"{algorithm.name} can train inside join() only if its optimizer was passed to"
            " with_bagua(), so that ranks that run out of batches can take over its state"
        )
    if how is WithoutBatch.WEIGHTS and not all_count:
        raise ValueError(
            f"{divides}: {algorithm.name} averages weights, and ranks without batches have weights,"
            " too, so that they count; use join(divide_by_initial_world_size=True)"
        )
    if traits.averages and algorithm.delivers_errors and not all_count:
        raise ValueError(
            f"{divides}: {algorithm.name} also applies what ranks have left out in earlier rounds,"
            " those without batches included; use join(divide_by_initial_world_size=True), or train"
            " without memory"
        )
    if how is WithoutBatch.ABSENT and all_count:
        raise ValueError(
            f"{divides}: {algorithm.name} averages momenta after its warm-up, and a rank without"
            " batches has none; use join(divide_by_initial_world_size=False), which divides by the"
            " number of ranks that have batches"
        )
    return how is not WithoutBatch.NO_ROUNDS


def _follow(joinings: Sequence[Joining]) -> None:
    """Run `Joining.follow` for all active joinings; several run concurrently, each on its own
    thread.
    """
    joinings = [joining for joining in joinings if joining.under_way]
    if len(joinings) < 2:
        for joining in joinings:
            joining.follow()
        return
    errors: list[BaseException] = []

    def follow(joining: Joining) -> None:
        try:
            joining.follow()
        except BaseException as error:
            errors.append(error)

    world = joinings[0].training.world
    threads = [world.spawn(partial(follow, joining), "bagua_ref join") for joining in joinings]
    # the threads' own waits are interrupted
    with world.waiting_for_own_thread(lambda reason: None):
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


class Joining:
    """State of one module in a `join` context.

    Args:
        training: the module's training.
        all_count: whether means are over all ranks, not only over those that have batches.
        throws: whether training ends on all ranks as soon as one has no more batches.
        others: the joinables that are not modules.

    Attributes:
        number: number from 1 that encodes the options, which must be equal on all ranks.
        ended_early: why training has ended, if a rank had no more batches and ``throws``; else "".
        shares_others: whether ranks also load the state of ``others`` at the end.

    Raises:
        NotImplementedError: a layer of the module communicates by itself.
        RuntimeError: the module is in another `join` context.
    """

    shares_others = False

    def __init__(
        self, training: ModuleTraining, all_count: bool, throws: bool, others: Sequence[Any]
    ) -> None:
        self.training, self.others = training, others
        self._all_count, self._throws = all_count, throws
        self.number = 1 + 2 * all_count + throws
        self._shadowed = 0
        """Number of rounds in which this rank took part without a batch."""
        self.ended_early = ""
        for name, layer in training.module.named_modules():
            if isinstance(layer, torch.nn.SyncBatchNorm):
                raise NotImplementedError(
                    f"layer {name!r} is a SyncBatchNorm, which communicates in each forward pass,"
                    " and a rank without batches runs none. Use BatchNorm inside join()"
                )
        if training.rounds.joining is not None:
            raise RuntimeError(
                f"module {training.bagua_module_name!r} is inside join() already; leave that"
                " context first"
            )

    @property
    def under_way(self) -> bool:
        """Whether the joining is active: begun and not ended."""
        return self.training.rounds.joining is self

    def end(self) -> None:
        """Stop announcing in rounds whether this rank has batches."""
        self.training.rounds.joining, self.training.has_batches = None, True

    def round_ended(self, announced: Announced) -> None:
        """Handle the end of a round in which this rank had a batch.

        Raises:
            RuntimeError: some rank had no batch, and ``throws``.
        """
        if not announced.joined:
            return
        training = self.training
        if training.bagua_algorithm.traits.averages and not self._all_count:
            share = (len(announced.active) + len(announced.joined)) / len(announced.active)
            for bucket in training.bagua_buckets:
                torch._foreach_mul_(
                    [tensor.detach() for tensor in bucket.effective_tensors()], share
                )
        self._end_early(announced)
        self.raise_if_early()

    def follow(self) -> None:
        """Take part in the rounds of ranks with batches until there are none; then load the state
        that this rank has missed.
        """
        training = self.training
        if context_of(training.module) is not training:
            raise RuntimeError(
                f"module {training.bagua_module_name!r} was wrapped again or resynchronized inside"
                " join(); leave the context first"
            )
        training.has_batches = False
        while (announced := self._shadow()).active:
            if announced.act == BUFFERS:
                training.buffers.broadcast(announced.active[0], training.engine.meter)
            elif announced.act == PLAN:
                training.reset()
            elif announced.act == ROUND:
                self._shadowed += 1
                self._end_early(announced)
                if self.ended_early:
                    return
        self._take_over()

    def _shadow(self) -> Announced:
        """Announce that this rank has no more batches; take part in the round that the other ranks
        begin, if any.
        """
        training, rounds = self.training, self.training.rounds
        engine, traits = training.engine, training.bagua_algorithm.traits
        facts = rounds.facts(JOINED)
        no_digest = Fact(DIGEST, UNSAID) if traits.same_replicas else None

        def begin() -> Comparison:
            comparison = rounds.compare(facts)
            if Announced.of(comparison).act == ROUND and not traits.alike_rounds:
                comparison.check(lambda: no_digest)
            return comparison

        with rounds.aborting():
            comparison = engine.run(begin)
            announced = Announced.of(comparison)
            if announced.act != ROUND:
                return announced
            if rounds.unused is not None and announced.facts[-1]:
                rounds.unused.agree_without_batch()
            for fact, value in zip(facts[COMMON:], announced.facts, strict=True):
                if fact.adopt is not None:
                    fact.adopt(value)
            if training.bagua_algorithm.need_reset():
                training.reset()
            if traits.without_batch is WithoutBatch.WEIGHTS:
                engine.run_round(training.bagua_buckets, is_open=True)
                engine.wait_pending_comm_ops()
            else:
                engine.run(lambda: [*map(BaguaBucket.shadow, training.bagua_buckets)])
            training._post_backward_hook()
            if traits.alike_rounds:
                engine.run(lambda: comparison.check(lambda: no_digest))
        return announced

    def _take_over(self) -> None:
        """End the joining; if ranks had no batch in some rounds, load the state of the rank with
        the fewest such rounds on all ranks. Collective.
        """
        training, algorithm = self.training, self.training.bagua_algorithm
        comm = training.process_group.get_global_communicator()
        shadowed = [number for (number,) in comm.exchange_ints([self._shadowed])()]
        source = shadowed.index(min(shadowed))
        if training.will_broadcast_buffers():
            training.buffers.broadcast(source, training.engine.meter)
        if any(shadowed):
            training.rounds.steps.clear()  # those of ranks that had batches
            if algorithm.traits.same_replicas:
                named = training.module.named_parameters()
                ignored = training.parameters_to_ignore
                parameters = [parameter for name, parameter in named if name not in ignored]
                share_state(parameters, training.bagua_optimizers, comm, source)
            counters = comm.broadcast_object(algorithm.counters(), source)
            if comm.rank() != source:
                algorithm.load_counters(counters)
            for other in self.others if self.shares_others else ():
                state = share_object(other.state_dict(), comm, source)
                if comm.rank() != source:
                    other.load_state_dict(state)
        self.end()

    def raise_if_early(self) -> None:
        """Raise RuntimeError if training has ended early."""
        if self.ended_early:
            raise RuntimeError(self.ended_early)

    def _end_early(self, announced: Announced) -> None:
        """End training after a round in which ranks had no batch, if ``throws``."""
        if self._throws:
            ranks = [self.training.process_group.ranks[rank] for rank in announced.joined]
            self.ended_early = (
                f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} no more batches,"
                " which ends training on all ranks, as join(throw_on_early_termination=True) asks"
                " for"
            )
            self._take_over()


def _sorted(joinables: Sequence[Any]) -> tuple[list[ModuleTraining], list[Any]]:
    """Split ``joinables`` into the trainings of modules, and other objects."""
    if not isinstance(joinables, (list, tuple)):
        raise TypeError(
            f"joinables={joinables!r} must be a list of wrapped modules, and of objects with a"
            " state"
        )
    trainings: list[ModuleTraining] = []
    others: list[Any] = []
    for joinable in joinables:
        if isinstance(joinable, torch.nn.Module):
            inside = getattr(joinable, "module", None)
            training = context_of(joinable) or (
                context_of(inside) if isinstance(inside, torch.nn.Module) else None
            )
            if training is None:
                raise ValueError(
                    f"joinables hold a {type(joinable).__name__} that is not wrapped; call"
                    " with_bagua() first"
                )
            if training in trainings:
                raise ValueError(f"joinables hold module {training.bagua_module_name!r} twice")
            trainings.append(training)
        elif hasattr(joinable, "state_dict") and hasattr(joinable, "load_state_dict"):
            others.append(joinable)
        else:
            raise TypeError(
                f"joinables hold {joinable!r}, which is neither a wrapped module nor an object with"
                " a state_dict()"
            )
    if not trainings:
        raise ValueError(f"joinables={joinables!r} must hold at least one wrapped module")
    return trainings, others

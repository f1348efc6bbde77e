"""One module's rounds of communication, which begin only if all ranks agree, and end for good when one fails."""

from __future__ import annotations

import weakref
import zlib
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.agreement import Agreement, Fact
from bagua_ref.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bagua_ref.algorithms.base import TrainingContext

__all__ = ["AgreedRounds"]


class AgreedRounds:
    """What the ranks of one training compare before each round, and the failure after which no round begins any more.

    Args:
        training: the training; held weakly.

    Attributes:
        broken: why no round can begin; "" while all is well.
        steps_of_optimizers: the steps that each optimizer has taken.
        backward_passes: those begun outside `no_sync`.
    """

    def __init__(self, training: TrainingContext) -> None:
        self._training, self._group = weakref.ref(training), training.process_group
        self.broken = ""
        self._loaded = False
        """Whether a state was loaded since the last round."""
        self.steps_of_optimizers = [0] * len(training.bagua_optimizers)
        self.backward_passes = 0
        self._plan = 0
        comm = self._group.get_global_communicator()
        self._agreement = Agreement(comm, self._group.ranks, training.bagua_module_name)
        self._alone = comm.nranks() == 1
        if not self._alone:
            training._bagua_backend.before_round = self._open

    def plan(self) -> None:
        """Note the buckets, which must be equal on all ranks."""
        buckets = self._trained.bagua_buckets
        described = [(b.name, str(b.dtype), [list(t.shape) for t in b.tensors]) for b in buckets]
        self._plan = zlib.crc32(repr(described).encode())

    def _open(self) -> Callable[[], None]:
        """Return the comparison for the round that begins now."""
        training = self._trained
        algorithm, optimizers = training.bagua_algorithm, training.bagua_optimizers
        facts = [Fact("{has} buckets of plan {value}", self._plan), *algorithm.facts()]
        if algorithm.steps_together:
            several = len(optimizers) > 1
            for place, (optimizer, steps) in enumerate(zip(optimizers, self.steps_of_optimizers, strict=True)):
                which = f" of optimizer {place}, {type(optimizer).__name__}" if several else ""
                facts.append(Fact(f"{{has}} taken {{value}} optimizer steps{which}", steps))
        loaded, self._loaded = self._loaded, False
        return partial(self._agreement.check, facts, loaded, self._digest)

    def note_load(self, *_: Any) -> None:
        """Note that a state was loaded: a hook of the module and its optimizers."""
        self._loaded = True

    def _digest(self) -> Fact | None:
        """Return a checksum of weights and optimizer state, if they are equal on all ranks."""
        training = self._trained
        if not training.bagua_algorithm.replicas_are_equal:
            return None
        checksum = 0
        for _, parameter in training.bagua_build_params():
            states = [optimizer.state[parameter] for optimizer in training.bagua_optimizers if parameter in optimizer.state]
            tensors = [parameter, *(value for state in states for _, value in sorted(state.items(), key=lambda item: str(item[0])))]
            for tensor in tensors:
                if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
                    continue  # a number, or a tensor whose bytes only its library knows
                data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                checksum = zlib.crc32(data.data, checksum)
        return Fact("{has} weights and optimizer state of checksum {value} after a state was loaded", checksum)

    def give_up(self, why: str) -> None:
        """Let no round begin any more, here and on the other ranks; a training alone can go on."""
        if not self.broken and not self._alone:
            self.broken = why
            self._group.abort(why)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Give up if communication fails in this context."""
        try:
            yield
        except CommunicationError as error:
            self.give_up(str(error))
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

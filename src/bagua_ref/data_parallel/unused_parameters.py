"""Parameters that no rank's backward passes reached: the ranks agree on them, and their gradients stay as they were (S2.5)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua_ref.algorithms.base import TrainingContext
from bagua_ref.communicators.base import Communicator
from bagua_ref.errors import CommunicationError
from bagua_ref.types import Group

__all__ = ["UnusedParameters"]

_BITS = 63
"""Of each number of a note."""


class UnusedParameters:
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

    @property
    def _trained(self) -> TrainingContext:
        training = self._training()
        assert training is not None, "it is under way"
        return training


def _nothing() -> None:
    """Do nothing."""

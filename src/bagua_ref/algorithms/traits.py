"""Traits of an algorithm in a phase, and the schedule of its rounds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bagua_ref.scheduling.engine import Fact

__all__ = ["Rounds", "Traits", "WithoutBatch"]


class WithoutBatch(Enum):
    """The contribution of a rank without batches to the others' rounds in `bagua_ref.join`."""

    ZEROS = "zeros, which may count in the mean"
    ABSENT = "zeros, which the mean over the others leaves out"
    WEIGHTS = "its weights, which go on being averaged"
    NO_ROUNDS = "nothing: ranks do not wait for each other"


@dataclass(frozen=True)
class Traits:
    """Properties of an algorithm in one of its phases that determine how training handles it.

    Attributes:
        averages: the buckets' result is the mean over ranks of their contributions, not the sum.
        same_forwards: all ranks run the same training forward passes, so that buffers can be
            broadcast before them.
        same_steps: all ranks take the same optimizer steps.
        same_replicas: weights and optimizer state are equal on all ranks; if so, they are compared
            after a state was loaded.
        alike_rounds: every round sends the same messages and changes nothing but gradients. Then
            buckets run while the ranks still compare their next actions, and waiting for the round
            raises if they differ; otherwise the first bucket waits for the comparison.
        in_node: whether rounds communicate inside nodes only, so that nodes need not compare; None:
            no round of any phase does.
        steps_follow_backward: optimizer steps without a preceding backward pass of the module are
            not counted.
        own_optimizers: only optimizers that were passed when wrapping, or are among the algorithm's
            options, may step the parameters.
        without_batch: contribution of a rank without batches in `bagua_ref.join`, or a text: the
            reason why the algorithm cannot train there.
    """

    averages: bool = True
    same_forwards: bool = True
    same_steps: bool = True
    same_replicas: bool = False
    alike_rounds: bool = False
    in_node: bool | None = None
    steps_follow_backward: bool = False
    own_optimizers: bool = False
    without_batch: WithoutBatch | str = (
        "its Traits.without_batch does not say what a rank without batches contributes. Set it, or"
        " use gradient_allreduce, bytegrad, decentralized or low_precision_decentralized"
    )


@dataclass(frozen=True)
class Rounds:
    """Schedule of a training: its warm-up steps, and the steps that a round of communication
    follows.

    Steps t are counted from 1. A round follows if t > warmup and ``(t - warmup - offset) mod period
    = 0``.

    Args:
        warmup: number of steps of the warm-up.
        period: number of steps from one round to the next.
        offset: from 0 to period - 1. With 0, step ``period`` after the warm-up is the first with a
            round; with 1, the first step is.
        phase: the name of the phase after the warm-up, for messages.

    >>> [Rounds(warmup=1, period=2).kind(step) for step in range(1, 6)]
    ['warm-up', 'local', 'round', 'local', 'round']
    """

    warmup: int = 0
    period: int = 1
    offset: int = 0
    phase: str = "the local phase"

    def past_warmup(self, taken: int) -> bool:
        """Return whether the step after the first ``taken`` steps is past the warm-up."""
        return taken >= self.warmup

    def kind(self, step: int) -> str:
        """Return the kind of a step: "warm-up", "round" if a round follows it, else "local"."""
        if step <= self.warmup:
            return "warm-up"
        return "local" if (step - self.warmup - self.offset) % self.period else "round"

    def fact(self, past_warmup: bool) -> Fact:
        """Return the agreement field of the phase, which must be equal on all ranks."""
        return Fact("{is} in {value}", int(past_warmup), ("the warm-up", self.phase))

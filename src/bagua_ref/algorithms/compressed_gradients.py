"""The base of powersgd and topk: exact means in the warm-up, then rounds that keep what was left
out (S10, S11.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms.base import AlgorithmImpl, TrainingContext
from bagua_ref.algorithms.registry import check_join_with_memory
from bagua_ref.algorithms.state import TensorStore, check_saved_here
from bagua_ref.scheduling.engine import Fact
from bagua_ref.types import Group

__all__ = ["CompressedGradientsImpl"]


class CompressedGradientsImpl(AlgorithmImpl):
    """Gradients are averaged as by gradient_allreduce while t <= warmup_steps, and compressed after
    that.

    t counts the steps of the last optimizer from 1; a step that no backward pass preceded does not
    count. A round is a backward pass that communicates.

    Args:
        process_group: the group to communicate in.
        options: of the algorithm; have ``warmup_steps``, the last step with exact means.
        has_memory: whether ranks keep what compression leaves out.

    Attributes:
        rounds: compressed rounds so far.
        memories: what compression has left out on this rank.
        factors: what the last round has left for the next one, equal on all ranks.
    """

    steps_follow_backward = True
    replicas_are_equal = True  # all ranks step with the same gradients
    entries = frozenset(
        {"version", "rank", "world_size", "steps_of_optimizers", "algorithm", "factors"}
    )
    rank_state = frozenset({"memories"})
    counted = ("rounds",)

    def __init__(self, process_group: Group, options: Any, has_memory: bool) -> None:
        super().__init__(process_group)
        self.warmup_steps = options.warmup_steps
        self.has_memory = self.delivers_error_memory = has_memory
        self.rounds = 0
        self.memories, self.factors = TensorStore("memories"), TensorStore("factors")
        self.stores = {
            "factors": self.factors,
            **({"memories": self.memories} if has_memory else {}),
        }
        self._shadowed: bool | None = None
        """While this rank has no batch: whether the other ranks' round is compressed."""

    @property
    def compressing(self) -> bool:
        """Whether the round that begins, or is under way, is compressed."""
        if self._shadowed is not None:
            return self._shadowed
        return not self.warmup_steps or self.context.steps_of_optimizers[-1] >= self.warmup_steps

    def round_number(self) -> int | None:
        """Return the number of compressed rounds before this one, None if it is not compressed."""
        return self.rounds if self.compressing else None

    def replicas(self) -> list[tuple[Tensor, list[torch.optim.Optimizer]]]:
        """Return the weights and the factors."""
        return [*super().replicas(), *((factor, []) for factor in self.factors.written())]

    def facts(self) -> list[Fact]:
        """Return the phase, and the number of compressed rounds, which random columns depend on."""
        return [
            Fact("{is} in {value}", int(self.compressing), ("the warm-up", "the compressed phase")),
            Fact("{has} finished {value} compressed rounds", self.rounds),
        ]

    def why_refused(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the reason to refuse other optimizers in the warm-up, which would never end; ""
        after it.
        """
        return (
            ""
            if self.compressing
            else f"{self.name} counts the steps of those to tell when its warm-up is over"
        )

    def check_join(self, divide_by_initial_world_size: bool) -> bool:
        """Return True: ranks without batches contribute zero gradients, and what they have left out
        before.

        Raises:
            ValueError: there is a memory, and divide_by_initial_world_size=False.
        """
        if self.has_memory:
            check_join_with_memory(self.name, divide_by_initial_world_size)
        return True

    def shadow(self, facts: Sequence[int]) -> None:
        """Contribute zeros, and this rank's memory, in the phase in which the other ranks are."""
        self._shadowed, self.rounds = bool(facts[0]), facts[1]
        try:
            super().shadow(facts)
            self.rounds += self._shadowed
        finally:
            self._shadowed = None

    def init_post_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[], object]:
        """Return a hook that waits for communication, and counts the round."""
        wait = super().init_post_backward_hook(bagua_ddp)

        def hook() -> None:
            wait()
            self.rounds += self.compressing

        return hook

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the factors, which are equal on all ranks, and this rank's
        memories.
        """
        return {**super().state_dict(), "algorithm": self.name}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` can load ``state``."""
        super().check_state(state)
        if self.has_memory and state.get("memories"):
            check_saved_here(state, self.process_group)

    def load_checked(self, state: dict[str, Any]) -> None:
        """Load the factors and memories; the next round compares what must be equal on all
        ranks.
        """
        super().load_checked(state)
        self.context.note_load()

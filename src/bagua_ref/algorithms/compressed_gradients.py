"""The base of powersgd and topk: exact means in the warm-up, then rounds that keep what was left out (S10, S11.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms.base import TrainingContext
from bagua_ref.algorithms.error_memories import check_join_with_memory
from bagua_ref.algorithms.named_tensors import NamedTensors
from bagua_ref.algorithms.versioned_state import VersionedStateImpl, check_saved_here
from bagua_ref.rounds import Fact
from bagua_ref.types import Group

__all__ = ["CompressedGradientsImpl"]


class CompressedGradientsImpl(VersionedStateImpl):
    """Gradients are averaged as by gradient_allreduce while t <= warmup_steps, and compressed after that.

    t counts the steps of the last optimizer from 1; a step that no backward pass preceded does not count. A round is a backward
    pass that communicates.

    Args:
        process_group: the group to communicate in.
        warmup_steps: the last step with exact means.
        has_memory: whether ranks keep what compression leaves out.

    Attributes:
        rounds: compressed rounds so far.
        memories: what compression has left out on this rank.
        factors: what the last round has left for the next one, equal on all ranks.
    """

    steps_follow_backward = True
    rank_state = frozenset({"memories"})

    def __init__(self, process_group: Group, warmup_steps: int, has_memory: bool) -> None:
        super().__init__(process_group)
        self.warmup_steps = warmup_steps
        self.has_memory = self.delivers_error_memory = has_memory
        self.rounds = 0
        self.memories, self.factors = NamedTensors("memories"), NamedTensors("factors")
        self._shadowed: bool | None = None
        """While this rank has no batch: whether the other ranks' round is compressed."""

    @property
    def compressing(self) -> bool:
        """Whether the round that begins, or is under way, is compressed."""
        if self._shadowed is not None:
            return self._shadowed
        return not self.warmup_steps or self.context.steps_of_optimizers[-1] >= self.warmup_steps

    def round_number(self) -> int | None:
        """Return how many compressed rounds came before this one, None if it is not compressed."""
        return self.rounds if self.compressing else None

    @property
    def replicas_are_equal(self) -> bool:
        """True: all ranks step with the same gradients."""
        return True

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
        """Return why another optimizer must not step in the warm-up, which would never end; "" after it."""
        return "" if self.compressing else f"{self.name} counts the steps of those to tell when its warm-up is over"

    def check_join(self, divide_by_initial_world_size: bool) -> bool:
        """Return True: ranks without batches contribute zero gradients, and what they have left out before.

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
        """Return the counters, what is equal on all ranks, and this rank's memories."""
        memories = {"memories": self.memories.state()} if self.has_memory else {}
        return {**super().state_dict(), "algorithm": self.name, "factors": self.factors.state(), **memories}

    def load_state_dict(self, state: dict[str, Any], drop_local: bool = False) -> None:
        """Continue from ``state``; call it on every rank, after wrapping and after loading the state of model and optimizers.

        It does not communicate; the next round compares what must be equal on all ranks.

        Args:
            state: what `state_dict` returned on the same rank of as many ranks.
            drop_local: take the state of any rank of any number of ranks, and start with memories of zero.

        Raises:
            ValueError: it is a state of another algorithm, version, model or, with memories, rank; nothing has been loaded.
        """
        if drop_local or not self.has_memory:
            state = {name: value for name, value in state.items() if name != "memories"}
        super().load_state_dict(state)
        self.factors.load(state["factors"])
        self.memories.load(state.get("memories", {}))

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` can load ``state``."""
        super().check_state(state)
        missing = sorted({"algorithm", "factors", "rank", "world_size"} - state.keys())
        if missing:
            raise ValueError(f"state is not one of {self.name}: it lacks {', '.join(missing)}")
        if state["algorithm"] != self.name:
            raise ValueError(f"state was saved by {state['algorithm']}, and this training uses {self.name}")
        self.factors.check(state["factors"])
        memories = state.get("memories", {})
        if self.has_memory and memories != {}:
            check_saved_here(state, self.process_group)
            self.memories.check(memories)

    def counters(self) -> dict[str, Any]:
        """Return the steps and the compressed rounds so far."""
        return {**super().counters(), "rounds": self.rounds}

    def load_counters(self, state: dict[str, Any]) -> None:
        """Continue from the numbers that `counters` returned."""
        super().load_counters(state)
        self.rounds = state["rounds"]

"""Base of powersgd, topk and demo: exact means in the warm-up, then compressed rounds with error
feedback (S10, S11.2, S15.6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl, TrainingContext
from bagua_ref.algorithms.state import TensorStore
from bagua_ref.algorithms.traits import Rounds, Traits, WithoutBatch
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.storage import registration
from bagua_ref.scheduling.engine import Fact
from bagua_ref.types import Group


class CompressedGradients(Algorithm):
    """Options of an algorithm that compresses gradients after a warm-up.

    Attributes:
        warmup_steps: number of first steps, with exact means.
        has_memory: whether ranks keep compression errors for the next round.
    """

    takes_shards = True
    takes_float64 = False
    warmup_steps: int
    has_memory = True

    @property
    def counts_steps(self) -> bool:  # type: ignore[override]
        """Whether the algorithm counts optimizer steps: only with a warm-up."""
        return self.warmup_steps > 0


class CompressedGradientsImpl(AlgorithmImpl):
    """Gradient averaging, exact as in gradient_allreduce while t <= warmup_steps and compressed
    after that.

    t counts the steps of the last optimizer from 1; a step that no backward pass preceded does not
    count. A round is a backward pass that communicates.

    Args:
        process_group: the group to communicate in.
        options: the algorithm object, which holds the options.

    Attributes:
        rounds: number of compressed rounds so far.
        memories: residuals of compression on this rank.
        factors: low-rank factors of the last round, used by the next one; equal on all ranks.
    """

    # all ranks step with the same gradients; steps are counted to tell when the warm-up is over
    _compressed = Traits(
        same_replicas=True, steps_follow_backward=True, without_batch=WithoutBatch.ZEROS
    )
    phases = (replace(_compressed, own_optimizers=True), _compressed)
    entries = frozenset({"factors"})
    rank_state = frozenset({"memories"})
    counted = ("rounds",)

    def __init__(self, process_group: Group, **options: Any) -> None:
        super().__init__(process_group, self.algorithm(**options))
        self.warmup = Rounds(self.options.warmup_steps, phase="the compressed phase")
        self.rounds = 0
        self.memories, self.factors = TensorStore("memories"), TensorStore("factors")
        self.stores = {"factors": self.factors}
        if self.options.has_memory:
            self.stores["memories"] = self.memories

    @property
    def compressing(self) -> bool:
        """Whether the current or next round is compressed."""
        return not self.warmup.warmup or self.warmup.past_warmup(
            self.context.steps_of_optimizers[-1]
        )

    @property
    def phase(self) -> int:
        """Phase index: 0 in the warm-up, 1 after it."""
        return int(self.compressing)

    def round_number(self) -> int | None:
        """Return the index of this round among the compressed rounds; None if it is not
        compressed.
        """
        return self.rounds if self.compressing else None

    def replicas(self) -> list[tuple[Tensor, list[torch.optim.Optimizer]]]:
        """Return the weights and, with low-rank compression, the factors."""
        return [*super().replicas(), *((factor, []) for _, factor in sorted(self.factors.items()))]

    def facts(self) -> list[Fact]:
        """Return the phase and the number of compressed rounds, which seeds random columns."""
        return [
            self.warmup.fact(self.compressing),
            Fact(
                "{has} finished {value} compressed rounds",
                self.rounds,
                adopt=partial(setattr, self, "rounds"),
            ),
        ]

    def memory_of(self, bucket: BaguaBucket) -> Callable[[], Tensor] | None:
        """Return a getter of the residuals of a bucket's gradients as one flat tensor; None without
        error memory.
        """
        if not self.options.has_memory:
            return None
        names = [registration(proxy).name for proxy in bucket.tensors]
        for name, layout in zip(names, bucket.layouts, strict=True):
            like = torch.empty((), dtype=torch.float32, device=bucket.device).expand(layout.shape)
            self.memories.expect(name, like, layout)
        return lambda: self.memories.flat(names)

    def init_post_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[], object]:
        """Return a hook that waits for communication and counts compressed rounds."""
        wait = super().init_post_backward_hook(bagua_ddp)

        def hook() -> None:
            wait()
            self.rounds += self.compressing

        return hook

"""Local SGD: every rank steps on its own gradients, and weights are averaged every ``period``
steps; the base of diloco (S9.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl, TrainingContext, nothing
from bagua_ref.algorithms.registry import check_whole, implements
from bagua_ref.algorithms.traits import Rounds, Traits
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.storage import register, registration
from bagua_ref.comm_ops import CentralizedFullPrecision
from bagua_ref.scheduling.engine import Fact
from bagua_ref.types import Group

__all__ = ["LocalSGDAlgorithm", "LocalSGDAlgorithmImpl"]

_KINDS = ("gradients", "weights")


@dataclass(frozen=True, eq=False)
class LocalSGDAlgorithm(Algorithm):
    """Local SGD: every rank trains on its own gradients; weights are averaged over ranks every
    ``period`` optimizer steps (S9.1).

    After step t > warmup_steps with ``(t - warmup_steps - offset) mod period = 0``: ``x <- mean of
    x over ranks``. Optimizer state and buffers stay local. Each rank sends ``2 (n-1)/n`` of the
    weights every ``period`` steps. The warm-up is `GradientAllReduceAlgorithm`, bit for bit.

    Args:
        period: steps from one averaging to the next, at least 1.
        warmup_steps: number of first steps, on averaged gradients.
        offset: from 0 to period - 1. With 0, step ``period`` of the local phase is the first to
            average; with 1, its first step.
        hierarchical: average gradients inside each node after each backward pass of the local
            phase, too (post-local SGD).

    Raises:
        ValueError: an argument is out of range; when wrapping: no optimizer was passed.
        TypeError: a number is not an int, or hierarchical is not a bool.

    >>> LocalSGDAlgorithm(period=8, warmup_steps=100)
    LocalSGDAlgorithm(period=8, warmup_steps=100, offset=0, hierarchical=False)

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
    Data", AISTATS 2017 (arXiv:1602.05629); Lin et al., "Don't Use Large Mini-Batches, Use Local
    SGD", ICLR 2020 (arXiv:1808.07217).
    """

    period: int
    warmup_steps: int = 0
    offset: int = 0
    hierarchical: bool = False

    takes_shards = counts_steps = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("period", self.period, 1)
        check_whole("warmup_steps", self.warmup_steps, 0)
        check_whole("offset", self.offset, 0)
        if self.offset >= self.period:
            raise ValueError(
                f"offset={self.offset} must be from 0 to {self.period - 1}, less than"
                f" period={self.period}"
            )

    def rounds(self) -> Rounds:
        """Return the schedule of the steps after which weights are averaged."""
        return Rounds(self.warmup_steps, self.period, self.offset)


class LocalUpdatesImpl(AlgorithmImpl):
    """Base of local_sgd and diloco: gradients are averaged as in gradient_allreduce while t <=
    warmup_steps; after that, subclasses communicate after optimizer steps.

    t counts the steps of the last optimizer from 1; a step that no backward pass preceded does not
    count.

    Args:
        process_group: the group to communicate in.
        options: the algorithm object, whose ``rounds()`` is the schedule of the local phase.
    """

    # after the warm-up, buffers, weights and optimizers stay local
    phases = tuple(
        Traits(
            same_forwards=warmup,
            same_replicas=warmup,
            steps_follow_backward=True,
            own_optimizers=True,
            without_batch="a rank without batches would have no local steps. Give all ranks"
            " equally many batches, or use gradient_allreduce, bytegrad or decentralized",
        )
        for warmup in (True, False)
    )

    def __init__(self, process_group: Group, **options: Any) -> None:
        super().__init__(process_group, self.algorithm(**options))
        self.rounds = self.options.rounds()
        self._past_warmup: bool | None = None
        """Whether the current buckets are those of the local phase; None before there are any."""
        self._drifts: dict[int, Sequence[Tensor]] = {}
        """For each exchanged part of the model, the norms of the difference between local weights
        and result.
        """

    @property
    def step(self) -> int:
        """Number of optimizer steps taken, which is t of the last step."""
        return self.context.steps_of_optimizers[-1]

    @property
    def phase(self) -> int:
        """Phase index: 0 in the warm-up, 1 after it."""
        return int(bool(self._past_warmup))

    def facts(self) -> list[Fact]:
        """Return the phase, and the number of backward passes, which differs if a rank skips
        steps.
        """
        passes = self.passes if self._past_warmup else 0
        return [
            self.rounds.fact(bool(self._past_warmup)),
            Fact("{has} run {value} backward passes since the last round", passes),
        ]

    def need_reset(self) -> bool:
        """Return whether the buckets belong to another phase: once after the warm-up, or after
        loading a checkpoint.
        """
        return self._past_warmup is not self.rounds.past_warmup(self.step)

    def init_tensors(self, bagua_ddp: TrainingContext) -> list[Tensor]:
        """Return the gradients, last layer first."""
        self._past_warmup = self.rounds.past_warmup(self.step)
        return super().init_tensors(bagua_ddp)

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        """Return buckets of gradients in the warm-up; none after it."""
        return [] if self._past_warmup else super().tensors_to_buckets(tensors, do_flatten)

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append gradient averaging (S3.1)."""
        bucket.append_centralized_synchronous_op(group=self.process_group)

    def init_backward_hook(
        self, bagua_ddp: TrainingContext
    ) -> Callable[[str, torch.nn.Parameter], object]:
        """Mark gradients ready in the warm-up only."""
        if self._past_warmup:
            return nothing
        mark = super().init_backward_hook(bagua_ddp)
        # After the last optimizer's step w, another optimizer may still wait for a backward pass,
        # which then belongs to step w + 1.
        return lambda name, parameter: (
            None if self.rounds.past_warmup(self.step) else mark(name, parameter)
        )

    def init_post_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[], object]:
        """Wait for the gradients in the warm-up; return a no-op after it, since fragments in flight
        must not be waited for.
        """
        return nothing if self._past_warmup else super().init_post_backward_hook(bagua_ddp)

    def init_post_optimizer_step_hook(
        self, bagua_ddp: TrainingContext
    ) -> Callable[[torch.optim.Optimizer], object]:
        """Call `after_local_step` after each step of the last optimizer in the local phase."""
        return lambda optimizer: self._after_step(optimizer, communicates=True)

    def end_unsynchronized_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `after_local_step` for a step that must not communicate."""
        self._after_step(optimizer, communicates=False)

    def _after_step(self, optimizer: torch.optim.Optimizer, communicates: bool) -> None:
        kind = self.rounds.kind(self.step)
        if optimizer is self.context.bagua_optimizers[-1] and kind != "warm-up":
            self.after_local_step(communicates and kind == "round")

    def after_local_step(self, has_round: bool) -> None:
        """Handle the end of an optimizer step in the local phase.

        Args:
            has_round: whether a round follows this step.
        """
        raise NotImplementedError

    def run_round(self, buckets: Sequence[BaguaBucket]) -> None:
        """Start a round that runs ``buckets`` in the background."""
        self.context.engine.run_round(buckets)
        self.passes = 0

    def metrics(self) -> dict[str, float | int]:
        """Return the drift: the L2 norm of the difference between local and shared weights at the
        last exchange, if any.
        """
        norms = [norm.item() for part in self._drifts.values() for norm in part]
        return {"drift": math.hypot(*norms)} if norms else {}


@implements(LocalSGDAlgorithm)
class LocalSGDAlgorithmImpl(LocalUpdatesImpl):
    """Implementation of `LocalSGDAlgorithm` for one module."""

    name = "local_sgd"

    def __init__(self, process_group: Group, **options: Any) -> None:
        super().__init__(process_group, **options)
        if self.options.hierarchical:
            warmup, local = self.phases
            self.phases = tuple(
                replace(traits, in_node=in_node)
                for traits, in_node in ((warmup, False), (local, True), (local, False))
            )
        self._parts: list[Sequence[Tensor]] = []
        """The parameters, in parts of about the size of a bucket."""
        self._averaging_weights = False

    @property
    def _averages_in_nodes(self) -> bool:
        """Whether gradients are averaged inside nodes in the current phase."""
        return self.options.hierarchical and bool(self._past_warmup)

    @property
    def phase(self) -> int:
        """Phase index: 0 in the warm-up, 1 after it; 2 in rounds that average weights if the other
        rounds stay inside nodes.
        """
        return super().phase + (self._averages_in_nodes and self._averaging_weights)

    def facts(self) -> list[Fact]:
        """Return, in addition, the kind of the round: gradients or weights."""
        kind = int(self._averaging_weights)
        return [*super().facts(), Fact("{is} about to average {value}", kind, _KINDS)]

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        """Return buckets of gradients in phases that average gradients; none in others."""
        self._parts = list(tensors)
        if self._averages_in_nodes:
            return AlgorithmImpl.tensors_to_buckets(self, tensors, do_flatten)
        return super().tensors_to_buckets(tensors, do_flatten)

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append gradient averaging (S3.1), after the warm-up among the ranks of the node."""
        if not self._averages_in_nodes:
            super().init_operations(bagua_ddp, bucket)
            return
        node = self.process_group.get_intra_node_communicator()
        bucket.append_op(
            CentralizedFullPrecision(node, bucket.kernels, average=True), self.process_group
        )

    def init_backward_hook(
        self, bagua_ddp: TrainingContext
    ) -> Callable[[str, torch.nn.Parameter], object]:
        """Mark gradients ready in phases that average gradients."""
        return (
            bagua_ddp.engine.gradient_ready
            if self._averages_in_nodes
            else super().init_backward_hook(bagua_ddp)
        )

    def init_post_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[], object]:
        """Wait for the gradients in phases that average gradients."""
        return bagua_ddp.engine.wait_pending_comm_ops

    def after_local_step(self, has_round: bool) -> None:
        """Average the weights after a step that has a round."""
        if has_round:
            self.context.take_strides()  # they may have changed since the last forward pass
            self._averaging_weights = True
            try:
                self._average_weights()
            finally:
                self._averaging_weights = False

    def _average_weights(self) -> None:
        """Average copies of the weights, one part at a time: the weights keep their storage, and
        scratch memory is limited to a few buckets.
        """
        engine = self.context.engine
        for place, part in enumerate(self._parts):
            weights = [
                register(p.detach(), registration(p).name, registration(p).module_name)
                for p in part
            ]
            before = [weight.clone() for weight in weights]
            backend = self.context.kernel_backend
            bucket = BaguaBucket(weights, f"weights{place}", flatten=False, backend=backend)
            bucket.append_centralized_synchronous_op(group=self.process_group)
            self.run_round([bucket])
            engine.wait_pending_comm_ops()
            self._drifts[place] = norms_of(torch._foreach_sub(weights, before))


def norms_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor, on its device."""
    return [
        torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
        for tensor in tensors
    ]

"""Local SGD: every rank steps on its own gradients, and weights are averaged every ``period`` steps (S9.1)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bagua_ref.algorithms.base import Algorithm, TrainingContext
from bagua_ref.algorithms.local_updates import LocalUpdatesImpl, check_optimizers, check_whole, drift, norms_of
from bagua_ref.base.memory import Layout
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.tensor import BaguaTensor, registration
from bagua_ref.comm_ops import CentralizedFullPrecision
from bagua_ref.rounds import Fact
from bagua_ref.types import Group

__all__ = ["LocalSGDAlgorithm", "LocalSGDAlgorithmImpl"]


class _Averaged(BaguaBucket):
    """A bucket that notes how far its tensors are from what replaces them."""

    drift: Sequence[Tensor] = ()

    def copy_from_flat(self, flat: Tensor) -> None:
        """Copy ``flat`` into the tensors."""
        self.drift = norms_of(mean - x for mean, x in zip(self.views_of(flat), self.effective_tensors(), strict=True))
        super().copy_from_flat(flat)


class LocalSGDAlgorithmImpl(LocalUpdatesImpl):
    """`LocalSGDAlgorithm` at work on one module."""

    name = "local_sgd"
    kind_of_bucket = _Averaged

    def __init__(
        self, process_group: Group, period: int, warmup_steps: int = 0, offset: int = 0, hierarchical: bool = False
    ) -> None:
        super().__init__(process_group, warmup_steps)
        self.period, self.offset, self.hierarchical = period, offset, hierarchical
        self.agrees_in_nodes = hierarchical
        self._parts: list[Sequence[Tensor]] = []
        """The parameters in parts of about the size of a bucket."""
        self._averaging_weights = False
        self._drifts: dict[int, Sequence[Tensor]] = {}
        """For each part, the norms of what its weights differed from the mean when they were last averaged."""

    @property
    def _averages_in_nodes(self) -> bool:
        """Whether gradients are averaged inside nodes now."""
        return self.hierarchical and bool(self._past_warmup)

    @property
    def round_stays_in_node(self) -> bool:
        """Whether the round is one of gradients inside nodes."""
        return self._averages_in_nodes and not self._averaging_weights

    def facts(self) -> list[Fact]:
        """Return what a round averages, too, and the order of weights, which may have changed since the last forward pass."""
        weights = [str(Layout.of(weight)) for part in self._parts for weight in part] if self._averaging_weights else []
        return [
            *super().facts(),
            Fact("{is} about to average {value}", int(self._averaging_weights), ("gradients", "weights")),
            Fact("{has} weights with shapes and strides of checksum {value}", zlib.crc32(repr(weights).encode())),
        ]

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """Return the gradients' buckets where gradients are averaged."""
        self._parts = list(tensors)
        if self._averages_in_nodes:
            return [self.new_bucket(part, str(place), do_flatten, hierarchical=True) for place, part in enumerate(tensors)]
        return super().tensors_to_buckets(tensors, do_flatten)

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append S3.1, after a warm-up among the ranks of the node."""
        if not self._averages_in_nodes:
            super().init_operations(bagua_ddp, bucket)
            return
        node = self.process_group.get_intra_node_communicator()
        bucket.append_op(CentralizedFullPrecision(node, bucket.kernels, average=True), self.process_group)

    def init_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[str, torch.nn.Parameter], object]:
        """Mark gradients ready where they are averaged."""
        return bagua_ddp.engine.gradient_ready if self._averages_in_nodes else super().init_backward_hook(bagua_ddp)

    def init_post_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[], object]:
        """Wait for the gradients, if any are averaged."""
        return bagua_ddp.engine.wait_pending_comm_ops

    def after_local_step(self, local_step: int, communicates: bool) -> None:
        """Average the weights if the step is due."""
        if communicates and (local_step - self.offset) % self.period == 0:
            self._averaging_weights = True
            try:
                self._average_weights()
            finally:
                self._averaging_weights = False

    def _average_weights(self) -> None:
        """Average a copy of a part of the weights at a time: they stay where they are, and scratch is a bucket's size."""
        engine = self.context.engine
        for place, part in enumerate(self._parts):
            weights = [
                BaguaTensor.to_bagua_tensor(p, registration(p).name, registration(p).module_name)  # type: ignore[arg-type]
                for p in part
            ]
            options = {"period": self.period, "offset": self.offset, "hierarchical": self.hierarchical}
            bucket = self.new_bucket(weights, f"weights{place}", flatten=False, averages="weights", t=self.step, **options)
            bucket.append_centralized_synchronous_op(group=self.process_group)
            self.run_round([bucket])
            engine.wait_pending_comm_ops()
            assert isinstance(bucket, _Averaged)
            self._drifts[place] = bucket.drift

    def metrics(self) -> dict[str, float | int]:
        """Return the L2 norm of what the weights differed from their mean when they were last averaged."""
        return drift(self._drifts)


class LocalSGDAlgorithm(Algorithm):
    """Every rank trains on its own gradients; every ``period`` optimizer steps, weights become their mean over ranks (S9.1).

    After step t > warmup_steps with ``(t - warmup_steps - offset) mod period = 0``: ``x <- mean of x over ranks``. Optimizer state
    and buffers stay local. Each rank sends ``2 (n-1)/n`` of the weights every ``period`` steps. The warm-up is
    `GradientAllReduceAlgorithm`, bit for bit.

    Args:
        period: steps from one averaging to the next, at least 1.
        warmup_steps: steps on averaged gradients before that.
        offset: from 0 to period - 1. With 0, step ``period`` of the local phase is the first to average; with 1, its first step.
        hierarchical: average gradients inside each node after each backward pass of the local phase, too (post-local SGD).

    Raises:
        ValueError: an argument is out of range; on wrapping: no optimizer was passed.
        TypeError: an argument that is no int, or hierarchical that is no bool.

    >>> LocalSGDAlgorithm(period=8, warmup_steps=100)
    LocalSGDAlgorithm(period=8, warmup_steps=100, offset=0, hierarchical=False)

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017
    (arXiv:1602.05629); Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (arXiv:1808.07217).
    """

    takes_shards = True

    def __init__(self, period: int, warmup_steps: int = 0, offset: int = 0, hierarchical: bool = False) -> None:
        check_whole("period", period, 1)
        check_whole("warmup_steps", warmup_steps, 0)
        check_whole("offset", offset, 0)
        if offset >= period:
            raise ValueError(f"offset={offset} must be from 0 to {period - 1}, less than period={period}")
        if not isinstance(hierarchical, bool):
            raise TypeError(f"hierarchical={hierarchical!r} must be a bool")
        self.period, self.warmup_steps, self.offset, self.hierarchical = period, warmup_steps, offset, hierarchical

    def check(self, parameters: list[tuple[str, torch.nn.Parameter]], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse a training without optimizers, whose steps count."""
        check_optimizers("local_sgd", optimizers)

    def reify(self, process_group: Group) -> LocalSGDAlgorithmImpl:
        """Return the implementation for one module."""
        return LocalSGDAlgorithmImpl(process_group, **vars(self))

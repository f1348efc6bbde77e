"""The base of local_sgd and diloco: a warm-up on averaged gradients, then optimizer steps on local ones (S9)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bagua_ref.algorithms.base import TrainingContext
from bagua_ref.algorithms.versioned_state import VersionedStateImpl
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.rounds import Fact
from bagua_ref.types import Group

__all__ = ["LocalUpdatesImpl", "check_optimizers", "check_whole", "drift", "norms_of"]


class LocalUpdatesImpl(VersionedStateImpl):
    """Gradients are averaged as by gradient_allreduce while t <= warmup_steps; after that, subclasses communicate after steps.

    t counts the steps of the last optimizer from 1; a step that no backward pass preceded does not count.

    Args:
        process_group: the group to communicate in.
        warmup_steps: the last step with averaged gradients.
    """

    steps_follow_backward = True
    kind_of_bucket: ClassVar[type[BaguaBucket]] = BaguaBucket

    def __init__(self, process_group: Group, warmup_steps: int) -> None:
        super().__init__(process_group)
        self.warmup_steps = warmup_steps
        self._past_warmup: bool | None = None
        """Whether the buckets are those of the local phase; None before there are any."""
        self._passes_before = 0
        """Backward passes begun before the last round that `run_round` began."""

    @property
    def step(self) -> int:
        """The number of steps taken, which is t of the last one."""
        return self.context.steps_of_optimizers[-1]

    @property
    def ranks_in_step(self) -> bool:
        """Whether this is still the warm-up; buffers stay local after it."""
        return not self._past_warmup

    @property
    def replicas_are_equal(self) -> bool:
        """Whether this is still the warm-up."""
        return not self._past_warmup

    @property
    def begins_in_forward(self) -> bool:
        """True: the change of phase does."""
        return True

    def facts(self) -> list[Fact]:
        """Return the phase, and the backward passes, which tell that a rank skips steps."""
        passes = self.context.backward_passes - self._passes_before if self._past_warmup else 0
        return [
            Fact("{is} in {value}", int(self._past_warmup or False), ("the warm-up", "the local phase")),
            Fact("{has} run {value} backward passes since the last round", passes),
        ]

    def why_refused(self, optimizer: torch.optim.Optimizer) -> str:
        """Return why another optimizer must not step: its steps would not be counted."""
        return f"{self.name} counts the steps of those, and communicates after them"

    def need_reset(self) -> bool:
        """Return whether the phase is another than that of the buckets: once after the warm-up, or after loading a checkpoint."""
        return self._past_warmup is not (self.step >= self.warmup_steps)

    def init_tensors(self, bagua_ddp: TrainingContext) -> list[Tensor]:
        """Return the gradients, last layer first."""
        self._past_warmup = self.step >= self.warmup_steps
        return super().init_tensors(bagua_ddp)

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """Return the gradients' buckets in the warm-up; none after it."""
        return [] if self._past_warmup else super().tensors_to_buckets(tensors, do_flatten)

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append S3.1."""
        bucket.append_centralized_synchronous_op(group=self.process_group)

    def init_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[str, torch.nn.Parameter], object]:
        """Mark gradients ready in the warm-up only."""
        if self._past_warmup:
            return lambda name, parameter: None
        mark = super().init_backward_hook(bagua_ddp)
        # After the last optimizer's step w, another optimizer may still wait for a backward pass, which then belongs to step w + 1.
        return lambda name, parameter: mark(name, parameter) if self.step < self.warmup_steps else None

    def init_post_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[], object]:
        """Wait for the gradients in the warm-up; after it, nothing may wait for what is in flight."""
        return (lambda: None) if self._past_warmup else super().init_post_backward_hook(bagua_ddp)

    def init_post_optimizer_step_hook(self, bagua_ddp: TrainingContext) -> Callable[[torch.optim.Optimizer], object]:
        """Call `after_local_step` after the last optimizer's steps of the local phase."""
        return lambda optimizer: self._after_step(optimizer, communicates=True)

    def end_unsynchronized_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `after_local_step` for a step that must not communicate."""
        self._after_step(optimizer, communicates=False)

    def _after_step(self, optimizer: torch.optim.Optimizer, communicates: bool) -> None:
        if optimizer is self.context.bagua_optimizers[-1] and self.step > self.warmup_steps:
            self.after_local_step(self.step - self.warmup_steps, communicates)

    def after_local_step(self, local_step: int, communicates: bool) -> None:
        """Do what follows a step of the local phase.

        Args:
            local_step: the number of the step, from 1.
            communicates: whether communication may begin now.
        """
        raise NotImplementedError

    def run_round(self, buckets: Sequence[BaguaBucket]) -> None:
        """Begin a round that runs ``buckets`` in the background."""
        context = self.context
        context.engine.run_round(buckets)
        self._passes_before = context.backward_passes

    def new_bucket(self, tensors: Sequence[Tensor], name: str, flatten: bool, **about: Any) -> BaguaBucket:
        """Return a bucket for one round; ``about`` are options and information for recorders."""
        bucket = self.kind_of_bucket(tensors, name, flatten, backend=self.context.kernel_backend)
        bucket.about = {"algorithm": self.name, "warmup_steps": self.warmup_steps, **about}
        return bucket

    def load_counters(self, state: dict[str, Any]) -> None:
        """Continue from the numbers that `counters` returned."""
        super().load_counters(state)
        self._passes_before = self.context.backward_passes


def norms_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor, still on its device."""
    return [torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def drift(norms: Mapping[int, Sequence[Tensor]]) -> dict[str, float | int]:
    """Return the metric ``drift`` from the `norms_of` the model's parts; none before the first exchange."""
    return {"drift": math.hypot(*(norm.item() for part in norms.values() for norm in part))} if norms else {}


def check_whole(name: str, value: int, least: int) -> None:
    """Raise unless the argument ``name`` is an int from ``least``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be an int, {least} or more")
    if value < least:
        raise ValueError(f"{name}={value} must be {least} or more")


def check_optimizers(name: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise unless there are optimizers, whose steps count."""
    if not optimizers:
        raise ValueError(
            f"optimizers=[]: {name} counts the steps of the last optimizer; pass the module's optimizers to with_bagua"
        )

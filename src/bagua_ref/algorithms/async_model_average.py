"""Asynchronous model averaging: weights are averaged in the background while each rank trains at
its own speed (S5.6).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from bagua_ref.algorithms.async_rounds import AveragingThread, State, WeightLockHooks
from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl, TrainingContext, nothing
from bagua_ref.algorithms.registry import check_number, check_whole, implements
from bagua_ref.algorithms.traits import Rounds, Traits, WithoutBatch
from bagua_ref.base.memory import by_dtype_and_device
from bagua_ref.base.untrusted import check_form
from bagua_ref.base.utils import uncompiled
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.storage import register
from bagua_ref.groups.process_group import BaguaProcessGroup
from bagua_ref.types import Group

__all__ = ["AsyncModelAverageAlgorithm", "AsyncModelAverageAlgorithmImpl", "State"]


@dataclass(frozen=True, eq=False)
class AsyncModelAverageAlgorithm(Algorithm):
    """Asynchronous model averaging: weights are averaged in the background at time intervals while
    every rank trains at its own speed (S5.6, S3.6).

    Ranks need not take the same number of steps; call ``model.bagua_algorithm.abort(model)`` on
    every rank before evaluating. ``destroy_process_group()`` and the exit of the interpreter also
    call it, and wait for the other ranks.

    Args:
        peer_selection_mode: "all": the mean over all ranks.
        sync_interval_ms: milliseconds between the end of a round and the next; 0: no rounds.
        warmup_steps: number of first steps, which all-reduce gradients instead.

    Raises:
        ValueError: peer_selection_mode is not "all", or the interval or the number of steps is
            negative.
        TypeError: the interval is not a number, or the number of steps is not an int.

    Source: asynchronous model average of Bagua 0.9.
    """

    peer_selection_mode: str = "all"
    sync_interval_ms: float = 500
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.peer_selection_mode != "all":
            raise ValueError(f"peer_selection_mode={self.peer_selection_mode!r} must be 'all'")
        check_number("sync_interval_ms", self.sync_interval_ms, 0, math.inf)
        check_whole("warmup_steps", self.warmup_steps, 0)


@implements(AsyncModelAverageAlgorithm)
class AsyncModelAverageAlgorithmImpl(AlgorithmImpl):
    """Implementation of `AsyncModelAverageAlgorithm` for one module.

    The buckets of weights, their operations and the background thread exist from the start: a rank
    that aborts during warm-up must take part in the rounds of ranks that have finished theirs.
    """

    name = "async"
    # the warm-up, its end, and after it
    phases = (
        Traits(same_replicas=True, own_optimizers=True, without_batch=WithoutBatch.ZEROS),
        Traits(same_replicas=True, own_optimizers=True, without_batch=WithoutBatch.NO_ROUNDS),
        Traits(
            same_forwards=False,
            same_steps=False,
            own_optimizers=True,
            without_batch=WithoutBatch.NO_ROUNDS,
        ),
    )

    def __init__(
        self,
        process_group: Group,
        peer_selection_mode: str = "all",
        sync_interval_ms: float = 500,
        warmup_steps: int = 0,
    ) -> None:
        options = AsyncModelAverageAlgorithm(peer_selection_mode, sync_interval_ms, warmup_steps)
        super().__init__(process_group, options)
        self.warmup = Rounds(warmup_steps)
        self._warming_up = warmup_steps > 0
        self._weight_buckets: list[BaguaBucket] = []

    @property
    def step(self) -> int:
        """Index of the current training step, from 0 (S5)."""
        return self.context.bagua_train_step_counter - 1

    @property
    def phase(self) -> int:
        """Phase index: 0 during warm-up, 1 until the first step after it, then 2."""
        if not self._warming_up:
            return 2
        return int(self.warmup.past_warmup(self.context.bagua_train_step_counter))

    def need_reset(self) -> bool:
        """Return True once, before the first step after warm-up."""
        if self._warming_up and self.warmup.past_warmup(self.step):
            self.context.end_join()
            self._warming_up = False
            # A rank that is in the warm-up still would wait for this one.
            self.process_group.abort(
                f"it has left the warm-up, of {self.options.warmup_steps} steps"
            )
            return True
        return False

    def init_tensors(self, bagua_ddp: TrainingContext) -> list[Tensor]:
        """Return the gradients in warm-up, the weights after it; last layer first in both."""
        return super().init_tensors(bagua_ddp) if self._warming_up else self._weights()

    def _weights(self) -> list[Tensor]:
        """Return proxies of the parameters; the parameters themselves may be registered for their
        gradients at the same time.
        """
        return [
            register(
                parameter.detach(),
                name,
                self.context.bagua_module_name,
                lambda _, parameter=parameter: parameter,  # type: ignore[misc]
            )
            for name, parameter in reversed(self.context.bagua_build_params())
        ]

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        """Return buckets of gradients in warm-up, and one bucket of weights per dtype and device
        after it.

        Raises:
            ValueError: do_flatten is False.
        """
        if not do_flatten:
            raise ValueError(
                "do_flatten=False: asynchronous averaging changes weights in their flat storage; it"
                " needs do_flatten=True"
            )
        if not self._weight_buckets:
            self._prepare_rounds()
        return (
            super().tensors_to_buckets(tensors, do_flatten)
            if self._warming_up
            else self._weight_buckets
        )

    def _prepare_rounds(self) -> None:
        context, group = self.context, self.process_group.sibling()
        for place, proxies in enumerate(by_dtype_and_device(self._weights())):
            bucket = BaguaBucket(proxies, str(place), flatten=True, backend=context.kernel_backend)
            for proxy, weight in zip(proxies, bucket.effective_tensors(), strict=True):
                proxy.data = weight.detach()  # or it would keep the weight's former storage
            bucket.append_asynchronous_model_average_op(
                self.options.peer_selection_mode, group=group
            )
            self._weight_buckets.append(bucket)
        interval = self.options.sync_interval_ms / 1000
        meter, name = context.engine.meter, context.bagua_module_name
        self._rounds = AveragingThread(
            context.world, meter, name, self._weight_buckets, group, interval
        )
        self.background = self._rounds
        self._holder = WeightLockHooks(
            context.called_module, context.bagua_optimizers, self._rounds.ops, meter
        )
        self.handles = [self._holder]
        # neither the thread nor the group may keep the optimizers
        self._rounds.release = weakref.WeakMethod(self._holder.drop)
        weakref.finalize(self, self._rounds.forget).atexit = False
        cast(BaguaProcessGroup, group).before_destruction = self._rounds.end

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append gradient averaging (S3.1) to buckets of gradients; buckets of weights already have
        their operation.
        """
        if bucket not in self._weight_buckets:
            bucket.append_centralized_synchronous_op(group=self.process_group)

    def init_forward_pre_hook(self, bagua_ddp: TrainingContext) -> Callable[[Any], object]:
        """Start averaging at the second forward pass after the warm-up; raise the error that ended
        the averaging thread, if any.
        """

        def hook(input: Any) -> None:
            self._rounds.raise_failure()
            if self.options.sync_interval_ms > 0 and self.step > self.options.warmup_steps:
                self._rounds.start()

        return hook

    def init_backward_hook(
        self, bagua_ddp: TrainingContext
    ) -> Callable[[str, torch.nn.Parameter], object]:
        """Mark gradients ready during the warm-up only."""
        return super().init_backward_hook(bagua_ddp) if self._warming_up else nothing

    def init_post_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[], object]:
        """Wait for the gradients and release the weight locks, whatever the forward pass
        returned.
        """

        def hook() -> None:
            bagua_ddp.engine.wait_pending_comm_ops()
            self._holder.drop_forward()

        return hook

    def abort(self, bagua_ddp: Any = None, *, bagua_module: Any = None) -> None:
        """Stop averaging on all ranks; wait until all of them have called this (S5.6).

        Collective. Can be called in any state; a second call before `resume` has no effect. There
        is no final averaging.

        Args:
            bagua_ddp: the wrapped module, its wrapper, or the training context.
            bagua_module: the same, under the name in Bagua's documentation.

        Raises:
            ValueError: it is not the module that this algorithm trains.
            CommunicationError: a round failed, for instance because a rank died.
        """
        self._check_module(bagua_ddp if bagua_module is None else bagua_module)
        self._rounds.stop()

    def resume(self, bagua_ddp: Any = None, *, bagua_module: Any = None) -> None:
        """Allow averaging again after `abort`, from the next training forward pass; no effect if it
        was not aborted (S5.6).

        Args:
            bagua_ddp: the wrapped module, its wrapper, or the training context.
            bagua_module: the same, under the name in Bagua's documentation.

        Raises:
            ValueError: it is not the module that this algorithm trains.
        """
        self._check_module(bagua_ddp if bagua_module is None else bagua_module)
        self._rounds.resume()

    def _check_module(self, given: Any) -> None:
        context = self.context
        modules = [
            uncompiled(module)
            for module in (given, getattr(given, "module", None))
            if isinstance(module, torch.nn.Module)
        ]
        if given is not context and context.module not in modules:
            raise ValueError(
                f"{type(given).__name__} is not the module that this algorithm trains,"
                f" {context.bagua_module_name!r}; pass it"
            )

    def metrics(self) -> dict[str, float | int]:
        """Return the number of completed averaging rounds."""
        return {"async_rounds": self._rounds.completed}

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and whether averaging was aborted."""
        return {**super().state_dict(), "aborted": self._rounds.state is State.ABORTED}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` can load ``state``."""
        super().check_state(state)
        check_form(state, {"aborted": bool}, "state")

    def load_checked(self, state: dict[str, Any]) -> None:
        """Restore whether averaging was aborted."""
        self._rounds.restore(state["aborted"])

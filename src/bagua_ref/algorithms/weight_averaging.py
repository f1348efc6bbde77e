"""The base of algorithms that average weights: gradients stay local, and buckets hold weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms.base import AlgorithmImpl, TrainingContext
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.tensor import BaguaTensor

__all__ = ["WeightAveragingImpl", "bagua_tensor", "check_count", "check_interval", "register_weights"]


class WeightAveragingImpl(AlgorithmImpl):
    """Gradients stay local, and the buckets hold weights."""

    def check_join(self, divide_by_initial_world_size: bool) -> bool:
        """Return True: ranks without batches go on averaging their weights.

        Raises:
            ValueError: divide_by_initial_world_size=False.
        """
        if not divide_by_initial_world_size:
            raise ValueError(
                f"divide_by_initial_world_size=False: {type(self).__name__} averages weights, and ranks without batches have "
                "weights, too, so that they count; use join(divide_by_initial_world_size=True)"
            )
        return True

    def shadow(self, facts: Sequence[int]) -> None:
        """Average this rank's weights with the others'."""
        engine = self.context.engine
        engine.run_round(self.context.bagua_buckets, is_open=True)
        engine.wait_pending_comm_ops()

    def init_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[str, torch.nn.Parameter], object]:
        """Return a hook that does nothing; gradients stay local."""
        return lambda name, parameter: None


def bagua_tensor(tensor: Tensor, name: str | None = None, module_name: str | None = None) -> Tensor:
    """Return ``tensor`` as a bagua tensor."""
    return BaguaTensor.ensure_bagua_tensor(tensor, name, module_name)  # type: ignore[arg-type]


def register_weights(context: TrainingContext) -> list[Tensor]:
    """Return the weights as bagua tensors, last layer first."""
    return [bagua_tensor(p, name, context.bagua_module_name) for name, p in reversed(context.bagua_build_params())]


def check_interval(interval: int) -> None:
    """Raise unless ``communication_interval`` is an int of 1 or more."""
    if not isinstance(interval, int) or isinstance(interval, bool):
        raise TypeError(f"communication_interval={interval!r} must be an int, 1 or more")
    if interval < 1:
        raise ValueError(f"communication_interval={interval} must be 1 or more")


def check_count(what: str, entries: Sequence[Any], buckets: Sequence[BaguaBucket]) -> None:
    """Raise ValueError unless a state's ``entries`` are one for each bucket; ``what`` they are is for the message."""
    if len(entries) != len(buckets):
        raise ValueError(
            f"state holds {what} of {len(entries)} buckets, this module has {len(buckets)}; it was saved for other weights"
        )

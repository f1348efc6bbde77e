"""Decentralized averaging on a ring, with compressed differences (S5.4), and the base of the
algorithms that average weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl, TrainingContext, nothing
from bagua_ref.algorithms.registry import check_whole, implements
from bagua_ref.algorithms.state import check_tensors, communicator_of
from bagua_ref.algorithms.traits import Rounds, Traits, WithoutBatch
from bagua_ref.base.memory import Layout
from bagua_ref.buckets.bucket import BaguaBucket, check_compression
from bagua_ref.buckets.storage import register, registration
from bagua_ref.comm_ops.decentralized import trade_with_neighbours
from bagua_ref.scheduling.engine import Fact
from bagua_ref.types import Group

__all__ = ["LowPrecisionDecentralizedAlgorithm", "LowPrecisionDecentralizedAlgorithmImpl"]


class WeightAveragingImpl(AlgorithmImpl):
    """Base of algorithms that average weights: gradients stay local, and buckets hold weights."""

    phases: tuple[Traits, ...] = (Traits(own_optimizers=True, without_batch=WithoutBatch.WEIGHTS),)

    def __init__(self, process_group: Group, options: Any) -> None:
        super().__init__(process_group, options)
        interval = options.communication_interval
        self.rounds = Rounds(period=interval, offset=1 % interval)  # the first step averages

    def init_backward_hook(
        self, bagua_ddp: TrainingContext
    ) -> Callable[[str, torch.nn.Parameter], object]:
        """Return a no-op: gradients stay local."""
        return nothing

    def init_tensors(self, bagua_ddp: TrainingContext) -> list[Tensor]:
        """Return the weights, last layer first."""
        self.tensors = [
            register(p, name, bagua_ddp.bagua_module_name)
            for name, p in reversed(bagua_ddp.bagua_build_params())
        ]
        return self.tensors

    def mark_ready(self) -> None:
        """Mark all weights ready."""
        for tensor in self.tensors:
            self.context.engine.mark_ready(tensor)


@dataclass(frozen=True, eq=False)
class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """Averages weights with the two ring neighbours after optimizer steps, and sends compressed
    changes of the weights (S5.4).

    Every rank keeps replicas of its own and its neighbours' weights, bitwise equal to those that
    the neighbours keep, and sends only the difference between its weights and its own replica
    (S3.5).

    Args:
        hierarchical: average inside nodes; the ring connects their leaders.
        communication_interval: number of optimizer steps from one averaging to the next; the first
            one averages.
        compression: the name of a codec, one of `bagua_ref.list_codecs` (S4, S12).

    Raises:
        ValueError: the interval is below 1, or there is no such codec; when wrapping: no optimizer
            holds a parameter, or an optimizer is fused.
        TypeError: the interval is not an int; when wrapping: a parameter is float64.

    Source: decentralized low precision in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499);
    difference compression in Tang et al., "Communication Compression for Decentralized Training",
    NeurIPS 2018 (arXiv:1803.06443).
    """

    hierarchical: bool = True
    communication_interval: int = 1
    _: KW_ONLY
    compression: str = "MinMaxUInt8"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("communication_interval", self.communication_interval, 1)
        check_compression(self.compression)

    def check(
        self,
        parameters: list[tuple[str, torch.nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Raise an error for a fused optimizer, and for parameters that no optimizer holds
        (S5.4).
        """
        for optimizer in optimizers:
            if getattr(optimizer, "_bagua_fused_optimizer", None) is not None:
                raise ValueError(
                    f"optimizers hold a fused {type(optimizer).__name__}, which"
                    " low_precision_decentralized does not take; pass the optimizer without"
                    " fuse_optimizer()"
                )
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        held = {id(parameter) for group in groups for parameter in group}
        loose = [name for name, parameter in parameters if id(parameter) not in held]
        if loose:
            raise ValueError(
                f"no optimizer passed to with_bagua holds {', '.join(map(repr, loose))};"
                " low_precision_decentralized averages weights after their optimizer's step. Pass"
                " that optimizer, or list the names in module._bagua_params_and_buffers_to_ignore"
            )


@implements(LowPrecisionDecentralizedAlgorithm)
class LowPrecisionDecentralizedAlgorithmImpl(WeightAveragingImpl):
    """Implementation of `LowPrecisionDecentralizedAlgorithm` for one module."""

    name = "low_precision_decentralized"
    rank_state = frozenset({"ring", "replicas"})
    counted = ("optimizer_steps", "passes")

    def __init__(
        self,
        process_group: Group,
        hierarchical: bool = True,
        communication_interval: int = 1,
        *,
        compression: str = "MinMaxUInt8",
    ) -> None:
        options = LowPrecisionDecentralizedAlgorithm(
            hierarchical, communication_interval, compression=compression
        )
        super().__init__(process_group, options)
        self.optimizer_steps = 0
        """Number of steps of the last optimizer."""

    def facts(self) -> list[Fact]:
        """Return the number of optimizer steps, which schedules rounds, and of backward passes,
        which differs if a rank skips steps.
        """
        return [
            Fact("{has} taken {value} steps with the last optimizer", self.optimizer_steps),
            Fact(
                "{has} run {value} backward passes since the last round",
                self.passes,
            ),
        ]

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append ring averaging (S3.5); the replicas are ``bucket._weight``, ``_left_peer_weight``
        and ``_right_peer_weight``.
        """
        weight = bucket.flattened_tensor()
        # They equal this rank's weights after wrapping, but not when a failed attempt to wrap again
        # repeats this during training.
        ring = communicator_of(self.process_group, self.options.hierarchical)
        left, right = (
            (weight.clone(), weight.clone())
            if ring.rank() < 0
            else trade_with_neighbours(weight, ring)
        )
        bucket.append_low_precision_decentralized_synchronous_op(
            register(weight),
            register(left),
            register(right),
            self.options.hierarchical,
            self.options.compression,
            group=self.process_group,
        )

    def init_post_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[], object]:
        """Return a no-op: communication follows the optimizer step."""
        return nothing

    def init_post_optimizer_step_hook(
        self, bagua_ddp: TrainingContext
    ) -> Callable[[torch.optim.Optimizer], object]:
        """Average the weights after each step of the last optimizer that has a round."""

        def hook(optimizer: torch.optim.Optimizer) -> None:
            if optimizer is not bagua_ddp.bagua_optimizers[-1]:
                return
            self.optimizer_steps += 1
            if self.rounds.kind(self.optimizer_steps) == "round":
                self.mark_ready()
                self.passes = 0
                bagua_ddp.engine.wait_pending_comm_ops()

        return hook

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, this rank's position on the ring, and the replicas."""
        return {
            **super().state_dict(),
            "ring": self._place_on_ring(),
            "replicas": {name: replica.clone() for name, replica in self._replicas().items()},
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` can load ``state``."""
        super().check_state(state)
        if not self.rank_state & state.keys():
            return
        if tuple(state["ring"]) != self._place_on_ring():
            raise ValueError(
                f"state was saved by (rank, number of ranks)={tuple(state['ring'])} of a ring, this"
                f" is {self._place_on_ring()}; each rank must load the state that it saved itself,"
                " in a ring of the same size"
            )
        replicas = self._replicas()
        layouts = {name: Layout.of(replica) for name, replica in replicas.items()}
        check_tensors("replicas", state["replicas"], replicas, layouts)

    def load_checked(self, state: dict[str, Any]) -> None:
        """Load the replicas; if the state has none, initialize them with this rank's weights, which
        are then equal on all ranks.
        """
        super().load_checked(state)
        weights = dict(self.context.bagua_build_params())
        for name, replica in self._replicas().items():
            saved = state.get("replicas")
            replica.copy_(saved[name] if saved else weights[name.rpartition(": ")[0]].detach())

    def _place_on_ring(self) -> tuple[int, int]:
        ring = communicator_of(self.process_group, self.options.hierarchical)
        return ring.rank(), ring.nranks()

    def _replicas(self) -> dict[str, Tensor]:
        """Return three replicas of each weight - this rank's and both neighbours' - as views of the
        buckets' replicas.
        """
        return {
            f"{registration(proxy).name}: {whose}": replica
            for bucket in self.context.bagua_buckets
            for whose, flat in (
                ("own", bucket._weight),
                ("left neighbour", bucket._left_peer_weight),
                ("right neighbour", bucket._right_peer_weight),
            )
            for proxy, replica in zip(bucket.tensors, bucket.views_of(flat), strict=True)
        }

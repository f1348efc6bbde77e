"""Decentralized averaging of weights with all ranks, or along a graph (S5.3, S13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from bagua_ref.algorithms.base import Algorithm, TrainingContext
from bagua_ref.algorithms.low_precision_decentralized import (
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
    WeightAveragingImpl,
)
from bagua_ref.algorithms.registry import check_whole, implements
from bagua_ref.base.memory import by_dtype_and_device
from bagua_ref.base.utils import OwnHook, inside_backward, tensors_with_graph
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.storage import register
from bagua_ref.formulas.graphs import PeerSelection, check_mode
from bagua_ref.scheduling.engine import Fact
from bagua_ref.types import Group

__all__ = [
    "WEIGHTS_AVERAGED",
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
]

WEIGHTS_AVERAGED = (
    "decentralized replaces the weights by their average at the end of a backward pass (S5.3), so"
    " that forward passes that came before have no backward pass any more. Add the losses and call"
    " backward() once, or call backward() after each forward pass before the next one; or run all"
    " these forward and backward passes inside model.no_sync(), which averages nothing"
)


@dataclass(frozen=True, eq=False)
class DecentralizedAlgorithm(Algorithm):
    """Decentralized training: each rank steps on its own gradients, and weights are averaged with
    all ranks or along a graph (S5.3, S3.4, S13).

    Averaging runs during the forward and backward pass. Its result replaces the weights at the end
    of the backward pass; the optimizer then applies this rank's gradients, which were computed with
    the weights before averaging.

    Args:
        hierarchical: average inside nodes, and communicate between their leaders. "Rank" below then
            means a leader.
        peer_selection_mode: what each rank averages; t counts averagings from 0, n is the number of
            ranks.

            - "all": all ranks;
            - "shift_one": itself and one rank of the other half, the next one each time; n must be
              even;
            - "one_peer_exponential": itself and rank (r - 2^k) mod n, k = t mod ceil(log2 n);
            - "hypercube": itself and rank r xor 2^k, k = t mod log2 n; n must be a power of two;
            - "ring": itself and both neighbours;
            - "exponential": itself and ranks (r - 2^k) mod n for all k;
            - a function ``(t, n) -> graph``, the same on all ranks. A graph is a list that has for
              each receiving rank a list of (source rank, weight) pairs, itself among them. The
              weights of each rank, and those with which it is received, sum to 1.
        communication_interval: number of training forward passes from one averaging to the next;
            the first one averages.

    Raises:
        ValueError: the mode is unknown, or the interval is below 1; when wrapping: the mode does
            not support this number of ranks, or the first graph of a function is not doubly
            stochastic or differs between ranks.
        TypeError: the interval is not an int.

    >>> def lazy_ring(t, n):
    ...     return [[(r, 0.75), ((r - 1) % n, 0.25)] for r in range(n)]
    >>> DecentralizedAlgorithm(hierarchical=False, peer_selection_mode=lazy_ring).communication_interval
    1

    Source: decentralized full precision in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499); Lian
    et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017
    (arXiv:1705.09056); graphs: Ying et al., NeurIPS 2021 (arXiv:2110.13363).
    """

    hierarchical: bool = True
    peer_selection_mode: PeerSelection = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mode(self.peer_selection_mode)
        check_whole("communication_interval", self.communication_interval, 1)


@implements(DecentralizedAlgorithm)
class DecentralizedAlgorithmImpl(WeightAveragingImpl):
    """Implementation of `DecentralizedAlgorithm` for one module."""

    name = "decentralized"
    counted = ("averagings",)
    # A rank may skip optimizer steps. The steps of those that were passed tell whether weights were
    # averaged; without any, none is needed.
    phases = tuple(
        replace(traits, same_steps=False, own_optimizers=own)
        for traits in WeightAveragingImpl.phases
        for own in (True, False)
    )

    def __init__(
        self,
        process_group: Group,
        hierarchical: bool = True,
        peer_selection_mode: PeerSelection = "all",
        communication_interval: int = 1,
    ) -> None:
        options = DecentralizedAlgorithm(hierarchical, peer_selection_mode, communication_interval)
        super().__init__(process_group, options)
        self._averaging = False
        """Whether the last training forward pass marked the weights ready, and the result is not
        copied back yet.
        """
        self._averagings = 0
        self._guard = GraphGuard(WEIGHTS_AVERAGED)

    @property
    def averagings(self) -> int:
        """The number of averaging rounds begun, which is the step t of the next graph."""
        return self._averagings

    @averagings.setter
    def averagings(self, value: int) -> None:
        self._averagings = value
        for bucket in self.context.bagua_buckets:
            bucket._decentralized_op.step = value

    @property
    def phase(self) -> int:
        """Phase index: 0 if optimizers were passed when wrapping, else 1."""
        return int(not self.context.bagua_optimizers)

    def facts(self) -> list[Fact]:
        """Return the number of averaging rounds, and the step number if some steps do not
        average.
        """
        step = self.context.bagua_train_step_counter - 1 if self.rounds.period > 1 else 0
        return [
            Fact("{has} averaged weights {value} times", self._averagings),
            Fact("{is} at training step {value}", step),
        ]

    def init_tensors(self, bagua_ddp: TrainingContext) -> list[Tensor]:
        """Return the weights, last layer first."""
        if not self.handles:
            self.handles = [self._guard.watch(bagua_ddp.called_module)]
        return super().init_tensors(bagua_ddp)

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        """Return one bucket for each dtype and device (S5.3)."""
        return super().tensors_to_buckets(
            by_dtype_and_device(chain.from_iterable(tensors)), do_flatten
        )

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append decentralized averaging (S3.4); the operation is ``bucket._decentralized_op``, its
        result ``bucket._peer_weight``.
        """
        op = bucket.append_decentralized_synchronous_op(
            register(bucket.flattened_tensor()),
            self.options.hierarchical,
            self.options.peer_selection_mode,
            self.process_group,
        )
        # more than 0 where a failed attempt to wrap again repeats this during training
        op.step = self._averagings

    def init_forward_pre_hook(self, bagua_ddp: TrainingContext) -> Callable[[Any], object]:
        """Mark the weights ready at steps that have a round."""

        def hook(input: Any) -> None:
            self._averaging = self.rounds.kind(bagua_ddp.bagua_train_step_counter) == "round"
            if self._averaging:
                self.mark_ready()
                self._averagings += 1

        return hook

    def init_post_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[], object]:
        """Copy the averaged weights back, once for each forward pass that marked the weights
        ready.
        """

        def hook() -> None:
            averaging, self._averaging = self._averaging, False
            # without batches, in the rounds of the others
            if averaging or not bagua_ddp.has_batches:
                bagua_ddp.engine.wait_pending_comm_ops()
                for bucket in bagua_ddp.bagua_buckets:
                    bucket._decentralized_op.copy_back_peer_weight(bucket)
                self._guard.overwritten += 1

        return hook


class GraphGuard:
    """Guard that raises an error if a backward pass runs after the weights of its forward pass were
    overwritten.

    Without the guard, torch raises an error about a tensor's version for most such passes. Graphs
    that save no weights, or that recompute with them, as checkpoints do, would mix old and new
    weights.

    Args:
        message: text of the error.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self.overwritten = 0
        """Number of times that the weights were overwritten."""

    def watch(self, module: torch.nn.Module) -> RemovableHandle:
        """Register a forward hook on ``module``, the module that training calls; return its
        handle.
        """
        return module.register_forward_hook(OwnHook(self._after_forward))

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if inside_backward():  # a checkpoint computes this forward anew
            return
        for tensor in tensors_with_graph(output):
            tensor.register_hook(partial(OwnHook(self._check), self.overwritten))

    def _check(self, overwritten: int, gradient: Tensor) -> None:
        if overwritten != self.overwritten:
            raise RuntimeError(self._message)

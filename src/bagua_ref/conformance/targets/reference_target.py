"""The package's parts as one target: an example, and the target that the checks themselves are
tested on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.conformance.targets.reference_algorithms import ReferenceAlgorithms
from bagua_ref.conformance.targets.world import RankWorld, own_communicator
from bagua_ref.formulas.graphs import in_turn
from bagua_ref.groups.process_group import init_process_group

__all__ = ["ReferenceCommOps", "ReferenceTarget"]


@dataclass
class ReferenceTarget:
    """A target with every part that suites check.

    ``bagua-ref verify --backend bagua_ref.conformance.targets.reference_target:ReferenceTarget``
    checks them.

    Args:
        kernels: a backend or its name.
        flatten: give buckets flat storage.
    """

    kernels: Any = "reference"
    flatten: bool = True

    name = "bagua_ref"
    communicator = staticmethod(own_communicator)

    @cached_property
    def samplers(self) -> Any:
        """The package's own samplers."""
        from bagua_ref import contrib  # not needed by other parts

        return contrib

    @property
    def comm_ops(self) -> ReferenceCommOps:
        """The package's own operations, with these kernels."""
        return ReferenceCommOps(self.kernels, self.flatten)

    @property
    def algorithms(self) -> ReferenceAlgorithms:
        """The package's own algorithms, with these kernels."""
        return ReferenceAlgorithms(self.kernels, flatten=self.flatten)


class ReferenceCommOps:
    """The interface of a target's ``comm_ops``: each method runs on every rank of a simulated
    world.

    Args:
        kernels: a backend or its name.
        flatten: give each bucket flat storage; without it, operations gather tensors and copy
            results back.
        ring_codec: name of the codec on the ring of S3.5.
    """

    def __init__(self, kernels: Any, flatten: bool = True, ring_codec: str = "MinMaxUInt8") -> None:
        self.kernels, self.flatten, self._ring_codec = kernels, flatten, ring_codec

    def centralized(
        self,
        world: RankWorld,
        x: Tensor,
        *,
        average: bool,
        scattergather: bool,
        compression: str | None,
        hierarchical: bool,
    ) -> Tensor:
        """Return the sum or mean over all ranks (S3.1 to S3.3).

        Args:
            world: world of this rank.
            x: this rank's elements.
            average: the mean instead of the sum.
            scattergather: each rank reduces one chunk.
            compression: name of the codec, or None.
            hierarchical: communicate between node leaders.
        """
        bucket = self._bucket(x)
        bucket.append_centralized_synchronous_op(
            hierarchical=hierarchical,
            average=average,
            scattergather=scattergather,
            compression=compression,
        )
        bucket.execute()
        return _joined(bucket)

    def decentralized(
        self, world: RankWorld, rounds: list[Any], *, mode: Any, hierarchical: bool
    ) -> list[Tensor]:
        """Return this rank's elements after each round of one operation and its copy-back (S3.4).

        Args:
            world: world of this rank.
            rounds: this rank's elements before each round; None: as the last round left them.
            mode: choice of peers, "all" or "shift_one".
            hierarchical: average between node leaders.
        """
        bucket = self._bucket(rounds[0])
        peer_weight = bucket.flattened_tensor().ensure_bagua_tensor("peer")  # type: ignore[attr-defined]
        op = bucket.append_decentralized_synchronous_op(peer_weight, hierarchical, mode)
        return self._each(bucket, rounds, lambda: op.copy_back_peer_weight(bucket))

    def decentralized_on_graph(
        self, world: RankWorld, rounds: list[Any], *, graph: str | list[Any], hierarchical: bool
    ) -> list[Tensor]:
        """Return this rank's elements after each round of one operation and its copy-back (S13).

        Args:
            world: world of this rank.
            rounds: this rank's elements before each round; None: as the last round left them.
            graph: a name, or graphs that follow each other in a cycle: for each receiving rank a
                list of (source, weight) pairs.
            hierarchical: average between node leaders.

        Raises:
            ValueError: a graph is not doubly stochastic; on every rank.
        """
        mode = graph if isinstance(graph, str) else in_turn(graph)
        return self.decentralized(world, rounds, mode=mode, hierarchical=hierarchical)

    def low_precision_decentralized(
        self, world: RankWorld, rounds: list[Any], *, hierarchical: bool
    ) -> list[Tensor]:
        """Return this rank's elements after each step on the ring (S3.5).

        Args:
            world: world of this rank.
            rounds: first the initial value of all replicas on all ranks, or a list of this rank's
                W, L and R; then this rank's elements before each step; None: as the last step left
                them.
            hierarchical: connect node leaders by the ring instead of all ranks.
        """
        start, *rounds = rounds
        bucket = self._bucket(rounds[0])
        replicas = start if isinstance(start, list) else [start] * 3
        weight, left, right = (
            x.clone().ensure_bagua_tensor(name) for name, x in zip("WLR", replicas, strict=True)
        )
        bucket.append_low_precision_decentralized_synchronous_op(
            weight, left, right, hierarchical, self._ring_codec
        )
        return self._each(bucket, rounds, lambda: None)

    def _bucket(self, x: Tensor) -> BaguaBucket:
        init_process_group()
        parts = [
            part.clone().ensure_bagua_tensor(f"x{place}")  # type: ignore[attr-defined]
            for place, part in enumerate(x.tensor_split(3))
        ]
        return BaguaBucket(parts, "0", flatten=self.flatten, backend=self.kernels)

    def _each(self, bucket: BaguaBucket, rounds: list[Any], afterwards: Any) -> list[Tensor]:
        seen = []
        for x in rounds:
            if x is not None:
                for mine, part in zip(bucket.tensors, x.tensor_split(3), strict=True):
                    mine.data.copy_(part)
            bucket.execute()
            afterwards()
            seen.append(_joined(bucket))
        return seen


def _joined(bucket: BaguaBucket) -> Tensor:
    return torch.cat([tensor.detach() for tensor in bucket.tensors])

"""Replay of bucket operations: all ranks' recorded inputs, run through the operation in a simulated world."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.backends import get_backend
from bagua_ref.backends.base import COMPRESSIBLE, FLOATS
from bagua_ref.bucket import BaguaBucket
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, Tolerance
from bagua_ref.process_group import init_process_group
from bagua_ref.simulation import SimulatedWorld
from bagua_ref.tensor import BaguaTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from bagua_ref.conformance.trace.files import Record

__all__ = ["Expected", "NotReplayable", "Replay"]


class NotReplayable(Exception):  # noqa: N818 - not a failure: this execution cannot be checked
    """An execution cannot be replayed from its records; the message says why."""


@dataclass(frozen=True)
class Expected:
    """An expected output.

    Attributes:
        name: name of the output.
        values: expected values, by rank.
        tolerance: the tolerance of the comparison.
        magnitude: for sums, the sum (or mean) of the absolute values.
    """

    name: str
    values: list[Tensor]
    tolerance: Tolerance = EXACT
    magnitude: Tensor | None = None


@dataclass(frozen=True)
class Replay:
    """Replays executions of one algorithm's operation.

    Args:
        algorithm: its name.
        options: all its options, see `bagua_ref.conformance.trace.options`.
        nodes: number of ranks on each node.
    """

    algorithm: str
    options: dict[str, Any]
    nodes: tuple[int, ...]

    def __call__(self, step: int, records: list[Record], before: list[Record] | None) -> list[Expected]:
        """Return the expected outputs of one execution of a bucket's operation.

        Args:
            step: the step of the execution.
            records: its records, by rank.
            before: the records of the same bucket's previous recorded execution, if there is one.

        Raises:
            NotReplayable: inputs are missing or do not match.
        """
        first = records[0]
        if len({record.info.get("execution", record.execution) for record in records}) > 1:
            raise NotReplayable("ranks count their executions differently: they did not begin to record at the same step")
        if (members := first.info.get("ranks", len(records))) != len(records):
            raise NotReplayable(
                f"the operation ran on a group of {members} ranks, but the trace has {len(records)}: pass the rank, world_size and "
                "nodes of the group to Recorder"
            )
        if self.algorithm == "async":
            return self._async(records) if "snapshot" in first.inputs else self._full_precision(records, False, True)
        if self.algorithm == "decentralized":
            return self._decentralized(records)
        if self.algorithm == "low_precision_decentralized":
            return self._ring(records, before)
        average, hierarchical = self.options.get("average", True), self.options["hierarchical"]
        if self.algorithm == "gradient_allreduce" and not self.options.get("scattergather"):
            return self._full_precision(records, hierarchical, average)
        if self.algorithm == "qadam":
            warm_up = step < self.options["warmup_steps"] if self.options["warmup_steps"] is not None else _warming_up(first)
            if warm_up:
                return self._full_precision(records, False, True)
            if "momentum" in first.inputs:
                self._update_momenta(records)
        compression = None if self.algorithm == "gradient_allreduce" else "MinMaxUInt8"
        return self._low_precision(records, hierarchical, average, compression)

    def _full_precision(self, records: list[Record], hierarchical: bool, average: bool) -> list[Expected]:
        """S3.1, S3.3. Inputs that were divided by n on their way in are summed."""
        xs = self._inputs(records, "x", FLOATS if average else None)
        divided = records[0].info.get("divided_by", 1)
        if divided != 1 and not (average and divided == len(xs)):
            raise NotReplayable(
                f"the recorded values are already divided by {divided}, which fits a mean over {divided} ranks only"
            )
        average = average and divided == 1
        results = self._run(xs, hierarchical=hierarchical, average=average)
        if not xs[0].dtype.is_floating_point:
            return [Expected("x", results)]
        n = len(xs)
        magnitude = torch.stack(xs).double().abs().sum(0) / (n if average else 1)
        return [Expected("x", results, SUM(n + hierarchical), magnitude)]

    def _low_precision(self, records: list[Record], hierarchical: bool, average: bool, compression: str | None) -> list[Expected]:
        """S3.2, S3.3; S3.1 by scatter-gather. The input is padded with zeros to a multiple of the chunks (S2.2)."""
        self._refuse_divided(records)
        xs = self._inputs(records, "x", COMPRESSIBLE if compression else FLOATS)
        size = xs[0].numel()
        padding = -size % (math.lcm(len(xs), len(self.nodes)) if hierarchical else len(xs))
        padded = [torch.nn.functional.pad(x, (0, padding)) for x in xs] if padding else xs
        results = self._run(padded, hierarchical=hierarchical, average=average, scattergather=True, compression=compression)
        return [Expected("x", [result[:size] for result in results])]

    def _decentralized(self, records: list[Record]) -> list[Expected]:
        """S3.4."""
        self._refuse_divided(records)
        hierarchical, mode = self.options["hierarchical"], self.options["peer_selection_mode"]
        xs, t = self._inputs(records, "x", FLOATS), records[0].info.get("execution", records[0].execution)
        members = len(self.nodes) if hierarchical else len(xs)
        if mode == "shift_one" and members % 2:
            raise NotReplayable(f"shift_one pairs {'nodes' if hierarchical else 'ranks'}, and there are {members}")

        def rank(bucket: BaguaBucket, number: int) -> Tensor:
            peer_weight = _bagua_tensor(bucket.flattened_tensor(), "peer_weight")
            op = bucket.append_decentralized_synchronous_op(peer_weight, hierarchical=hierarchical, peer_selection_mode=mode)
            op.step = t
            bucket.execute()
            op.copy_back_peer_weight(bucket)
            return bucket.flattened_tensor()

        results = self._on_buckets(xs, rank)
        if mode == "shift_one":
            return [Expected("x", results)]
        magnitude = torch.stack(xs).double().abs().sum(0) / len(xs)
        return [Expected("x", results, SUM(len(xs) + hierarchical), magnitude)]

    def _ring(self, records: list[Record], before: list[Record] | None) -> list[Expected]:
        """S3.5. Replicas are recorded or are the results of the previous execution: W this rank's, L and R its neighbours'."""
        self._refuse_divided(records)
        hierarchical = self.options["hierarchical"]
        xs = self._inputs(records, "x", COMPRESSIBLE)
        leaders = [sum(self.nodes[:node]) for node in range(len(self.nodes))] if hierarchical else list(range(len(xs)))
        roles = ("weight", "left", "right")
        if all(role in records[leader].inputs for leader in leaders for role in roles):
            replicas = {leader: [records[leader].inputs[role] for role in roles] for leader in leaders}
        elif before is not None and before[0].execution == records[0].execution - 1:
            results = [before[leader].outputs["x"] for leader in leaders]
            n = len(leaders)
            replicas = {leaders[i]: [results[i], results[(i - 1) % n], results[(i + 1) % n]] for i in range(n)}
        else:
            raise NotReplayable("neither the replicas (weight, left, right) nor the previous execution were recorded")
        if any(replica.shape != xs[0].shape or replica.dtype != xs[0].dtype for three in replicas.values() for replica in three):
            raise NotReplayable("replicas differ from x in size or dtype")

        def rank(bucket: BaguaBucket, number: int) -> Tensor:
            mine = replicas.get(number, [xs[number]] * 3)  # replicas are not used on ranks that lead no node
            weight, left, right = (_bagua_tensor(replica, name) for replica, name in zip(mine, roles, strict=True))
            bucket.append_low_precision_decentralized_synchronous_op(weight, left, right, hierarchical)
            bucket.execute()
            return bucket.flattened_tensor()

        return [Expected("x", self._on_buckets(xs, rank))]

    def _async(self, records: list[Record]) -> list[Expected]:
        """S3.6: the sum of the snapshots; and where x was recorded before and after, what the round has added to it."""
        snapshots = self._inputs(records, "snapshot", FLOATS)
        wide = torch.stack(snapshots).to(torch.float64 if snapshots[0].dtype is torch.float64 else torch.float32)
        magnitude = wide.double().abs().sum(0)
        reduced = wide.sum(0)
        found = []
        if all("reduced" in record.outputs for record in records):
            found.append(Expected("reduced", [reduced] * len(records), SUM(len(records)), magnitude))
        if all("before" in r.inputs | r.outputs and {"reduced", "x"} <= r.outputs.keys() for r in records):
            results = []
            for record, snapshot in zip(records, snapshots, strict=True):
                x = (record.inputs | record.outputs)["before"].clone()
                get_backend("reference").async_average_(x, record.outputs["reduced"], snapshot, len(records))
                results.append(x)
            found.append(Expected("x", results))
        if not found:
            raise NotReplayable("a round needs at least the input snapshot and the output reduced")
        return found

    def _update_momenta(self, records: list[Record]) -> None:
        """S5.5: put ``x <- beta1*momentum + (1-beta1)*grad`` in place of the recorded x of each rank."""
        momenta, gradients = (self._inputs(records, role, COMPRESSIBLE) for role in ("momentum", "grad"))
        for record, momentum, gradient in zip(records, momenta, gradients, strict=True):
            updated, beta1 = momentum.clone(), record.info.get("beta1", self.options["beta1"])
            if not 0 <= beta1 <= 1:
                raise NotReplayable(f"beta1={beta1!r} must be a number from 0 to 1")
            get_backend("reference").update_momentum_(updated, gradient, beta1)
            record.inputs["x"] = updated

    def _refuse_divided(self, records: list[Record]) -> None:
        if (divided := records[0].info.get("divided_by", 1)) != 1:
            raise NotReplayable(
                f"the recorded values are already divided by {divided}, as in gradient_allreduce, "
                f"but {self.algorithm} does not divide them"
            )

    def _inputs(self, records: list[Record], role: str, dtypes: tuple[torch.dtype, ...] | None) -> list[Tensor]:
        found = [record.inputs.get(role) for record in records]
        if any(x is None for x in found):
            raise NotReplayable(f"input {role!r} was not recorded on rank {found.index(None)}")
        xs = [x for x in found if x is not None]
        for rank, x in enumerate(xs):
            if x.shape != xs[0].shape or x.dtype != xs[0].dtype:
                raise NotReplayable(
                    f"input {role!r} has {x.numel()} elements of {x.dtype} on rank {rank}, but {xs[0].numel()} of {xs[0].dtype} "
                    "on rank 0"
                )
        if dtypes is not None and xs[0].dtype not in dtypes:
            raise NotReplayable(f"{self.algorithm} does not support {xs[0].dtype}; it supports {', '.join(map(str, dtypes))}")
        return xs

    def _run(self, xs: list[Tensor], **options: Any) -> list[Tensor]:
        def rank(bucket: BaguaBucket, number: int) -> Tensor:
            bucket.append_centralized_synchronous_op(**options)
            bucket.execute()
            return bucket.flattened_tensor()

        return self._on_buckets(xs, rank)

    def _on_buckets(self, xs: list[Tensor], rank: Callable[[BaguaBucket, int], Tensor]) -> list[Tensor]:
        """Return the results of ``rank(bucket, number)``, called on each rank with a bucket of its x."""

        def program(comm: Any) -> Tensor:
            init_process_group()
            return rank(BaguaBucket([_bagua_tensor(xs[comm.rank()], "x")], "0", flatten=True, backend="reference"), comm.rank())

        return SimulatedWorld(sum(self.nodes), nodes=self.nodes).run(program)


def _bagua_tensor(tensor: Tensor, name: str) -> Tensor:
    """Return a copy of ``tensor`` as a bucket's tensor."""
    return BaguaTensor.ensure_bagua_tensor(tensor.clone(), name)  # type: ignore[arg-type]


def _warming_up(record: Record) -> bool:
    """Return whether the operation was in full precision, or was recorded with ``warmup=True``."""
    return bool(record.info.get("warmup", record.info.get("operation") == "CentralizedFullPrecision"))

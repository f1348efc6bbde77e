"""Replay of bucket operations: all ranks' recorded inputs, run through the operation in a simulated world."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms.fragments import Fragment, FragmentSchedule
from bagua_ref.backends import get_backend
from bagua_ref.backends.base import FLOATS
from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.base.untrusted import load_json
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.tensor import BaguaTensor
from bagua_ref.conformance.expected.tolerances import SUM
from bagua_ref.conformance.trace.compressed import expected_of_powersgd, expected_of_topk
from bagua_ref.conformance.trace.expectation import Expected, NotReplayable
from bagua_ref.conformance.trace.files import Record
from bagua_ref.conformance.trace.wire import expected_on_wire
from bagua_ref.formulas.graphs import MODES, Graph, checked_graph, in_turn
from bagua_ref.groups.process_group import init_process_group
from bagua_ref.simulation import SimulatedWorld

__all__ = ["Expected", "NotReplayable", "Replay"]


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
        inside_nodes = self._is_inside_nodes(records)
        if not inside_nodes and (members := first.info.get("ranks", len(records))) != len(records):
            raise NotReplayable(
                f"the operation ran on a group of {members} ranks, but the trace has {len(records)}: pass the rank, world_size and "
                "nodes of the group to Recorder"
            )
        if self.algorithm == "async":
            return self._async(records) if "snapshot" in first.inputs else self._full_precision(records, False, True)
        if self.algorithm == "local_sgd":
            return [*self._means(records, inside_nodes), *self._averages(records)]
        if self.algorithm == "diloco":
            return self._full_precision(records, False, True) if _warming_up(first) else self._diloco(records)
        if self.algorithm in ("powersgd", "topk"):
            if _warming_up(first):
                return self._full_precision(records, False, True)
            self._refuse_divided(records)
            find = expected_of_powersgd if self.algorithm == "powersgd" else expected_of_topk
            return find(records, self._inputs(records, "x", FLOATS if find is expected_of_powersgd else COMPRESSIBLE), self.options)
        if self.algorithm == "decentralized":
            return self._decentralized(records)
        if self.algorithm == "low_precision_decentralized":
            return self._ring(records, before)
        average, hierarchical = self.options.get("average", True), self.options["hierarchical"]
        if wire := self.options.get("wire"):
            return [expected_on_wire(found, records, wire) for found in self._full_precision(records, hierarchical, average)]
        if self.algorithm == "gradient_allreduce" and not self.options.get("scattergather"):
            return self._full_precision(records, hierarchical, average)
        if self.algorithm == "qadam":
            warm_up = step < self.options["warmup_steps"] if self.options["warmup_steps"] is not None else _warming_up(first)
            if warm_up:
                return self._full_precision(records, False, True)
            if "momentum" in first.inputs:
                self._update_momenta(records)
        compression = None if self.algorithm == "gradient_allreduce" else self.options["compression"]
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
        if any(record.info.get("operation") == "CentralizedErrorFeedback" for record in records):
            raise NotReplayable("error memories, which the result depends on, are not recorded")
        self._refuse_divided(records)
        xs = self._inputs(records, "x", COMPRESSIBLE if compression else FLOATS)
        size = xs[0].numel()
        padding = -size % (math.lcm(len(xs), len(self.nodes)) if hierarchical else len(xs))
        padded = [torch.nn.functional.pad(x, (0, padding)) for x in xs] if padding else xs
        results = self._run(padded, hierarchical=hierarchical, average=average, scattergather=True, compression=compression)
        return [Expected("x", [result[:size] for result in results])]

    def _decentralized(self, records: list[Record]) -> list[Expected]:
        """S3.4, S13."""
        self._refuse_divided(records)
        hierarchical, mode = self.options["hierarchical"], self.options["peer_selection_mode"]
        xs, t = self._inputs(records, "x", FLOATS), records[0].info.get("execution", records[0].execution)
        members, what = (len(self.nodes), "nodes") if hierarchical else (len(xs), "ranks")
        if mode == "function":
            mode = in_turn([self._recorded_graph(records, members)])
        elif not MODES[mode].takes(members):
            raise NotReplayable(f"{mode} needs {MODES[mode].sizes} of {what}, and there are {members}")

        def rank(bucket: BaguaBucket, number: int) -> Tensor:
            peer_weight = _bagua_tensor(bucket.flattened_tensor(), "peer_weight")
            op = bucket.append_decentralized_synchronous_op(peer_weight, hierarchical=hierarchical, peer_selection_mode=mode)
            op.step = t
            bucket.execute()
            op.copy_back_peer_weight(bucket)
            return bucket.flattened_tensor()

        results = self._on_buckets(xs, rank)
        if mode != "all":
            return [Expected("x", results)]
        magnitude = torch.stack(xs).double().abs().sum(0) / len(xs)
        return [Expected("x", results, SUM(len(xs) + hierarchical), magnitude)]

    def _recorded_graph(self, records: list[Record], members: int) -> Graph:
        """Return the graph of a function, which is JSON of a list for each receiver with [source, weight] lists."""
        graphs = [record.info.get("graph") or "" for record in records]
        if "" in graphs:
            raise NotReplayable(f"the graph of the function was not recorded on rank {graphs.index('')}")
        if differing := [rank for rank, graph in enumerate(graphs) if graph != graphs[0]]:
            raise NotReplayable(f"rank {differing[0]} used another graph than rank 0")
        try:
            return checked_graph(load_json(graphs[0].encode()), members)
        except (TypeError, ValueError) as error:
            raise NotReplayable(f"the recorded graph cannot be used: {error}") from None

    def _is_inside_nodes(self, records: list[Record]) -> bool:
        """Return whether the operation ran among the ranks of each node, as gradients of post-local SGD do (S9.1)."""
        members = [record.info.get("ranks", len(records)) for record in records]
        hierarchical = self.algorithm == "local_sgd" and self.options["hierarchical"]
        return hierarchical and members == [size for size in self.nodes for _ in range(size)]

    def _means(self, records: list[Record], inside_nodes: bool) -> list[Expected]:
        """S3.1, over all ranks or inside each node."""
        if not inside_nodes:
            return self._full_precision(records, False, True)
        self._inputs(records, "x", FLOATS)
        found, first = [], 0
        for size in self.nodes:
            found += Replay(self.algorithm, self.options, (size,))._full_precision(records[first : first + size], False, True)
            first += size
        magnitudes = torch.stack([expected.magnitude for expected in found if expected.magnitude is not None])
        return [Expected("x", [x for expected in found for x in expected.values], SUM(max(self.nodes)), magnitudes.amax(0))]

    def _averages(self, records: list[Record]) -> list[Expected]:
        """S9.1: whether weights are averaged after step t; the record says that they were."""
        period, first = self.options["period"], (self.options["warmup_steps"] or 0) + self.options["offset"]
        known = all("t" in record.info and record.info.get("averages") == "weights" for record in records)
        if period is None or not known:
            return []
        due = [
            record.info["t"] > (self.options["warmup_steps"] or 0) and (record.info["t"] - first) % period == 0
            for record in records
        ]
        return self._told(records, "averages", [1] * len(records), [int(is_due) for is_due in due])

    def _diloco(self, records: list[Record]) -> list[Expected]:
        """S9.5: the mean of what was sent; and of S9.4 the difference, the mix and the schedule, where these were recorded."""
        compression = self.options["compression"]
        if compression or self.options["scattergather"]:
            found = self._low_precision(records, False, True, compression)
        else:
            found = self._full_precision(records, False, True)
        if all({"g", "weights"} <= record.inputs.keys() for record in records):
            found += self._differences(records)
        if all({"g", "before", "weights"} <= record.outputs.keys() for record in records):
            found += self._applied(records)
        if self.options["period"] is not None and all({"t", "fragment"} <= record.info.keys() for record in records):
            try:
                schedule = FragmentSchedule(self.options["period"], self.options["fragments"], self.options["delay"])
            except ValueError as error:
                raise NotReplayable(str(error)) from None
            steps = [record.info["t"] - (self.options["warmup_steps"] or 0) for record in records]
            due = [schedule.sent_after(t) if t > 0 else None for t in steps]
            sent = [record.info["fragment"] for record in records]
            found += self._told(records, "fragment", sent, [-1 if place is None else place for place in due])
        return found

    def _differences(self, records: list[Record]) -> list[Expected]:
        """S9.4: g - x in g's dtype; what is padded is zero."""
        sent, gs, weights = (self._inputs(records, role, FLOATS) for role in ("x", "g", "weights"))
        padding = sent[0].numel() - gs[0].numel()
        if gs[0].shape != weights[0].shape or padding < 0:
            raise NotReplayable(
                f"inputs g and weights have {gs[0].numel()} and {weights[0].numel()} elements, and x has {sent[0].numel()}"
            )
        for record, x in zip(records, sent, strict=True):
            record.outputs["difference"] = x
        values = [torch.nn.functional.pad(g - w, (0, padding)) for g, w in zip(gs, weights, strict=True)]
        return [Expected("difference", values)]

    def _applied(self, records: list[Record]) -> list[Expected]:
        """S9.4: g is the same on all ranks, and the weights are mixed with it."""
        gs, mix = [record.outputs["g"] for record in records], self.options["mix"]
        found, values = [Expected("g", [gs[0]] * len(gs))], []
        for rank, (record, g) in enumerate(zip(records, gs, strict=True)):
            x = torch.nn.Parameter(record.outputs["before"].clone(), requires_grad=False)
            fragment = Fragment(["x"], [x], lambda tensors: torch.optim.SGD(tensors, lr=1.0))
            if fragment.copies[0].dtype != g.dtype or x.shape != g.shape:
                raise NotReplayable(
                    f"output g of rank {rank} has {g.numel()} elements of {g.dtype}, before {x.numel()} of {x.dtype}"
                )
            fragment.copies[0].detach().copy_(g)
            fragment.mix(0.0 if mix is None else mix)
            values.append(x.detach())
        return [*found, Expected("weights", values)]

    def _told(self, records: list[Record], name: str, told: list[int], due: list[int]) -> list[Expected]:
        """Compare numbers that the records tell with those that are due."""
        for record, value in zip(records, told, strict=True):
            record.outputs[name] = torch.tensor([value])
        return [Expected(name, [torch.tensor([value]) for value in due])]

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
            bucket.append_low_precision_decentralized_synchronous_op(weight, left, right, hierarchical, self.options["compression"])
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

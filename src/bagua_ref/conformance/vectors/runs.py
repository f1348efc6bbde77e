"""Golden vectors on the package itself, through its kernels and the adapter that the suites use.

Operations that are no part of a target, such as schedules, have no run here: tests compare them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends import get_backend, get_codec
from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.expected.tolerances import EXACT, assert_equal
from bagua_ref.conformance.targets.reference_target import ReferenceTarget
from bagua_ref.conformance.targets.world import RankWorld, run_world
from bagua_ref.conformance.vectors.case import Case
from bagua_ref.types import ReduceOp

__all__ = ["run"]

Tensors = dict[str, Tensor]
Run = Callable[..., Tensors]
"""Called with the case, and its parameters as keywords."""

_TARGET, _KERNELS = ReferenceTarget(), get_backend("reference")


def run(case: Case) -> Tensors:
    """Return the package's outputs of a case; none if no part of a target computes them."""
    found = _RUNS.get(f"{case.suite}/{case.operation}", _RUNS.get(case.suite))
    return {} if found is None else found(case, **case.parameters)


def _on_ranks(nodes: list[int], program: Callable[[RankWorld], Any]) -> list[Any]:
    return run_world(lambda world: world, tuple(nodes), program)


def _kernel(case: Case, **parameters: Any) -> Tensors:
    """Call the kernel that changes x, the first input."""
    x, *others = (value.clone() for value in case.inputs.values())
    getattr(_KERNELS, f"{case.operation}_")(x, *others, **parameters)
    return {"x": x}


def _gather_flat(case: Case) -> Tensors:
    flat = torch.empty_like(case.outputs["flat"])
    _KERNELS.gather_flat(list(case.inputs.values()), flat)
    return {"flat": flat}


def _scatter_flat(case: Case, shapes: list[list[int]]) -> Tensors:
    parts = {f"t{place}": torch.empty(shape, dtype=case.dtype) for place, shape in enumerate(shapes)}
    _KERNELS.scatter_flat(case.inputs["flat"], list(parts.values()))
    return parts


def _order_by_complexity(case: Case) -> Tensors:
    return {"order": _KERNELS.order_by_complexity(case.inputs["keys"])}


def _codec(
    case: Case, num_chunks: int, target_chunk: int | None = None, num_elements: int = 0, codec: str = "MinMaxUInt8"
) -> Tensors:
    """Compress x if there is one, and decompress the payload if that gives an output."""
    found, outputs = get_codec(codec, "reference"), Tensors()
    if "x" in case.inputs:
        before = None if target_chunk is None else case.inputs["payload"].clone()
        outputs["payload"] = found.compress(case.inputs["x"], num_chunks, target_chunk, before)
    if "x" in case.outputs:
        outputs["x"] = torch.empty_like(case.outputs["x"])
        found.decompress((case.inputs | outputs)["payload"], num_chunks, outputs["x"])
    return outputs


def _reduced(case: Case, x: Tensor, nodes: list[int], hierarchical: bool, average: bool) -> Tensor:
    options: dict[str, Any] = {"average": average, "hierarchical": hierarchical}
    options["scattergather"] = case.operation != "centralized_full_precision"
    options["compression"] = "MinMaxUInt8" if case.operation in ("centralized_low_precision", "qadam_momentum") else None
    return torch.stack(_on_ranks(nodes, lambda world: _TARGET.comm_ops.centralized(world, x[world.rank], **options)))


def _centralized(case: Case, **parameters: Any) -> Tensors:
    return {"x": _reduced(case, case.inputs["x"], **parameters)}


def _qadam_momentum(case: Case, nodes: list[int], hierarchical: bool, beta1: float) -> Tensors:
    x = case.inputs["m"].repeat(sum(nodes), 1)
    for momentum, gradient in zip(x, case.inputs["grad"], strict=True):
        _KERNELS.update_momentum_(momentum, gradient, beta1)
    return {"m": _reduced(case, x, nodes, hierarchical, average=True)}


def _before_rounds(case: Case) -> Tensor:
    """Return every rank's weights before each round: those expected of the last round, and the update."""
    before = torch.cat([case.inputs["x"][None], case.outputs["x"][:-1]])
    _KERNELS.add_(before.view(-1), case.inputs["updates"].view(-1))
    return before


def _decentralized(case: Case, nodes: list[int], hierarchical: bool, graph: Any = "shift_one") -> Tensors:
    every_rank = case.operation == "decentralized_all"
    before = case.inputs["x"][None] if every_rank else _before_rounds(case)
    options: dict[str, Any] = {"graph": graph} if case.suite == "graphs" else {"mode": "all" if every_rank else graph}
    operation = getattr(_TARGET.comm_ops, "decentralized_on_graph" if case.suite == "graphs" else "decentralized")

    def program(world: RankWorld) -> Tensor:
        return torch.stack(operation(world, list(before[:, world.rank]), hierarchical=hierarchical, **options))

    x = torch.stack(_on_ranks(nodes, program), dim=1)
    return {"x": x[0] if every_rank else x}


def _ring(case: Case, nodes: list[int], hierarchical: bool) -> Tensors:
    """Run a round more than the case has: its result must be that of new operations with the expected replicas."""
    before, last = _before_rounds(case), case.outputs["x"][-1]
    leaders = [sum(nodes[:node]) for node in range(len(nodes))] if hierarchical else list(range(sum(nodes)))
    replicas = {leader: [case.outputs[name][i] for name in ("weight", "left", "right")] for i, leader in enumerate(leaders)}

    def rounds(start: Callable[[int], Any], before: Tensor) -> Tensor:
        def program(world: RankWorld) -> Tensor:
            given = [start(world.rank), *before[:, world.rank], last[world.rank]]
            return torch.stack(_TARGET.comm_ops.low_precision_decentralized(world, given, hierarchical=hierarchical))

        return torch.stack(_on_ranks(nodes, program), dim=1)

    x = rounds(lambda rank: case.inputs["x"][rank], before)
    again = rounds(lambda rank: replicas.get(rank, [last[rank]] * 3), before[:0])
    assert_equal(x[-1], again[0], EXACT)
    return {"x": x[:-1]}


def _collective(case: Case, **parameters: Any) -> Tensors:
    """Call the communicator on every rank, in place if the collective leaves other ranks' tensors as they are."""
    name, n = case.operation, parameters.pop("nranks", len(case.inputs["x"]))
    arguments = [ReduceOp[parameters[key]] if key == "op" else parameters[key] for key in ("root", "op") if key in parameters]

    def program(world: RankWorld) -> Tensor:
        comm: Any = world.transport
        x = case.inputs["x"].expand(n, -1)[world.rank].clone()
        if name in ("broadcast", "allreduce", "reduce"):
            getattr(comm, name if name == "broadcast" else f"{name}_inplace")(x, *arguments)
            return x
        out = torch.empty(case.outputs["out"].shape[-1], dtype=case.dtype)
        getattr(comm, name)(x, out, *arguments)
        return out

    ranks = _on_ranks([n], program)
    return {"out": ranks[parameters["root"]] if name == "gather" else torch.stack(ranks)}


def _alltoall_v(case: Case) -> Tensors:
    def program(world: RankWorld) -> Tensor:
        comm: Any = world.transport
        mine = {name: value[world.rank] for name, value in case.inputs.items()}
        sent, received = ([mine[f"{way}_{of}"].tolist() for of in ("counts", "displs")] for way in ("send", "recv"))
        out = mine["before"].clone()
        comm.alltoall_v(mine["x"], *sent, out, *received)
        return out

    return {"out": torch.stack(_on_ranks([len(case.inputs["x"])], program))}


_LOOKS: dict[str, list[tuple[str, ...]]] = {"local_sgd": [], "diloco": [("global weights",)]}
"""What is looked at after each step of a training that is a program of actions."""


def _training(case: Case, nodes: list[int], sizes: list[int], **options: Any) -> Tensors:
    """Train on the given gradients."""
    weights, algorithm = case.inputs["x"].split(sizes), getattr(_TARGET.algorithms, case.operation)
    if case.operation == "diloco":
        outer = {name: options.pop(f"outer_{name}") for name in ("lr", "momentum", "nesterov")}
        options["outer_optimizer"] = {"class": "SGD", **outer}
    looks = _LOOKS.get(case.operation)

    def program(world: RankWorld) -> Tensor:
        steps: list[Any] = [dict(enumerate(step[world.rank].split(sizes))) for step in case.inputs["gradients"]]
        if looks is not None:
            steps = [action for gradients in steps for action in (("step", gradients), *looks)]
        given = {name: dict(value) if isinstance(value, dict) else value for name, value in options.items()}
        seen = algorithm(world, list(weights), steps, bucket_bytes=10 * 2**20, **given)
        return torch.stack([torch.cat(values) for values in seen])

    seen = torch.stack(_on_ranks(nodes, program), dim=1)
    each = 1 + len(looks or [])
    return {name: seen[place::each] for place, name in enumerate(case.outputs)}


def _topk(case: Case, **options: Any) -> Tensors:
    gradients = case.inputs["gradients"]
    steps = [
        [action for g in gradients[:, rank] for action in (("step", {0: g}), ("memories",))] for rank in range(gradients.shape[1])
    ]

    def program(world: RankWorld) -> Any:
        weights = [torch.zeros(gradients.shape[2], dtype=case.dtype)]
        return _TARGET.algorithms.topk(
            world, weights, steps[world.rank], lr=0.5, bucket_bytes=10 * 2**20, warmup_steps=0, **options
        )

    ranks = _on_ranks([len(steps)], program)
    found = {"x": torch.stack([after[0] for after in ranks[0][::2]])}
    if "errors" in case.outputs:
        found["errors"] = torch.stack([torch.stack([after[0] for after in rank[1::2]]) for rank in ranks], dim=1)
    return found


def _samplers(case: Case, settings: dict[str, Any]) -> list[Any]:
    found = []
    for rank in range(settings["num_replicas"]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some datasets here have nothing to balance
            sampler = _TARGET.samplers.LoadBalancingDistributedSampler(
                range(settings["N"]), None, settings["num_replicas"], rank, settings["shuffle"], settings["seed"],
                settings["drop_last"], settings["random_level"], complexities=case.inputs["complexities"], backend="reference",
            )  # fmt: skip
        sampler.set_epoch(settings["epoch"])
        found.append(sampler)
    return found


def _sampler_indices(case: Case, **settings: Any) -> Tensors:
    return {"indices": torch.tensor([list(sampler) for sampler in _samplers(case, settings)], dtype=torch.int64)}


def _sampler_batches(case: Case, drop_last_batch: bool, max_cost: int, **settings: Any) -> Tensors:
    cut = partial(samplers_plain.filled_batches, case.inputs["complexities"].tolist(), max_cost)
    batched = _TARGET.samplers.LoadBalancingDistributedBatchSampler
    drawn = [list(batched(sampler, cut, drop_last_batch)) for sampler in _samplers(case, settings)]
    return {
        "sizes": torch.tensor([[len(batch) for batch in batches] for batches in drawn]),
        "indices": torch.tensor([index for batches in drawn for batch in batches for index in batch]),
    }


_RUNS: dict[str, Run] = {
    "kernels": _kernel,
    "kernels/gather_flat": _gather_flat,
    "kernels/scatter_flat": _scatter_flat,
    "kernels/order_by_complexity": _order_by_complexity,
    "codec": _codec,
    "codecs": _codec,
    "comm_ops/centralized_full_precision": _centralized,
    "comm_ops/centralized_scatter_gather": _centralized,
    "comm_ops/centralized_low_precision": _centralized,
    "comm_ops/qadam_momentum": _qadam_momentum,
    "comm_ops/decentralized_all": _decentralized,
    "comm_ops/decentralized_shift_one": _decentralized,
    "comm_ops/low_precision_decentralized": _ring,
    "graphs/decentralized_on_graph": _decentralized,
    "collectives": _collective,
    "collectives/alltoall_v": _alltoall_v,
    "local_updates/local_sgd": _training,
    "local_updates/diloco": _training,
    **{
        f"algorithms/{name}": _training
        for name in ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized")
    },
    "compressed_gradients/topk": _topk,
    "samplers/sampler_indices": _sampler_indices,
    "samplers/sampler_batches": _sampler_batches,
}
"""A suite or one of its operations -> how it runs."""

"""A second opinion on every case, from inputs and parameters alone, by code that shares nothing with the reference.

It computes with `bagua_ref.conformance.expected`, one number at a time; the export compares it with what the reference gave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from bagua_ref.conformance.expected import (
    codec_scalar,
    codecs_scalar,
    comm_ops_scalar,
    decentralized_numpy,
    graphs_numpy,
    kernels_scalar,
    local_updates_numpy,
    samplers_plain,
)
from bagua_ref.conformance.vectors.independent_compressed import OF_COMPRESSED_GRADIENTS
from bagua_ref.conformance.vectors.independent_ranks import OF_COLLECTIVES, OF_TRAININGS

__all__ = ["solve"]

Tensors = dict[str, "Tensor"]
Parameters = dict[str, Any]

_ELEMENTWISE: dict[str, Callable[..., float]] = {
    "add": kernels_scalar.add,
    "subtract": kernels_scalar.subtract,
    "add_scaled": kernels_scalar.add_scaled,
    "average": kernels_scalar.average,
    "divide": kernels_scalar.quotient,
    "combine_ring": kernels_scalar.combine_ring,
    "async_average": kernels_scalar.async_average,
    "update_momentum": kernels_scalar.update_momentum,
}


def solve(suite: str, operation: str, dtype: str, parameters: Parameters, inputs: Tensors) -> Tensors:
    """Return the outputs of a case."""
    if suite == "kernels" and operation in _ELEMENTWISE:
        columns = zip(*(x.tolist() for x in inputs.values()), strict=True)
        return {"x": _tensor([_ELEMENTWISE[operation](dtype, *column, *parameters.values()) for column in columns], dtype)}
    solvers = {**_SOLVERS, **{"collectives": OF_COLLECTIVES, "algorithms": OF_TRAININGS}.get(suite, {})}
    with np.errstate(all="ignore"):  # infinities and NaN are results here
        return solvers[operation](dtype, inputs, **parameters)


def _tensor(values: Any, dtype: str) -> Tensor:
    found: torch.dtype = getattr(torch, dtype)
    return torch.tensor(values, dtype=torch.float64 if found.is_floating_point else found).to(found)


def _reduce_chunks(dtype: str, inputs: Tensors, num_chunks: int, target_chunk: int, average: bool) -> Tensors:
    rows = inputs["x"].view(num_chunks, -1).tolist()
    rows[target_chunk] = [kernels_scalar.reduce_in_order(dtype, list(column), average) for column in zip(*rows, strict=True)]
    return {"x": _tensor([value for row in rows for value in row], dtype)}


def _gather_flat(dtype: str, inputs: Tensors) -> Tensors:
    return {"flat": _tensor([value for x in inputs.values() for value in x.reshape(-1).tolist()], dtype)}


def _scatter_flat(dtype: str, inputs: Tensors, shapes: list[list[int]]) -> Tensors:
    values, outputs = inputs["flat"].tolist(), {}
    for place, shape in enumerate(shapes):
        size = math.prod(shape)
        outputs[f"t{place}"] = _tensor(values[:size], dtype).view(shape)
        values = values[size:]
    return outputs


def _order(dtype: str, inputs: Tensors) -> Tensors:
    keys = inputs["keys"].tolist()
    order = sorted(range(len(keys)), key=lambda i: (True, 0.0) if math.isnan(keys[i]) else (False, keys[i]))
    return {"order": torch.tensor(order, dtype=torch.int64)}


def _compress(dtype: str, inputs: Tensors, num_chunks: int, target_chunk: int | None = None) -> Tensors:
    chunks = inputs["x"].view(num_chunks, -1).tolist()
    blocks = [codec_scalar.compress_chunk(chunk, dtype) for chunk in chunks]
    if target_chunk is not None:
        before = inputs["payload"].view(num_chunks, -1).tolist()
        blocks = [block if place == target_chunk else bytes(before[place]) for place, block in enumerate(blocks)]
    return {"payload": torch.tensor(list(b"".join(blocks)), dtype=torch.uint8)}


def _decompress(dtype: str, inputs: Tensors, num_chunks: int, num_elements: int) -> Tensors:
    size, values = num_elements // num_chunks, []
    for block in inputs["payload"].view(num_chunks, -1).tolist():
        values += codec_scalar.decompress_chunk(bytes(block), size, dtype)
    return {"x": _tensor(values, dtype)}


def _roundtrip(dtype: str, inputs: Tensors, num_chunks: int) -> Tensors:
    payload = _compress(dtype, inputs, num_chunks)
    return {**payload, **_decompress(dtype, payload, num_chunks, inputs["x"].numel())}


def _codec_compress(dtype: str, inputs: Tensors, codec: str, num_chunks: int, target_chunk: int | None = None) -> Tensors:
    blocks = [codecs_scalar.compress_chunk(codec, chunk, dtype) for chunk in _chunks(inputs["x"], num_chunks)]
    if target_chunk is not None:
        before = inputs["payload"].view(num_chunks, -1).tolist()
        blocks = [block if place == target_chunk else bytes(before[place]) for place, block in enumerate(blocks)]
    return {"payload": torch.tensor(list(b"".join(blocks)), dtype=torch.uint8)}


def _codec_decompress(dtype: str, inputs: Tensors, codec: str, num_chunks: int, num_elements: int) -> Tensors:
    blocks, size = _chunks(inputs["payload"], num_chunks), num_elements // num_chunks
    values = [value for block in blocks for value in codecs_scalar.decompress_chunk(codec, bytes(block), size, dtype)]
    return {"x": _tensor(values, dtype)}


def _chunks(x: Tensor, num_chunks: int) -> list[list[Any]]:
    rows: list[list[Any]] = x.view(num_chunks, x.numel() // num_chunks).tolist()
    return rows


def _centralized(operation: Callable[..., list[list[float]]]) -> Callable[..., Tensors]:
    def solver(dtype: str, inputs: Tensors, nodes: list[int], hierarchical: bool, average: bool) -> Tensors:
        xs = inputs["x"].tolist()
        if hierarchical:
            return {"x": _tensor(comm_ops_scalar.hierarchical(operation, xs, nodes, dtype, average), dtype)}
        return {"x": _tensor(operation(xs, dtype, average), dtype)}

    return solver


def _full_precision(dtype: str, inputs: Tensors, nodes: list[int], hierarchical: bool, average: bool) -> Tensors:
    n = len(inputs["x"])
    total = [math.fsum(column) / (n if average else 1) for column in inputs["x"].T.tolist()]
    return {"x": _tensor([total] * n, dtype)}


def _arrays(x: Tensor) -> list[Any]:
    return list((x if x.dtype is torch.float64 else x.float()).numpy())


def _rows(arrays: list[Any], dtype: str) -> Tensor:
    return torch.from_numpy(np.stack(arrays)).to(getattr(torch, dtype))


def _decentralized(dtype: str, inputs: Tensors, nodes: list[int], hierarchical: bool, graph: Any = "shift_one") -> Tensors:
    ranks, after = _arrays(inputs["x"]), []
    for step, update in enumerate(inputs["updates"]):
        ranks = [decentralized_numpy.stored(x + u, dtype) for x, u in zip(ranks, _arrays(update), strict=True)]
        ranks = decentralized_numpy.average(ranks, dtype, graph, hierarchical, nodes, step)
        after.append(_rows(ranks, dtype))
    return {"x": torch.stack(after)}


def _graph_sources(dtype: str, inputs: Tensors, graph: str, nranks: int) -> Tensors:
    """Average unit vectors: the sources of a rank are those that leave something in its row."""
    units, averages, sources = np.eye(nranks), dict[int, Any](), []
    for rank, step in zip(inputs["rank"].tolist(), inputs["step"].tolist(), strict=True):
        if step not in averages:
            averages[step] = graphs_numpy.averaged(units, graph, step)
        sources.append(np.flatnonzero(averages[step][rank]).tolist())
    return {"sources": torch.tensor(sources)}


def _decentralized_all(dtype: str, inputs: Tensors, nodes: list[int], hierarchical: bool) -> Tensors:
    return _full_precision(dtype, inputs, nodes, hierarchical, average=True)


def _ring(dtype: str, inputs: Tensors, nodes: list[int], hierarchical: bool) -> Tensors:
    ranks, after = _arrays(inputs["x"]), []
    members = [group[0] for group in decentralized_numpy.split(ranks, nodes)] if hierarchical else ranks
    ring = decentralized_numpy.Ring.of(members)
    for update in inputs["updates"]:
        ranks = [decentralized_numpy.stored(x + u, dtype) for x, u in zip(ranks, _arrays(update), strict=True)]
        if hierarchical:
            leaders = [decentralized_numpy.node_mean(node, dtype) for node in decentralized_numpy.split(ranks, nodes)]
            ranks = decentralized_numpy.on_every_rank(ring.step(leaders, dtype), nodes)
        else:
            ranks = ring.step(ranks, dtype)
        after.append(_rows(ranks, dtype))
    replicas = {"weight": ring.W, "left": ring.L, "right": ring.R}
    return {"x": torch.stack(after), **{name: _rows(values, dtype) for name, values in replicas.items()}}


def _async(dtype: str, inputs: Tensors, nodes: list[int], hierarchical: bool) -> Tensors:
    xs, updates, n = inputs["x"].tolist(), inputs["updates"].tolist(), len(inputs["x"])
    sums = [math.fsum(column) for column in zip(*xs, strict=True)]
    return {
        "x": _tensor(
            [
                [
                    kernels_scalar.async_average(dtype, kernels_scalar.add(dtype, x, update), total, x, n)
                    for x, update, total in zip(row, row_of_updates, sums, strict=True)
                ]
                for row, row_of_updates in zip(xs, updates, strict=True)
            ],
            dtype,
        )
    }


def _qadam_momentum(dtype: str, inputs: Tensors, nodes: list[int], hierarchical: bool, beta1: float) -> Tensors:
    m = inputs["m"].tolist()
    xs = [
        [kernels_scalar.update_momentum(dtype, old, grad, beta1) for old, grad in zip(m, grads, strict=True)]
        for grads in inputs["grad"].tolist()
    ]
    if hierarchical:
        return {"m": _tensor(comm_ops_scalar.hierarchical(comm_ops_scalar.low_precision, xs, nodes, dtype, True), dtype)}
    return {"m": _tensor(comm_ops_scalar.low_precision(xs, dtype, True), dtype)}


def _peers(dtype: str, inputs: Tensors, nranks: int) -> Tensors:
    tables: dict[int, dict[int, int]] = {}
    peers = []
    for rank, step in zip(inputs["rank"].tolist(), inputs["step"].tolist(), strict=True):
        if step not in tables:
            tables[step] = decentralized_numpy.pairs(nranks, step)
        peers.append(tables[step][rank])
    return {"peer": torch.tensor(peers)}


def _indices_of_ranks(inputs: Tensors, num_replicas: int, drop_last: bool) -> list[list[int]]:
    """Return what each replica draws, with the noise and the order of chunks that torch's generator gave (S7.2, S7.3)."""
    costs = [cost + extra for cost, extra in zip(inputs["complexities"].tolist(), inputs["noise"].tolist(), strict=True)]
    order = sorted(range(len(costs)), key=costs.__getitem__)
    count = samplers_plain.num_samples(len(order), num_replicas, drop_last)
    chunks = inputs["chunk_order"].tolist()[:count]
    return [[order[(chunk * num_replicas + rank) % len(order)] for chunk in chunks] for rank in range(num_replicas)]


def _sampler_indices(dtype: str, inputs: Tensors, num_replicas: int, drop_last: bool, **drawn: Any) -> Tensors:
    return {"indices": torch.tensor(_indices_of_ranks(inputs, num_replicas, drop_last), dtype=torch.int64)}


def _sampler_batches(
    dtype: str, inputs: Tensors, num_replicas: int, drop_last: bool, drop_last_batch: bool, max_cost: int, **drawn: Any
) -> Tensors:
    costs = inputs["complexities"].tolist()
    of_replicas = []
    for indices in _indices_of_ranks(inputs, num_replicas, drop_last):
        batches: list[list[int]] = []
        room = -1
        for index in indices:
            if costs[index] > room:
                batches.append([])
                room = max_cost
            batches[-1].append(index)
            room -= costs[index]
        of_replicas.append(batches)
    equal = samplers_plain.equal_batches(of_replicas, drop_last_batch)
    return {
        "sizes": torch.tensor([[len(batch) for batch in batches] for batches in equal]),
        "indices": torch.tensor([index for batches in equal for batch in batches for index in batch]),
    }


def _cache_store(dtype: str, inputs: Tensors, dataset_name: str, num_stores: int) -> Tensors:
    data, hashes = bytes(inputs["keys"].tolist()), []
    escaped = dataset_name.encode().replace(b"%", b"%25").replace(b"_", b"%5F")
    for length in inputs["lengths"].tolist():
        hashes.append(xxhash.xxh64_intdigest(escaped + b"_" + data[:length]))
        data = data[length:]
    return {
        "hash": torch.from_numpy(np.array(hashes, np.uint64)),
        "store": torch.tensor([number % num_stores for number in hashes]),
    }


def _qadam_step(dtype: str, inputs: Tensors, s: int, lr: float, beta1: float, beta2: float, eps: float) -> Tensors:
    p, m, v = (inputs[name].double() for name in ("p", "m", "v"))
    moved = p - lr / (1 - beta1**s) * m / (v.sqrt() / math.sqrt(1 - beta2**s) + eps)
    return {"p": torch.where(v == 0, p, moved).to(inputs["p"].dtype)}


def _fragment_of_parameter(dtype: str, inputs: Tensors, fragments: int) -> Tensors:
    return {"fragment": torch.tensor(local_updates_numpy.fragment_of(inputs["bytes"].tolist(), fragments))}


def _local_sgd_schedule(dtype: str, inputs: Tensors, period: int, offset: int, warmup_steps: int) -> Tensors:
    """Count from the first averaging on, period by period."""
    first = warmup_steps + (offset or period)
    return {"averages": ((inputs["step"] >= first) & ((inputs["step"] - first) % period == 0)).long()}


def _diloco_schedule(dtype: str, inputs: Tensors, period: int, fragments: int, delay: int, warmup_steps: int) -> Tensors:
    """Try every fragment for every step."""
    gap, outputs = period // fragments, {}
    for name, early in (("sent", delay), ("applied", 0)):
        found = torch.full_like(inputs["step"], -1)
        for p in range(fragments):
            due = (inputs["step"] - warmup_steps - ((p + 1) * gap - early)) % period == 0
            found[due & (inputs["step"] > warmup_steps)] = p
        outputs[name] = found
    return outputs


def _mix(dtype: str, inputs: Tensors, mix: float) -> Tensors:
    (x,), (g,) = _arrays(inputs["x"][None]), _arrays(inputs["g"][None])
    return {"x": _rows([local_updates_numpy.mixed(x, g, mix, dtype)], dtype)[0]}


def _parameters(flat: Tensor, sizes: list[int]) -> list[Any]:
    return np.split(_arrays(flat[None])[0], np.cumsum(sizes)[:-1])


def _local_training(inputs: Tensors, sizes: list[int]) -> tuple[list[Any], list[list[list[Any]]]]:
    """Return the weights, and the gradients by step, rank and parameter."""
    return _parameters(inputs["x"], sizes), [[_parameters(g, sizes) for g in ranks] for ranks in inputs["gradients"]]


def _joined_ranks(ranks: list[list[Any]], dtype: str) -> Tensor:
    return _rows([np.concatenate(weights) for weights in ranks], dtype)


def _local_sgd(dtype: str, inputs: Tensors, nodes: list[int], sizes: list[int], lr: float, **options: Any) -> Tensors:
    start, gradients = _local_training(inputs, sizes)
    history = local_updates_numpy.local_sgd(start, gradients, lr, [dtype] * len(sizes), nodes, **options)
    return {"x": torch.stack([_joined_ranks(ranks, dtype) for ranks in history])}


def _diloco(
    dtype: str, inputs: Tensors, nodes: list[int], sizes: list[int], lr: float, fragments: Any,
    outer_lr: float, outer_momentum: float, outer_nesterov: bool, **options: Any,
) -> Tensors:  # fmt: skip
    start, gradients = _local_training(inputs, sizes)
    if isinstance(fragments, int):
        fragments = local_updates_numpy.places_of([size * inputs["x"].element_size() for size in sizes], fragments)

    def outer(tensors: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(tensors, lr=outer_lr, momentum=outer_momentum, nesterov=outer_nesterov)

    model = local_updates_numpy.DiLoCo(start, sum(nodes), lr, [dtype] * len(sizes), fragments, outer, **options)
    xs, gs = [], []
    for of_ranks in gradients:
        model.step(of_ranks)
        xs.append(_joined_ranks(model.ranks, dtype))
        shown = model.ranks if model.g is None else [[decentralized_numpy.stored(g, dtype) for g in model.g]] * sum(nodes)
        gs.append(_joined_ranks(shown, dtype))
    return {"x": torch.stack(xs), "g": torch.stack(gs)}


_SOLVERS: dict[str, Callable[..., Tensors]] = {
    "reduce_chunks": _reduce_chunks,
    "gather_flat": _gather_flat,
    "scatter_flat": _scatter_flat,
    "order_by_complexity": _order,
    "compress_minmax_uint8": _compress,
    "decompress_minmax_uint8": _decompress,
    "roundtrip_minmax_uint8": _roundtrip,
    "codec_compress": _codec_compress,
    "codec_decompress": _codec_decompress,
    "centralized_scatter_gather": _centralized(comm_ops_scalar.scatter_gather),
    "centralized_low_precision": _centralized(comm_ops_scalar.low_precision),
    "centralized_full_precision": _full_precision,
    "decentralized_shift_one": _decentralized,
    "decentralized_on_graph": _decentralized,
    "graph_sources": _graph_sources,
    "fragment_of_parameter": _fragment_of_parameter,
    "local_sgd_schedule": _local_sgd_schedule,
    "diloco_schedule": _diloco_schedule,
    "mix": _mix,
    "local_sgd": _local_sgd,
    "diloco": _diloco,
    "decentralized_all": _decentralized_all,
    "low_precision_decentralized": _ring,
    "async_average": _async,
    "qadam_momentum": _qadam_momentum,
    "shift_one_peer": _peers,
    "sampler_indices": _sampler_indices,
    "sampler_batches": _sampler_batches,
    "cache_store": _cache_store,
    "qadam_step": _qadam_step,
    "qadam_frozen_step": _qadam_step,
    **OF_COMPRESSED_GRADIENTS,
}

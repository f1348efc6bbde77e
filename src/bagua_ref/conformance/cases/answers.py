"""Expected outputs of golden vectors, from inputs and parameters alone: one function for each family
of operations, whose arguments have the names of a case's inputs and parameters.

All computation is in `bagua_ref.conformance.expected`, so that the vectors share no fault with the
package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bagua_ref.conformance.expected import (
    algorithms_numpy,
    chunked_numpy,
    codecs_scalar,
    collectives_plain,
    compression_numpy,
    decentralized_numpy,
    kernels_numpy,
    local_updates_numpy,
    samplers_plain,
)
from bagua_ref.conformance.expected.kernels_numpy import array, stored

Outputs = dict[str, Any]
"""Outputs by name: tensors, bytes, or numbers in lists or arrays."""
Nodes: TypeAlias = "list[int] | None"
"""Number of ranks on each node if node leaders communicate, None if all ranks do."""


def answer(
    operation: str, dtype: str, inputs: dict[str, Tensor], parameters: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the outputs of a case, by name."""
    with np.errstate(all="ignore"):  # infinities and NaN are results here
        suite, _, name = operation.partition("/")
        compute = _ANSWERS.get(operation) or partial(_BY_NAME[suite], name)
        found = compute(dtype, **inputs, **parameters)
    return {name: _tensor(values, dtype) for name, values in found.items()}


def _tensor(values: Any, dtype: str) -> Tensor:
    """Convert outputs to tensors: bytes to uint8, integers to int64, other numbers to the case's
    dtype.
    """
    if isinstance(values, Tensor):
        return values
    if isinstance(values, bytes):
        return torch.tensor(list(values), dtype=torch.uint8)
    x = torch.from_numpy(np.array(values))
    return x.to(getattr(torch, dtype)) if x.is_floating_point() else x


def _integers(values: Iterable[int]) -> Any:
    return np.array(list(values), np.int64)  # int64 also if empty


def _empty(dtype: str) -> Tensor:
    return torch.empty(0, dtype=getattr(torch, dtype))


def _split(flat: Any, sizes: Iterable[int]) -> list[Any]:
    return [flat[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


# Kernels and codecs


def _elementwise(name: str, dtype: str, **given: Any) -> Outputs:
    arguments = [array(x) if isinstance(x, Tensor) else x for x in given.values()]
    return {"x": getattr(kernels_numpy, name)(dtype, *arguments)}


def _reduce_chunks(
    dtype: str, x: Tensor, num_chunks: int, target_chunk: int, average: bool
) -> Outputs:
    chunks = array(x).reshape(num_chunks, -1).copy()
    chunks[target_chunk] = kernels_numpy.reduce_chunks(dtype, [*chunks], average)
    return {"x": chunks.reshape(-1)}


def _scatter_flat(dtype: str, flat: Tensor, shapes: list[list[int]]) -> Outputs:
    parts = zip(_split(flat, map(math.prod, shapes)), shapes, strict=True)
    return {f"t{place}": part.view(shape) for place, (part, shape) in enumerate(parts)}


def _compress(
    dtype: str,
    x: Tensor,
    codec: str,
    num_chunks: int,
    target_chunk: int | None = None,
    payload: Tensor | None = None,
) -> Outputs:
    blocks = [
        codecs_scalar.compress_chunk(codec, chunk, dtype)
        for chunk in x.view(num_chunks, x.numel() // num_chunks).tolist()
    ]
    if payload is not None:
        kept = payload.view(num_chunks, -1).tolist()
        blocks = [
            block if place == target_chunk else bytes(kept[place])
            for place, block in enumerate(blocks)
        ]
    return {"payload": b"".join(blocks)}


def _decompress(
    dtype: str, payload: Tensor, codec: str, num_chunks: int, num_elements: int
) -> Outputs:
    size, restore = num_elements // num_chunks, codecs_scalar.decompress_chunk
    blocks = payload.view(num_chunks, payload.numel() // num_chunks).tolist()
    parts = [np.array(restore(codec, bytes(block), size, dtype), float) for block in blocks]
    return {"x": np.concatenate(parts)}


# Bucket operations and collectives


def _centralized(one_byte: bool, dtype: str, x: Any, nodes: Nodes, average: bool = True) -> Outputs:
    ranks = list(array(x))
    result = algorithms_numpy.centralized(ranks, dtype, average, one_byte, nodes)
    return {"x": [result] * len(ranks)}


def _qadam_momentum(dtype: str, m: Tensor, grad: Tensor, nodes: Nodes, beta1: float) -> Outputs:
    ranks = [kernels_numpy.update_momentum(dtype, array(m), of, beta1) for of in array(grad)]
    return {"m": [algorithms_numpy.centralized(ranks, dtype, True, True, nodes)] * len(ranks)}


def _on_updates(dtype: str, ranks: Any, updates: Tensor, step: Callable[..., Any]) -> list[Any]:
    """Return all ranks' weights after each step; a step first adds the updates, then calls
    ``step``.
    """
    after = []
    for t, update in enumerate(array(updates)):
        ranks = step([stored(x + u, dtype) for x, u in zip(ranks, update, strict=True)], t)
        after.append(ranks)
    return after


def _decentralized(
    dtype: str, x: Tensor, updates: Tensor, nodes: Nodes, graph: Any = "shift_one"
) -> Outputs:
    average = decentralized_numpy.average
    step = lambda ranks, t: average(ranks, dtype, graph, nodes, t)  # noqa: E731
    return {"x": _on_updates(dtype, array(x), updates, step)}


def _ring(dtype: str, x: Tensor, updates: Tensor, nodes: Nodes) -> Outputs:
    ranks = [array(x)] * updates.shape[1]
    ring = decentralized_numpy.Ring.of(ranks[: len(nodes or ranks)])
    between, average = decentralized_numpy.between_leaders, lambda ranks: ring.step(ranks, dtype)
    after = _on_updates(
        dtype, ranks, updates, lambda ranks, t: between(average, ranks, dtype, nodes)
    )
    return {"x": after, "weight": ring.W, "left": ring.L, "right": ring.R}


def _async_average(dtype: str, x: Tensor, updates: Tensor) -> Outputs:
    start = array(x)
    total, moved = start.sum(0), kernels_numpy.add(dtype, start, array(updates))  # sums are exact
    return {"x": kernels_numpy.async_average(dtype, moved, total, start, len(start))}


def _shift_one_peer(dtype: str, rank: Tensor, step: Tensor, nranks: int) -> Outputs:
    pairs = decentralized_numpy.pairs
    return {"peer": [[pairs(nranks, t)[r] for t in step.tolist()] for r in rank.tolist()]}


def _graph_sources(dtype: str, rank: Tensor, step: Tensor, graph: str, nranks: int) -> Outputs:
    """Return each rank's sources at each step: the non-zero entries of its row when unit vectors
    are averaged.
    """
    average, ones = decentralized_numpy.averaged, np.eye(nranks)
    after = [average(ones, graph, t) for t in step.tolist()]
    return {"sources": [[np.flatnonzero(x[r]) for x in after] for r in rank.tolist()]}


def _collective(operation: str, dtype: str, x: Tensor, **given: Any) -> Outputs:
    if operation in ("gather", "scatter"):
        del given["root"]  # x is the root's tensor, or is sent to it
    return {"out": getattr(collectives_plain, operation)(x, **given)}


def _alltoall_v(
    dtype: str, x: Tensor, before: Tensor, recv_counts: Tensor, **layout: Tensor
) -> Outputs:
    lists = {name: rows.tolist() for name, rows in layout.items()}
    return {"out": torch.stack(collectives_plain.alltoall_v(list(x), list(before), **lists))}


# Trainings


def _on_gradients(
    one_byte: bool,
    dtype: str,
    x: Tensor,
    gradients: Tensor,
    sizes: list[int],
    nodes: Nodes,
    lr: float,
    average: bool,
) -> Outputs:
    # of parameters in their bucket (S2.1)
    order = np.concatenate(_split(np.arange(x.numel()), sizes)[::-1])
    steps = [list(ranks[:, order]) for ranks in array(gradients)]
    exchange = algorithms_numpy.full_precision(average)
    if one_byte:
        exchange = algorithms_numpy.one_byte(average, nodes)
    history = algorithms_numpy.train_on_gradients(array(x)[order], steps, lr, dtype, exchange)
    return {"x": [[weights[np.argsort(order)]] * len(steps[0]) for weights in history]}


def _on_weights(
    dtype: str,
    x: Tensor,
    gradients: Tensor,
    sizes: list[int],
    nodes: Nodes,
    lr: float,
    communication_interval: int,
    peer_selection_mode: str | None = None,
) -> Outputs:
    steps, train = list(map(list, array(gradients))), decentralized_numpy.train_decentralized
    how = (nodes, peer_selection_mode, communication_interval)
    return {"x": train(array(x), steps, lr, dtype, *how)}


def _qadam_step(
    dtype: str, s: int, beta1: float, beta2: float, lr: float, eps: float, **x: Tensor
) -> Outputs:
    p, m, v = (array(x[name]) for name in "pmv")
    step, betas = algorithms_numpy.step_along_momentum, (beta1, beta2)
    return {"p": step(dtype, p, m, v, s, lr=lr, betas=betas, eps=eps)}


def _local_sgd(
    dtype: str,
    x: Tensor,
    gradients: Tensor,
    sizes: list[int],
    nodes: Nodes,
    lr: float,
    **options: Any,
) -> Outputs:
    start, dtypes = _split(array(x), sizes), [dtype] * len(sizes)
    steps = [[_split(g, sizes) for g in ranks] for ranks in array(gradients)]
    options["hierarchical"] = nodes is not None
    nodes = nodes or [len(steps[0])]
    history = local_updates_numpy.local_sgd(start, steps, lr, dtypes, nodes, **options)
    return {"x": [[np.concatenate(weights) for weights in ranks] for ranks in history]}


def _diloco(
    dtype: str,
    x: Tensor,
    gradients: Tensor,
    sizes: list[int],
    lr: float,
    fragments: Any,
    outer: dict[str, Any],
    **options: Any,
) -> Outputs:
    n, dtypes = gradients.shape[1], [dtype] * len(sizes)
    if isinstance(fragments, int):
        of_bytes = [size * x.element_size() for size in sizes]
        fragments = local_updates_numpy.places_of(of_bytes, fragments)
    optimizer, start = partial(torch.optim.SGD, **outer), _split(array(x), sizes)
    model = local_updates_numpy.DiLoCo(start, n, lr, dtypes, fragments, optimizer, **options)
    found: dict[str, list[Any]] = {"x": [], "g": []}
    for ranks in array(gradients):
        model.step([_split(g, sizes) for g in ranks])
        seen = model.ranks if model.g is None else [[stored(g, dtype) for g in model.g]] * n
        for name, weights in (("x", model.ranks), ("g", seen)):
            found[name].append([np.concatenate(of_rank) for of_rank in weights])
    return found


def _diloco_schedule(dtype: str, step: Tensor, delay: int, **schedule: int) -> Outputs:
    def due(delay: int) -> list[int]:
        found = [
            local_updates_numpy.fragment_due(t, delay=delay, **schedule) for t in step.tolist()
        ]
        return [-1 if fragment is None else fragment for fragment in found]

    return {"sent": due(delay), "applied": due(0)}


# Compressed gradients


def _powersgd_round(
    dtype: str,
    gradients: Tensor,
    columns: Tensor,
    memory: str | None,
    q: Tensor | None = None,
    errors: Tensor | None = None,
    **options: Any,
) -> Outputs:
    kept = None if memory is None else list((gradients * 0 if errors is None else errors).numpy())
    factor = None if q is None else q.numpy()
    found = compression_numpy.power_sgd_round(
        list(gradients.numpy()), kept, factor, columns.shape[1], memory=memory, **options
    )
    assert found.q is not None  # every round sets it
    outputs = {"x": found.result, "qq": compression_numpy.gram(found.q)}
    return outputs | ({} if memory is None else {"errors": found.errors})


def _topk(dtype: str, gradients: Tensor, ratio: float, error_feedback: bool) -> Outputs:
    errors: Any = list(torch.zeros(gradients.shape[1:]).numpy()) if error_feedback else None
    xs, kept = [], []
    for step in array(gradients):
        result, errors = compression_numpy.topk_round(list(step), errors, ratio, dtype)
        xs.append(result)
        kept.append(errors)
    return {"x": xs} | ({"errors": torch.tensor(np.array(kept))} if error_feedback else {})


def _stat2(dtype: str, x: Tensor) -> Outputs:
    payload, decoded = chunked_numpy.stat2(x.numpy())
    return {"payload": torch.tensor([*payload], dtype=torch.uint8), "x": decoded}


def _sparse(dtype: str, gradients: Tensor, **options: Any) -> Outputs:
    rounds, n, *shape = gradients.shape
    errors = [np.zeros(gradients[0, 0].numel(), np.float32)] * n
    xs, kept, messages = [], [], []
    for step in array(gradients).reshape(rounds, n, -1):
        found = chunked_numpy.sparse_round(list(step), errors, tuple(shape), **options)
        errors = found.errors
        xs.append(stored(found.result, dtype))
        kept.append(np.array(errors))
        messages.append([[*message] for message in found.messages])
    return {
        "x": np.array(xs).reshape(rounds, *shape),
        "errors": torch.from_numpy(np.array(kept)).view(rounds, n, *shape),
        "messages": torch.tensor(messages, dtype=torch.uint8),
    }


def _error_feedback(
    dtype: str, gradients: Tensor, nodes: Nodes, average: bool, codec: str
) -> Outputs:
    memory = compression_numpy.ErrorFeedback(nodes, codec, dtype, average)
    rounds = [
        (memory.round(list(step)), memory.workers, memory.servers) for step in array(gradients)
    ]
    xs, workers, servers = map(np.array, zip(*rounds, strict=True))
    return {"x": xs, "e": torch.from_numpy(workers), "f": torch.from_numpy(servers)}


# Samplers


def stretches(
    operation: str,
    costs: Tensor,
    draws: samplers_plain.Draws,
    num_replicas: int,
    max_cost: Any = None,
    padded: Any = None,
    drop_last_batch: bool = False,
    **options: Any,
) -> list[list[list[Any]]]:
    """Return each replica's samples or batches by stretch of a case's epoch (S7.3 to S7.7); a
    stretch has a constant number of replicas.
    """
    options |= {"replicas": num_replicas, "draws": draws}
    if operation == "budget_batches":
        padded = samplers_plain.FORMULAS.get(padded, padded)
        return samplers_plain.budget_stretches(costs.tolist(), max_cost, padded=padded, **options)
    if operation == "sampler_batches":
        cut = partial(samplers_plain.filled_batches, costs.tolist(), max_cost)
        options |= {"cut": cut, "drop_batches": drop_last_batch}
    return samplers_plain.stretches_of(costs.tolist(), **options)


def _samples(
    operation: str, dtype: str, noise: Tensor, permutations: Tensor, **given: Any
) -> Outputs:
    draws = samplers_plain.RecordedDraws(noise.tolist(), permutations.tolist())
    found = stretches(operation, draws=draws, **given)
    items = [item for shares in found for share in shares for item in share]
    outputs = {"counts": _integers(len(shares[0]) for shares in found)}
    if operation != "sampler_indices":
        outputs["sizes"] = _integers(map(len, items))
        items = [index for batch in items for index in batch]
    return outputs | {"indices": _integers(items)}


_BY_NAME: dict[str, Callable[..., Outputs]] = {
    "kernels": _elementwise,
    "collectives": _collective,
    "samplers": _samples,
}
"""Suite -> function for those of its operations that have no row below, called with their names."""
_ANSWERS: dict[str, Callable[..., Outputs]] = {
    "kernels/reduce_chunks": _reduce_chunks,
    "kernels/gather_flat": lambda dtype, **parts: {
        "flat": torch.cat([_empty(dtype), *(x.reshape(-1) for x in parts.values())])
    },
    "kernels/scatter_flat": _scatter_flat,
    "kernels/order_by_complexity": lambda dtype, keys: {
        "order": kernels_numpy.order_by_complexity(np.array(keys.tolist()))
    },
    "codecs/compress": _compress,
    "codecs/decompress": _decompress,
    "comm_ops/centralized_full_precision": partial(_centralized, False),
    "comm_ops/centralized_scatter_gather": partial(_centralized, False),
    "comm_ops/centralized_low_precision": partial(_centralized, True),
    "comm_ops/decentralized_all": partial(_centralized, False),
    "comm_ops/decentralized_shift_one": _decentralized,
    "comm_ops/decentralized_on_graph": _decentralized,
    "comm_ops/low_precision_decentralized": _ring,
    "comm_ops/async_average": _async_average,
    "comm_ops/qadam_momentum": _qadam_momentum,
    "comm_ops/shift_one_peer": _shift_one_peer,
    "comm_ops/graph_sources": _graph_sources,
    "collectives/alltoall_v": _alltoall_v,
    "algorithms/gradient_allreduce": partial(_on_gradients, False),
    "algorithms/bytegrad": partial(_on_gradients, True),
    "algorithms/decentralized": _on_weights,
    "algorithms/low_precision_decentralized": _on_weights,
    "algorithms/qadam_step": _qadam_step,
    "local_updates/fragment_of_parameter": lambda dtype, bytes, fragments: {
        "fragment": local_updates_numpy.fragment_of(bytes.tolist(), fragments)
    },
    "local_updates/local_sgd_schedule": lambda dtype, step, **schedule: {
        "averages": _integers(local_updates_numpy.is_averaged(t, **schedule) for t in step.tolist())
    },
    "local_updates/diloco_schedule": _diloco_schedule,
    "local_updates/mix": lambda dtype, x, g, mix: {
        "x": local_updates_numpy.mixed(array(x), array(g), mix, dtype)
    },
    "local_updates/local_sgd": _local_sgd,
    "local_updates/diloco": _diloco,
    "compressed_gradients/powersgd_rank": lambda dtype, n, m, **limits: {
        "r": [
            compression_numpy.compressed_rank(shape, *limits.values())
            for shape in zip(n.tolist(), m.tolist(), strict=True)
        ]
    },
    "compressed_gradients/orthonormalize": lambda dtype, x: {
        "projection": compression_numpy.gram(compression_numpy.orthonormal(x.numpy()))
    },
    "compressed_gradients/powersgd_round": _powersgd_round,
    "compressed_gradients/topk_count": lambda dtype, m, ratio: {
        "k": [compression_numpy.sent_count(size, ratio) for size in m.tolist()]
    },
    "compressed_gradients/topk_indices": lambda dtype, p, k: {
        "indices": compression_numpy.kept(p.numpy(), k)
    },
    "compressed_gradients/topk": _topk,
    "compressed_gradients/chunks": lambda dtype, shape, chunk: {
        "places": _integers(chunked_numpy.chunks(tuple(shape.tolist()), chunk)[0].tolist())
    },
    "compressed_gradients/stat2": _stat2,
    "compressed_gradients/sparse": _sparse,
    "compressed_gradients/error_feedback": _error_feedback,
}
"""Suite and operation -> function that returns the outputs."""

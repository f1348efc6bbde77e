"""Expected outputs of golden vectors, from inputs and parameters alone.

Nothing here but `bagua_ref.conformance.expected` computes, so that the vectors share no fault with
the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.conformance.expected import (
    algorithms_numpy,
    codecs_scalar,
    collectives_plain,
    compression_numpy,
    decentralized_numpy,
    kernels_scalar,
    local_updates_numpy,
    samplers_plain,
)
from bagua_ref.conformance.expected.algorithms_numpy import array

__all__ = ["Given", "answer", "stretches_of"]

Tensors = dict[str, Tensor]


class Given:
    """A case's inputs and parameters as attributes.

    Attributes:
        operation: what to compute.
        dtype: its name.
        inputs: tensors by name.
        parameters: JSON values by name.
    """

    def __init__(
        self, operation: str, dtype: str, parameters: dict[str, Any], inputs: Tensors
    ) -> None:
        self.operation, self.dtype, self.parameters, self.inputs = (
            operation,
            dtype,
            parameters,
            inputs,
        )

    def __getattr__(self, name: str) -> Any:
        return self.parameters[name] if name in self.parameters else self.inputs[name]

    @property
    def leaders(self) -> list[int] | None:
        """The number of ranks on each node if node leaders communicate, None if all ranks do."""
        nodes: list[int] = self.parameters["nodes"]
        return nodes if self.parameters["hierarchical"] else None

    def options(self, *names: str) -> dict[str, Any]:
        """Return these parameters."""
        return {name: self.parameters[name] for name in names}


Answer = Callable[[Given], Tensors]


def answer(
    suite: str, operation: str, dtype: str, parameters: dict[str, Any], inputs: Tensors
) -> Tensors:
    """Return the outputs of a case."""
    compute = _ANSWERS.get(f"{suite}/{operation}") or _ANSWERS[suite]
    with np.errstate(all="ignore"):  # infinities and NaN are results here
        return compute(Given(operation, dtype, parameters, inputs))


def _tensor(values: Any, dtype: str) -> Tensor:
    found: torch.dtype = getattr(torch, dtype)
    return torch.tensor(values, dtype=torch.float64 if found.is_floating_point else found).to(found)


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _rows(arrays: Any, dtype: str) -> Tensor:
    return torch.from_numpy(np.stack(arrays)).to(getattr(torch, dtype))


def _split(flat: Any, sizes: list[int]) -> list[Any]:
    return [flat[start:end] for start, end in pairwise([0, *accumulate(sizes)])]


def _elementwise(c: Given) -> Tensors:
    kernel: Any = getattr(kernels_scalar, "quotient" if c.operation == "divide" else c.operation)
    columns = zip(*(x.tolist() for x in c.inputs.values()), strict=True)
    return {
        "x": _tensor(
            [kernel(c.dtype, *column, *c.parameters.values()) for column in columns], c.dtype
        )
    }


def _reduce_chunks(c: Given) -> Tensors:
    rows = c.x.view(c.num_chunks, -1).tolist()
    columns = zip(*rows, strict=True)
    rows[c.target_chunk] = [
        kernels_scalar.reduce_in_order(c.dtype, list(column), c.average) for column in columns
    ]
    return {"x": _tensor(rows, c.dtype).view(-1)}


def _scatter_flat(c: Given) -> Tensors:
    parts = _split(c.flat.tolist(), [math.prod(shape) for shape in c.shapes])
    return {
        f"t{i}": _tensor(part, c.dtype).view(shape)
        for i, (part, shape) in enumerate(zip(parts, c.shapes, strict=True))
    }


def _chunks(x: Tensor, num_chunks: int) -> list[list[Any]]:
    rows: list[list[Any]] = x.view(num_chunks, x.numel() // num_chunks).tolist()
    return rows


def _compress(c: Given) -> Tensors:
    blocks = [
        codecs_scalar.compress_chunk(c.parameters.get("codec", "MinMaxUInt8"), chunk, c.dtype)
        for chunk in _chunks(c.x, c.num_chunks)
    ]
    target = c.parameters.get("target_chunk")
    if target is not None:
        before = _chunks(c.payload, c.num_chunks)
        blocks = [
            block if place == target else bytes(before[place]) for place, block in enumerate(blocks)
        ]
    return {"payload": torch.tensor(list(b"".join(blocks)), dtype=torch.uint8)}


def _decompress(c: Given) -> Tensors:
    size, codec, values = (
        c.num_elements // c.num_chunks,
        c.parameters.get("codec", "MinMaxUInt8"),
        [],
    )
    for block in map(bytes, _chunks(c.payload, c.num_chunks)):
        values += codecs_scalar.decompress_chunk(codec, block, size, c.dtype)
    return {"x": _tensor(values, c.dtype)}


def _roundtrip(c: Given) -> Tensors:
    payload = _compress(c)
    return {
        **payload,
        **_decompress(
            Given(c.operation, c.dtype, {**c.parameters, "num_elements": c.x.numel()}, payload)
        ),
    }


def _reduced(c: Given, ranks: Any) -> Tensor:
    one_byte, average = (
        c.operation in ("centralized_low_precision", "qadam_momentum"),
        c.parameters.get("average", True),
    )
    return _rows(
        [algorithms_numpy.centralized(list(ranks), c.dtype, average, one_byte, c.leaders)]
        * sum(c.nodes),
        c.dtype,
    )


def _qadam_momentum(c: Given) -> Tensors:
    m, update = c.m.tolist(), kernels_scalar.update_momentum
    xs = [
        [update(c.dtype, old, new, c.beta1) for old, new in zip(m, grad, strict=True)]
        for grad in c.grad.tolist()
    ]
    return {"m": _reduced(c, np.array(xs, np.float32))}


def _on_updates(c: Given, step: Callable[[list[Any], int], list[Any]]) -> Tensor:
    """Return all ranks' weights after each step, before which the updates are added."""
    ranks, after = list(array(c.x)), []
    for t, update in enumerate(c.updates):
        ranks = step(
            [
                algorithms_numpy.stored(x + u, c.dtype)
                for x, u in zip(ranks, array(update), strict=True)
            ],
            t,
        )
        after.append(_rows(ranks, c.dtype))
    return torch.stack(after)


def _decentralized(c: Given) -> Tensors:
    mode = c.parameters.get("graph", "shift_one")
    average = decentralized_numpy.average
    return {"x": _on_updates(c, lambda ranks, t: average(ranks, c.dtype, mode, c.leaders, t))}


def _ring(c: Given) -> Tensors:
    members, between = c.leaders or [1] * sum(c.nodes), decentralized_numpy.between_leaders
    ring = decentralized_numpy.Ring.of(
        [group[0] for group in algorithms_numpy.split(list(array(c.x)), members)]
    )

    def average(ranks: list[Any]) -> list[Any]:
        return ring.step(ranks, c.dtype)

    x = _on_updates(c, lambda ranks, t: between(average, ranks, c.dtype, c.leaders))
    return {
        "x": x,
        **{
            name: _rows(rows, c.dtype)
            for name, rows in {"weight": ring.W, "left": ring.L, "right": ring.R}.items()
        },
    }


def _async_average(c: Given) -> Tensors:
    xs, updates, k = c.x.tolist(), c.updates.tolist(), kernels_scalar
    totals = [math.fsum(column) for column in zip(*xs, strict=True)]
    rows = [
        [
            k.async_average(c.dtype, k.add(c.dtype, x, update), total, x, len(xs))
            for x, update, total in zip(*columns, totals, strict=True)
        ]
        for columns in zip(xs, updates, strict=True)
    ]
    return {"x": _tensor(rows, c.dtype)}


def _queries(c: Given, at_step: Callable[[int], Any]) -> list[Any]:
    """Return what belongs to each queried rank and step."""
    found = {step: at_step(step) for step in set(c.step.tolist())}
    return [found[step][rank] for rank, step in zip(c.rank.tolist(), c.step.tolist(), strict=True)]


def _graph_sources(c: Given) -> Tensors:
    """Average unit vectors: the sources of a rank are those that leave something in its row."""
    rows = _queries(c, lambda step: decentralized_numpy.averaged(np.eye(c.nranks), c.graph, step))
    return {"sources": torch.tensor([np.flatnonzero(row).tolist() for row in rows])}


def _collective(c: Given) -> Tensors:
    given = dict(c.parameters)
    if c.operation in ("gather", "scatter"):
        del given["root"]  # x is that of the root, or goes to it
    return {"out": getattr(collectives_plain, c.operation)(c.x, **given)}


def _alltoall_v(c: Given) -> Tensors:
    layout = [x.tolist() for x in (c.send_counts, c.send_displs, c.recv_displs)]
    return {"out": torch.stack(collectives_plain.alltoall_v(list(c.x), list(c.before), *layout))}


def _on_gradients(c: Given, exchange: algorithms_numpy.Exchange) -> Tensors:
    # of parameters in their bucket (S2.1)
    order = np.concatenate(_split(np.arange(c.x.numel()), c.sizes)[::-1])
    gradients = [list(array(ranks)[:, order]) for ranks in c.gradients]
    history = algorithms_numpy.train_on_gradients(
        array(c.x)[order], gradients, c.lr, c.dtype, exchange
    )
    return {
        "x": _rows([[weights[np.argsort(order)]] * sum(c.nodes) for weights in history], c.dtype)
    }


def _on_weights(c: Given, mode: str | None) -> Tensors:
    gradients, interval = [list(array(ranks)) for ranks in c.gradients], c.communication_interval
    train = decentralized_numpy.train_decentralized
    return {
        "x": _rows(train(array(c.x), gradients, c.lr, c.dtype, c.leaders, mode, interval), c.dtype)
    }


def _local_training(c: Given) -> tuple[list[Any], Any, list[str]]:
    """Return the weights, the gradients by step, rank and parameter, and the dtypes."""
    gradients = [[_split(array(g), c.sizes) for g in ranks] for ranks in c.gradients]
    return _split(array(c.x), c.sizes), gradients, [c.dtype] * len(c.sizes)


def _joined(ranks: list[list[Any]], dtype: str) -> Tensor:
    return _rows([np.concatenate(weights) for weights in ranks], dtype)


def _local_sgd(c: Given) -> Tensors:
    start, gradients, dtypes = _local_training(c)
    options = c.options("period", "offset", "warmup_steps", "hierarchical", "momentum")
    history = local_updates_numpy.local_sgd(start, gradients, c.lr, dtypes, c.nodes, **options)
    return {"x": torch.stack([_joined(ranks, c.dtype) for ranks in history])}


def _diloco(c: Given) -> Tensors:
    (start, gradients, dtypes), n, fragments = _local_training(c), sum(c.nodes), c.fragments
    if isinstance(fragments, int):
        fragments = local_updates_numpy.places_of(
            [size * c.x.element_size() for size in c.sizes], fragments
        )

    def outer(tensors: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            tensors, lr=c.outer_lr, momentum=c.outer_momentum, nesterov=c.outer_nesterov
        )

    options = c.options("period", "delay", "mix", "warmup_steps", "compression", "momentum")
    model, xs, gs = (
        local_updates_numpy.DiLoCo(start, n, c.lr, dtypes, fragments, outer, **options),
        [],
        [],
    )
    for of_ranks in gradients:
        model.step(of_ranks)
        xs.append(_joined(model.ranks, c.dtype))
        shown = (
            model.ranks
            if model.g is None
            else [[algorithms_numpy.stored(g, c.dtype) for g in model.g]] * n
        )
        gs.append(_joined(shown, c.dtype))
    return {"x": torch.stack(xs), "g": torch.stack(gs)}


def _fragments_due(c: Given, delay: int) -> Tensor:
    schedule = c.options("period", "fragments", "warmup_steps")
    due = [local_updates_numpy.fragment_due(t, delay=delay, **schedule) for t in c.step.tolist()]
    return _integers(-1 if fragment is None else fragment for fragment in due)


def _gram(columns: Any, dtype: str) -> Tensor:
    """Return V V^T, which does not depend on the basis of the span of orthonormal columns."""
    wide = columns.astype(np.float64)
    return _rows(compression_numpy.product(wide, wide.T), dtype)


def _powersgd_rank(c: Given) -> Tensors:
    shapes, options = (
        zip(c.n.tolist(), c.m.tolist(), strict=True),
        (c.matrix_approximation_rank, c.min_compression_rate),
    )
    return {"r": _integers(compression_numpy.compressed_rank(shape, *options) for shape in shapes)}


def _powersgd_round(c: Given) -> Tensors:
    gradients, q, errors = list(c.gradients.numpy()), c.q.numpy() if "q" in c.inputs else None, None
    if c.memory is not None:
        errors = (
            list(c.errors.numpy())
            if "errors" in c.inputs
            else [np.zeros_like(g) for g in gradients]
        )
    found = compression_numpy.power_sgd_round(
        gradients, errors, q, c.columns.shape[1], **c.parameters
    )
    outputs = {"x": _rows(found.result, c.dtype), "qq": _gram(found.q, c.dtype)}
    return outputs if found.errors is None else {**outputs, "errors": _rows(found.errors, c.dtype)}


def _topk(c: Given) -> Tensors:
    _, ranks, size = c.gradients.shape
    errors = [np.zeros(size, np.float32) for _ in range(ranks)] if c.error_feedback else None
    xs, kept = [], []
    for step in c.gradients:
        result, errors = compression_numpy.topk_round(list(array(step)), errors, c.ratio, c.dtype)
        xs.append(result)
        kept.append(errors)
    return {"x": _rows(xs, c.dtype)} | (
        {"errors": _rows(kept, "float32")} if c.error_feedback else {}
    )


def _error_feedback(c: Given) -> Tensors:
    memory = compression_numpy.ErrorFeedback(c.leaders, c.codec, c.dtype, c.average)
    rounds = [
        (memory.round(list(array(step))), memory.workers, memory.servers) for step in c.gradients
    ]
    xs, workers, servers = zip(*rounds, strict=True)
    return {"x": _rows(xs, c.dtype), "e": _rows(workers, "float32"), "f": _rows(servers, "float32")}


def _qadam_step(c: Given) -> Tensors:
    (p, m, v), betas = map(array, (c.p, c.m, c.v)), (c.beta1, c.beta2)
    return {
        "p": _rows(
            algorithms_numpy.step_along_momentum(
                c.dtype, p, m, v, c.s, lr=c.lr, betas=betas, eps=c.eps
            ),
            c.dtype,
        )
    }


def _items_of_replicas(c: Given, **cut: Any) -> list[list[Any]]:
    options = c.options("shuffle", "seed", "epoch", "drop_last", "random_level")
    draws = samplers_plain.RecordedDraws(c.noise.tolist(), c.chunk_order.tolist())
    return samplers_plain.stretches_of(
        c.complexities.tolist(), [], c.num_replicas, draws=draws, **cut, **options
    )[0]


def _sampler_batches(c: Given) -> Tensors:
    cut = partial(samplers_plain.filled_batches, c.complexities.tolist(), c.max_cost)
    equal = _items_of_replicas(c, cut=cut, drop_batches=c.drop_last_batch)
    sizes = torch.tensor([[len(batch) for batch in batches] for batches in equal])
    return {
        "sizes": sizes,
        "indices": _integers(index for batches in equal for batch in batches for index in batch),
    }


def stretches_of(c: Given, draws: samplers_plain.Draws) -> list[list[list[Any]]]:
    """Return each replica's samples or batches in each stretch of a case's epoch (S7.6, S7.7)."""
    costs, options = (
        c.costs.tolist(),
        {**c.options("shuffle", "seed", "epoch", "drop_last"), "draws": draws},
    )
    if c.operation == "budget_batches":
        options |= {"padded": samplers_plain.FORMULAS.get(c.padded, c.padded), "mix": c.mix}
        return samplers_plain.budget_stretches(
            costs, c.max_cost, c.history, c.num_replicas, **options
        )
    if c.operation == "sampler_stretch_batches":
        options |= {
            "cut": partial(samplers_plain.filled_batches, costs, c.max_cost),
            "drop_batches": c.drop_last_batch,
        }
    return samplers_plain.stretches_of(
        costs, c.history, c.num_replicas, random_level=c.random_level, **options
    )


def _stretches(c: Given) -> Tensors:
    stretches = stretches_of(
        c, samplers_plain.RecordedDraws(c.noise.tolist(), c.permutations.tolist())
    )
    items = [item for shares in stretches for share in shares for item in share]
    found = {"counts": _integers(len(shares[0]) for shares in stretches)}
    if c.operation != "sampler_stretches":
        found["sizes"], items = (
            _integers(map(len, items)),
            [index for batch in items for index in batch],
        )
    return {**found, "indices": _integers(items)}


_ANSWERS: dict[str, Answer] = {
    "kernels": _elementwise,
    "kernels/reduce_chunks": _reduce_chunks,
    "kernels/gather_flat": lambda c: {
        "flat": _tensor([v for x in c.inputs.values() for v in x.view(-1).tolist()], c.dtype)
    },
    "kernels/scatter_flat": _scatter_flat,
    "kernels/order_by_complexity": lambda c: {
        "order": _integers(kernels_scalar.ascending(c.keys.tolist()))
    },
    "codec/compress_minmax_uint8": _compress,
    "codec/decompress_minmax_uint8": _decompress,
    "codec/roundtrip_minmax_uint8": _roundtrip,
    "codecs/codec_compress": _compress,
    "codecs/codec_decompress": _decompress,
    "comm_ops": lambda c: {"x": _reduced(c, array(c.x))},
    "comm_ops/decentralized_shift_one": _decentralized,
    "comm_ops/low_precision_decentralized": _ring,
    "comm_ops/async_average": _async_average,
    "comm_ops/qadam_momentum": _qadam_momentum,
    "peers/shift_one_peer": lambda c: {
        "peer": _integers(_queries(c, lambda t: decentralized_numpy.pairs(c.nranks, t)))
    },
    "graphs/decentralized_on_graph": _decentralized,
    "graphs/graph_sources": _graph_sources,
    "collectives": _collective,
    "collectives/alltoall_v": _alltoall_v,
    "algorithms/gradient_allreduce": lambda c: _on_gradients(
        c, algorithms_numpy.full_precision(c.average)
    ),
    "algorithms/bytegrad": lambda c: _on_gradients(
        c, algorithms_numpy.one_byte(c.average, c.leaders)
    ),
    "algorithms/decentralized": lambda c: _on_weights(c, c.peer_selection_mode),
    "algorithms/low_precision_decentralized": lambda c: _on_weights(c, None),
    "algorithms/qadam_frozen_step": _qadam_step,
    "qadam/qadam_step": _qadam_step,
    "local_updates/fragment_of_parameter": lambda c: {
        "fragment": _integers(local_updates_numpy.fragment_of(c.bytes.tolist(), c.fragments))
    },
    "local_updates/local_sgd_schedule": lambda c: {
        "averages": _integers(
            local_updates_numpy.is_averaged(t, **c.parameters) for t in c.step.tolist()
        )
    },
    "local_updates/diloco_schedule": lambda c: {
        "sent": _fragments_due(c, c.delay),
        "applied": _fragments_due(c, 0),
    },
    "local_updates/mix": lambda c: {
        "x": _rows(local_updates_numpy.mixed(array(c.x), array(c.g), c.mix, c.dtype), c.dtype)
    },
    "local_updates/local_sgd": _local_sgd,
    "local_updates/diloco": _diloco,
    "compressed_gradients/powersgd_rank": _powersgd_rank,
    "compressed_gradients/orthonormalize": lambda c: {
        "projection": _gram(compression_numpy.orthonormal(c.x.numpy()), c.dtype)
    },
    "compressed_gradients/powersgd_round": _powersgd_round,
    "compressed_gradients/topk_count": lambda c: {
        "k": _integers(compression_numpy.sent_count(m, c.ratio) for m in c.m.tolist())
    },
    "compressed_gradients/topk_indices": lambda c: {
        "indices": _integers(compression_numpy.kept(c.p.numpy(), c.k))
    },
    "compressed_gradients/topk": _topk,
    "compressed_gradients/error_feedback": _error_feedback,
    "samplers/sampler_indices": lambda c: {
        "indices": torch.tensor(_items_of_replicas(c), dtype=torch.int64)
    },
    "samplers/sampler_batches": _sampler_batches,
    **dict.fromkeys(
        (
            "samplers/sampler_stretches",
            "samplers/sampler_stretch_batches",
            "samplers/budget_batches",
        ),
        _stretches,
    ),
}
"""A suite or one of its operations -> its answer."""

"""A second opinion on collectives and on whole trainings of S5, from inputs and parameters alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.conformance.expected import algorithms_plain, decentralized_numpy

__all__ = ["OF_COLLECTIVES", "OF_TRAININGS"]

Tensors = dict[str, "Tensor"]

_OPS: dict[str, Callable[[list[Any]], Any]] = {
    "SUM": lambda column: math.fsum(column) if isinstance(column[0], float) else sum(column),
    "AVG": lambda column: math.fsum(column) / len(column),
    "PRODUCT": math.prod,
    "MIN": lambda column: math.nan if any(map(math.isnan, column)) else min(column),
    "MAX": lambda column: math.nan if any(map(math.isnan, column)) else max(column),
    "BAND": lambda column: reduce(lambda a, b: a & b, column),
    "BOR": lambda column: reduce(lambda a, b: a | b, column),
    "BXOR": lambda column: reduce(lambda a, b: a ^ b, column),
}


def _combined(x: Tensor, op: str) -> Tensor:
    """Reduce over ranks with Python's numbers, exact and without end; integers then wrap around."""
    values = [_OPS[op](list(column)) for column in x.T.tolist()]
    if x.dtype.is_floating_point:
        return torch.tensor(values, dtype=torch.float64).to(x.dtype)
    bits = 8 * x.dtype.itemsize
    wrapped = [value % (1 << bits) for value in values]
    signed = x.dtype is torch.int64
    return torch.tensor([value - (1 << bits) if signed and value >> (bits - 1) else value for value in wrapped], dtype=x.dtype)


def _allreduce(dtype: str, inputs: Tensors, op: str) -> Tensors:
    return {"out": _combined(inputs["x"], op).repeat(len(inputs["x"]), 1)}


def _reduce(dtype: str, inputs: Tensors, op: str, root: int) -> Tensors:
    out = inputs["x"].clone()
    out[root] = _combined(inputs["x"], op)
    return {"out": out}


def _reduce_scatter(dtype: str, inputs: Tensors, op: str) -> Tensors:
    return {"out": _combined(inputs["x"], op).view(len(inputs["x"]), -1)}


def _broadcast(dtype: str, inputs: Tensors, root: int) -> Tensors:
    return {"out": inputs["x"][root].repeat(len(inputs["x"]), 1)}


def _gather(dtype: str, inputs: Tensors, root: int) -> Tensors:
    return {"out": inputs["x"].reshape(-1)}


def _allgather(dtype: str, inputs: Tensors) -> Tensors:
    return {"out": inputs["x"].reshape(-1).repeat(len(inputs["x"]), 1)}


def _scatter(dtype: str, inputs: Tensors, root: int, nranks: int) -> Tensors:
    return {"out": inputs["x"].view(nranks, -1)}


def _alltoall(dtype: str, inputs: Tensors) -> Tensors:
    n = len(inputs["x"])
    return {"out": inputs["x"].view(n, n, -1).transpose(0, 1).reshape(n, -1)}


def _alltoall_v(dtype: str, inputs: Tensors) -> Tensors:
    x, out = inputs["x"].tolist(), inputs["before"].tolist()
    counts, starts, places = (inputs[name].tolist() for name in ("send_counts", "send_displs", "recv_displs"))
    for source, of_source in enumerate(counts):
        for destination, count in enumerate(of_source):
            start, place = starts[source][destination], places[destination][source]
            out[destination][place : place + count] = x[source][start : start + count]
    return {"out": torch.tensor(out)}


def _split(flat: list[float], sizes: list[int]) -> list[list[float]]:
    return [flat[start:end] for start, end in pairwise([0, *accumulate(sizes)])]


def _on_gradients(one_byte: bool) -> Callable[..., Tensors]:
    def solver(
        dtype: str, inputs: Tensors, nodes: list[int], sizes: list[int], lr: float, hierarchical: bool, average: bool
    ) -> Tensors:
        exchange = algorithms_plain.full_precision(average)
        if one_byte:
            exchange = algorithms_plain.one_byte(average, nodes, hierarchical)
        gradients: Any = [[_split(rank, sizes) for rank in ranks] for ranks in inputs["gradients"].tolist()]
        weights = _split(inputs["x"].tolist(), sizes)
        history = algorithms_plain.train_on_gradients(weights, gradients, lr, [dtype] * len(sizes), 10 * 2**20, exchange)
        after = torch.tensor([[w for weights in parameters for w in weights] for parameters in history], dtype=torch.float64).to(
            getattr(torch, dtype)
        )
        return {"x": after.unsqueeze(1).repeat(1, sum(nodes), 1)}

    return solver


def _arrays(x: Tensor) -> list[Any]:
    return list((x if x.dtype is torch.float64 else x.float()).numpy())


def _on_weights(train: Callable[..., list[list[Any]]]) -> Callable[..., Tensors]:
    def solver(
        dtype: str, inputs: Tensors, nodes: list[int], sizes: list[int], lr: float, hierarchical: bool,
        communication_interval: int, **more: Any,
    ) -> Tensors:  # fmt: skip
        start, gradients = _arrays(inputs["x"][None])[0], [_arrays(ranks) for ranks in inputs["gradients"]]
        options = {"hierarchical": hierarchical, "interval": communication_interval}
        if "peer_selection_mode" in more:
            options["mode"] = more["peer_selection_mode"]
        history = train(start, gradients, lr, dtype, nodes, **options)
        return {"x": torch.from_numpy(np.stack([np.stack(ranks) for ranks in history])).to(inputs["x"].dtype)}

    return solver


OF_COLLECTIVES: dict[str, Callable[..., Tensors]] = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "gather": _gather,
    "allgather": _allgather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "alltoall_v": _alltoall_v,
}
"""The solver of each operation of suite ``collectives``."""

OF_TRAININGS: dict[str, Callable[..., Tensors]] = {
    "gradient_allreduce": _on_gradients(one_byte=False),
    "bytegrad": _on_gradients(one_byte=True),
    "decentralized": _on_weights(decentralized_numpy.train_decentralized),
    "low_precision_decentralized": _on_weights(decentralized_numpy.train_on_ring),
}
"""The solver of each operation of suite ``algorithms``."""

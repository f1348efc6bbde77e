"""A second opinion on the cases of powersgd and topk (S10, S11.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.conformance.expected import power_sgd_numpy, topk_numpy

__all__ = ["OF_COMPRESSED_GRADIENTS"]

Tensors = dict[str, "Tensor"]


def _powersgd_rank(dtype: str, inputs: Tensors, matrix_approximation_rank: int, min_compression_rate: float) -> Tensors:
    sizes = zip(inputs["n"].tolist(), inputs["m"].tolist(), strict=True)
    return {"r": torch.tensor([power_sgd_numpy.compressed_rank(n, matrix_approximation_rank, min_compression_rate) for n in sizes])}


def _orthonormalize(dtype: str, inputs: Tensors) -> Tensors:
    v = power_sgd_numpy.orthonormal(inputs["x"].numpy()).astype(np.float64)
    return {"projection": torch.from_numpy(v @ v.T).to(inputs["x"].dtype)}


def _powersgd_round(dtype: str, inputs: Tensors, memory: str | None, **drawn: Any) -> Tensors:
    gradients, q = list(inputs["gradients"].numpy()), inputs["q"].numpy() if "q" in inputs else None
    errors = None
    if memory is not None:
        errors = list(inputs["errors"].numpy()) if "errors" in inputs else [np.zeros_like(g) for g in gradients]
    found = power_sgd_numpy.power_sgd_round(gradients, errors, q, inputs["columns"].shape[1], memory=memory, **drawn)
    assert found.q is not None
    wide = found.q.astype(np.float64)
    outputs = {"x": torch.from_numpy(found.result), "qq": torch.from_numpy(wide @ wide.T).to(inputs["gradients"].dtype)}
    return outputs if found.errors is None else {**outputs, "errors": torch.from_numpy(np.stack(found.errors))}


def _topk_count(dtype: str, inputs: Tensors, ratio: float) -> Tensors:
    return {"k": torch.tensor([topk_numpy.sent_count(m, ratio) for m in inputs["m"].tolist()])}


def _topk_indices(dtype: str, inputs: Tensors, k: int) -> Tensors:
    return {"indices": torch.tensor(topk_numpy.kept(inputs["p"].numpy(), k))}


def _topk(dtype: str, inputs: Tensors, ratio: float, error_feedback: bool) -> Tensors:
    errors = (
        [np.zeros(inputs["gradients"].shape[2], np.float32) for _ in range(inputs["gradients"].shape[1])]
        if error_feedback
        else None
    )
    xs, left = [], []
    for of_ranks in inputs["gradients"]:
        result, errors = topk_numpy.topk_round(list(of_ranks.float().numpy()), errors, ratio, dtype)
        xs.append(result)
        left.append(np.stack(errors or [result]))
    outputs = {"x": torch.from_numpy(np.stack(xs)).to(getattr(torch, dtype))}
    return {**outputs, "errors": torch.from_numpy(np.stack(left))} if error_feedback else outputs


OF_COMPRESSED_GRADIENTS: dict[str, Callable[..., Tensors]] = {
    "powersgd_rank": _powersgd_rank,
    "orthonormalize": _orthonormalize,
    "powersgd_round": _powersgd_round,
    "topk_count": _topk_count,
    "topk_indices": _topk_indices,
    "topk": _topk,
}

"""Cases of whole trainings with algorithms that exchange gradients or average weights (S5.1 to S5.4)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends.base import FLOATS
from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.conformance.vectors.case import Case, case_id, name_of, seed_of
from bagua_ref.conformance.vectors.numbers import Numbers
from bagua_ref.conformance.vectors.trainings import trained

__all__ = ["algorithm_cases"]

_SUITE, _SINCE = "algorithms", "2"
_SIZES = (3, 1, 4, 0, 5)
"""Elements of the parameters: 13, so that buckets are padded on every number of ranks but 1."""
_STEPS, _LR = 4, 0.5

_GRADIENT_ALLREDUCE: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((1,), {"hierarchical": False, "average": True}),
    ((3,), {"hierarchical": False, "average": False}),
    ((4,), {"hierarchical": False, "average": True}),
    ((3, 1), {"hierarchical": True, "average": True}),
    ((1, 2), {"hierarchical": True, "average": False}),
)
_BYTEGRAD: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((1,), {"hierarchical": False, "average": True}),
    ((2,), {"hierarchical": False, "average": False}),
    ((5,), {"hierarchical": False, "average": True}),
    ((3, 1), {"hierarchical": True, "average": True}),
    ((1, 3, 2), {"hierarchical": True, "average": False}),
)
_DECENTRALIZED: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((2,), {"hierarchical": False, "peer_selection_mode": "all", "communication_interval": 1}),
    ((4,), {"hierarchical": False, "peer_selection_mode": "shift_one", "communication_interval": 1}),
    ((6,), {"hierarchical": False, "peer_selection_mode": "shift_one", "communication_interval": 2}),
    ((3, 1), {"hierarchical": True, "peer_selection_mode": "shift_one", "communication_interval": 1}),
    ((2, 1, 1, 2), {"hierarchical": True, "peer_selection_mode": "shift_one", "communication_interval": 3}),
)
_RING: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((1,), {"hierarchical": False, "communication_interval": 1}),
    ((2,), {"hierarchical": False, "communication_interval": 1}),
    ((3,), {"hierarchical": False, "communication_interval": 2}),
    ((5,), {"hierarchical": False, "communication_interval": 1}),
    ((1, 3, 2), {"hierarchical": True, "communication_interval": 1}),
)


def algorithm_cases() -> Iterator[Case]:
    """Yield every case of suite ``algorithms``."""
    for dtype in FLOATS:
        for place, (nodes, options) in enumerate(_GRADIENT_ALLREDUCE):
            yield _training("gradient_allreduce", "S5.1", dtype, place, nodes, options)
        for place, (nodes, options) in enumerate(_DECENTRALIZED):
            yield _training("decentralized", "S5.3", dtype, place, nodes, options)
    for dtype in COMPRESSIBLE:
        for place, (nodes, options) in enumerate(_BYTEGRAD):
            yield _training("bytegrad", "S5.2", dtype, place, nodes, options)
        for place, (nodes, options) in enumerate(_RING):
            yield _training("low_precision_decentralized", "S5.4", dtype, place, nodes, options)


def _training(algorithm: str, clause: str, dtype: torch.dtype, place: int, nodes: tuple[int, ...], options: dict[str, Any]) -> Case:
    """Return a training in one bucket; sums that may be formed in any order are exact."""
    n, name = sum(nodes), f"{place:02}-{'+'.join(map(str, nodes))}"
    numbers = Numbers(seed_of(case_id(_SUITE, algorithm, name_of(dtype), name)))
    x, size = numbers.eighths(sum(_SIZES), dtype), _STEPS * n * sum(_SIZES)
    exact = algorithm == "gradient_allreduce"
    gradients = (numbers.eighths(size, dtype, 7) if exact else numbers.uniform(size, dtype, -1, 1)).view(_STEPS, n, -1)
    parameters = {"nodes": list(nodes), "sizes": list(_SIZES), "lr": _LR, **options}
    outputs = trained(algorithm, nodes, _split(x), [[_split(g) for g in step] for step in gradients], parameters)
    return Case(
        _SUITE, algorithm, clause, name_of(dtype), name, {"x": x, "gradients": gradients}, outputs, parameters, since=_SINCE
    )


def _split(flat: Tensor) -> list[Tensor]:
    return [flat[start:end] for start, end in pairwise([0, *accumulate(_SIZES)])]

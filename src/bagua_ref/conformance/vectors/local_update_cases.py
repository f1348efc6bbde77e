"""Cases of local updates: fragments, schedules, mixing, and small trainings (S9)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms.fragments import Fragment, FragmentSchedule, split_into_fragments
from bagua_ref.backends.base import FLOATS
from bagua_ref.conformance.vectors.case import Case, canonical, case_id, name_of, seed_of
from bagua_ref.conformance.vectors.numbers import KINDS, Numbers, tensor_of
from bagua_ref.conformance.vectors.trainings import trained

__all__ = ["local_update_cases"]

_SUITE, _SINCE = "local_updates", "2"
_SIZES = (3, 1, 4, 0, 5)
"""Elements of the parameters of a training."""


def local_update_cases() -> Iterator[Case]:
    """Yield every case of suite ``local_updates``."""
    yield from _fragments()
    yield from _schedules()
    for dtype in FLOATS:
        yield from _mixes(dtype)
        for number, (nodes, options) in enumerate(_LOCAL_SGD):
            yield _training("local_sgd", "S9.1", dtype, f"{number:02}-{_plus(nodes)}", nodes, options)
        for number, (clause, nodes, options) in enumerate(_DILOCO):
            if dtype is not torch.float64 or options.get("compression") is None:
                yield _training("diloco", clause, dtype, f"{number:02}-{_plus(nodes)}", nodes, {**_DEFAULTS, **options})


def _plus(nodes: tuple[int, ...]) -> str:
    return "+".join(map(str, nodes))


def _fragments() -> Iterator[Case]:
    """Yield the fragment of each parameter, by its bytes."""
    sizes = {
        "equal": [8] * 12,
        "one-large": [4, 4, 4000, 4, 4, 4],
        "large-first": [4000, 4, 4, 4, 4, 4],
        "large-last": [4, 4, 4, 4, 4, 4000],
        "alternating": [400, 4] * 6,
        "zeros": [0, 0, 0, 0],
        "some-zeros": [0, 6, 0, 0, 2, 4, 0],
        "halves": [1, 1, 2, 2, 4, 4, 8, 8],
        "beyond-32-bits": [2**33, 2**32 + 2, 2**31, 2, 2**33 - 2],
    }
    for name, given in sizes.items():
        for count in sorted({1, 2, 3, len(given) - 1, len(given)}):
            found = split_into_fragments(given, count)
            yield Case(
                _SUITE, "fragment_of_parameter", "S9.3", "int64", f"{name}-{count}",
                {"bytes": torch.tensor(given)}, {"fragment": torch.tensor(found)}, {"fragments": count}, ("valid", "edge"),
                since=_SINCE,
            )  # fmt: skip


def _schedules() -> Iterator[Case]:
    """Yield what is averaged, sent or applied after steps, the last of them beyond 32 bits."""
    for period, offset, warmup_steps in ((1, 0, 0), (4, 0, 0), (4, 1, 0), (4, 3, 2), (5, 0, 3), (7, 2, 1)):
        steps = [*range(1, 2 * period + warmup_steps + 2), 2**40 + 1, 2**40 + 2, 2**40 + 3]
        due = [int(t > warmup_steps and (t - warmup_steps - offset) % period == 0) for t in steps]
        parameters = {"period": period, "offset": offset, "warmup_steps": warmup_steps}
        yield Case(
            _SUITE, "local_sgd_schedule", "S9.1", "int64", f"{period}-{offset}-{warmup_steps}",
            {"step": torch.tensor(steps)}, {"averages": torch.tensor(due)}, parameters, ("valid", "edge"), since=_SINCE,
        )  # fmt: skip
    for period, count, delay, warmup_steps in (
        (1, 1, 0, 0), (6, 1, 0, 0), (6, 1, 5, 0), (6, 3, 0, 0), (6, 3, 1, 0), (12, 4, 2, 3), (20, 2, 9, 1), (5, 5, 0, 2),
    ):  # fmt: skip
        schedule = FragmentSchedule(period, count, delay)
        steps = [*range(1, 2 * period + warmup_steps + 2), 2**40 + 1, 2**40 + 2, 2**40 + 3]
        outputs = {
            "sent": [schedule.sent_after(t - warmup_steps) if t > warmup_steps else None for t in steps],
            "applied": [schedule.applied_after(t - warmup_steps) if t > warmup_steps else None for t in steps],
        }
        parameters = {"period": period, "fragments": count, "delay": delay, "warmup_steps": warmup_steps}
        yield Case(
            _SUITE, "diloco_schedule", "S9.4", "int64", f"{period}-{count}-{delay}-{warmup_steps}",
            {"step": torch.tensor(steps)},
            {name: torch.tensor([-1 if p is None else p for p in fragments]) for name, fragments in outputs.items()},
            parameters, ("valid", "edge"), since=_SINCE,
        )  # fmt: skip


def _mixes(dtype: torch.dtype) -> Iterator[Case]:
    """Yield weights after mixing with g, which is float32 (float64 for float64)."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for kind in ("plain", "wide", "denormal", "huge", "special", "zeros"):
        for mix in (0.0, 0.3, 0.5, 0.9, 1.0):
            name = f"{kind}-{mix:g}"
            numbers = Numbers(seed_of(case_id(_SUITE, "mix", name_of(dtype), name)))
            x = canonical(KINDS[kind][1](numbers, 33, dtype))
            g = canonical(KINDS[kind][1](numbers, 33, dtype).to(wide))
            if kind in ("plain", "wide"):  # bits that x has no room for
                g = g + g * tensor_of([numbers.between(-1e-3, 1e-3) for _ in range(33)], wide)
            fragment = Fragment(["x"], [torch.nn.Parameter(x.clone())], lambda tensors: torch.optim.SGD(tensors, lr=1.0))
            with torch.no_grad():
                fragment.copies[0].copy_(g)
            fragment.mix(mix)
            result = canonical(fragment._parameters[0])
            yield Case(
                _SUITE, "mix", "S9.4", name_of(dtype), name, {"x": x, "g": g}, {"x": result}, {"mix": mix}, (KINDS[kind][0],),
                since=_SINCE,
            )  # fmt: skip


_LOCAL_SGD: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((2,), {"period": 2, "offset": 0, "warmup_steps": 0, "hierarchical": False, "momentum": 0.5}),
    ((1, 1), {"period": 3, "offset": 1, "warmup_steps": 2, "hierarchical": False, "momentum": 0.0}),
    ((4,), {"period": 2, "offset": 1, "warmup_steps": 1, "hierarchical": False, "momentum": 0.0}),
    ((2, 2), {"period": 3, "offset": 0, "warmup_steps": 1, "hierarchical": True, "momentum": 0.0}),
)
_DEFAULTS: dict[str, Any] = {
    "delay": 0, "mix": 0.0, "warmup_steps": 0, "compression": None, "momentum": 0.0,
    "outer_lr": 0.5, "outer_momentum": 0.5, "outer_nesterov": True,
}  # fmt: skip
_BYTES = {"compression": "MinMaxUInt8"}
_DILOCO: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("S9.2", (1,), {"period": 2, "fragments": 1, "momentum": 0.5}),
    ("S9.2", (2,), {"period": 1, "fragments": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "outer_nesterov": False}),
    ("S9.2", (2,), {"period": 3, "fragments": 1, "warmup_steps": 2, "outer_nesterov": False}),
    ("S9.3", (1, 1), {"period": 4, "fragments": 4}),
    ("S9.3", (2,), {"period": 3, "fragments": [[4, 0], [1], [3, 2]]}),
    ("S9.4", (2,), {"period": 4, "fragments": 2, "delay": 1}),
    ("S9.4", (2,), {"period": 6, "fragments": 2, "delay": 2, "mix": 0.3, "warmup_steps": 1}),
    ("S9.4", (1, 1), {"period": 3, "fragments": 1, "delay": 2, "mix": 0.5, "momentum": 0.5}),
    ("S9.4", (4,), {"period": 4, "fragments": 2, "delay": 1, "outer_momentum": 0.0, "outer_nesterov": False}),
    ("S9.5", (2,), {"period": 2, "fragments": 2, **_BYTES}),
    ("S9.5", (3,), {"period": 2, "fragments": 1, **_BYTES, "delay": 1}),
    ("S9.5", (2, 3), {"period": 4, "fragments": [[4, 2], [0, 1, 3]], **_BYTES, "mix": 0.9}),
)


def _training(operation: str, clause: str, dtype: torch.dtype, name: str, nodes: tuple[int, ...], options: dict[str, Any]) -> Case:
    """Return a training; with more than two ranks, sums over ranks that are not compressed are exact in any order."""
    n, steps = sum(nodes), 8
    numbers = Numbers(seed_of(case_id(_SUITE, operation, name_of(dtype), name)))
    size = sum(_SIZES)
    x = numbers.eighths(size, dtype)
    if n > 2 and options.get("compression") is None:
        gradients = numbers.eighths(steps * n * size, dtype, 7)
    else:
        gradients = numbers.uniform(steps * n * size, dtype, -1, 1)
    gradients = gradients.view(steps, n, size)
    parameters = {"nodes": list(nodes), "sizes": list(_SIZES), "lr": 0.5, **options}
    outputs = trained(operation, nodes, _split(x), [[_split(g) for g in step] for step in gradients], parameters)
    return Case(
        _SUITE, operation, clause, name_of(dtype), name, {"x": x, "gradients": gradients}, outputs, parameters, since=_SINCE
    )


def _split(flat: Tensor) -> list[Tensor]:
    return [flat[start:end] for start, end in pairwise([0, *accumulate(_SIZES)])]

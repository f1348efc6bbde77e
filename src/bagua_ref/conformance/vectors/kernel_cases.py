"""Cases of the kernels other than codecs (S1, S2.3, S3.4 to S3.7, S5.5, S7.2) and samplers
(S7).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends.base import FLOATS
from bagua_ref.conformance.cases.tensor_files import name_of
from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.vectors import answers
from bagua_ref.conformance.vectors.case import KINDS, Case, numbers_of

__all__ = ["kernel_cases", "sampler_cases"]

_SIZE = 33

_ELEMENTWISE: tuple[tuple[str, str, tuple[str, ...], tuple[dict[str, Any], ...]], ...] = (
    ("add", "S1", ("y",), ({},)),
    ("subtract", "S1", ("y",), ({},)),
    ("add_scaled", "S3.5", ("y",), ({"factor": 1 / 3}, {"factor": -5 / 3}, {"factor": 0.1})),
    ("average", "S3.4", ("y",), ({},)),
    ("divide", "S3.3", (), ({"divisor": 3.0}, {"divisor": 1.5}, {"divisor": 7.0})),
    ("combine_ring", "S3.5", ("left", "right", "weight"), ({},)),
    (
        "async_average",
        "S3.6",
        ("reduced", "snapshot"),
        ({"nranks": 1}, {"nranks": 3}, {"nranks": 8}),
    ),
    (
        "update_momentum",
        "S5.5",
        ("grad",),
        ({"beta1": 0.9}, {"beta1": 0.99}, {"beta1": 0.0}, {"beta1": 1.0}),
    ),
)
"""Operation, clause, what it reads beside x, and the parameters it is tried with. ``x`` is m for
update_momentum.
"""

_REDUCTIONS = ((1, 5), (2, 9), (3, 8), (4, 1), (5, 33), (8, 4), (16, 33), (64, 1))
"""Numbers of chunks and their sizes: also such that a library would add pairwise."""


def kernel_cases() -> Iterator[Case]:
    """Yield every case of suite ``kernels``."""
    for dtype in FLOATS:
        for kind in (*KINDS, "empty"):
            for operation, clause, others, choices in _ELEMENTWISE:
                for place, parameters in enumerate(choices if kind != "empty" else choices[:1]):
                    yield _elementwise(
                        operation, clause, others, dtype, kind, place, len(choices), parameters
                    )
        yield from _reductions(dtype)
        yield from _movements(dtype)
        yield from _orders(dtype)
    for dtype in (torch.uint8, torch.int64):
        yield from _movements(dtype)
        yield from _orders(dtype)


def _elementwise(
    operation: str,
    clause: str,
    others: tuple[str, ...],
    dtype: torch.dtype,
    kind: str,
    place: int,
    of: int,
    parameters: Any,
) -> Case:
    name = f"{kind}-{place}" if of > 1 and kind != "empty" else kind
    numbers, empty = numbers_of("kernels", operation, dtype, name), kind == "empty"
    inputs = {
        key: numbers.of("plain" if empty else kind, 0 if empty else _SIZE, dtype)
        for key in ("x", *others)
    }
    if operation == "async_average" and dtype is not torch.float64:
        inputs["reduced"] = inputs["reduced"].float()
    return Case(
        "kernels", operation, clause, dtype, name, inputs, parameters, (KINDS.get(kind, "edge"),)
    )


def _reductions(dtype: torch.dtype) -> Iterator[Case]:
    """Yield chunk reductions (S3.7)."""
    rows = [("plain", *shape) for shape in _REDUCTIONS] + [
        (kind, 3, 9) for kind in KINDS if kind != "plain"
    ]
    rows += [("plain", 4, 0), ("plain", 259, 4)]  # which bfloat16 has no number for
    for kind, num_chunks, size in rows:
        for average in (False, True):
            name = f"{kind}-{num_chunks}x{size}-{'mean' if average else 'sum'}"
            numbers = numbers_of("kernels", "reduce_chunks", dtype, name)
            x, flags = (
                numbers.of(kind, num_chunks * size, dtype),
                (KINDS[kind] if size else "edge",),
            )
            parameters = {
                "num_chunks": num_chunks,
                "target_chunk": numbers.below(num_chunks),
                "average": average,
            }
            yield Case("kernels", "reduce_chunks", "S3.7", dtype, name, {"x": x}, parameters, flags)


def _movements(dtype: torch.dtype) -> Iterator[Case]:
    """Yield gathering into and scattering out of a flat tensor (S2.3)."""
    for name, shapes in (
        ("some", [[2, 3], [], [4], [1, 2, 2]]),
        ("with-empty", [[0], [3], [2, 0]]),
        ("none", []),
    ):
        numbers, flags = (
            numbers_of("kernels", "gather_flat", dtype, name),
            ("valid" if name == "some" else "edge",),
        )
        counts = [
            torch.tensor([numbers.below(200) for _ in range(torch.Size(shape).numel())])
            for shape in shapes
        ]
        parts = [
            (x / 8 if dtype.is_floating_point else x).to(dtype).view(shape)
            for x, shape in zip(counts, shapes, strict=True)
        ]
        inputs = {f"t{place}": part for place, part in enumerate(parts)}
        gather = Case("kernels", "gather_flat", "S2.3", dtype, name, inputs, {}, flags)
        yield gather
        if parts:
            yield Case(
                "kernels",
                "scatter_flat",
                "S2.3",
                dtype,
                name,
                gather.outputs,
                {"shapes": shapes},
                flags,
            )


def _orders(dtype: torch.dtype) -> Iterator[Case]:
    """Yield stable orders (S7.2)."""
    for kind in (
        ("plain", "ties", "special", "empty") if dtype.is_floating_point else ("ties", "empty")
    ):
        numbers = numbers_of("kernels", "order_by_complexity", dtype, kind)
        if kind in ("plain", "special"):
            keys = numbers.of(kind, 40, dtype)
        else:
            keys = torch.tensor([numbers.below(7) for _ in range(40 if kind == "ties" else 0)]).to(
                dtype
            )
        flags = ("edge",) if kind in ("special", "empty") else ("valid",)
        yield Case("kernels", "order_by_complexity", "S7.2", dtype, kind, {"keys": keys}, {}, flags)


_OPTIONS: tuple[dict[str, Any], ...] = tuple(
    {
        "shuffle": shuffle,
        "drop_last": drop_last,
        "random_level": level,
        "seed": seed,
        "epoch": epoch,
    }
    for shuffle, drop_last, level, seed, epoch in (
        (False, False, 0.0, 0, 0),
        (False, True, 0.0, 0, 0),
        (True, False, 0.0, 0, 1),
        (True, False, 0.25, 1234, 3),
        (True, True, 1.0, 7, 0),
        (True, False, 1.0, 2**40, 17),
    )
)

_SAMPLERS: tuple[dict[str, Any], ...] = tuple(
    {"N": n, "num_replicas": r, **options}
    for n, r in ((1, 1), (1, 4), (3, 4), (10, 3), (12, 3), (64, 8), (101, 7), (257, 16))
    for options in _OPTIONS
)

_HISTORIES: tuple[tuple[int, list[list[int]], int], ...] = (
    (10, [[3, 1]], 2),
    (12, [[3, 4]], 2),  # nothing is left
    (5, [[2, 2]], 3),
    (12, [[1, 2]], 16),
    (64, [[8, 3], [4, 5]], 6),
    (101, [[7, 5], [3, 10], [5, 2]], 4),
    (257, [[16, 16]], 2),
)
"""Samples; the replicas of each stretch that ended, and what each drew; the replicas of the last
stretch (S7.6).
"""

_BATCHED: tuple[tuple[int, list[list[int]], int], ...] = (
    (12, [[3, 1]], 2),
    (64, [[8, 1], [4, 2]], 6),
    (101, [[3, 4]], 5),
)

_BUDGETS: tuple[tuple[int, list[list[int]], int, int, bool | str, int], ...] = (
    (1, [], 1, 40, True, 8),
    (3, [], 5, 40, False, 8),  # some samples are drawn once more
    (24, [], 4, 41, True, 8),  # most batches are single samples
    (24, [[1, 5]], 7, 60, False, 2),
    (64, [[2, 3]], 3, 120, True, 1),
    (64, [[2, 3]], 3, 120, False, 3),
    (101, [[4, 2], [2, 3]], 5, 160, True, 8),
    (101, [[4, 2]], 3, 4800, "m * h * h", 2),
    (40, [[4, 1]], 1, 160, True, 32),
)
"""As `_HISTORIES`, and ``max_cost``, ``padded`` and ``mix`` (S7.7)."""


def sampler_cases() -> Iterator[Case]:
    """Yield every case of suite ``samplers``: which samples each replica draws, and in which
    batches.
    """
    yield from _whole_epochs()
    for place, (operation, settings) in enumerate(_epochs_in_stretches()):
        name = f"{place:02}-N{settings['N']}-R{settings['num_replicas']}-seed{settings['seed']}-epoch{settings['epoch']}"
        dtype = (torch.int64, torch.float64)[place % 2]
        numbers = numbers_of("samplers", operation, dtype, name)
        lowest = 1 if operation == "budget_batches" else 0
        costs = torch.tensor(
            [lowest + numbers.below(157) / 4 for _ in range(settings["N"])], dtype=torch.float64
        ).to(dtype)
        draws = samplers_plain.Draws(settings["seed"] + settings["epoch"])
        answers.stretches_of(
            answers.Given(operation, name_of(dtype), settings, {"costs": costs}), draws
        )
        inputs = {
            "costs": costs,
            "noise": torch.tensor(draws.noise),
            "permutations": torch.tensor(draws.permutations),
        }
        inputs = {name: x.to(x.dtype if len(x) else torch.int64) for name, x in inputs.items()}
        clause = "S7.7" if operation == "budget_batches" else "S7.6"
        flags = (
            ("edge",)
            if settings["N"] < settings["num_replicas"] or settings["N"] == 1
            else ("valid",)
        )
        yield Case("samplers", operation, clause, dtype, name, inputs, settings, flags)


def _epochs_in_stretches() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield operations and parameters of epochs in which the number of replicas changes."""
    for place, (n, history, r) in enumerate(_HISTORIES):
        for options in _OPTIONS[place % 2 :: 2]:
            yield "sampler_stretches", {"N": n, "history": history, "num_replicas": r, **options}
    for n, history, r in _BATCHED:
        for options in (_OPTIONS[0], _OPTIONS[3]):
            for drop_last in (False, True):
                more = {"drop_last_batch": drop_last, "max_cost": 60}
                yield (
                    "sampler_stretch_batches",
                    {"N": n, "history": history, "num_replicas": r, **options, **more},
                )
    for place, (n, history, r, max_cost, padded, mix) in enumerate(_BUDGETS):
        for options in _OPTIONS[place % 2 :: 2]:
            if n >= r or not options["drop_last"]:  # else no batch is left, which is an error
                settings = {"N": n, "history": history, "num_replicas": r, **options}
                del settings["random_level"]
                yield (
                    "budget_batches",
                    {**settings, "max_cost": max_cost, "padded": padded, "mix": mix},
                )


def _whole_epochs() -> Iterator[Case]:
    """Yield epochs of one stretch (S7.3, S7.4)."""
    for place, settings in enumerate(_SAMPLERS):
        n, r, seed, epoch = (settings[key] for key in ("N", "num_replicas", "seed", "epoch"))
        name = f"{place:02}-N{n:g}-R{r:g}-seed{seed:g}-epoch{epoch:g}"
        for dtype in (torch.int64, torch.float64):
            flags = ("edge",) if n < r or n == 1 else ("valid",)
            inputs = _inputs("sampler_indices", dtype, name, settings)
            yield Case("samplers", "sampler_indices", "S7.3", dtype, name, inputs, settings, flags)
            if dtype is torch.int64 and not settings["drop_last"] and n >= 10:
                for drop_last in (False, True):
                    batches = f"{name}-{'drop' if drop_last else 'repeat'}"
                    inputs = _inputs("sampler_batches", dtype, batches, settings)
                    parameters = {**settings, "drop_last_batch": drop_last, "max_cost": 60}
                    yield Case(
                        "samplers", "sampler_batches", "S7.4", dtype, batches, inputs, parameters
                    )


def _inputs(
    operation: str, dtype: torch.dtype, name: str, settings: dict[str, Any]
) -> dict[str, Tensor]:
    """Return complexities, some of them equal, and what torch's generator draws, so that vectors
    are of use without torch, too.
    """
    numbers = numbers_of("samplers", operation, dtype, name)
    drawn = torch.tensor([numbers.below(40) for _ in range(settings["N"])])
    complexities = drawn if dtype is torch.int64 else drawn.double() / 4
    options = {
        key: settings[key] for key in ("shuffle", "seed", "epoch", "drop_last", "random_level")
    }
    noise, chunks = samplers_plain.noise_and_chunks(
        complexities.tolist(), settings["num_replicas"], **options
    )
    return {
        "complexities": complexities,
        "noise": torch.tensor(noise),
        "chunk_order": torch.tensor(chunks),
    }

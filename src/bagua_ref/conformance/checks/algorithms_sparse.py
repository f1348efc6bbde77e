"""SparseLoCo and DeMo, bit for bit; with the cosine transform, round by round (S15)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import COMPRESSIBLE, Draw, seeds, worlds
from bagua_ref.conformance.cases.training_cases import (
    PLAIN,
    any_kind,
    any_weights,
    each_gradient,
    grid_weights,
    outer_optimizer,
    outer_optimizers,
    schedules,
    tame,
)
from bagua_ref.conformance.checks.algorithms_compressed import TOPK
from bagua_ref.conformance.checks.algorithms_local import (
    DILOCO,
    follow_model,
    refuse,
)
from bagua_ref.conformance.checks.registry import check, check_trainings, nothing
from bagua_ref.conformance.expected.chunked_numpy import (
    Round,
    SparseDiLoCo,
    chunks,
    cosine,
    sparse_round,
)
from bagua_ref.conformance.expected.kernels_numpy import Array, added, stored
from bagua_ref.conformance.expected.tolerances import SUM
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import (
    SHOWS_GRADIENTS,
    TrainedAlgorithm,
    Training,
    of_kinds,
)

__all__ = ["DEMO", "SPARSELOCO"]

_SHAPES = [(67,), (6, 7), (130,), (65, 3), (), (0,), (3, 0), (2, 3, 4), (2, 4, 6, 5), (1, 96)]
_WILD = st.sampled_from(["huge", "edges", "tiny", "halfway", "bits", "constant", "grid"])


def _sparse(draw: Draw) -> dict[str, Any]:
    """Draw options that both algorithms have."""
    return {
        "lr": 1.0,
        "warmup_steps": 0,
        "top_k": draw(st.sampled_from([1, 2, 3, 7])),
        "chunk": draw(st.sampled_from([1, 2, 3, 4, 64])),
        "mean": draw(st.sampled_from(["all", "contributors"])),
        "compression": draw(st.sampled_from([None, "Stat2", "Stat2", "MinMaxUInt8"])),
    }


# SparseLoCo.


def _options_of_sparseloco(draw: Draw, weights: list[Tensor]) -> dict[str, Any]:
    drawn = {**_sparse(draw), **schedules(draw, len(weights)), "momentum": 0.0, "mix": 0.0}
    drawn["outer_optimizer"] = draw(outer_optimizers | st.none())
    return {**drawn, "error_decay": draw(st.sampled_from([0.95, 0.95, 0.5, 1.0, 0.0]))}


def _model_of(training: Training) -> SparseDiLoCo:
    """Take the steps of a training as S15.5 says."""
    options, weights = training.options, training.weights
    training.exact = training.exact or not options["warmup_steps"]
    named = {name: options[name] for name in ("top_k", "chunk", "mean", "compression")}
    orders = [
        training.ravel(place, torch.arange(w.numel()).view(w.shape))
        for place, w in enumerate(weights)
    ]
    make = partial(
        SparseDiLoCo,
        shapes=[tuple(w.shape) for w in weights],
        orders=[order.astype(int) for order in orders],
        sparse={**named, "decay": options["error_decay"]},
    )
    outer = outer_optimizer(options["outer_optimizer"] or PLAIN)
    model: SparseDiLoCo = follow_model(training, make, outer)
    return model


def _follow_sparseloco(training: Training) -> None:
    _model_of(training)


SPARSELOCO = TrainedAlgorithm(
    "diloco",
    _options_of_sparseloco,
    _follow_sparseloco,
    worlds=lambda dtype: worlds(4),
    weights=lambda draw, dtype: any_weights(draw, dtype, 3),
    gradients=of_kinds(tame),
    steps=lambda draw, options: (
        options["warmup_steps"] + options["period"] + draw(st.integers(1, 4))
    ),
)


@check("S15.3", "messages", needs=(SPARSELOCO.method,), effort=0.4)
def messages(lab: Lab, draw: Draw) -> None:
    """Each fragment is one all-gather of bytes: of its tensors in order, the indices of 12 bits, and
    the values.
    """
    wanted: list[list[bytes]] = []

    def follow(training: Training) -> None:
        wanted.extend(_model_of(training).messages)

    nodes = draw(st.sampled_from([(2,), (1, 1), (2, 1)]))
    how: dict[str, Any] = {"looks": ("memories",), "record": True}  # which waits for what was sent
    training = SPARSELOCO.train(lab, draw, nodes=nodes, follow=follow, **how)
    sent = [sends for what, sends in lab.messages if what == "allgather()"]
    sent = [sends for sends in sent if sends[0].dtype is torch.uint8 and sends[0].numel()]
    wanted = [ranks for ranks in wanted if ranks[0]]
    lab.assert_that(len(sent) == len(wanted), f"{len(sent)} all-gathers, not {len(wanted)}")
    for number, ranks in enumerate(wanted):
        for rank in range(training.n):
            bytes_of = torch.tensor([*ranks[rank]], dtype=torch.uint8)
            lab.assert_equal(sent[number][rank], bytes_of, where=f"rank {rank}, message {number}")


# DeMo.


def _options_of_demo(draw: Draw, weights: list[Tensor]) -> dict[str, Any]:
    sign, decay = draw(st.booleans()), draw(st.sampled_from([0.999, 0.5, 1.0]))
    drawn = {"decay": decay, "transform": None, "sign": sign}
    return {**_sparse(draw), **drawn, **SHOWS_GRADIENTS}


def _round(training: Training, step: int, place: int, errors: list[Array]) -> Round:
    names = ("top_k", "chunk", "decay", "mean", "compression", "transform", "sign")
    given = [x.numpy().ravel() for x in training.tensors(step, place)]
    shape = tuple(training.weights[place].shape)
    options = {name: training.options[name] for name in names}
    return sparse_round(given, errors, shape, **options)


def _shaped(training: Training, place: int, found: Array) -> Tensor:
    """Return row-major numbers as a gradient of a parameter."""
    w = training.weights[place]
    return torch.from_numpy(stored(found, training.dtypes[place]).copy()).view(w.shape).to(w.dtype)


def _follow_demo(training: Training) -> None:
    places, n = range(len(training.weights)), training.n
    errors = [[np.zeros(w.numel(), np.float32)] * n for w in training.weights]
    for step in range(training.steps):
        if step < training.options["warmup_steps"]:
            results = [training.mean(step, place) for place in places]
        else:
            rounds = [_round(training, step, place, errors[place]) for place in places]
            errors = [each.errors for each in rounds]
            results = [_shaped(training, place, rounds[place].result) for place in places]
        training.step([results] * n)
        kept = [
            [
                torch.from_numpy(e[rank]).view(w.shape)
                for e, w in zip(errors, training.weights, strict=True)
            ]
            for rank in range(n)
        ]
        training.look("memories", kept)


DEMO = TrainedAlgorithm(
    "demo",
    _options_of_demo,
    _follow_demo,
    gradients=of_kinds(any_kind),
    steps=lambda draw, options: options["warmup_steps"] + 3,
)


def _unjudged(training: Training) -> None:
    for _ in range(training.steps):
        training.step()
        training.look("memories")


@check("S15.6", "cosine", dtypes=COMPRESSIBLE, needs=(DEMO.method,), effort=0.4)
def cosine_transform(lab: Lab, draw: Draw) -> None:
    """The largest coefficients of each chunk's discrete cosine transform, of decay*M + g, are
    averaged, and leave M.
    """

    def judge(training: Training) -> None:
        options = training.options
        for place, w in enumerate(training.weights):
            cells, sides = chunks(tuple(w.shape), options["chunk"])
            errors = [np.zeros(w.numel(), np.float32)] * training.n
            for step in range(training.steps):
                given = [x.numpy().ravel() for x in training.tensors(step, place)]
                inputs = [
                    np.float32(options["decay"]) * e + g for e, g in zip(errors, given, strict=True)
                ]
                expected = _round(training, step, place, errors)
                size = max([float(np.abs(x).max()) for x in inputs if x.size] + [1e-30])
                if all(_is_clear(cosine(x, cells, sides), cells, options["top_k"]) for x in inputs):
                    result = _shaped(training, place, expected.result)
                    if options["sign"]:
                        unsure = _unsure(training, step, place, errors, cells)
                        result = torch.where(unsure, training.seen("step", 0, step, place), result)
                    for rank in range(training.n):
                        see = partial(training.expect_seen, rank=rank, step=step, place=place)
                        see("step", want=result, tolerance=SUM(4096), magnitude=size)
                        left = torch.from_numpy(expected.errors[rank]).view(w.shape)
                        see("memories", want=left, tolerance=SUM(4096), magnitude=size)
                errors = [
                    training.seen("memories", rank, step, place).numpy().ravel()
                    for rank in range(training.n)
                ]

    forms = [draw(st.sampled_from(_SHAPES)) for _ in range(2)]
    DEMO.train(
        lab,
        draw,
        nodes=draw(worlds(3)),
        weights=grid_weights(draw, [lab.dtype] * 2, forms),
        gradients=of_kinds(st.sampled_from(["tame", "near"])),
        follow=_unjudged,
        judge=judge,
        transform="dct",
        compression=None,
        chunk=draw(st.sampled_from([4, 7, 64])),
    )


def _is_clear(y: Array, cells: Array, k: int) -> bool:
    """Return whether rounding does not decide which k elements of a chunk are the largest."""
    if k >= cells.shape[1]:
        return True
    largest = np.sort(np.abs(y[cells]), axis=1)[:, ::-1]
    return bool((largest[:, k - 1] - largest[:, k] > 2e-6 * largest[:, 0]).all())


def _unsure(training: Training, step: int, place: int, errors: list[Array], cells: Array) -> Tensor:
    """Return where the result is so small that rounding decides its sign."""
    signs, training.options["sign"] = training.options["sign"], False
    x = np.abs(_round(training, step, place, errors).result)
    training.options["sign"] = signs
    small = np.zeros(x.shape, bool)
    small[cells] = x[cells] < 2.0**-20 * x[cells].max(axis=1, keepdims=True, initial=0)
    return torch.from_numpy(small).view(training.weights[place].shape)


# Identities.


def _like_allreduce(training: Training) -> None:
    for step in range(training.steps):
        results = []
        for place in range(len(training.weights)):
            x = [g.numpy().ravel() for g in training.tensors(step, place)]
            results.append(_shaped(training, place, added(x) / np.float32(training.n)))
        training.step([results] * training.n)
        none = [torch.zeros(w.shape) for w in training.weights]
        training.look("memories", [none] * training.n)


def _like_topk(training: Training) -> None:
    options, m = training.options, training.weights[0].numel()
    ratio = (min(options["top_k"], m) - 0.5) / m
    training.options = {**options, "ratio": ratio, "error_feedback": True}
    TOPK.follow(training)
    training.options = options


_WHOLE = {"top_k": 4096, "compression": None, "mean": "all"}
_PLAIN_SUM = {"transform": None, "sign": False, "mean": "all", "compression": None}


def _ties(lab: Lab, draw: Draw) -> dict[str, Any]:
    generator = np.random.default_rng(draw(seeds))

    def signs(g: Tensor) -> Tensor:
        return torch.from_numpy(generator.choice([-2.0, -1, 1, 2], tuple(g.shape))).float()

    return {"change": each_gradient(signs), "nodes": draw(worlds(3)), "sign": False}


check_trainings(
    (
        TrainedAlgorithm.train,
        SPARSELOCO,
        0.5,
        "S15.1.chunks",
        (),
        lambda lab, draw: {
            "weights": grid_weights(
                draw,
                [torch.float32] * 3,
                [draw(st.sampled_from(_SHAPES)) for _ in range(3)],
            ),
            "nodes": draw(worlds(2)),
            "chunk": draw(st.integers(1, 64)),
        },
        (
            "Chunks are blocks whose sides are the largest divisors up to chunk of a tensor's last"
            " two dimensions, whatever its strides."
        ),
    ),
    (
        TrainedAlgorithm.train,
        DEMO,
        0.3,
        "S15.2.ties",
        (),
        _ties,
        "Of equal absolute values in a chunk, those of lower row-major index are sent.",
    ),
    (
        TrainedAlgorithm.train,
        DEMO,
        0.5,
        "S15.3.stat2",
        (),
        lambda *_: {
            "gradients": of_kinds(_WILD),
            "compression": "Stat2",
            "sign": False,
            "top_k": 9,
        },
        (
            "Stat2 decodes to three levels from exact sums, 0 stays 0, and what overflows makes the"
            " tensor NaN."
        ),
    ),
    (
        TrainedAlgorithm.train,
        DEMO,
        0.3,
        "S15.4.contributors",
        (),
        lambda *_: {
            "gradients": of_kinds(st.sampled_from(["grid", "sparse", "ties"])),
            "mean": "contributors",
            "sign": False,
        },
        "Each element is divided by the number of ranks whose decoded value is not 0.",
    ),
    (
        TrainedAlgorithm.train,
        SPARSELOCO,
        0.5,
        "S15.5.rounds",
        COMPRESSIBLE,
        lambda *_: {"looks": ("memories",)},
        (
            "Each fragment's error memory decays, the difference is added, and what was sent leaves"
            " it."
        ),
    ),
    (
        TrainedAlgorithm.train,
        SPARSELOCO,
        0.3,
        "S15.5.plain",
        COMPRESSIBLE,
        lambda lab, draw: {
            **_WHOLE,
            "follow": DILOCO.follow,
            "exact": True,
            "outer_optimizer": draw(outer_optimizers),
            "mix": draw(st.sampled_from([0.0, 0.3, 0.7])),
        },
        "With every element of each chunk selected and no codec, it is diloco, bit for bit.",
    ),
    (
        refuse,
        SPARSELOCO,
        0.3,
        "S15.5.not_finite",
        (),
        lambda *_: {"compression": "Stat2"},
        (
            "Where differences of one rank overflow, the step raises an error on every rank, and"
            " the fragment and its error memories stay as they were."
        ),
    ),
    (
        TrainedAlgorithm.train,
        DEMO,
        0.5,
        "S15.6.rounds",
        COMPRESSIBLE,
        nothing,
        (
            "M decays, the gradient is added, the largest elements of each chunk are averaged, or"
            " their signs applied, and leave M."
        ),
    ),
    (
        TrainedAlgorithm.train,
        DEMO,
        0.3,
        "S15.6.averaged_gradients",
        COMPRESSIBLE,
        lambda *_: {**_PLAIN_SUM, "top_k": 4096, "follow": _like_allreduce},
        (
            "Without a transform and signs, and with every element selected, gradients are averaged"
            " in rank order, and M is 0."
        ),
    ),
    (
        TrainedAlgorithm.train,
        DEMO,
        0.3,
        "S15.6.topk",
        COMPRESSIBLE,
        lambda lab, draw: {
            **_PLAIN_SUM,
            "follow": _like_topk,
            "decay": 1.0,
            "chunk": 64,
            "weights": [torch.zeros(draw(st.sampled_from([(7,), (5, 9), (64,)])), dtype=lab.dtype)],
        },
        "Without a transform, decay and signs, a bucket of one chunk is topk's, bit for bit.",
    ),
)

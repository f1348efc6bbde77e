"""Error memory of bytegrad and qadam, round by round (S11.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected.algorithms_plain import Exchange, Parameters
from bagua_ref.conformance.expected.compression_numpy import ErrorFeedback
from bagua_ref.conformance.expected.tolerances import EXACT, SUM
from bagua_ref.conformance.inputs.strategies import COMPRESSIBLE, Draw, worlds
from bagua_ref.conformance.inputs.training_cases import ONE_BUCKET, any_kind, grid_weights
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import TrainedAlgorithm, TrainingPlay, of_kinds
from bagua_ref.conformance.suites.algorithms import QADAM, follow_qadam
from bagua_ref.conformance.suites.checks import check

__all__ = ["BYTEGRAD_WITH_MEMORY"]

_NEEDS = ("bytegrad_with_memory",)
_EXACT = ("MinMaxUInt8", "MXFP8", "MXFP4", "MXINT8")
"""Codecs whose payloads are known to the bit; OneBit's scale may differ by an ulp."""
_nodes = st.sampled_from([(2,), (3,), (2, 1), (1, 3), (2, 2), (1,), (2, 1, 2), (1, 1)])


def _known(lab: Lab) -> Any:
    """Return the codecs of the kernels, or those that the target's own algorithms say that they have in ``codecs``."""
    own = lab.target.parts.get("algorithms")
    return lab.target.kernels.codecs if own is None else getattr(own, "codecs", ("MinMaxUInt8",))


def _codec(lab: Lab, draw: Draw, *preferred: str) -> str:
    """Draw one of the preferred codecs that the target has, else of all whose payloads are known to the bit."""
    known = _known(lab)
    found: str = draw(st.sampled_from([c for c in preferred if c in known] or [c for c in _EXACT if c in known]))
    return found


def _options(draw: Draw, weights: list[Tensor]) -> dict[str, Any]:
    flags = {name: draw(st.booleans()) for name in ("hierarchical", "average")}
    return {"lr": 0.5, **flags, "compression": "MinMaxUInt8"}


def _rounds_of(training: TrainingPlay, bucket: list[int]) -> ErrorFeedback:
    options, dtype = training.options, training.dtypes[bucket[0]]
    flags = options["hierarchical"], options["compression"], dtype, options.get("average", True)
    return ErrorFeedback(list(training.nodes), *flags)


def _follow(training: TrainingPlay) -> None:
    memories = [(bucket, _rounds_of(training, bucket)) for bucket in training.layout()]
    tolerance = SUM(16) if training.options["compression"] == "OneBit" else EXACT
    for step in range(training.steps):
        results: list[Any] = [...] * len(training.weights)
        for bucket, memory in memories:
            mean = memory.round(training.flat(step, bucket))
            ends = np.cumsum([training.weights[place].numel() for place in bucket])[:-1]
            for place, mine in zip(bucket, np.split(mean, ends), strict=True):
                results[place] = mine
        training.step([results] * training.n, tolerance)


BYTEGRAD_WITH_MEMORY = TrainedAlgorithm(
    "bytegrad_with_memory",
    _options,
    _follow,
    worlds=lambda dtype: _nodes,
    gradients=of_kinds(any_kind),
    steps=lambda draw, options: 3,
)


@check("algorithms", "S11.1", "rounds", dtypes=COMPRESSIBLE, needs=_NEEDS, effort=0.3)
def rounds(lab: Lab, draw: Draw) -> None:
    """What compression has left out of a rank's gradients, and out of its chunk of the result, is added in the next round."""
    BYTEGRAD_WITH_MEMORY.train(lab, draw, compression=_codec(lab, draw))


@check("algorithms", "S11.1", "leaders", needs=_NEEDS, effort=0.3)
def leaders(lab: Lab, draw: Draw) -> None:
    """Hierarchical, memories are those of node leaders, of the node's sum divided by n/L, also on uneven nodes and on one."""
    nodes = draw(st.sampled_from([(2, 1), (1, 3), (2, 2), (3,), (2, 1, 2)]))
    BYTEGRAD_WITH_MEMORY.train(lab, draw, nodes=nodes, hierarchical=True)


@check("algorithms", "S11.1", "padding", needs=_NEEDS, effort=0.4)
def padding(lab: Lab, draw: Draw) -> None:
    """Padding is data to the codec, but nothing is remembered of it: neither what a rank sends nor of the result."""
    nodes = draw(st.sampled_from([(2,), (3,), (5,), (2, 1)]))
    size = draw(st.integers(1, 12).filter(lambda size: size % sum(nodes) != 0))
    BYTEGRAD_WITH_MEMORY.train(
        lab, draw, nodes=nodes, weights=grid_weights(draw, [torch.float32], [(size,)]), gradients=of_kinds(st.just("tame")),
        compression=_codec(lab, draw, "OneBit"), bucket_bytes=ONE_BUCKET,
    )  # fmt: skip


@check("algorithms", "S11.1", "not_finite", dtypes=COMPRESSIBLE, needs=_NEEDS, effort=0.2)
def not_finite(lab: Lab, draw: Draw) -> None:
    """Where a result is NaN, memories of every rank stay as they were before the round; elsewhere they are replaced."""
    bad, value = draw(st.integers(0, 1)), draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    weights = grid_weights(draw, [lab.dtype], [(13,)])

    def poisoned(gradients: Any) -> Any:
        gradients[draw(st.integers(0, len(gradients) - 1))][bad][0].view(-1)[draw(st.integers(0, 12))] = value
        return gradients

    BYTEGRAD_WITH_MEMORY.train(
        lab, draw, weights=weights, change=poisoned, gradients=of_kinds(st.just("tame")), steps=4,
        compression=_codec(lab, draw, "MinMaxUInt8"), bucket_bytes=ONE_BUCKET,
    )  # fmt: skip


@check("algorithms", "S11.1", "new_buckets", needs=_NEEDS, effort=0.1)
def new_buckets(lab: Lab, draw: Draw) -> None:
    """Buckets of the same tensors find their memories again."""
    BYTEGRAD_WITH_MEMORY.train(lab, draw, steps=4, before=lambda steps: {2: draw(st.sampled_from(["new buckets", "restart"]))})


def _exchange(memory: ErrorFeedback) -> Exchange:
    def run(ranks: Parameters, dtype: str) -> Parameters:
        result = memory.round([np.array(x, np.float32) for x in ranks]).tolist()
        return [list(result) for _ in ranks]

    return run


def _follow_momenta(training: TrainingPlay) -> None:
    follow_qadam(training, [_exchange(_rounds_of(training, bucket)) for bucket in training.layout()])


@check("algorithms", "S11.1", "momenta", needs=("qadam_with_memory",), effort=0.2)
def momenta(lab: Lab, draw: Draw) -> None:
    """After qadam's warm-up, what compression has left out of momenta is added to the next ones."""
    _QADAM_WITH_MEMORY.train(lab, draw, nodes=draw(worlds(4)), compression=_codec(lab, draw), warmup_steps=2)


_QADAM_WITH_MEMORY = TrainedAlgorithm(
    "qadam_with_memory", QADAM.options, _follow_momenta, gradients=QADAM.gradients, steps=lambda draw, options: 6
)

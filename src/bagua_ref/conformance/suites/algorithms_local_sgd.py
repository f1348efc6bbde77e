"""Local SGD, step by step, compared with one loop over all ranks (S9.1)."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected import local_updates_numpy as plain
from bagua_ref.conformance.inputs.local_update_cases import (
    momenta,
    multi_rank_worlds,
    sized_worlds,
    some_weights,
    tame,
    used_parts,
)
from bagua_ref.conformance.inputs.strategies import FLOATS, Draw
from bagua_ref.conformance.inputs.training_cases import ByRank, any_gradients, exact_gradients, grid_weights
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.trial import Trial
from bagua_ref.conformance.suites.checks import check

_LOCAL_SGD = ("local_sgd",)


def _local_sgd(
    lab: Lab, draw: Draw, nodes: tuple[int, ...], weights: list[Tensor], gradients: ByRank, restart: int = 0, **options: Any
) -> None:
    n = sum(nodes)
    given = {"period": draw(st.integers(1, 4)), "warmup_steps": 0, "offset": 0, "hierarchical": False, "momentum": draw(momenta)}
    given |= options
    trial = Trial(draw, nodes, weights, gradients, given, exact=n <= 2)
    by_step = [trial.gradients(step) for step in range(trial.steps)]
    history = plain.local_sgd(trial.start, by_step, 1.0, trial.dtypes, list(nodes), **given)
    for step, ranks in enumerate(history, start=1):
        trial.step(ranks)
        if step == restart:
            trial.look("restart", ranks)
    trial.run(lab, "local_sgd")


@check("algorithms", "S9.1", "period", dtypes=FLOATS, needs=_LOCAL_SGD, effort=0.2)
def period(lab: Lab, draw: Draw) -> None:
    """After steps divisible by the period, all weights become their mean over ranks; other steps and optimizers stay local."""
    nodes, weights = draw(sized_worlds(lab.dtype)), some_weights(draw, lab.dtype)
    _local_sgd(lab, draw, nodes, weights, any_gradients(draw, weights, sum(nodes), draw(st.integers(2, 7)), tame))


@check("algorithms", "S9.1", "offset", needs=_LOCAL_SGD, effort=0.3)
def offset(lab: Lab, draw: Draw) -> None:
    """With an offset, the first averaging follows that step: offset 1 begins with the first, offset 0 with step period."""
    nodes, weights, size = draw(multi_rank_worlds), some_weights(draw, lab.dtype, 2), draw(st.integers(2, 4))
    gradients = exact_gradients(draw, weights, sum(nodes), draw(st.integers(size, 2 * size + 1)))
    _local_sgd(lab, draw, nodes, weights, gradients, period=size, offset=draw(st.integers(0, size - 1)))


@check("algorithms", "S9.1", "warmup", needs=_LOCAL_SGD, effort=0.3)
def warmup_of_local_sgd(lab: Lab, draw: Draw) -> None:
    """Up to warmup_steps, every step applies the mean gradient; steps of periods are counted from there."""
    nodes, weights, warmup_steps = draw(multi_rank_worlds), some_weights(draw, lab.dtype, 3), draw(st.integers(1, 4))
    gradients = exact_gradients(draw, weights, sum(nodes), warmup_steps + draw(st.integers(1, 5)))
    _local_sgd(lab, draw, nodes, weights, gradients, warmup_steps=warmup_steps)


@check("algorithms", "S9.1", "inside_nodes", needs=_LOCAL_SGD, effort=0.3)
def inside_nodes(lab: Lab, draw: Draw) -> None:
    """Hierarchical, each step after the warm-up applies the mean gradient of the node's ranks, and periods average over all."""
    nodes = draw(st.sampled_from([(2, 1), (2, 2), (1, 3), (2,), (1, 1, 2)]))
    weights, warmup_steps = some_weights(draw, lab.dtype, 3), draw(st.integers(0, 2))
    gradients = exact_gradients(draw, weights, sum(nodes), warmup_steps + draw(st.integers(2, 6)))
    _local_sgd(lab, draw, nodes, weights, gradients, warmup_steps=warmup_steps, hierarchical=True)


@check("algorithms", "S9.1", "unused_parameters", needs=_LOCAL_SGD, effort=0.3)
def unused_by_local_sgd(lab: Lab, draw: Draw) -> None:
    """Parameters that a rank has not used, or never uses, are averaged all the same."""
    nodes, weights = draw(multi_rank_worlds), grid_weights(draw, [torch.float32] * draw(st.integers(2, 4)))
    gradients = exact_gradients(draw, weights, sum(nodes), draw(st.integers(2, 6)))
    _local_sgd(lab, draw, nodes, weights, used_parts(draw, gradients))


@check("algorithms", "S9", "restart_of_local_sgd", needs=_LOCAL_SGD, effort=0.3)
def restart_of_local_sgd(lab: Lab, draw: Draw) -> None:
    """Training that continues from saved weights and states averages at the steps at which it would have."""
    nodes, weights, warmup_steps = draw(multi_rank_worlds), some_weights(draw, lab.dtype, 2), draw(st.integers(0, 2))
    gradients = exact_gradients(draw, weights, sum(nodes), warmup_steps + draw(st.integers(2, 7)))
    restart = draw(st.integers(1, len(gradients[0])))
    _local_sgd(lab, draw, nodes, weights, gradients, restart, warmup_steps=warmup_steps)

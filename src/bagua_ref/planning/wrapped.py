"""Bytes and memory of a training that begins: a warning where an option costs bytes, and a line in the log (S14.1)."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import Any

from bagua_ref.algorithms import GlobalAlgorithmRegistry, GradientAllReduceAlgorithm
from bagua_ref.data_parallel.training import ModuleTraining
from bagua_ref.planning.plans import plan_of
from bagua_ref.planning.shapes import Cluster, Parameters
from bagua_ref.planning.steps import StepPlan

__all__ = ["describe"]

_logger = logging.getLogger(__name__)


def describe(training: ModuleTraining) -> None:
    """Warn if ``hierarchical=True`` costs bytes on one node, and log bytes and memory at INFO; on the group's first rank alone.

    Bytes are those that the busiest rank sends, after the warm-up by the mean of a period. Left out are trainings without a plan
    and graphs by a user's function, which is called for steps that are trained only.

    Args:
        training: of two ranks or more.
    """
    algorithm: Any = training.algorithm
    if training.world.identity.rank != training.given_group.ranks[0]:
        return
    nodes = tuple(len(ranks) for ranks in training.given_group.nodes.values())
    costs_bytes = len(nodes) == 1 and getattr(algorithm, "hierarchical", False)
    asked = costs_bytes or _logger.isEnabledFor(logging.INFO)
    if sum(nodes) < 2 or not asked or callable(getattr(algorithm, "peer_selection_mode", None)):
        return
    try:
        parameters, cluster = Parameters(training.module, training.bucket_bytes), Cluster(nodes)
        plan = plan_of(algorithm, parameters, cluster)
        flat = plan_of(replace(algorithm, hierarchical=False), parameters, cluster) if costs_bytes else plan
    except (TypeError, ValueError, NotImplementedError):  # an algorithm of the user's, or an odd number of ranks in pairs
        return
    if plan.sent[0] > flat.sent[0]:
        warnings.warn(
            f"with hierarchical=True, {type(algorithm).__name__} saves no bytes on one node: a rank sends up to "
            f"{plan.sent[0]:,.0f} B per step, and {flat.sent[0]:,.0f} B if you pass hierarchical=False to it",
            stacklevel=5,
        )
    if _logger.isEnabledFor(logging.INFO):
        _logger.info("%s", _line(plan, parameters, cluster))


def _line(plan: StepPlan, parameters: Parameters, cluster: Cluster) -> str:
    """Return the bytes of a step now and after the warm-up, the ratio to gradient_allreduce, and the memory."""
    dense, (kept, scratch) = plan_of(GradientAllReduceAlgorithm(), parameters, cluster).sent[0], plan.memory()
    several = len(cluster.nodes) > 1
    first = max(sent["between" if several else "inside"].bytes_sent for sent in plan.traffic(1))
    unit = "step" if plan.interval is None else "round"
    now = f"{first:,} B per {unit} now, {plan.sent[0]:,.0f} B after {plan.warmup:,} steps of warm-up"
    return (
        f"{GlobalAlgorithmRegistry.name_of(plan.algorithm)}, {cluster.n} ranks on {len(cluster.nodes)} node{'s' * several}: a rank "
        f"sends {'other nodes ' * several}up to {now if plan.warmup else f'{plan.sent[0]:,.0f} B per {unit}'} "
        f"({plan.sent[0] / dense:.3f} of gradient_allreduce); extra memory: {kept:,} B, and {scratch:,} B during communication"
    )

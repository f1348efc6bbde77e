"""Costs of a running job, from what ``model.bagua_metrics()`` has counted (S14.2 to S14.4)."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import attrgetter
from typing import Any

from bagua_ref.base.untrusted import check_form
from bagua_ref.planning.measured import Estimate, MeasuredMachine
from bagua_ref.planning.steps import StepPlan
from bagua_ref.planning.timeline import predict

__all__ = ["costs_of_job"]

_TIMES = ("seconds_per_step", "exposed_wait_seconds_per_step", "codec_seconds_per_step")
_HIDDEN = 0.01
"""Up to this part of a step, waiting does not tell how long communication takes."""
_APART = 0.1
"""The part by which bytes may differ from the plan's, where the first steps send something else or a period is not over."""


def costs_of_job(metrics: Any, plan: StepPlan, alpha: Estimate, assumed: MeasuredMachine, part: float) -> MeasuredMachine:
    """Return the costs that the metrics of a job tell, and for the rest those that are assumed.

    The rank that waits least is the slowest one, and waits for communication only:

        compute = its seconds per step - its exposed wait per step
        codec   = its codec seconds per step / elements that pass through the codec
        beta    : with it, S14.4 predicts that a step of the plan waits as long

    Beta is of links between nodes, or on one node, of those inside.

    Args:
        metrics: of one rank, or a list of several ranks', as JSON has them.
        plan: of the algorithm that the job trains with, on its ranks.
        alpha: seconds, of the links whose beta is sought.
        assumed: the other links, and codecs. Not changed.
        part: by which an estimate may be off, either way. Without the metrics of all ranks, beta may also be 0, as the one
            that waits least may have waited for another rank.

    Raises:
        ValueError: the metrics have another form or no times, or their bytes are not those of the plan.
    """
    ranks = metrics if isinstance(metrics, list) else [metrics]
    check_form(ranks, [{"bytes_sent_per_step": (int, float)} | {f"{name}?": (int, float) for name in _TIMES}], "the metrics")
    if not ranks or not all(0 <= rank.get(name, -1) < math.inf for rank in ranks for name in _TIMES):
        raise ValueError(f"the metrics need {', '.join(_TIMES)}, which are counted on the CPU from the second step on")
    steps = [plan.traffic(plan.warmup + step) for step in range(1, plan.cycle + 1)]
    planned = [sum(sum(kind.bytes_sent for kind in rank.values()) for rank in of_rank) for of_rank in zip(*steps, strict=True)]
    for sent in (rank["bytes_sent_per_step"] for rank in ranks if plan.interval is None):
        if all(abs(sent * plan.cycle - nbytes) > _APART * nbytes for nbytes in planned):
            raise ValueError(
                f"the metrics are not those of {type(plan.algorithm).__name__}: {sent:,.0f} bytes a step, not "
                f"{max(planned) / plan.cycle:,.0f}; give the job's model and ranks, and its algorithm as the first --algorithm"
            )
    seconds, wait, codec = min(([rank[name] for name in _TIMES] for rank in ranks), key=lambda times: times[1])
    about = f"from the metrics of {len(ranks)} of {plan.cluster.n} ranks"
    found = replace(assumed, compute=Estimate.within(seconds - wait, part), about=about)
    elements = sum(count * each.elements for exchanges, count in plan.repeated.items() for each in exchanges) / plan.cycle
    if codec > 0 and elements:
        found.codec = {"": Estimate.within(codec / elements, part)}

    def with_link(beta: Estimate) -> MeasuredMachine:
        several = len(plan.cluster.nodes) > 1
        return replace(found, between=(alpha, beta), inside=found.inside if several else (alpha, beta))

    low, high = 1e-15, 1e-3
    for _ in range(60):
        beta = math.sqrt(low * high)
        exposed = predict(plan, with_link(Estimate(beta, beta, beta)).machine(attrgetter("value"))).exposed
        low, high = (beta, high) if exposed < wait else (low, beta)
    if wait <= _HIDDEN * seconds or not 1e-14 < beta < 1e-4:
        return found
    likely = Estimate.within(beta, part)
    return with_link(likely if len(ranks) == plan.cluster.n else likely._replace(low=0.0))

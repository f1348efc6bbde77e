"""Epochs that continue with another number of replicas (S7.6), and batches under a budget (S7.7), compared with plain Python."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.inputs.sampler_cases import budgets, cases, cut
from bagua_ref.conformance.inputs.strategies import Draw
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.suites.checks import check
from bagua_ref.conformance.suites.samplers import SamplerScript

_SAMPLER = ("LoadBalancingDistributedSampler", "BudgetBatchSampler")  # which came with S7.6; programs are not asked for either
_BATCHES = (*_SAMPLER, "LoadBalancingDistributedBatchSampler")


def _continued(script: SamplerScript, draw: Draw, name: str, unit: str, make: Any, plan: Any) -> None:
    """Run an epoch whose number of replicas changes twice: each stretch draws what the earlier ones have left."""
    history: list[tuple[int, int]] = []
    for replicas in draw(st.permutations(range(1, 6)))[: draw(st.integers(2, 3))]:
        rank = draw(st.integers(0, replicas - 1))
        make(replicas, rank)
        if history:
            script.do(f"{name}.load_state_dict(state)")
        wanted = plan(history, replicas)[-1][rank]
        script.same(f"len({name})", len(wanted))
        script.same(f"list({name})", wanted)
        if wanted:
            history.append((replicas, draw(st.integers(1, len(wanted)))))
            script.do(f"state = {name}.state_dict({unit}={history[-1][1]})")


@check("samplers", "S7.6", "stretches", needs=_SAMPLER, effort=4)
def stretches(lab: Lab, draw: Draw) -> None:
    """With another number of replicas, an epoch continues with the samples that no chunk has drawn, in the epoch's order."""
    (values, _, options), script = draw(cases()), SamplerScript(lab)
    if draw(st.booleans()):  # the chunk that is filled up with the first samples is often drawn before them
        values = list(range(draw(st.sampled_from([3, 5, 7, 11]))))
        options = {"shuffle": True, "seed": draw(st.integers(0, 99)), "epoch": 0, "drop_last": False, "random_level": 0}
    _continued(
        script, draw, "sampler", "samples",
        lambda replicas, rank: script.sampler(values, replicas, rank, options),
        lambda history, replicas: samplers_plain.stretches_of(values, history, replicas, **options),
    )  # fmt: skip


@check("samplers", "S7.6", "batches", needs=_BATCHES, effort=3)
def batches(lab: Lab, draw: Draw) -> None:
    """A stretch of batches has drawn the samples in the first batches of all its replicas; the rest is cut anew."""
    (values, _, options), script = draw(cases()), SamplerScript(lab)
    options, limit, drop_last = {**options, "drop_last": False}, draw(st.integers(1, 3)), draw(st.booleans())

    def make(replicas: int, rank: int) -> None:
        script.sampler(values, replicas, rank, options)
        script.do(f"batches = samplers.LoadBalancingDistributedBatchSampler(sampler, cut({limit}), {drop_last})")

    _continued(
        script, draw, "batches", "batches", make,
        lambda history, replicas: samplers_plain.stretches_of(values, history, replicas, cut(limit), drop_last, **options),
    )  # fmt: skip


@check("samplers", "S7.7", "budget", needs=("BudgetBatchSampler",), effort=6)
def budget(lab: Lab, draw: Draw) -> None:
    """Batches are cut from samples in order of cost, mixed, made as many for each replica, and continued with other replicas."""
    (costs, most, options), script = draw(budgets()), SamplerScript(lab)
    options["drop_last"] = False
    given = "".join(f", {name}={value!r}" for name, value in options.items() if name != "epoch")

    def make(replicas: int, rank: int) -> None:
        script.do(
            f"batches = samplers.BudgetBatchSampler({costs}, {most}, num_replicas={replicas}, rank={rank}{given})\n"
            f"batches.set_epoch({options['epoch']})"
        )

    _continued(
        script, draw, "batches", "batches", make,
        lambda history, replicas: samplers_plain.budget_stretches(costs, most, history, replicas, **options),
    )  # fmt: skip


@check("samplers", "S7.7", "dropped", needs=("BudgetBatchSampler",), effort=3)
def dropped(lab: Lab, draw: Draw) -> None:
    """With drop_last, the cheapest batches are dropped; if none is left, that is a ValueError."""
    (costs, most, options), script = draw(budgets()), SamplerScript(lab)
    options["drop_last"], replicas = True, draw(st.integers(1, 4))
    given = "".join(f", {name}={value!r}" for name, value in options.items() if name != "epoch")
    wanted = samplers_plain.budget_stretches(costs, most, [], replicas, **{**options, "epoch": 0})[0]
    made = f"samplers.BudgetBatchSampler({costs}, {most}, num_replicas={replicas}, rank=0{given})"
    if wanted[0]:
        script.same(f"list({made})", wanted[0])
    else:
        script.refuses(made)

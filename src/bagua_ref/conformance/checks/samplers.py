"""Balanced samplers compared with plain Python (S7): a target's ``samplers`` has the classes by
their names.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from bagua_ref.conformance.cases.sampler_cases import (
    about_an_edge,
    budgets,
    cases,
    complexities,
    cut,
    few_or_many,
    levels,
    many_for,
    noisy_cases,
    one_to_five,
)
from bagua_ref.conformance.cases.strategies import Draw
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.play import Play

_SAMPLER = ("LoadBalancingDistributedSampler",)
_BATCHES = (*_SAMPLER, "LoadBalancingDistributedBatchSampler")
# which came with S7.6; programs are not asked for either
_CONTINUED = ("LoadBalancingDistributedSampler", "BudgetBatchSampler")
_POSITION = ("LoadBalancingDistributedSampler.load_state_dict",)


class SamplerScript(Play):
    """A script about samplers, whose warnings do not matter."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab, "samplers", "from bagua_ref.conformance.cases.sampler_cases import *")

    def do(self, line: str) -> None:
        """Append a line and run it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().do(line)

    def sampler(self, values: object, replicas: int, rank: int, options: dict[str, Any]) -> None:
        """Make a sampler of samples that are their own complexities, at its epoch, if ``options``
        have one.
        """
        given = _without_epoch(options)
        then = f"\nsampler.set_epoch({options['epoch']})" if "epoch" in options else ""
        self.do(
            f"sampler = samplers.LoadBalancingDistributedSampler({values}, identity, {replicas},"
            f" {rank}{given}){then}"
        )

    def same(self, expression: str, wanted: object) -> None:
        """Compare the value of an expression."""
        self.do(f"found = {expression}")
        self.lab.comparisons += 1
        if self.names["found"] != wanted:
            self.do(
                f"assert found == {wanted!r}, f'{expression} is {{found!r}} instead of '"
                f" {str(wanted)!r}"
            )


def _without_epoch(options: dict[str, Any]) -> str:
    """Return the source of further arguments of a sampler, whose epoch is set afterwards."""
    return "".join(f", {name}={value!r}" for name, value in options.items() if name != "epoch")


@check("S7.1", "lengths", needs=_SAMPLER, effort=3)
def lengths(lab: Lab, draw: Draw) -> None:
    """All ranks draw the same number of samples, which is their length."""
    (values, replicas, options), script = draw(cases()), SamplerScript(lab)
    wanted = samplers_plain.num_samples(len(values), replicas, options["drop_last"])
    script.sampler(values, replicas, replicas - 1, options)
    script.same("len(sampler)", wanted)
    script.same("len(list(sampler))", wanted)


@check("S7.2", "one_replica", needs=_SAMPLER, effort=3)
def one_replica(lab: Lab, draw: Draw) -> None:
    """Without shuffling, a single replica draws samples in ascending order of their exact
    complexities; the sort is stable.
    """
    values, script = (
        draw(about_an_edge() if draw(st.booleans()) else complexities),
        SamplerScript(lab),
    )
    script.sampler(values, 1, 0, {"shuffle": False, "epoch": draw(st.integers(0, 3))})
    script.same("list(sampler)", sorted(range(len(values)), key=values.__getitem__))


@check("S7.2", "inputs_unchanged", needs=_SAMPLER)
def inputs_unchanged(lab: Lab, draw: Draw) -> None:
    """Complexities that are tensors are not changed in any epoch."""
    if lab.target.requests is not None:
        lab.skip("a program gets copies of the complexities")
    numbers, script = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12)), SamplerScript(lab)
    script.give(dataset=[torch.tensor(number) for number in numbers])
    options = {"shuffle": True, "seed": draw(st.integers(0, 5)), "random_level": draw(levels)}
    script.sampler("dataset", 2, 0, options)
    for epoch in range(3):
        script.do(f"sampler.set_epoch({epoch})")
        script.same(
            "list(sampler)",
            samplers_plain.indices(numbers, 2, 0, epoch=epoch, drop_last=False, **options),
        )
    script.same("[sample.item() for sample in dataset]", numbers)


@check("S7.3", "indices", needs=_SAMPLER, effort=8)
def indices(lab: Lab, draw: Draw) -> None:
    """A rank's indices are as specified, and the same when iterated again."""
    (values, replicas, options), script = draw(cases()), SamplerScript(lab)
    # the last one repeats most
    rank = draw(st.one_of(st.integers(0, replicas - 1), st.just(replicas - 1)))
    script.sampler(values, replicas, rank, options)
    wanted = samplers_plain.indices(values, replicas, rank, **options)
    for _ in range(3):
        script.same("list(sampler)", wanted)


@check("S7.3", "digits", needs=_SAMPLER, effort=2)
def digits(lab: Lab, draw: Draw) -> None:
    """The bound of the noise is a product of floats, and no digit of the epoch is lost."""
    (values, replicas, options), script = draw(noisy_cases()), SamplerScript(lab)
    script.sampler(values, replicas, 0, options)
    script.same("list(sampler)", samplers_plain.indices(values, replicas, 0, **options))


@check("S7.4", "batches", needs=_BATCHES, effort=3)
def batches(lab: Lab, draw: Draw) -> None:
    """All replicas get the same number of batches: the largest, with batches repeated in cycle, or
    with drop_last the smallest.
    """
    (values, replicas, options), script = draw(cases()), SamplerScript(lab)
    # no two replicas have the same samples, so that one alone may have the most batches
    if draw(st.booleans()):
        values, replicas = (
            list(range(draw(st.sampled_from([9, 12, 20, 40])))),
            draw(st.sampled_from([9, 12, 3])),
        )
    options = {**options, "drop_last": False}
    limit, owner, drop_last = (
        draw(st.integers(1, 5)),
        draw(st.sampled_from([replicas - 1, 0])),
        draw(st.booleans()),
    )
    drawn = [samplers_plain.indices(values, replicas, rank, **options) for rank in range(replicas)]
    sample = drawn[owner][0]
    rules = [
        (one_to_five, "one_to_five"),
        (cut(limit), f"cut({limit})"),
        (many_for(sample), f"many_for({sample})"),
    ]
    for batch_fn, source in rules:
        wanted = samplers_plain.equal_batches([batch_fn(indices) for indices in drawn], drop_last)
        for rank in draw(st.permutations(range(replicas)))[:2]:
            script.sampler(values, replicas, rank, {**options, "epoch": 0})
            made = (
                f"batches = samplers.LoadBalancingDistributedBatchSampler(sampler, {source},"
                f" {drop_last})"
            )
            script.do(f"{made}\nbatches.set_epoch({options['epoch']})")
            script.same("len(batches)", len(wanted[rank]))
            script.same("list(batches)", wanted[rank])


@check("S7.3", "position", needs=_POSITION)
def position(lab: Lab, draw: Draw) -> None:
    """A sampler that loads a position goes on with the sample after it, also if its epoch is set
    again; later epochs are whole.
    """
    (values, replicas, options), script = draw(cases()), SamplerScript(lab)
    rank = draw(st.integers(0, replicas - 1))
    wanted = samplers_plain.indices(values, replicas, rank, **options)
    script.sampler(values, replicas, rank, options)
    _stop_and_go_on(
        script,
        draw,
        "sampler",
        options["epoch"],
        wanted,
        lambda: script.sampler(values, replicas, rank, {**options, "epoch": 0}),
    )
    epoch = options["epoch"] + 1
    script.do(f"sampler.set_epoch({epoch})")
    script.same(
        "list(sampler)",
        samplers_plain.indices(values, replicas, rank, **{**options, "epoch": epoch}),
    )


def _stop_and_go_on(
    script: SamplerScript,
    draw: Draw,
    name: str,
    epoch: int,
    wanted: list[Any],
    again: Callable[[], None],
) -> None:
    """Draw some of an epoch's samples or batches, and the rest from another sampler, which
    ``again`` makes under the same name.
    """
    taken = draw(st.integers(0, len(wanted)))
    script.do(
        f"import itertools\n\ndrawn = list(itertools.islice({name}, {taken}))\nsaved ="
        f" {name}.state_dict()"
    )
    script.same("drawn", wanted[:taken])
    again()
    script.do(f"{name}.load_state_dict(saved)")
    if draw(st.booleans()):
        script.do(f"{name}.set_epoch({epoch})  # which it has")
    script.same(f"len({name})", len(wanted))
    script.same(f"list({name})", wanted[taken:])


@check("S7.3", "other_settings", needs=_POSITION, effort=0.2)
def other_settings(lab: Lab, draw: Draw) -> None:
    """A position that was saved with other samples, costs, seed, shuffle, drop_last or random_level
    raises a ValueError.
    """
    # of even ones drop_last changes no length
    size, script = draw(st.sampled_from([4, 5, 6, 8])), SamplerScript(lab)
    values = draw(st.lists(st.integers(0, 20), min_size=size, max_size=size, unique=True))
    options = {"shuffle": True, "seed": draw(st.integers(0, 5)), "drop_last": False}
    options["random_level"] = draw(st.sampled_from([0.25, 1]))
    script.sampler(values, 2, 0, options)
    script.do("saved = sampler.state_dict()")
    changes = {
        "shuffle": False,
        "seed": options["seed"] + 1,
        "drop_last": True,
        "random_level": 0.75,
    }
    for change in (*changes, "samples", "costs"):
        others = {"samples": [*values, values[0]], "costs": values[::-1]}.get(change) or values
        other = {**options, **({change: changes[change]} if change in changes else {})}
        script.sampler(others, 2, 0, other)
        script.refuses(
            "sampler.load_state_dict(saved)",
            said=repr(f"a position with other {change} must raise a ValueError"),
        )
        script.same("list(sampler)", samplers_plain.indices(others, 2, 0, epoch=0, **other))


@check("S7.4", "position", needs=("LoadBalancingDistributedBatchSampler.load_state_dict",))
def position_of_batches(lab: Lab, draw: Draw) -> None:
    """A batch sampler that loads a position goes on with the batch after it."""
    (values, replicas, options), script = draw(cases()), SamplerScript(lab)
    options, drop_last, rank = (
        {**options, "drop_last": False},
        draw(st.booleans()),
        draw(st.integers(0, replicas - 1)),
    )
    plain = [
        few_or_many(samplers_plain.indices(values, replicas, other, **options))
        for other in range(replicas)
    ]

    def make() -> None:
        script.sampler(values, replicas, rank, {**options, "epoch": 0})
        script.do(
            "batches = samplers.LoadBalancingDistributedBatchSampler(sampler, few_or_many,"
            f" {drop_last})"
        )

    make()
    script.do(f"batches.set_epoch({options['epoch']})")
    _stop_and_go_on(
        script,
        draw,
        "batches",
        options["epoch"],
        samplers_plain.equal_batches(plain, drop_last)[rank],
        make,
    )


@check("S7.5", "refuses", needs=_BATCHES, effort=2)
def refuses(lab: Lab, draw: Draw) -> None:
    """An invalid random_level, rank, dataset, complexity (NaN), sampler, or a sampler with
    drop_last raises a ValueError.
    """
    # integers and floats are not read alike
    script, one = SamplerScript(lab), draw(st.sampled_from([1, 1.0]))
    sampler = "samplers.LoadBalancingDistributedSampler({})"
    batches = "samplers.LoadBalancingDistributedBatchSampler({}, lambda found: [found])"
    beyond = [-0.1, -1e-9, 1.1, 1.0004, 1 + 2.0**-52, math.nan, 2, -1]
    calls: list[tuple[str, dict[str, Any] | None]] = [
        *(
            (sampler.format(f"[1, 2], identity, 1, 0, random_level={level!r}"), None)
            for level in beyond
        ),
        (sampler.format(f"[1, 2], identity, 2, {draw(st.sampled_from([-1, 2, 5]))}"), None),
        (sampler.format(f"[1, 2], identity, {draw(st.sampled_from([0, -1]))}, 0"), None),
        (sampler.format("[], identity, 1, 0"), None),
        (
            sampler.format(
                f"{draw(st.permutations([one, math.nan, 2]))}, identity, 1, 0, shuffle=False"
            ),
            None,
        ),
        (batches.format("[[0]]"), None),
        (batches.format("sampler"), {"drop_last": True}),
        (batches.format("sampler").replace("[found]", "[]"), {}),
    ]
    first = draw(st.sampled_from([0, *range(len(beyond), len(calls))]))
    for call, options in calls[: len(beyond)] if first == 0 else calls[first : first + 1]:
        if options is not None:
            script.sampler([1, 2], 1, 0, options)
        script.refuses(call)


# Epochs that continue with another number of replicas (S7.6), and batches under a budget (S7.7).


def _continued(
    script: SamplerScript, draw: Draw, name: str, unit: str, make: Any, plan: Any
) -> None:
    """Run an epoch whose number of replicas changes twice: each stretch draws the samples that the
    earlier ones have left.
    """
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


@check("S7.6", "stretches", needs=_CONTINUED, effort=4)
def stretches(lab: Lab, draw: Draw) -> None:
    """With another number of replicas, an epoch continues with the samples that no chunk has drawn,
    in the epoch's order.
    """
    (values, _, options), script = draw(cases()), SamplerScript(lab)
    # the chunk that is filled up with the first samples is often drawn before them
    if draw(st.booleans()):
        values = list(range(draw(st.sampled_from([3, 5, 7, 11]))))
        options = {
            "shuffle": True,
            "seed": draw(st.integers(0, 99)),
            "epoch": 0,
            "drop_last": False,
            "random_level": 0,
        }
    _continued(
        script,
        draw,
        "sampler",
        "samples",
        lambda replicas, rank: script.sampler(values, replicas, rank, options),
        lambda history, replicas: samplers_plain.stretches_of(values, history, replicas, **options),
    )


@check("S7.6", "batches", needs=(*_CONTINUED, *_BATCHES[1:]), effort=3)
def continued_batches(lab: Lab, draw: Draw) -> None:
    """A stretch of batches has drawn the samples in the first batches of all its replicas; the rest
    is cut anew.
    """
    (values, _, options), script = draw(cases()), SamplerScript(lab)
    options, limit, drop_last = (
        {**options, "drop_last": False},
        draw(st.integers(1, 3)),
        draw(st.booleans()),
    )

    def make(replicas: int, rank: int) -> None:
        script.sampler(values, replicas, rank, options)
        script.do(
            f"batches = samplers.LoadBalancingDistributedBatchSampler(sampler, cut({limit}),"
            f" {drop_last})"
        )

    _continued(
        script,
        draw,
        "batches",
        "batches",
        make,
        lambda history, replicas: samplers_plain.stretches_of(
            values, history, replicas, cut(limit), drop_last, **options
        ),
    )


@check("S7.7", "budget", needs=("BudgetBatchSampler",), effort=6)
def budget(lab: Lab, draw: Draw) -> None:
    """Batches are cut from samples in order of cost, mixed, made as many for each replica, and
    continued with other replicas.
    """
    (costs, most, options), script = draw(budgets()), SamplerScript(lab)
    options["drop_last"] = False

    def make(replicas: int, rank: int) -> None:
        arguments = (
            f"{costs}, {most}, num_replicas={replicas}, rank={rank}{_without_epoch(options)}"
        )
        script.do(
            "batches ="
            f" samplers.BudgetBatchSampler({arguments})\nbatches.set_epoch({options['epoch']})"
        )

    _continued(
        script,
        draw,
        "batches",
        "batches",
        make,
        lambda history, replicas: samplers_plain.budget_stretches(
            costs, most, history, replicas, **options
        ),
    )


@check("S7.7", "dropped", needs=("BudgetBatchSampler",), effort=3)
def dropped(lab: Lab, draw: Draw) -> None:
    """With drop_last, the cheapest batches are dropped; if none is left, that is a ValueError."""
    (costs, most, options), script = draw(budgets()), SamplerScript(lab)
    options["drop_last"], replicas = True, draw(st.integers(1, 4))
    wanted = samplers_plain.budget_stretches(costs, most, [], replicas, **{**options, "epoch": 0})[
        0
    ]
    made = (
        f"samplers.BudgetBatchSampler({costs}, {most}, num_replicas={replicas},"
        f" rank=0{_without_epoch(options)})"
    )
    if wanted[0]:
        script.same(f"list({made})", wanted[0])
    else:
        script.refuses(made)

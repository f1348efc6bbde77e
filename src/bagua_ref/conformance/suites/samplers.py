"""Balanced samplers compared with plain Python (S7): a target's ``samplers`` has both classes by their names."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from hypothesis import strategies as st

from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.inputs.sampler_cases import about_an_edge, cases, complexities, cut, few_or_many, levels, noisy_cases
from bagua_ref.conformance.inputs.strategies import Draw
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.play import Play
from bagua_ref.conformance.suites.checks import check

_SAMPLER = ("LoadBalancingDistributedSampler",)
_BATCHES = (*_SAMPLER, "LoadBalancingDistributedBatchSampler")


class SamplerScript(Play):
    """A script about samplers, whose warnings do not matter."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab, "samplers", "from bagua_ref.conformance.inputs.sampler_cases import cut, few_or_many, identity")

    def do(self, line: str) -> None:
        """Append a line and run it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().do(line)

    def sampler(self, values: object, replicas: int, rank: int, options: dict[str, Any]) -> None:
        """Make a sampler of samples that are their own complexities, at its epoch, if ``options`` have one."""
        given = "".join(f", {name}={value!r}" for name, value in options.items() if name != "epoch")
        then = f"\nsampler.set_epoch({options['epoch']})" if "epoch" in options else ""
        self.do(f"sampler = samplers.LoadBalancingDistributedSampler({values}, identity, {replicas}, {rank}{given}){then}")

    def same(self, expression: str, wanted: object) -> None:
        """Compare the value of an expression."""
        self.do(f"found = {expression}")
        self.lab.comparisons += 1
        if self.names["found"] != wanted:
            self.do(f"assert found == {wanted!r}, f'{expression} is {{found!r}} instead of ' {str(wanted)!r}")

    def refuses(self, call: str) -> None:
        """Require a ValueError of a call."""
        complaint = f"{call} must raise a ValueError"
        self.do(f"try:\n    {call}\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError({complaint!r})")


@check("samplers", "S7.1", "lengths", needs=_SAMPLER, effort=3)
def lengths(lab: Lab, draw: Draw) -> None:
    """All ranks draw the same number of samples, which is their length."""
    (values, replicas, options), script = draw(cases()), SamplerScript(lab)
    wanted = samplers_plain.num_samples(len(values), replicas, options["drop_last"])
    script.sampler(values, replicas, replicas - 1, options)
    script.same("len(sampler)", wanted)
    script.same("len(list(sampler))", wanted)


@check("samplers", "S7.2", "one_replica", needs=_SAMPLER, effort=3)
def one_replica(lab: Lab, draw: Draw) -> None:
    """Without shuffling, a single replica draws samples in ascending order of their exact complexities; the sort is stable."""
    values, script = draw(about_an_edge() if draw(st.booleans()) else complexities), SamplerScript(lab)
    script.sampler(values, 1, 0, {"shuffle": False, "epoch": draw(st.integers(0, 3))})
    script.same("list(sampler)", sorted(range(len(values)), key=values.__getitem__))


@check("samplers", "S7.2", "inputs_unchanged", needs=_SAMPLER)
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
        script.same("list(sampler)", samplers_plain.indices(numbers, 2, 0, epoch=epoch, drop_last=False, **options))
    script.same("[sample.item() for sample in dataset]", numbers)


@check("samplers", "S7.3", "indices", needs=_SAMPLER, effort=8)
def indices(lab: Lab, draw: Draw) -> None:
    """A rank's indices are as specified, and the same when iterated again."""
    (values, replicas, options), script = draw(cases()), SamplerScript(lab)
    rank = draw(st.one_of(st.integers(0, replicas - 1), st.just(replicas - 1)))  # the last one repeats most
    script.sampler(values, replicas, rank, options)
    wanted = samplers_plain.indices(values, replicas, rank, **options)
    for _ in range(3):
        script.same("list(sampler)", wanted)


@check("samplers", "S7.3", "digits", needs=_SAMPLER, effort=2)
def digits(lab: Lab, draw: Draw) -> None:
    """The bound of the noise is a product of floats, and no digit of the epoch is lost."""
    (values, replicas, options), script = draw(noisy_cases()), SamplerScript(lab)
    script.sampler(values, replicas, 0, options)
    script.same("list(sampler)", samplers_plain.indices(values, replicas, 0, **options))


@check("samplers", "S7.4", "batches", needs=_BATCHES, effort=6)
def batches(lab: Lab, draw: Draw) -> None:
    """All replicas get the same number of batches: the largest, with batches repeated in cycle, or with drop_last the smallest."""
    (values, replicas, options), script = draw(cases()), SamplerScript(lab)
    options = {**options, "drop_last": False}
    limit, drop_last = draw(st.one_of(st.just(0), st.integers(1, 5))), draw(st.booleans())
    batch_fn, source = (cut(limit), f"cut({limit})") if limit else (few_or_many, "few_or_many")
    plain = [batch_fn(samplers_plain.indices(values, replicas, rank, **options)) for rank in range(replicas)]
    for rank, wanted in enumerate(samplers_plain.equal_batches(plain, drop_last)):
        script.sampler(values, replicas, rank, {**options, "epoch": 0})
        made = f"batches = samplers.LoadBalancingDistributedBatchSampler(sampler, {source}, {drop_last})"
        script.do(f"{made}\nbatches.set_epoch({options['epoch']})")
        script.same("len(batches)", len(wanted))
        script.same("list(batches)", wanted)


@check("samplers", "S7.5", "refuses", needs=_BATCHES, effort=2)
def refuses(lab: Lab, draw: Draw) -> None:
    """An invalid random_level, rank, dataset, complexity (NaN), sampler, or a sampler with drop_last raises a ValueError."""
    script, one = SamplerScript(lab), draw(st.sampled_from([1, 1.0]))  # integers and floats are not read alike
    sampler = "samplers.LoadBalancingDistributedSampler({})"
    batches = "samplers.LoadBalancingDistributedBatchSampler({}, lambda found: [found])"
    calls: list[tuple[str, dict[str, Any] | None]] = [
        (sampler.format(f"[1, 2], identity, 1, 0, random_level={draw(st.sampled_from([-0.1, 1.1, math.nan, 2, -1]))!r}"), None),
        (sampler.format(f"[1, 2], identity, 2, {draw(st.sampled_from([-1, 2, 5]))}"), None),
        (sampler.format(f"[1, 2], identity, {draw(st.sampled_from([0, -1]))}, 0"), None),
        (sampler.format("[], identity, 1, 0"), None),
        (sampler.format(f"{draw(st.permutations([one, math.nan, 2]))}, identity, 1, 0, shuffle=False"), None),
        (batches.format("[[0]]"), None),
        (batches.format("sampler"), {"drop_last": True}),
        (batches.format("sampler").replace("[found]", "[]"), {}),
    ]
    call, options = draw(st.sampled_from(calls))
    if options is not None:
        script.sampler([1, 2], 1, 0, options)
    script.refuses(call)

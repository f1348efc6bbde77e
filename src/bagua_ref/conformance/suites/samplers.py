"""Balanced samplers compared with plain Python (S7): a target's ``samplers`` has both classes by their names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st

from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.inputs.sampler_cases import about_an_edge, cases, complexities, cut, few_or_many, levels, noisy_cases
from bagua_ref.conformance.inputs.strategies import Draw
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.violation import Script, Violation
from bagua_ref.conformance.suites.checks import check

_SAMPLER = ("LoadBalancingDistributedSampler",)
_BATCHES = (*_SAMPLER, "LoadBalancingDistributedBatchSampler")


class _Trial:
    """Calls a target's samplers and records the calls as a script."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.samplers = lab, lab.target.parts["samplers"]
        if isinstance(self.samplers, ModuleType):
            setup = [f"import {self.samplers.__name__} as samplers"]
        else:
            setup = [*lab.target.origin, "samplers = target.samplers"]
        self.script = Script([*setup, ""])

    def sampler(self, values: list[Any], replicas: int, rank: int, options: dict[str, Any]) -> Any:
        """Return a sampler at its epoch, if ``options`` have one; raise `Violation` for any exception."""
        sampler = self.run(self.line(values, replicas, rank, options))
        if "epoch" in options:
            self.script.body.append(f"sampler.set_epoch({options['epoch']})")
            self.run(lambda: sampler.set_epoch(options["epoch"]))
        return sampler

    def line(self, values: list[Any], replicas: int, rank: int, options: dict[str, Any]) -> Callable[[], Any]:
        """Append the line that makes a sampler, and return a function that does the same."""
        given = {name: value for name, value in options.items() if name != "epoch"}
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        self.script.body.append(
            f"sampler = samplers.LoadBalancingDistributedSampler({values!r}, lambda x: x, {replicas}, {rank}, {arguments})"
        )

        def make() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self.samplers.LoadBalancingDistributedSampler(values, lambda value: value, replicas, rank, **given)

        return make

    def run(self, work: Callable[[], Any], source: str = "") -> Any:
        """Return the result of ``work()``, the last line of the script or ``source``; raise `Violation` for any exception."""
        try:
            with self.lab.journal.call(("samplers", f"{self.script}{source}")):
                return work()
        except Violation:
            raise
        except BaseException as error:  # whatever an implementation does, there is a verdict
            raise Violation(f"raised {type(error).__name__}: {error}", str(self.script)) from error

    def same(self, expression: str, found: Any, wanted: Any) -> None:
        """Raise `Violation` unless ``found`` equals ``wanted``."""
        if found != wanted:
            self.script.body.append(f"assert {expression} == {wanted!r}")
            raise Violation(f"{expression} is {found!r} instead of {wanted!r}"[:1000], str(self.script))

    def refused(self, work: Callable[[], Any], what: str) -> None:
        """Raise `Violation` unless ``work()``, the last line of the script, raises a ValueError."""
        try:
            with self.lab.journal.call((f"samplers: {what}", str(self.script))):
                work()
        except ValueError:
            return
        except BaseException as error:
            raise Violation(f"{what} raised {type(error).__name__}: {error}, not a ValueError", str(self.script)) from error
        raise Violation(f"{what} must raise a ValueError", str(self.script))


@check("samplers", "S7.1", "lengths", needs=_SAMPLER, effort=3)
def lengths(lab: Lab, draw: Draw) -> None:
    """All ranks draw the same number of samples, which is their length."""
    (values, replicas, options), trial = draw(cases()), _Trial(lab)
    wanted = samplers_plain.num_samples(len(values), replicas, options["drop_last"])
    sampler = trial.sampler(values, replicas, replicas - 1, options)
    trial.same("len(sampler)", trial.run(lambda: len(sampler), "len(sampler)"), wanted)
    trial.same("len(list(sampler))", trial.run(lambda: len(list(sampler)), "len(list(sampler))"), wanted)


@check("samplers", "S7.2", "one_replica", needs=_SAMPLER, effort=3)
def one_replica(lab: Lab, draw: Draw) -> None:
    """Without shuffling, a single replica draws samples in ascending order of their exact complexities; the sort is stable."""
    values, trial = draw(about_an_edge() if draw(st.booleans()) else complexities), _Trial(lab)
    sampler = trial.sampler(values, 1, 0, {"shuffle": False, "epoch": draw(st.integers(0, 3))})
    trial.same(
        "list(sampler)", trial.run(lambda: list(sampler), "list(sampler)"), sorted(range(len(values)), key=values.__getitem__)
    )


@check("samplers", "S7.2", "inputs_unchanged", needs=_SAMPLER)
def inputs_unchanged(lab: Lab, draw: Draw) -> None:
    """Complexities that are tensors are not changed in any epoch."""
    numbers, trial = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12)), _Trial(lab)
    dataset = [torch.tensor(number) for number in numbers]
    options = {"shuffle": True, "seed": draw(st.integers(0, 5)), "random_level": draw(levels)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = trial.sampler(dataset, 2, 0, options)
        for epoch in range(3):
            trial.script.body.append(f"sampler.set_epoch({epoch})")
            trial.run(lambda epoch=epoch: sampler.set_epoch(epoch))  # type: ignore[misc]
            wanted = samplers_plain.indices(numbers, 2, 0, epoch=epoch, drop_last=False, **options)
            trial.same("list(sampler)", trial.run(lambda: list(sampler), "list(sampler)"), wanted)
    trial.same("dataset", [sample.item() for sample in dataset], numbers)


@check("samplers", "S7.3", "indices", needs=_SAMPLER, effort=8)
def indices(lab: Lab, draw: Draw) -> None:
    """A rank's indices are as specified, and the same when iterated again."""
    (values, replicas, options), trial = draw(cases()), _Trial(lab)
    rank = draw(st.one_of(st.integers(0, replicas - 1), st.just(replicas - 1)))  # the last one repeats most
    sampler = trial.sampler(values, replicas, rank, options)
    wanted = samplers_plain.indices(values, replicas, rank, **options)
    for _ in range(3):
        trial.same("list(sampler)", trial.run(lambda: list(sampler), "list(sampler)"), wanted)


@check("samplers", "S7.3", "digits", needs=_SAMPLER, effort=2)
def digits(lab: Lab, draw: Draw) -> None:
    """The bound of the noise is a product of floats, and no digit of the epoch is lost."""
    (values, replicas, options), trial = draw(noisy_cases()), _Trial(lab)
    sampler = trial.sampler(values, replicas, 0, options)
    trial.same(
        "list(sampler)", trial.run(lambda: list(sampler), "list(sampler)"), samplers_plain.indices(values, replicas, 0, **options)
    )


@check("samplers", "S7.4", "batches", needs=_BATCHES, effort=6)
def batches(lab: Lab, draw: Draw) -> None:
    """All replicas get the same number of batches: the largest, with batches repeated in cycle, or with drop_last the smallest."""
    (values, replicas, options), trial = draw(cases()), _Trial(lab)
    options = {**options, "drop_last": False}
    batch_fn, drop_last = draw(st.one_of(st.just(few_or_many), st.integers(1, 5).map(cut))), draw(st.booleans())
    plain = [batch_fn(samplers_plain.indices(values, replicas, rank, **options)) for rank in range(replicas)]
    wanted = samplers_plain.equal_batches(plain, drop_last)

    def drawn(sampler: Any) -> tuple[int, list[list[int]]]:
        made = trial.samplers.LoadBalancingDistributedBatchSampler(sampler, batch_fn, drop_last)
        made.set_epoch(options["epoch"])
        return len(made), list(made)

    for rank in range(replicas):
        sampler = trial.sampler(values, replicas, rank, {**options, "epoch": 0})
        what = f"list(LoadBalancingDistributedBatchSampler(sampler, batch_fn, drop_last={drop_last}))"
        length, found = trial.run(lambda sampler=sampler: drawn(sampler), what)  # type: ignore[misc]
        trial.same(what, found, wanted[rank])
        trial.same(what.replace("list", "len", 1), length, len(wanted[rank]))


@check("samplers", "S7.5", "refuses", needs=_BATCHES, effort=2)
def refuses(lab: Lab, draw: Draw) -> None:
    """An invalid random_level, rank, dataset, complexity (NaN), sampler, or a sampler with drop_last raises a ValueError."""
    trial, classes = _Trial(lab), lab.target.parts["samplers"]
    case = draw(st.sampled_from(["level", "rank", "replicas", "empty", "nan", "sampler", "drop_last", "no batches"]))
    one = draw(st.sampled_from([1, 1.0]))  # integers and floats are not read alike
    level = draw(st.sampled_from([-0.1, 1.1, float("nan"), 2, -1]))
    samplers: dict[str, Callable[[], Any]] = {
        "level": lambda: trial.line([1, 2], 1, 0, {"random_level": level}),
        "rank": lambda: trial.line([1, 2], 2, draw(st.sampled_from([-1, 2, 5])), {}),
        "replicas": lambda: trial.line([1, 2], draw(st.sampled_from([0, -1])), 0, {}),
        "empty": lambda: trial.line([], 1, 0, {}),
        "nan": lambda: trial.line(draw(st.permutations([one, float("nan"), 2])), 1, 0, {"shuffle": False}),
    }
    what = f"{case}{f' {level}' if case == 'level' else ''}"
    if case in samplers:
        trial.refused(samplers[case](), what)
        return
    sampler = [[0]] if case == "sampler" else trial.sampler([1, 2], 1, 0, {"drop_last": True} if case == "drop_last" else {})
    batch_fn = (lambda found: []) if case == "no batches" else lambda found: [found]
    shown = f"{'[[0]]' if case == 'sampler' else 'sampler'}, lambda found: {'[]' if case == 'no batches' else '[found]'}"
    trial.script.body.append(f"samplers.LoadBalancingDistributedBatchSampler({shown})")
    trial.refused(lambda: classes.LoadBalancingDistributedBatchSampler(sampler, batch_fn), what)

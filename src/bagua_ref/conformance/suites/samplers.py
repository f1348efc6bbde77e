"""Balanced samplers against the clause in plain Python (S7): a target's ``samplers`` has the two classes by their names."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.inputs.strategies import Draw, seeds
from bagua_ref.conformance.lab.violation import Script, Violation
from bagua_ref.conformance.suites.checks import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from bagua_ref.conformance.lab.lab import Lab

_SAMPLER = ("LoadBalancingDistributedSampler",)
_BATCHES = (*_SAMPLER, "LoadBalancingDistributedBatchSampler")

_few = st.integers(-3, 3)
_near_edges = st.sampled_from([s * 2**p for p in (15, 16, 31, 32, 53, 62, 63) for s in (1, -1)]).flatmap(
    lambda edge: st.integers(edge - 3, edge + 3)
)
_numbers = (
    _few,
    _few.map(float),
    st.integers(0, 1000),
    st.floats(-4, 4),
    st.one_of(_near_edges, st.integers(-(2**80), 2**80)),
    st.floats(allow_nan=False, allow_infinity=False),
    st.one_of(_few, st.floats(-4, 4), st.sampled_from([-0.0, 0.0, 2.0**53, 2**53 + 1])),
)


@st.composite
def _about_an_edge(draw: st.DrawFn) -> list[Any]:
    """Integers, and floats among them, that one dtype hardly tells apart."""
    edge = draw(st.sampled_from([sign * 2**power for power in (24, 53, 54, 58, 61, 63, 80) for sign in (1, -1)]))
    close = st.integers(edge - 3, edge + 3)
    if draw(st.booleans()):
        return [edge + number - 3 for number in _many(draw(seeds), 20, 7)]
    return draw(st.lists(draw(st.sampled_from([close, st.one_of(close, close.map(float))])), min_size=2, max_size=20))


def _many(seed: int, size: int, most: int) -> list[int]:
    return torch.randint(most, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


_long = st.builds(_many, seeds, st.sampled_from([7, 16, 23, 40, 100]), st.sampled_from([2, 10, 1000]))
_complexities = st.one_of(
    _long, _long, _about_an_edge(), *(st.lists(number, min_size=1, max_size=40) for number in _numbers)
)  # fmt: skip
_levels = st.one_of(st.sampled_from([0, 1, 0.0, 0.1, 0.5, 1.0]), st.floats(0, 1))


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[Any], int, dict[str, Any]]:
    """Complexities, the number of replicas (at times more than samples) and options, such that S7 has an answer."""
    values = draw(_complexities)
    if draw(st.integers(0, 5)) == 5:
        values = values[: draw(st.integers(1, 3))]  # which replicas may need more than twice
    options = {
        "shuffle": draw(st.booleans()),
        "seed": draw(st.one_of(st.integers(0, 5), st.integers(-(2**40), 2**40))),
        "epoch": draw(st.integers(0, 5)),
        "drop_last": draw(st.booleans()),
        "random_level": draw(_levels),
    }
    if options["shuffle"]:
        try:
            limit = samplers_plain.noise_limit(values, options["random_level"])
        except (OverflowError, ValueError):
            limit = 2**64
        assume(limit < 2**63)
    return values, draw(st.integers(1, 9)), options


class _Trial:
    """Calls a target's samplers, writing down what it does."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.samplers = lab, lab.target.parts["samplers"]
        if isinstance(self.samplers, ModuleType):
            setup = [f"import {self.samplers.__name__} as samplers"]
        else:
            setup = [*lab.target.origin, "samplers = target.samplers"]
        self.script = Script([*setup, ""])

    def make(self, values: list[Any], replicas: int, rank: int, options: dict[str, Any]) -> Any:
        given = {name: value for name, value in options.items() if name != "epoch"}
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        self.script.body.append(
            f"sampler = samplers.LoadBalancingDistributedSampler({values!r}, lambda x: x, {replicas}, {rank}, {arguments})"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = self.samplers.LoadBalancingDistributedSampler(values, lambda value: value, replicas, rank, **given)
        if "epoch" in options:
            self.script.body.append(f"sampler.set_epoch({options['epoch']})")
            sampler.set_epoch(options["epoch"])
        return sampler

    def run(self, work: Callable[[], Any]) -> Any:
        """Return what ``work()`` does; raise `Violation` for whatever it raises."""
        try:
            with self.lab.journal.call((f"samplers: {self.script}"[:2000], None)):
                return work()
        except Violation:
            raise
        except BaseException as error:  # whatever an implementation does, there is a verdict
            raise Violation(f"raised {type(error).__name__}: {error}", str(self.script)) from error

    def same(self, expression: str, found: Any, wanted: Any) -> None:
        """Raise `Violation` unless what a sampler gave is as wanted."""
        if found != wanted:
            self.script.body.append(f"assert {expression} == {wanted!r}")
            raise Violation(f"{expression} is {found!r} instead of {wanted!r}"[:1000], str(self.script))

    def refused(self, work: Callable[[], Any], what: str) -> None:
        """Raise `Violation` unless ``work()`` is a ValueError."""
        try:
            with self.lab.journal.call((f"samplers: {what}", None)):
                work()
        except ValueError:
            return
        except BaseException as error:
            raise Violation(f"{what} raised {type(error).__name__}: {error}, not a ValueError", str(self.script)) from error
        raise Violation(f"{what} must be a ValueError", str(self.script))


@check("samplers", "S7.1", "lengths", needs=_SAMPLER, effort=3)
def lengths(lab: Lab, draw: Draw) -> None:
    """All ranks draw equally many, as many as they say."""
    (values, replicas, options), trial = draw(_cases()), _Trial(lab)
    wanted = samplers_plain.num_samples(len(values), replicas, options["drop_last"])
    sampler = trial.run(lambda: trial.make(values, replicas, replicas - 1, options))
    trial.same("len(sampler)", trial.run(lambda: len(sampler)), wanted)
    trial.same("len(list(sampler))", trial.run(lambda: len(list(sampler))), wanted)


@check("samplers", "S7.2", "one_replica", needs=_SAMPLER, effort=3)
def one_replica(lab: Lab, draw: Draw) -> None:
    """Without shuffling a replica alone draws samples in a stable ascending order of their exact complexities."""
    values, trial = draw(_about_an_edge() if draw(st.booleans()) else _complexities), _Trial(lab)
    sampler = trial.run(lambda: trial.make(values, 1, 0, {"shuffle": False, "epoch": draw(st.integers(0, 3))}))
    trial.same("list(sampler)", trial.run(lambda: list(sampler)), sorted(range(len(values)), key=values.__getitem__))


@check("samplers", "S7.2", "inputs_unchanged", needs=_SAMPLER)
def inputs_unchanged(lab: Lab, draw: Draw) -> None:
    """Complexities that are tensors stay as they were, epoch after epoch."""
    numbers, trial = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12)), _Trial(lab)
    dataset = [torch.tensor(number) for number in numbers]
    options = {"shuffle": True, "seed": draw(st.integers(0, 5)), "random_level": draw(_levels)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = trial.run(lambda: trial.make(dataset, 2, 0, options))
        for epoch in range(3):
            trial.run(lambda epoch=epoch: sampler.set_epoch(epoch))  # type: ignore[misc]
            wanted = samplers_plain.indices(numbers, 2, 0, epoch=epoch, drop_last=False, **options)
            trial.same("list(sampler)", trial.run(lambda: list(sampler)), wanted)
    trial.same("dataset", [sample.item() for sample in dataset], numbers)


@check("samplers", "S7.3", "indices", needs=_SAMPLER, effort=5)
def indices(lab: Lab, draw: Draw) -> None:
    """A rank's indices are those of the clause, and the same when asked again."""
    (values, replicas, options), trial = draw(_cases()), _Trial(lab)
    rank = draw(st.integers(0, replicas - 1))
    sampler = trial.run(lambda: trial.make(values, replicas, rank, options))
    wanted = samplers_plain.indices(values, replicas, rank, **options)
    trial.same("list(sampler)", trial.run(lambda: list(sampler)), wanted)
    trial.same("list(sampler)", trial.run(lambda: list(sampler)), wanted)


def _cut(values: list[Any], limit: int) -> Callable[[list[int]], list[list[int]]]:
    """Return a batch_fn: batches of 1 to ``limit`` samples, by a rule that sees each index."""

    def batches(drawn: list[int]) -> list[list[int]]:
        found: list[list[int]] = []
        for index in drawn:
            if not found or len(found[-1]) == limit or index % 3 == 0:
                found.append([])
            found[-1].append(index)
        return found

    return batches


@check("samplers", "S7.4", "batches", needs=_BATCHES, effort=4)
def batches(lab: Lab, draw: Draw) -> None:
    """All replicas get equally many batches: the largest number, short ones in cycle, or with drop_last the smallest."""
    (values, replicas, options), trial = draw(_cases()), _Trial(lab)
    options = {**options, "drop_last": False}
    batch_fn, drop_last = _cut(values, draw(st.integers(1, 5))), draw(st.booleans())
    plain = [batch_fn(samplers_plain.indices(values, replicas, rank, **options)) for rank in range(replicas)]
    wanted = samplers_plain.equal_batches(plain, drop_last)

    def drawn(rank: int) -> tuple[int, list[list[int]]]:
        sampler = trial.make(values, replicas, rank, {**options, "epoch": 0})
        made = trial.samplers.LoadBalancingDistributedBatchSampler(sampler, batch_fn, drop_last)
        made.set_epoch(options["epoch"])
        return len(made), list(made)

    for rank in range(replicas):
        length, found = trial.run(lambda rank=rank: drawn(rank))  # type: ignore[misc]
        what = f"list(LoadBalancingDistributedBatchSampler(sampler, batch_fn, drop_last={drop_last}))"
        trial.same(what, found, wanted[rank])
        trial.same(what.replace("list", "len", 1), length, len(wanted[rank]))


@check("samplers", "S7.5", "refuses", needs=_BATCHES, effort=2)
def refuses(lab: Lab, draw: Draw) -> None:
    """A random_level outside 0 to 1, a rank that is none, no samples, NaN, another sampler, drop_last below: ValueError."""
    trial, classes = _Trial(lab), lab.target.parts["samplers"]
    case = draw(st.sampled_from(["level", "rank", "replicas", "empty", "nan", "sampler", "drop_last", "no batches"]))
    one = draw(st.sampled_from([1, 1.0]))  # integers and floats are not read alike
    level = draw(st.sampled_from([-0.1, 1.1, float("nan"), 2, -1]))
    bad: dict[str, Callable[[], Any]] = {
        "level": lambda: trial.make([1, 2], 1, 0, {"random_level": level}),
        "rank": lambda: trial.make([1, 2], 2, draw(st.sampled_from([-1, 2, 5])), {}),
        "replicas": lambda: trial.make([1, 2], draw(st.sampled_from([0, -1])), 0, {}),
        "empty": lambda: trial.make([], 1, 0, {}),
        "nan": lambda: trial.make(draw(st.permutations([one, float("nan"), 2])), 1, 0, {"shuffle": False}),
        "sampler": lambda: classes.LoadBalancingDistributedBatchSampler([[0]], lambda found: [found]),
        "no batches": lambda: classes.LoadBalancingDistributedBatchSampler(trial.make([1, 2], 1, 0, {}), lambda found: []),
        "drop_last": lambda: classes.LoadBalancingDistributedBatchSampler(
            trial.make([1, 2], 1, 0, {"drop_last": True}), lambda found: [found]
        ),
    }
    trial.refused(bad[case], f"{case}{f' {level}' if case == 'level' else ''}")

"""Balanced samplers compared with plain Python (S7); a target's ``samplers`` has the classes as
attributes.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
    identity,
    levels,
    many_for,
    noisy_cases,
    one_to_five,
)
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.lab.lab import Lab

_SAMPLER = ("LoadBalancingDistributedSampler",)
_BATCHES = (*_SAMPLER, "LoadBalancingDistributedBatchSampler")
_POSITION = ("LoadBalancingDistributedSampler.load_state_dict",)
_POSITION_OF_BATCHES = ("LoadBalancingDistributedBatchSampler.load_state_dict",)
_DEFAULTS = {"shuffle": True, "seed": 0, "drop_last": False, "random_level": 0}
_DEFAULTS_OF_BUDGET = {"padded": True, "mix": 8, **_DEFAULTS}


def _value(lab: Lab, what: str, get: Callable[[], Any]) -> Any:
    """Call the target and return the result, ignoring warnings."""
    with lab.calling(what), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get()


def _same(lab: Lab, what: str, get: Callable[[], Any], wanted: Any) -> None:
    lab.assert_equal(_value(lab, what, get), wanted)


def _draws(lab: Lab, sampler: Any, wanted: list[Any], what: str = "sampler") -> None:
    """Compare the items of a sampler with the expected ones."""
    _same(lab, f"list({what})", lambda: list(sampler), wanted)


def _refuses(lab: Lab, what: str, get: Callable[[], Any]) -> None:
    def refused() -> bool:
        try:
            get()
        except ValueError:
            return True
        return False

    lab.assert_that(_value(lab, what, refused), "it must raise a ValueError")


@dataclass
class _Samples:
    """A target's sampler with its options, and its expected items; samples are their own
    complexities, or costs.

    Attributes:
        lab: the harness, which has the target.
        values: the samples.
        options: the sampler's options, including the epoch.
        batch_fn: batch function of a batch sampler on top; None: no batch sampler.
        drop_last: the batch sampler's drop_last.
        most: maximal cost of a batch; None: no budget.
    """

    lab: Lab
    values: list[Any]
    options: dict[str, Any]
    batch_fn: Any = None
    drop_last: bool = False
    most: Any = None

    def make(self, replicas: int, rank: int) -> Any:
        """Make a sampler as a user would, without options that have their default."""
        defaults = _DEFAULTS if self.most is None else _DEFAULTS_OF_BUDGET
        given = {
            name: value
            for name, value in self.options.items()
            if name != "epoch" and value != defaults[name]
        }
        classes = self.lab.part("samplers")
        if self.most is not None:
            given |= {"num_replicas": replicas, "rank": rank}
            return classes.BudgetBatchSampler(self.values, self.most, **given)
        make = classes.LoadBalancingDistributedSampler
        sampler = make(self.values, identity, replicas, rank, **given)
        if self.batch_fn is None:
            return sampler
        make = classes.LoadBalancingDistributedBatchSampler
        return make(sampler, self.batch_fn, self.drop_last)

    def listed(self, replicas: int, rank: int) -> list[Any]:
        """Return the items of a new sampler."""
        return list(self.make(replicas, rank))

    def create(self, replicas: int, rank: int) -> Any:
        """Make a sampler; an error is a violation."""
        drawn = {name: value for name, value in vars(self).items() if name != "lab"}
        self.lab.drawn |= drawn
        what = f"the sampler of values for rank {rank} of {replicas}"
        return _value(self.lab, what, partial(self.make, replicas, rank))

    def at(self, replicas: int, rank: int, epoch: int | None = None) -> Any:
        """Make a sampler and set its epoch, by default that of the options."""
        epoch = self.options["epoch"] if epoch is None else epoch
        return _at(self.lab, self.create(replicas, rank), epoch)

    def plan(self, history: Any, replicas: int, epoch: int | None = None) -> list[list[list[Any]]]:
        """Return the expected items of each replica by stretch of an epoch, by default that of the
        options.
        """
        options = self.options if epoch is None else {**self.options, "epoch": epoch}
        if self.most is not None:
            return samplers_plain.budget_stretches(
                self.values, self.most, history, replicas, **options
            )
        return samplers_plain.stretches_of(
            self.values, history, replicas, self.batch_fn, self.drop_last, **options
        )


def _at(lab: Lab, sampler: Any, epoch: int) -> Any:
    """Set the epoch of a sampler, and return the sampler."""
    _value(lab, f"set_epoch({epoch})", lambda: sampler.set_epoch(epoch))
    return sampler


def _loaded(lab: Lab, sampler: Any, state: Any) -> Any:
    """Load a position into a sampler, and return the sampler."""
    _value(lab, "load_state_dict", lambda: sampler.load_state_dict(state))
    return sampler


@check("samplers.S7.1.lengths", needs=_SAMPLER, effort=1.4)
def lengths(lab: Lab) -> None:
    """All ranks draw the same number of samples, equal to their samplers' ``len()``."""
    values, replicas, options = lab.draw(cases())
    wanted = samplers_plain.num_samples(len(values), replicas, options["drop_last"])
    sampler = _Samples(lab, values, options).at(replicas, replicas - 1)
    _same(lab, "len(sampler)", lambda: len(sampler), wanted)
    _same(lab, "len(list(sampler))", lambda: len(list(sampler)), wanted)


@check("samplers.S7.2.one_replica", needs=_SAMPLER, effort=1.4)
def one_replica(lab: Lab) -> None:
    """Without shuffling, a single replica draws samples in ascending order of their exact
    complexities; the sort is stable.
    """
    values = lab.draw(about_an_edge() if lab.flag() else complexities)
    samples = _Samples(lab, values, {"shuffle": False, "epoch": lab.integer(0, 3)})
    _draws(lab, samples.at(1, 0), sorted(range(len(values)), key=values.__getitem__))


@check("samplers.S7.2.inputs_unchanged", needs=_SAMPLER)
def inputs_unchanged(lab: Lab) -> None:
    """Complexities that are tensors are not changed in any epoch."""
    if lab.target.requests is not None:
        lab.skip("a program gets copies of the complexities")
    numbers = lab.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    dataset = [torch.tensor(number) for number in numbers]
    options = {"shuffle": True, "seed": lab.integer(0, 5), "random_level": lab.draw(levels)}
    sampler = _Samples(lab, dataset, options).create(2, 0)
    plain = _Samples(lab, numbers, {**options, "drop_last": False})
    for epoch in range(3):
        _draws(lab, _at(lab, sampler, epoch), plain.plan([], 2, epoch)[0][0])
    lab.assert_equal([sample.item() for sample in dataset], numbers, where="the complexities")


@check("samplers.S7.3.indices", needs=_SAMPLER, effort=3.5)
def indices(lab: Lab) -> None:
    """A rank's indices are as specified, and the same when iterated again."""
    values, replicas, options = lab.draw(cases())
    # the last one repeats most
    rank = lab.draw(st.integers(0, replicas - 1) | st.just(replicas - 1))
    samples = _Samples(lab, values, options)
    sampler, wanted = samples.at(replicas, rank), samples.plan([], replicas)[0][rank]
    for _ in range(3):
        _draws(lab, sampler, wanted)


@check("samplers.S7.3.digits", needs=_SAMPLER, effort=1)
def digits(lab: Lab) -> None:
    """The bound of the noise is a product of floats; no digit of a large epoch is lost."""
    values, replicas, options = lab.draw(noisy_cases())
    samples = _Samples(lab, values, options)
    _draws(lab, samples.at(replicas, 0), samples.plan([], replicas)[0][0])


@check("samplers.S7.4.batches", needs=_BATCHES, effort=1.4)
def batches(lab: Lab) -> None:
    """All replicas get the same number of batches: the largest, with batches repeated in cycle, or
    with drop_last the smallest.
    """
    values, replicas, options = lab.draw(cases())
    # no two replicas have the same samples, so that one alone may have the most batches
    if lab.flag():
        values = list(range(lab.choice([9, 12, 20, 40])))
        replicas = lab.choice([9, 12, 3])
    options = {**options, "drop_last": False}
    drop_last, owner = lab.flag(), lab.choice([replicas - 1, 0])
    first = _Samples(lab, values, options).plan([], replicas)[0][owner][0]
    for batch_fn in (one_to_five, cut(lab.integer(1, 5)), many_for(first)):
        of_replicas = _Samples(lab, values, options, batch_fn, drop_last)
        wanted = of_replicas.plan([], replicas)[0]
        for rank in lab.draw(st.permutations(range(replicas)))[:2]:
            found = _at(lab, of_replicas.at(replicas, rank, 0), options["epoch"])
            _same(lab, "len(batches)", partial(len, found), len(wanted[rank]))
            _draws(lab, found, wanted[rank], "batches")
    _draws(lab, found, wanted[rank], "batches, again")


def _stop_and_go_on(lab: Lab, samples: _Samples, replicas: int) -> None:
    """Draw part of an epoch, resume it in another sampler, and continue with the next epoch."""
    epoch, rank = samples.options["epoch"], lab.integer(0, replicas - 1)
    wanted = samples.plan([], replicas)[0][rank]
    following = samples.plan([], replicas, epoch + 1)[0][rank]
    first, taken = samples.at(replicas, rank), lab.integer(0, len(wanted))
    again = lab.flag()
    _same(lab, f"the first {taken}", lambda: list(itertools.islice(first, taken)), wanted[:taken])
    saved = _value(lab, "state_dict", first.state_dict)
    second = _loaded(lab, samples.at(replicas, rank, 0), saved)
    if again:
        _at(lab, second, epoch)  # the epoch that it already has
    _same(lab, "len", lambda: len(second), len(wanted))
    _draws(lab, second, wanted[taken:], f"what is left after {taken}")
    _at(lab, second, epoch + 1)
    # the position at the start of an epoch
    saved = _value(lab, "state_dict", second.state_dict)
    _draws(lab, _loaded(lab, samples.at(replicas, rank, 0), saved), following)
    _draws(lab, second, following)


@check("samplers.S7.3.position", needs=_POSITION)
def position(lab: Lab) -> None:
    """A sampler that loads a position continues with the next sample, also if its epoch is set
    again; later epochs are complete.
    """
    values, replicas, options = lab.draw(cases())
    _stop_and_go_on(lab, _Samples(lab, values, options), replicas)


@check("samplers.S7.4.position", needs=_POSITION_OF_BATCHES)
def position_of_batches(lab: Lab) -> None:
    """A batch sampler that loads a position continues with the next batch; later epochs are
    complete.
    """
    values, replicas, options = lab.draw(cases())
    options = {**options, "drop_last": False}
    of_replicas = _Samples(lab, values, options, few_or_many, lab.flag())
    _stop_and_go_on(lab, of_replicas, replicas)
    other = replace(of_replicas, values=[*values, values[0]])
    _refuses_each(lab, of_replicas, [other, replace(of_replicas, drop_last=not other.drop_last)])


def _refuses_each(lab: Lab, samples: _Samples, others: list[_Samples]) -> None:
    """Save a position of one replica; samplers with other settings must refuse it."""
    saved = _value(lab, "state_dict", samples.at(1, 0, 0).state_dict)
    for other in others:
        sampler = other.at(1, 0, 0)
        what = f"load_state_dict of a sampler of {samples.values}, {samples.options}"
        _refuses(lab, what, partial(sampler.load_state_dict, saved))


@check("samplers.S7.3.other_settings", needs=_POSITION, effort=0.2)
def other_settings(lab: Lab) -> None:
    """A position that was saved with other samples, costs, seed, shuffle, drop_last or random_level
    raises a ValueError.
    """
    size = lab.choice([4, 5, 6, 8])  # with even sizes, drop_last changes no length
    values = lab.draw(st.lists(st.integers(0, 20), min_size=size, max_size=size, unique=True))
    options: dict[str, Any] = {"shuffle": True, "drop_last": False, "epoch": 0}
    options["seed"] = lab.integer(0, 5)
    options["random_level"] = lab.choice([0.25, 1])
    saved = _value(lab, "state_dict", _Samples(lab, values, options).at(2, 0).state_dict)
    seed = options["seed"] + 1
    changed = {"shuffle": False, "seed": seed, "drop_last": True, "random_level": 0.75}
    others = [(values, {**options, name: value}) for name, value in changed.items()]
    for numbers, other in (*others, ([*values, values[0]], options), (values[::-1], options)):
        samples = _Samples(lab, numbers, other)
        sampler = samples.at(2, 0)
        what = f"load_state_dict of a sampler of {values} with {options}"
        _refuses(lab, what, partial(sampler.load_state_dict, saved))
        _draws(lab, sampler, samples.plan([], 2)[0][0])


@check("samplers.S7.5.refuses", needs=_BATCHES, effort=1)
def refuses(lab: Lab) -> None:
    """An invalid random_level, rank, dataset, complexity (NaN), sampler, or a sampler with
    drop_last raises a ValueError.
    """
    one = lab.choice([1, 1.0])  # ints and floats are converted in different ways
    levels = [-0.1, -1e-9, 1.1, 1.0004, 1 + 2.0**-52, math.nan, 2, -1]
    nan = lab.draw(st.permutations([one, math.nan, 2]))
    invalid: list[tuple[list[Any], dict[str, Any], int, int]] = [
        *(([1, 2], {"random_level": level}, 1, 0) for level in levels),
        ([1, 2], {}, 2, lab.choice([-1, 2, 5])),
        ([1, 2], {}, lab.choice([0, -1]), 0),
        ([], {}, 1, 0),
        (nan, {"shuffle": False}, 1, 0),
        ([1, math.inf], {}, 1, 0),
    ]
    for values, options, replicas, rank in invalid:
        what = f"the sampler of {values} for rank {rank} of {replicas}, {options}"
        # an infinite complexity may be found with the noise
        _refuses(lab, what, partial(_Samples(lab, values, options).listed, replicas, rank))
    make = lab.part("samplers").LoadBalancingDistributedBatchSampler
    _refuses(lab, "batches of a list", partial(make, [[0]], lambda found: [found]))
    for drop_last, batches in ((True, [[0]]), (False, [])):
        samples = _Samples(lab, [1, 2], {"drop_last": drop_last}, lambda _, found=batches: found)
        _refuses(lab, f"batches {batches}, {drop_last=}", partial(samples.make, 1, 0))


# Epochs that continue with another number of replicas (S7.6), and batches under a budget (S7.7).


def _continued(lab: Lab, samples: _Samples) -> None:
    """Run an epoch whose number of replicas changes: each stretch draws the remaining samples, and
    one with an unchanged number of replicas continues the last. The next epoch is complete,
    wherever its sampler was in this one.
    """
    history: list[tuple[int, int]] = []
    state, epoch = None, samples.options["epoch"]
    for replicas in lab.draw(st.lists(st.integers(1, 5), min_size=2, max_size=5)):
        rank, taken = lab.integer(0, replicas - 1), 0
        sampler = samples.at(replicas, rank)
        if state is not None:
            _loaded(lab, sampler, state)
        if history and history[-1][0] == replicas:
            taken = history.pop()[1]
        wanted = samples.plan(history, replicas)[-1][rank]
        what = f"stretch {replicas} after {history}, {taken} of it drawn"
        _same(lab, f"len of {what}", partial(len, sampler), len(wanted))
        _draws(lab, sampler, wanted[taken:], what)
        if wanted:
            number = lab.integer(max(1, taken), len(wanted))
            history.append((replicas, number))
            unit = "samples" if (samples.batch_fn, samples.most) == (None, None) else "batches"
            state = _value(lab, "state_dict", partial(sampler.state_dict, **{unit: number}))
    sampler = samples.at(replicas, rank)
    if state is not None and lab.flag():
        _loaded(lab, sampler, state)
    else:
        _value(lab, "the first 2", lambda: list(itertools.islice(sampler, 2)))
    following = samples.plan([], replicas, epoch + 1)[0][rank]
    _draws(lab, _at(lab, sampler, epoch + 1), following, f"epoch {epoch + 1}, set in epoch {epoch}")


@check("samplers.S7.6.stretches", needs=_POSITION, effort=1.8)
def stretches(lab: Lab) -> None:
    """With another number of replicas, an epoch continues with the samples not yet drawn by any
    chunk, in the epoch's order.
    """
    values, _, options = lab.draw(cases())
    # the chunk that is filled up with the first samples is often drawn before them
    if lab.flag():
        values = list(range(lab.choice([3, 5, 7, 11, 24])))
        options = {"shuffle": True, "epoch": 0, "drop_last": False, "random_level": 0}
        options["seed"] = lab.integer(0, 99)
    _continued(lab, _Samples(lab, values, options))


@check("samplers.S7.6.batches", needs=_POSITION_OF_BATCHES, effort=1.4)
def continued_batches(lab: Lab) -> None:
    """A stretch of batches has consumed the samples in the first batches of all its replicas; the
    rest is batched anew.
    """
    values, _, options = lab.draw(cases())
    batch_fn, options = cut(lab.integer(1, 3)), {**options, "drop_last": False}
    _continued(lab, _Samples(lab, values, options, batch_fn, lab.flag()))


@check("samplers.S7.7.budget", needs=("BudgetBatchSampler",), effort=2.6)
def budget(lab: Lab) -> None:
    """Batches are cut from samples in order of cost, shuffled, equal in number for each replica,
    and continued with other replicas.
    """
    costs, most, options = lab.draw(budgets())
    _continued(lab, _Samples(lab, costs, {**options, "drop_last": False}, most=most))


@check("samplers.S7.7.dropped", needs=("BudgetBatchSampler",), effort=1.4)
def dropped(lab: Lab) -> None:
    """With drop_last, the cheapest batches are dropped; if none remains, that is a ValueError. So
    are samples over the budget, and positions that were saved with other settings.
    """
    costs, most, options = lab.draw(budgets())
    of_replicas = _Samples(lab, costs, {**options, "drop_last": True, "epoch": 0}, most=most)
    replicas = lab.integer(1, 4)
    wanted = of_replicas.plan([], replicas)[0][0]
    if wanted:
        sampler = of_replicas.at(replicas, 0)
        every = len(of_replicas.plan([], 1)[0][0])
        _same(lab, "dropped", lambda: sampler.dropped, every % replicas)
        _draws(lab, sampler, wanted, "batches")
        _go_on(lab, of_replicas, sampler, (replicas, lab.integer(1, len(wanted))))
    else:
        _refuses(
            lab,
            "BudgetBatchSampler, of which no batch is left",
            partial(of_replicas.make, replicas, 0),
        )
    beyond = replace(of_replicas, values=[*costs, math.nextafter(most, math.inf) + most])
    _refuses(lab, f"a sample over the budget of {most}", partial(beyond.make, 1, 0))
    given = replace(of_replicas, options={**of_replicas.options, "shuffle": True})
    changed = [{"shuffle": False}, {"seed": options["seed"] + 1}, {"drop_last": False}]
    changed += [{"mix": options["mix"] + 1}, {"padded": not options["padded"]}]
    others = [replace(given, options={**given.options, **change}) for change in changed]
    others += [replace(given, values=[*costs, costs[0]]), replace(given, most=2 * most)]
    others.append(replace(given, values=[costs[0] * 0.75, *costs[1:]]))
    _refuses_each(lab, given, [lab.choice(others)])


def _go_on(lab: Lab, samples: _Samples, sampler: Any, drawn: tuple[int, int]) -> None:
    """Continue a position of a sampler with another number of replicas, if batches remain."""
    replicas = lab.integer(1, 4)
    wanted = samples.plan([drawn], replicas)[-1][0]
    if replicas == drawn[0] or not (wanted and samples.plan([], replicas)[0][0]):
        return
    state = _value(lab, "state_dict", partial(sampler.state_dict, batches=drawn[1]))
    _draws(lab, _loaded(lab, samples.at(replicas, 0), state), wanted, f"batches after {drawn}")

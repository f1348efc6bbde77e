"""Balanced samplers compared with plain Python (S7): a target's ``samplers`` has the classes by
their names.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
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
from bagua_ref.conformance.cases.strategies import Draw
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.lab.lab import Lab

_SAMPLER = ("LoadBalancingDistributedSampler",)
_BATCHES = (*_SAMPLER, "LoadBalancingDistributedBatchSampler")
_POSITION = ("LoadBalancingDistributedSampler.load_state_dict",)
_POSITION_OF_BATCHES = ("LoadBalancingDistributedBatchSampler.load_state_dict",)


def _value(lab: Lab, what: str, get: Callable[[], Any]) -> Any:
    """Return what a call of the target returns; its warnings do not matter."""
    with lab.calling(what), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get()


def _same(lab: Lab, what: str, get: Callable[[], Any], wanted: Any) -> None:
    lab.assert_equal(_value(lab, what, get), wanted)


def _draws(lab: Lab, sampler: Any, wanted: list[Any], what: str = "sampler") -> None:
    """Compare what a sampler draws."""
    _same(lab, f"list({what})", lambda: list(sampler), wanted)


def _refuses(lab: Lab, what: str, get: Callable[[], Any]) -> None:
    def refused() -> bool:
        try:
            get()
        except ValueError:
            return True
        return False

    lab.assert_that(_value(lab, what, refused), "it must raise a ValueError")


def _sampler(lab: Lab, values: Any, replicas: int, rank: int, options: dict[str, Any]) -> Any:
    """Make a sampler of samples that are their own complexities, at its epoch, if ``options`` have
    one.
    """
    given = {name: value for name, value in options.items() if name != "epoch"}
    lab.drawn |= {"values": values, "replicas": replicas, "rank": rank, "options": options}
    make = lab.part("samplers").LoadBalancingDistributedSampler

    def made() -> Any:
        sampler = make(values, identity, replicas, rank, **given)
        if "epoch" in options:
            sampler.set_epoch(options["epoch"])
        return sampler

    what = "LoadBalancingDistributedSampler(values, lambda x: x, replicas, rank, **options)"
    return _value(lab, what, made)


def _batches(lab: Lab, sampler: Any, batch_fn: Any, drop_last: bool = False) -> Any:
    """Make a batch sampler."""
    make = lab.part("samplers").LoadBalancingDistributedBatchSampler
    what = f"LoadBalancingDistributedBatchSampler(sampler, {batch_fn.__qualname__}, {drop_last})"
    return _value(lab, what, lambda: make(sampler, batch_fn, drop_last))


def _at(lab: Lab, sampler: Any, epoch: int) -> Any:
    """Set the epoch of a sampler; return the sampler."""
    _value(lab, f"set_epoch({epoch})", lambda: sampler.set_epoch(epoch))
    return sampler


def _loaded(lab: Lab, sampler: Any, state: Any) -> Any:
    """Load a position into a sampler; return the sampler."""
    _value(lab, "load_state_dict", lambda: sampler.load_state_dict(state))
    return sampler


@check("S7.1", "lengths", needs=_SAMPLER, effort=3)
def lengths(lab: Lab, draw: Draw) -> None:
    """All ranks draw the same number of samples, which is their length."""
    values, replicas, options = draw(cases())
    wanted = samplers_plain.num_samples(len(values), replicas, options["drop_last"])
    sampler = _sampler(lab, values, replicas, replicas - 1, options)
    _same(lab, "len(sampler)", lambda: len(sampler), wanted)
    _same(lab, "len(list(sampler))", lambda: len(list(sampler)), wanted)


@check("S7.2", "one_replica", needs=_SAMPLER, effort=3)
def one_replica(lab: Lab, draw: Draw) -> None:
    """Without shuffling, a single replica draws samples in ascending order of their exact
    complexities; the sort is stable.
    """
    values = draw(about_an_edge() if draw(st.booleans()) else complexities)
    sampler = _sampler(lab, values, 1, 0, {"shuffle": False, "epoch": draw(st.integers(0, 3))})
    _draws(lab, sampler, sorted(range(len(values)), key=values.__getitem__))


@check("S7.2", "inputs_unchanged", needs=_SAMPLER)
def inputs_unchanged(lab: Lab, draw: Draw) -> None:
    """Complexities that are tensors are not changed in any epoch."""
    if lab.target.requests is not None:
        lab.skip("a program gets copies of the complexities")
    numbers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    dataset = [torch.tensor(number) for number in numbers]
    options = {"shuffle": True, "seed": draw(st.integers(0, 5)), "random_level": draw(levels)}
    sampler = _sampler(lab, dataset, 2, 0, options)
    for epoch in range(3):
        wanted = samplers_plain.indices(numbers, 2, 0, epoch=epoch, drop_last=False, **options)
        _draws(lab, _at(lab, sampler, epoch), wanted)
    lab.assert_equal([sample.item() for sample in dataset], numbers, where="the complexities")


@check("S7.3", "indices", needs=_SAMPLER, effort=8)
def indices(lab: Lab, draw: Draw) -> None:
    """A rank's indices are as specified, and the same when iterated again."""
    values, replicas, options = draw(cases())
    # the last one repeats most
    rank = draw(st.one_of(st.integers(0, replicas - 1), st.just(replicas - 1)))
    sampler = _sampler(lab, values, replicas, rank, options)
    wanted = samplers_plain.indices(values, replicas, rank, **options)
    for _ in range(3):
        _draws(lab, sampler, wanted)


@check("S7.3", "digits", needs=_SAMPLER, effort=2)
def digits(lab: Lab, draw: Draw) -> None:
    """The bound of the noise is a product of floats, and no digit of the epoch is lost."""
    values, replicas, options = draw(noisy_cases())
    sampler = _sampler(lab, values, replicas, 0, options)
    _draws(lab, sampler, samplers_plain.indices(values, replicas, 0, **options))


@check("S7.4", "batches", needs=_BATCHES, effort=3)
def batches(lab: Lab, draw: Draw) -> None:
    """All replicas get the same number of batches: the largest, with batches repeated in cycle, or
    with drop_last the smallest.
    """
    values, replicas, options = draw(cases())
    # no two replicas have the same samples, so that one alone may have the most batches
    if draw(st.booleans()):
        values = list(range(draw(st.sampled_from([9, 12, 20, 40]))))
        replicas = draw(st.sampled_from([9, 12, 3]))
    options = {**options, "drop_last": False}
    drop_last, owner = draw(st.booleans()), draw(st.sampled_from([replicas - 1, 0]))
    drawn = [samplers_plain.indices(values, replicas, rank, **options) for rank in range(replicas)]
    for batch_fn in (one_to_five, cut(draw(st.integers(1, 5))), many_for(drawn[owner][0])):
        wanted = samplers_plain.equal_batches([batch_fn(indices) for indices in drawn], drop_last)
        for rank in draw(st.permutations(range(replicas)))[:2]:
            sampler = _sampler(lab, values, replicas, rank, {**options, "epoch": 0})
            found = _at(lab, _batches(lab, sampler, batch_fn, drop_last), options["epoch"])
            _same(lab, "len(batches)", partial(len, found), len(wanted[rank]))
            _draws(lab, found, wanted[rank], "batches")
    _draws(lab, found, wanted[rank], "batches, again")


@check("S7.3", "position", needs=_POSITION)
def position(lab: Lab, draw: Draw) -> None:
    """A sampler that loads a position goes on with the sample after it, also if its epoch is set
    again; later epochs are whole.
    """
    values, replicas, options = draw(cases())
    rank, epoch = draw(st.integers(0, replicas - 1)), options["epoch"]
    wanted, following = (
        samplers_plain.indices(values, replicas, rank, **{**options, "epoch": number})
        for number in (epoch, epoch + 1)
    )

    def make() -> Any:
        return _sampler(lab, values, replicas, rank, {**options, "epoch": 0})

    sampler = _stop_and_go_on(lab, draw, make, epoch, wanted)
    _at(lab, sampler, epoch + 1)
    # the position of an epoch of which nothing has been drawn
    saved = _value(lab, "state_dict", sampler.state_dict)
    _draws(lab, _loaded(lab, make(), saved), following)
    _draws(lab, sampler, following)


def _stop_and_go_on(
    lab: Lab, draw: Draw, make: Callable[[], Any], epoch: int, wanted: list[Any]
) -> Any:
    """Draw some of an epoch's samples or batches, and the rest from another sampler, which is
    returned.
    """
    first, taken = _at(lab, make(), epoch), draw(st.integers(0, len(wanted)))
    again = draw(st.booleans())
    _same(lab, f"the first {taken}", lambda: list(itertools.islice(first, taken)), wanted[:taken])
    saved = _value(lab, "state_dict", first.state_dict)
    second = _loaded(lab, make(), saved)
    if again:
        _at(lab, second, epoch)  # which it has
    _same(lab, "len", lambda: len(second), len(wanted))
    _draws(lab, second, wanted[taken:], f"what is left after {taken}")
    return second


@check("S7.3", "other_settings", needs=_POSITION, effort=0.2)
def other_settings(lab: Lab, draw: Draw) -> None:
    """A position that was saved with other samples, costs, seed, shuffle, drop_last or random_level
    raises a ValueError.
    """
    size = draw(st.sampled_from([4, 5, 6, 8]))  # of even ones drop_last changes no length
    values = draw(st.lists(st.integers(0, 20), min_size=size, max_size=size, unique=True))
    options = {"shuffle": True, "seed": draw(st.integers(0, 5)), "drop_last": False}
    options["random_level"] = draw(st.sampled_from([0.25, 1]))
    saved = _value(lab, "state_dict", _sampler(lab, values, 2, 0, options).state_dict)
    changed = {"shuffle": False, "seed": options["seed"] + 1, "drop_last": True}
    others = [(values, {**options, name: value}) for name, value in changed.items()]
    others += [(values, {**options, "random_level": 0.75})]
    others += [([*values, values[0]], options), (values[::-1], options)]
    for numbers, other in others:
        sampler = _sampler(lab, numbers, 2, 0, other)
        what = f"load_state_dict of a sampler of {values} with {options}"
        _refuses(lab, what, partial(sampler.load_state_dict, saved))
        _draws(lab, sampler, samplers_plain.indices(numbers, 2, 0, epoch=0, **other))


@check("S7.4", "position", needs=_POSITION_OF_BATCHES)
def position_of_batches(lab: Lab, draw: Draw) -> None:
    """A batch sampler that loads a position goes on with the batch after it."""
    values, replicas, options = draw(cases())
    options = {**options, "drop_last": False}
    drop_last, rank = draw(st.booleans()), draw(st.integers(0, replicas - 1))
    plain = [
        few_or_many(samplers_plain.indices(values, replicas, other, **options))
        for other in range(replicas)
    ]

    def make() -> Any:
        sampler = _sampler(lab, values, replicas, rank, {**options, "epoch": 0})
        return _batches(lab, sampler, few_or_many, drop_last)

    wanted = samplers_plain.equal_batches(plain, drop_last)[rank]
    _stop_and_go_on(lab, draw, make, options["epoch"], wanted)


@check("S7.5", "refuses", needs=_BATCHES, effort=2)
def refuses(lab: Lab, draw: Draw) -> None:
    """An invalid random_level, rank, dataset, complexity (NaN), sampler, or a sampler with
    drop_last raises a ValueError.
    """
    one = draw(st.sampled_from([1, 1.0]))  # integers and floats are not read alike
    levels = [-0.1, -1e-9, 1.1, 1.0004, 1 + 2.0**-52, math.nan, 2, -1]
    nan = draw(st.permutations([one, math.nan, 2]))
    invalid: list[tuple[list[Any], int, int, dict[str, Any]]] = [
        *(([1, 2], 1, 0, {"random_level": level}) for level in levels),
        ([1, 2], 2, draw(st.sampled_from([-1, 2, 5])), {}),
        ([1, 2], draw(st.sampled_from([0, -1])), 0, {}),
        ([], 1, 0, {}),
        (nan, 1, 0, {"shuffle": False}),
        ([1, math.inf], 1, 0, {}),
    ]
    samplers = lab.part("samplers")
    make_batches = samplers.LoadBalancingDistributedBatchSampler

    def listed(*arguments: Any, **options: Any) -> list[int]:
        return list(samplers.LoadBalancingDistributedSampler(*arguments, **options))

    for values, replicas, rank, options in invalid:
        what = f"LoadBalancingDistributedSampler({values}, identity, {replicas}, {rank}, {options})"
        # an infinite complexity may be found with the noise
        _refuses(lab, what, partial(listed, values, identity, replicas, rank, **options))
    for sampler, batch_fn in (
        ([[0]], lambda found: [found]),
        (_sampler(lab, [1, 2], 1, 0, {"drop_last": True}), lambda found: [found]),
        (_sampler(lab, [1, 2], 1, 0, {}), lambda found: []),
    ):
        what = "LoadBalancingDistributedBatchSampler(sampler, batch_fn)"
        _refuses(lab, what, partial(make_batches, sampler, batch_fn))


# Epochs that continue with another number of replicas (S7.6), and batches under a budget (S7.7).


def _continued(
    lab: Lab,
    draw: Draw,
    unit: str,
    epoch: int,
    make: Callable[[int, int], Any],
    plan: Callable[..., Any],
) -> None:
    """Run an epoch whose number of replicas changes: each stretch draws the samples that the
    earlier ones have left, and one with as many replicas as the last continues it. The next epoch
    is whole, wherever its sampler was in this one.
    """
    history: list[tuple[int, int]] = []
    state = None
    for replicas in draw(st.lists(st.integers(1, 5), min_size=2, max_size=5)):
        rank, taken = draw(st.integers(0, replicas - 1)), 0
        sampler = make(replicas, rank)
        if state is not None:
            _loaded(lab, sampler, state)
        if history and history[-1][0] == replicas:
            taken = history.pop()[1]
        wanted = plan(history, replicas, epoch)[-1][rank]
        what = f"stretch {replicas} after {history}, {taken} of it drawn"
        _same(lab, f"len of {what}", partial(len, sampler), len(wanted))
        _draws(lab, sampler, wanted[taken:], what)
        if wanted:
            number = draw(st.integers(max(1, taken), len(wanted)))
            history.append((replicas, number))
            state = _value(lab, "state_dict", partial(sampler.state_dict, **{unit: number}))
    sampler = make(replicas, rank)
    if state is not None and draw(st.booleans()):
        _loaded(lab, sampler, state)
    else:
        _value(lab, "the first 2", lambda: list(itertools.islice(sampler, 2)))
    following = plan([], replicas, epoch + 1)[0][rank]
    _draws(lab, _at(lab, sampler, epoch + 1), following, f"epoch {epoch + 1}, set in epoch {epoch}")


@check("S7.6", "stretches", needs=_POSITION, effort=4)
def stretches(lab: Lab, draw: Draw) -> None:
    """With another number of replicas, an epoch continues with the samples that no chunk has drawn,
    in the epoch's order.
    """
    values, _, options = draw(cases())
    # the chunk that is filled up with the first samples is often drawn before them
    if draw(st.booleans()):
        values = list(range(draw(st.sampled_from([3, 5, 7, 11, 24]))))
        options = {"shuffle": True, "epoch": 0, "drop_last": False, "random_level": 0}
        options["seed"] = draw(st.integers(0, 99))
    _continued(
        lab,
        draw,
        "samples",
        options["epoch"],
        lambda replicas, rank: _sampler(lab, values, replicas, rank, options),
        lambda history, replicas, epoch: samplers_plain.stretches_of(
            values, history, replicas, **{**options, "epoch": epoch}
        ),
    )


@check("S7.6", "batches", needs=_POSITION_OF_BATCHES, effort=3)
def continued_batches(lab: Lab, draw: Draw) -> None:
    """A stretch of batches has drawn the samples in the first batches of all its replicas; the rest
    is cut anew.
    """
    values, _, options = draw(cases())
    options, drop_last = {**options, "drop_last": False}, draw(st.booleans())
    batch_fn = cut(draw(st.integers(1, 3)))
    _continued(
        lab,
        draw,
        "batches",
        options["epoch"],
        lambda replicas, rank: _batches(
            lab, _sampler(lab, values, replicas, rank, options), batch_fn, drop_last
        ),
        lambda history, replicas, epoch: samplers_plain.stretches_of(
            values, history, replicas, batch_fn, drop_last, **{**options, "epoch": epoch}
        ),
    )


def _budget(
    lab: Lab, costs: list[Any], most: Any, replicas: int, rank: int, options: dict[str, Any]
) -> Any:
    """Make batches under a budget, at an epoch."""
    given = {name: value for name, value in options.items() if name != "epoch"}
    lab.drawn |= {"costs": costs, "most": most, "options": options}
    what = f"BudgetBatchSampler(costs, most, num_replicas={replicas}, rank={rank}, **options)"
    make = lab.part("samplers").BudgetBatchSampler
    return _at(
        lab,
        _value(lab, what, lambda: make(costs, most, num_replicas=replicas, rank=rank, **given)),
        options["epoch"],
    )


@check("S7.7", "budget", needs=("BudgetBatchSampler",), effort=6)
def budget(lab: Lab, draw: Draw) -> None:
    """Batches are cut from samples in order of cost, mixed, made as many for each replica, and
    continued with other replicas.
    """
    costs, most, options = draw(budgets())
    options["drop_last"] = False
    _continued(
        lab,
        draw,
        "batches",
        options["epoch"],
        lambda replicas, rank: _budget(lab, costs, most, replicas, rank, options),
        lambda history, replicas, epoch: samplers_plain.budget_stretches(
            costs, most, history, replicas, **{**options, "epoch": epoch}
        ),
    )


@check("S7.7", "dropped", needs=("BudgetBatchSampler",), effort=3)
def dropped(lab: Lab, draw: Draw) -> None:
    """With drop_last, the cheapest batches are dropped; if none is left, that is a ValueError."""
    costs, most, options = draw(budgets())
    options |= {"drop_last": True, "epoch": 0}
    replicas = draw(st.integers(1, 4))
    wanted = samplers_plain.budget_stretches(costs, most, [], replicas, **options)[0][0]
    if wanted:
        _draws(lab, _budget(lab, costs, most, replicas, 0, options), wanted, "batches")
    else:
        given = {name: value for name, value in options.items() if name != "epoch"}
        make = lab.part("samplers").BudgetBatchSampler
        what = f"BudgetBatchSampler({costs}, {most}, num_replicas={replicas}, rank=0, {given})"
        _refuses(lab, what, partial(make, costs, most, num_replicas=replicas, rank=0, **given))

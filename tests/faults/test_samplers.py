"""Samplers with a fault: each is found by a check of the clause that it breaks (S7)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.wrong_objects import Faults, Whole, assert_found

from bagua_ref import contrib

FAULTS = Faults()


class Balanced(contrib.LoadBalancingDistributedSampler):
    """The right sampler; what a fault overrides is wrong."""


class Budget(contrib.BudgetBatchSampler):
    """The right sampler; what a fault overrides is wrong."""


class Batches(contrib.LoadBalancingDistributedBatchSampler):
    """The right sampler; what a fault overrides is wrong."""


def target_of(made):
    """Return a target whose samplers are the package's but for one."""
    own = {
        "LoadBalancingDistributedSampler": Balanced,
        "LoadBalancingDistributedBatchSampler": Batches,
        "BudgetBatchSampler": Budget,
    }
    classes = {name: made if issubclass(made, kind) else kind for name, kind in own.items()}
    return Whole(samplers=SimpleNamespace(**classes))


def sampler(owner, method, check):
    """Return a decorator of a wrong method, which gets the right one and the arguments."""
    return FAULTS.of(owner, method, target_of)(f"samplers.{check}")


def with_option(name, owner, check, **fixed):
    """Enter a sampler that has options of its own."""

    @sampler(owner, "__init__", check)
    def init(right, *arguments, **options):
        right(*arguments, **options | fixed)

    FAULTS[-1] = pytest.param(*FAULTS[-1].values, id=name)


with_option("ForgetsTheSeed", Balanced, "S7.3.indices", seed=0)
with_option("NeverShuffles", Balanced, "S7.3.indices", shuffle=False)
with_option("HasNoNoise", Balanced, "S7.3.indices", random_level=0)
with_option("NeverDropsTheLast", Balanced, "S7.1.lengths", drop_last=False)
with_option("TakesAnyLevel", Balanced, "S7.5.refuses", random_level=1)
with_option("MixesNothing", Budget, "S7.7.budget", mix=1)
with_option("DropsNothing", Budget, "S7.7.dropped", drop_last=False)


@sampler(Budget, "__init__", "S7.7.budget")
def has_a_larger_budget(right, costs, most, *arguments, **options):
    right(costs, most * 2, *arguments, **options)


@sampler(Balanced, "set_epoch", "S7.3.indices")
def ignores_the_epoch(right, epoch):
    right(0)


def keeps_its_position(right, epoch):
    own, place = right.__self__, right.__self__._place
    right(epoch)
    own._place.taken, own._next = place.taken, own._place


for kind, check in ((Balanced, "S7.6.stretches"), (Budget, "S7.7.budget")):
    sampler(kind, "set_epoch", check)(keeps_its_position)


@sampler(Balanced, "__len__", "S7.1.lengths")
def counts_one_more(right):
    return right() + 1


@sampler(Balanced, "load_state_dict", "S7.3.position")
def ignores_a_loaded_position(right, state):
    right(state)
    right.__self__.set_epoch(state["epoch"] + 1)
    right.__self__.set_epoch(state["epoch"])


def takes_any_state(right, state):
    try:
        right(state)
    except ValueError:
        return


for kind, check in (
    (Balanced, "S7.3.other_settings"),
    (Batches, "S7.4.position"),
    (Budget, "S7.7.dropped"),
):
    sampler(kind, "load_state_dict", check)(takes_any_state)


@sampler(Batches, "__iter__", "S7.4.batches")
def loses_the_last_batch(right):
    return iter(list(right())[:-1])


@sampler(Batches, "load_state_dict", "S7.4.position")
def starts_batches_anew(right, state):
    return None


@pytest.mark.proof
@pytest.mark.parametrize(("make", "check"), FAULTS)
def test_a_wrong_sampler_is_found(make, check):
    assert_found(make(), check)

"""Samplers with a fault: each is found by a check of the clause that it breaks (S7)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.wrong_objects import Whole, assert_found

from bagua_ref import contrib

FOUND_BY = []


def found_by(check):
    """Enter a sampler into the table, with the check that must fail for it."""

    def enter(sampler):
        FOUND_BY.append(pytest.param(sampler, check, id=sampler.__name__))
        return sampler

    return enter


class Balanced(contrib.LoadBalancingDistributedSampler):
    """The right sampler; what a fault overrides is wrong."""


class Budget(contrib.BudgetBatchSampler):
    """The right sampler; what a fault overrides is wrong."""


class Batches(contrib.LoadBalancingDistributedBatchSampler):
    """The right sampler; what a fault overrides is wrong."""


@found_by("samplers.S7.3.indices")
class IgnoresTheEpoch(Balanced):
    def set_epoch(self, epoch):
        super().set_epoch(0)


@found_by("samplers.S7.3.indices")
class ForgetsTheSeed(Balanced):
    def __init__(self, *arguments, seed=0, **options):
        super().__init__(*arguments, seed=0, **options)


@found_by("samplers.S7.3.indices")
class NeverShuffles(Balanced):
    def __init__(self, *arguments, shuffle=True, **options):
        super().__init__(*arguments, shuffle=False, **options)


@found_by("samplers.S7.3.indices")
class HasNoNoise(Balanced):
    def __init__(self, *arguments, random_level=0, **options):
        super().__init__(*arguments, random_level=0, **options)


@found_by("samplers.S7.3.indices")
class DrawsBackwards(Balanced):
    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


@found_by("samplers.S7.1.lengths")
class CountsOneMore(Balanced):
    def __len__(self):
        return super().__len__() + 1


@found_by("samplers.S7.1.lengths")
class NeverDropsTheLast(Balanced):
    def __init__(self, *arguments, drop_last=False, **options):
        super().__init__(*arguments, drop_last=False, **options)


@found_by("samplers.S7.3.position")
class IgnoresALoadedPosition(Balanced):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.set_epoch(state["epoch"] + 1)
        self.set_epoch(state["epoch"])


@found_by("samplers.S7.3.other_settings")
class TakesAnyState(Balanced):
    def load_state_dict(self, state):
        try:
            super().load_state_dict(state)
        except ValueError:
            return


@found_by("samplers.S7.5.refuses")
class TakesAnyLevel(Balanced):
    def __init__(self, *arguments, random_level=0, **options):
        super().__init__(*arguments, random_level=min(1, max(0, random_level)), **options)


@found_by("samplers.S7.7.budget")
class HasALargerBudget(Budget):
    def __init__(self, costs, max_cost, *arguments, **options):
        super().__init__(costs, max_cost * 2, *arguments, **options)


@found_by("samplers.S7.7.budget")
class MixesNothing(Budget):
    def __init__(self, *arguments, mix=8, **options):
        super().__init__(*arguments, mix=1, **options)


@found_by("samplers.S7.7.dropped")
class DropsNothing(Budget):
    def __init__(self, *arguments, drop_last=False, **options):
        super().__init__(*arguments, drop_last=False, **options)


@found_by("samplers.S7.4.batches")
class LosesTheLastBatch(Batches):
    def __iter__(self):
        return iter(list(super().__iter__())[:-1])


@found_by("samplers.S7.4.position")
class StartsBatchesAnew(Batches):
    def load_state_dict(self, state):
        return None


@pytest.mark.proof
@pytest.mark.parametrize(("sampler", "check"), FOUND_BY)
def test_a_wrong_sampler_is_found(sampler, check):
    assert_found(target_of(sampler), check)


def target_of(sampler):
    """Return a target whose samplers are the package's but for this one."""
    own = {
        "LoadBalancingDistributedSampler": Balanced,
        "LoadBalancingDistributedBatchSampler": Batches,
        "BudgetBatchSampler": Budget,
    }
    classes = {name: sampler if issubclass(sampler, kind) else kind for name, kind in own.items()}
    return Whole(samplers=SimpleNamespace(**classes))

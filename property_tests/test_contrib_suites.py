"""Properties of samplers and collectives as shipped in the suites (S3.9, S7)."""

from __future__ import annotations

import functools
from functools import partialmethod
from types import SimpleNamespace

import pytest
from property_tests.strategies import Seeded, every_backend

from bagua_ref.conformance.run.pytest_suites import (
    CollectiveSuite,
    SamplerSuite,
)
from bagua_ref.conformance.targets.reference_target import ReferenceTarget
from bagua_ref.contrib import (
    BudgetBatchSampler,
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)


@functools.cache
def with_samplers_on(backend: str) -> SimpleNamespace:
    made = partialmethod(LoadBalancingDistributedSampler.__init__, backend=backend)
    sampler = type("SamplerOnBackend", (LoadBalancingDistributedSampler,), {"__init__": made})
    parts = SimpleNamespace(
        LoadBalancingDistributedSampler=sampler,
        LoadBalancingDistributedBatchSampler=LoadBalancingDistributedBatchSampler,
        BudgetBatchSampler=BudgetBatchSampler,
    )
    return SimpleNamespace(samplers=parts)


@every_backend
class TestSamplers(Seeded, SamplerSuite):
    @pytest.fixture
    def target(self, backend):
        return with_samplers_on(backend)


TARGET = ReferenceTarget()


class TestOwnParts(Seeded, CollectiveSuite):
    @pytest.fixture
    def target(self):
        return TARGET

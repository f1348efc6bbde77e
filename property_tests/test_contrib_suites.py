"""Properties of samplers and collectives as shipped in the suites (S3.9, S7)."""

from __future__ import annotations

import functools
from functools import partialmethod
from types import SimpleNamespace

from property_tests.strategies import Judging, every_backend, every_check

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
@every_check("samplers")
class TestSamplers(Judging):
    def test_check(self, backend, check, dtype):
        self.judge(with_samplers_on(backend), check, dtype)


TARGET = ReferenceTarget()


@every_check("collectives")
class TestOwnParts(Judging):
    def test_check(self, check, dtype):
        self.judge(TARGET, check, dtype)

"""Our own collectives, samplers, cache and fused optimizer, by the checks that outsiders run (S3.9, S6, S7, S8)."""

from __future__ import annotations

import os

import pytest

from bagua_ref.conformance.run.pytest_suites import CacheSuite, CollectiveSuite, FusedOptimizerSuite, SamplerSuite
from bagua_ref.conformance.targets.reference_target import ReferenceTarget


class TestOwnParts(CollectiveSuite, SamplerSuite, CacheSuite, FusedOptimizerSuite):
    seed = 0 if "CI" in os.environ else int.from_bytes(os.urandom(4), "big")

    @pytest.fixture
    def target(self):
        return ReferenceTarget()

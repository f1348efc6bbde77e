"""Properties of the package's collectives, cache and fused optimizer, as shipped in the suites (S3.9, S6, S8)."""

from __future__ import annotations

import pytest
from property_tests.strategies import Seeded

from bagua_ref.conformance.run.pytest_suites import CacheSuite, CollectiveSuite, FusedOptimizerSuite
from bagua_ref.conformance.targets.reference_target import ReferenceTarget

TARGET = ReferenceTarget()


class TestOwnParts(Seeded, CollectiveSuite, CacheSuite, FusedOptimizerSuite):
    @pytest.fixture
    def target(self):
        return TARGET

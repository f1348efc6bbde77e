"""Bucket operations and whole trainings on every backend, and all other parts, by the checks that outsiders run (S2 to S8)."""

from __future__ import annotations

import os

import pytest
from property_tests.strategies import every_backend

from bagua_ref.conformance.reference_target import ReferenceTarget
from bagua_ref.conformance.suites import (
    AlgorithmSuite,
    CacheSuite,
    CollectiveSuite,
    CommOpSuite,
    FusedOptimizerSuite,
    SamplerSuite,
)

SEED = 0 if "CI" in os.environ else int.from_bytes(os.urandom(4), "big")


@every_backend
class TestBackends(CommOpSuite, AlgorithmSuite):
    seed = SEED

    @pytest.fixture
    def target(self, backend):
        return backend


class TestOwnParts(CollectiveSuite, SamplerSuite, CacheSuite, FusedOptimizerSuite):
    seed = SEED

    @pytest.fixture
    def target(self):
        return ReferenceTarget()

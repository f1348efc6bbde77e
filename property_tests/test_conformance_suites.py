"""Bucket operations and whole trainings on every backend, by the checks that outsiders run (S2, S3, S5)."""

from __future__ import annotations

import pytest
from property_tests.strategies import Seeded, every_backend_in_proof

from bagua_ref.conformance.run.pytest_suites import AlgorithmSuite, CommOpSuite


@every_backend_in_proof
class TestBackends(Seeded, CommOpSuite, AlgorithmSuite):
    @pytest.fixture
    def target(self, backend):
        return backend

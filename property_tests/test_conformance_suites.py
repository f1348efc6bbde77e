"""Bucket operations and whole trainings on every backend, by the checks that outsiders run (S2, S3, S5)."""

from __future__ import annotations

import os

import pytest
from property_tests.strategies import every_backend

from bagua_ref.conformance.run.pytest_suites import AlgorithmSuite, CommOpSuite


@every_backend
class TestBackends(CommOpSuite, AlgorithmSuite):
    seed = 0 if "CI" in os.environ else int.from_bytes(os.urandom(4), "big")

    @pytest.fixture
    def target(self, backend):
        return backend

"""Every kernel of every backend against one element at a time (S1, S2.3, S3, S5.5, S7.2): the checks that outsiders run."""

from __future__ import annotations

import os

import pytest
from property_tests.strategies import every_backend

from bagua_ref.conformance.run.pytest_suites import KernelSuite


@every_backend
class TestKernels(KernelSuite):
    profile = os.environ.get("HYPOTHESIS_PROFILE", "quick")
    seed = 0 if "CI" in os.environ else int.from_bytes(os.urandom(4), "big")

    @pytest.fixture
    def target(self, backend):
        return backend

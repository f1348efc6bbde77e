"""Every kernel of every backend against one element at a time (S1, S2.3, S3, S5.5, S7.2): the checks that outsiders run."""

from __future__ import annotations

import os

import pytest
from property_tests.strategies import Seeded, every_backend

from bagua_ref.conformance.run.pytest_suites import KernelSuite


@every_backend
class TestKernels(Seeded, KernelSuite):
    profile = os.environ.get("HYPOTHESIS_PROFILE", "quick")

    @pytest.fixture
    def target(self, backend):
        return backend

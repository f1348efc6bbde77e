"""Properties of kernels on every backend, one element at a time, as shipped in the suite (S1, S2.3, S3, S5.5, S7.2)."""

from __future__ import annotations

import pytest
from property_tests.strategies import Seeded, every_backend

from bagua_ref.conformance.run.pytest_suites import KernelSuite


@every_backend
class TestKernels(Seeded, KernelSuite):
    @pytest.fixture
    def target(self, backend):
        return backend

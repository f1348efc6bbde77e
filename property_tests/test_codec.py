"""Properties of the codecs (S4, S12) on every backend, as shipped in the conformance suite."""

from __future__ import annotations

import pytest
from property_tests.strategies import Seeded, every_backend

from bagua_ref.conformance.run.pytest_suites import CodecSuite


@every_backend
class TestCodec(Seeded, CodecSuite):
    @pytest.fixture
    def target(self, backend):
        return backend

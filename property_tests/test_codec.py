"""MinMaxUInt8 (S4) of every backend against one number at a time: the checks that outsiders run."""

from __future__ import annotations

import os

import pytest
from property_tests.strategies import Seeded, every_backend

from bagua_ref.conformance.run.pytest_suites import CodecSuite


@every_backend
class TestCodec(Seeded, CodecSuite):
    profile = os.environ.get("HYPOTHESIS_PROFILE", "quick")

    @pytest.fixture
    def target(self, backend):
        return backend

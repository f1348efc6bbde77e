"""Properties of kernels, codecs, bucket operations and trainings as shipped in the suites, on every
backend.
"""

from __future__ import annotations

import functools

import pytest
from property_tests.strategies import Seeded, every_backend, every_backend_but

from bagua_ref.conformance.run.pytest_suites import (
    AlgorithmSuite,
    CodecSuite,
    CommOpSuite,
    KernelSuite,
)
from bagua_ref.conformance.suites.checks import checks_of
from bagua_ref.conformance.targets.reference_target import ReferenceTarget


@functools.cache
def own_parts(backend: str, flatten: bool) -> ReferenceTarget:
    """Return a target that has the package's own operations and algorithms as parts, so that each
    of their calls counts.
    """
    return ReferenceTarget(backend, flatten)


@every_backend
class TestKernels(Seeded, KernelSuite, CodecSuite):
    @pytest.fixture
    def target(self, backend):
        return backend


@every_backend_but("cuda-emulated")
class TestOperations(Seeded, CommOpSuite, AlgorithmSuite):
    @pytest.fixture
    def target(self, backend):
        return own_parts(backend, flatten=True)


@pytest.mark.proof
@every_backend_but("reference")
class TestUnflattened(Seeded, CommOpSuite, AlgorithmSuite):
    """Buckets without flat storage, whose operations gather tensors and copy results back."""

    # Asynchronous averaging needs flat buckets.
    xfail = tuple(
        name
        for name, check in checks_of(["algorithms"]).items()
        if "async_model_average" in check.needs
    )

    @pytest.fixture
    def target(self, backend):
        return own_parts(backend, flatten=False)

"""Properties of kernels, codecs, bucket operations and trainings as shipped in the suites, on every backend."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
from property_tests.strategies import Seeded, every_backend, every_backend_in_proof

from bagua_ref.conformance.run.pytest_suites import AlgorithmSuite, CodecSuite, CommOpSuite, KernelSuite
from bagua_ref.conformance.suites.checks import checks_of
from bagua_ref.conformance.targets.reference_algorithms import ReferenceAlgorithms
from bagua_ref.conformance.targets.reference_target import ReferenceCommOps


@every_backend
class TestKernels(Seeded, KernelSuite, CodecSuite):
    @pytest.fixture
    def target(self, backend):
        return backend


@every_backend_in_proof
class TestOperations(Seeded, CommOpSuite, AlgorithmSuite):
    @pytest.fixture
    def target(self, backend):
        return backend


@functools.cache
def unflattened(backend: str) -> SimpleNamespace:
    algorithms = ReferenceAlgorithms(backend, flatten=False)
    return SimpleNamespace(kernels=backend, comm_ops=ReferenceCommOps(backend, flatten=False), algorithms=algorithms)


@pytest.mark.proof
@every_backend
class TestUnflattened(Seeded, CommOpSuite, AlgorithmSuite):
    """Buckets without flat storage, whose operations gather tensors and copy results back."""

    # Asynchronous averaging needs flat buckets.
    xfail = tuple(name for name, check in checks_of(["algorithms"]).items() if "async_model_average" in check.needs)

    @pytest.fixture
    def target(self, backend):
        return unflattened(backend)

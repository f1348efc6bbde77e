"""Properties of kernels, codecs, bucket operations and trainings as shipped in the suites, on every
backend.
"""

from __future__ import annotations

import functools

import pytest
from property_tests.strategies import Judging, every_backend, every_backend_but, every_check

from bagua_ref.conformance.checks.registry import checks_of
from bagua_ref.conformance.targets.reference_target import ReferenceTarget


@functools.cache
def own_parts(backend: str, flatten: bool) -> ReferenceTarget:
    """Return a target that has the package's own operations and algorithms as parts, so that each
    of their calls counts.
    """
    return ReferenceTarget(backend, flatten)


@every_backend
@every_check("kernels", "codec")
class TestKernels(Judging):
    def test_check(self, backend, check, dtype):
        self.judge(backend, check, dtype)


@every_backend_but("cuda-emulated")
@every_check("comm_ops", "algorithms")
class TestOperations(Judging):
    def test_check(self, backend, check, dtype):
        self.judge(own_parts(backend, flatten=True), check, dtype)


@pytest.mark.proof
@every_backend_but("reference")
@every_check("comm_ops", "algorithms")
class TestUnflattened(Judging):
    """Buckets without flat storage, whose operations gather tensors and copy results back."""

    # Asynchronous averaging needs flat buckets.
    xfail = tuple(
        name
        for name, check in checks_of(["algorithms"]).items()
        if "async_model_average" in check.needs
    )

    def test_check(self, backend, check, dtype):
        self.judge(own_parts(backend, flatten=False), check, dtype)

"""The checks as pytest classes: subclass one, give it a fixture ``target``, and every check is a test.

>>> class TestMyKernels(KernelSuite):
...     @pytest.fixture
...     def target(self):
...         return "reference"
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from bagua_ref.conformance.checks import Check, all_checks, variants
from bagua_ref.conformance.runner import check_ids, reason_to_skip, row_id, run_one
from bagua_ref.conformance.search import Search
from bagua_ref.conformance.target import Target, resolve

__all__ = [
    "AlgorithmSuite",
    "CacheSuite",
    "CodecSuite",
    "CollectiveSuite",
    "CommOpSuite",
    "ConformanceSuite",
    "FusedOptimizerSuite",
    "KernelSuite",
    "SamplerSuite",
    "judge",
]


def judge(target: Target, check: Check, dtype: str | None, how: Search, xfail: tuple[str, ...], time_limit: float = 10.0) -> None:
    """Run a check for one dtype as a pytest test: pass, fail, skip or xfail; an expected failure that passes fails."""
    if reason := reason_to_skip(target, check, dtype):
        pytest.skip(reason)
    outcome = run_one(target, check, dtype, how, time_limit)
    expected = check.id in xfail or row_id(check, dtype) in xfail
    if expected and outcome.passed:
        pytest.fail(f"{row_id(check, dtype)} passed, but is listed as a known failure: take it off the list", pytrace=False)
    if expected:
        pytest.xfail(outcome.message)
    if not outcome.passed:
        pytest.fail(f"{check.id}: {check.sentence}\n{outcome.message} (seed {how.seed})\n\n{outcome.snippet}", pytrace=False)


def _rows(*suites: str) -> list[Any]:
    return [
        pytest.param(check, dtype, id=row_id(check, dtype))
        for check in all_checks().values()
        if check.suite in suites
        for dtype in variants(check)
    ]


class ConformanceSuite:
    """What the suites share. Subclasses define the fixture ``target``, and may set what follows.

    Attributes:
        profile: "quick" or "full".
        seed: of all inputs.
        xfail: ids of checks, with or without ``[dtype]``, that are known to fail; one that passes is a failure.
        time_limit: seconds that a single call may take.
    """

    profile: ClassVar[str] = "quick"
    seed: ClassVar[int] = 0
    xfail: ClassVar[tuple[str, ...]] = ()
    time_limit: ClassVar[float] = 10.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        unknown = set(cls.xfail) - {*all_checks(), *check_ids()}
        if unknown:
            raise ValueError(f"{cls.__name__}.xfail: no check is called {', '.join(map(repr, sorted(unknown)))}")

    @pytest.fixture
    def target(self) -> Any:
        """Return what is judged; see `run_conformance`."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture 'target' that returns what is to be judged")

    def _judge(self, target: Any, check: Check, dtype: str | None) -> None:
        judge(resolve(target), check, dtype, Search(self.profile, self.seed), self.xfail, self.time_limit)


class KernelSuite(ConformanceSuite):
    """Every kernel but the codec (S1, S2.3, S3, S5.5, S7.2)."""

    @pytest.mark.parametrize(("check", "dtype"), _rows("kernels"))
    def test_kernels(self, target: Any, check: Check, dtype: str | None) -> None:
        """Check a kernel."""
        self._judge(target, check, dtype)


class CodecSuite(ConformanceSuite):
    """MinMaxUInt8 (S4)."""

    @pytest.mark.parametrize(("check", "dtype"), _rows("codec"))
    def test_codec(self, target: Any, check: Check, dtype: str | None) -> None:
        """Check the codec."""
        self._judge(target, check, dtype)


class CollectiveSuite(ConformanceSuite):
    """Collectives between ranks (S3.9)."""

    @pytest.mark.parametrize(("check", "dtype"), _rows("collectives"))
    def test_collectives(self, target: Any, check: Check, dtype: str | None) -> None:
        """Check a collective."""
        self._judge(target, check, dtype)


class CommOpSuite(ConformanceSuite):
    """Bucket operations (S3.1 to S3.5)."""

    @pytest.mark.parametrize(("check", "dtype"), _rows("comm_ops"))
    def test_comm_ops(self, target: Any, check: Check, dtype: str | None) -> None:
        """Check an operation."""
        self._judge(target, check, dtype)


class AlgorithmSuite(ConformanceSuite):
    """Whole trainings with the six algorithms (S2, S5)."""

    @pytest.mark.parametrize(("check", "dtype"), _rows("algorithms"))
    def test_algorithms(self, target: Any, check: Check, dtype: str | None) -> None:
        """Check an algorithm."""
        self._judge(target, check, dtype)


class SamplerSuite(ConformanceSuite):
    """Balanced samplers (S7)."""

    @pytest.mark.parametrize(("check", "dtype"), _rows("samplers"))
    def test_samplers(self, target: Any, check: Check, dtype: str | None) -> None:
        """Check a sampler."""
        self._judge(target, check, dtype)


class CacheSuite(ConformanceSuite):
    """Caches (S8)."""

    @pytest.mark.parametrize(("check", "dtype"), _rows("cache"))
    def test_cache(self, target: Any, check: Check, dtype: str | None) -> None:
        """Check a cache."""
        self._judge(target, check, dtype)


class FusedOptimizerSuite(ConformanceSuite):
    """Fused optimizers (S6)."""

    @pytest.mark.parametrize(("check", "dtype"), _rows("fused_optimizer"))
    def test_fused_optimizer(self, target: Any, check: Check, dtype: str | None) -> None:
        """Check a fused optimizer."""
        self._judge(target, check, dtype)

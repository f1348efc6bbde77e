"""The checks as pytest classes: in a subclass with a fixture ``target``, every check is a test.

>>> class TestMyKernels(KernelSuite):
...     @pytest.fixture
...     def target(self):
...         return "reference"
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from bagua_ref.conformance.clauses import SUITES
from bagua_ref.conformance.run.runner import OneByOne, check_ids, reason_to_skip, row_id, verdict
from bagua_ref.conformance.run.search import Search
from bagua_ref.conformance.suites.checks import Check, all_checks, checks_of, variants
from bagua_ref.conformance.targets.target import Target

__all__ = [
    "AlgorithmSuite",
    "CodecSuite",
    "CollectiveSuite",
    "CommOpSuite",
    "ConformanceSuite",
    "KernelSuite",
    "SamplerSuite",
    "judge",
]


def judge(
    runs: OneByOne,
    target: Target,
    check: Check,
    dtype: str | None,
    how: Search,
    xfail: tuple[str, ...],
    time_limit: float = 10.0,
) -> None:
    """Run a check for one dtype as a pytest test: pass, fail, skip or xfail; an expected failure
    that passes fails.
    """
    if reason := reason_to_skip(target, check, dtype):
        pytest.skip(reason)
    outcome = runs.run(target, check, dtype, how, time_limit)
    status, message = verdict(outcome, check.id in xfail or row_id(check, dtype) in xfail)
    if status == "skipped":
        pytest.skip(message)
    if status == "xfailed":
        pytest.xfail(message)
    if status == "xpassed":
        pytest.fail(f"{row_id(check, dtype)} {message}", pytrace=False)
    if status == "failed":
        pytest.fail(
            f"{check.id}: {check.sentence}\n{message} (seed {how.seed})\n\n{outcome.snippet}",
            pytrace=False,
        )


class ConformanceSuite:
    """The base class of all suites. Subclasses define the fixture ``target`` and may set these
    attributes.

    Attributes:
        profile: "quick", "full" or "large".
        seed: seed of all inputs.
        xfail: ids of checks, with or without ``[dtype]``, that are known to fail; one that passes
            counts as a failure.
        time_limit: time limit of a single call in seconds.
    """

    profile: ClassVar[str] = "quick"
    seed: ClassVar[int] = 0
    xfail: ClassVar[tuple[str, ...]] = ()
    time_limit: ClassVar[float] = 10.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        unknown = set(cls.xfail) - {*all_checks(), *check_ids()}
        if unknown:
            raise ValueError(
                f"{cls.__name__}.xfail: no check is called {', '.join(map(repr, sorted(unknown)))}"
            )

    @pytest.fixture
    def target(self) -> Any:
        """Return the implementation under test; see `run_conformance`."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a fixture 'target' that returns the implementation under"
            " test"
        )

    @pytest.fixture(scope="class")
    @classmethod
    def bagua_runs(cls) -> Iterator[OneByOne]:
        """What runs the checks of this class."""
        runs = OneByOne()
        yield runs
        runs.stop()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give ``test_kernels`` the checks of the suite "kernels", and so on; no other suite is
        imported.
        """
        suite = metafunc.definition.originalname.removeprefix("test_")
        if "check" in metafunc.fixturenames and suite in SUITES:
            rows = [
                (check, dtype) for check in checks_of([suite]).values() for dtype in variants(check)
            ]
            metafunc.parametrize(("check", "dtype"), rows, ids=[row_id(*row) for row in rows])

    def _judge(self, bagua_runs: OneByOne, target: Any, check: Check, dtype: str | None) -> None:
        judge(
            bagua_runs,
            bagua_runs.resolve(target),
            check,
            dtype,
            Search(self.profile, self.seed),
            self.xfail,
            self.time_limit,
        )


class KernelSuite(ConformanceSuite):
    """Every kernel but the codec (S1, S2.3, S3, S5.5, S7.2)."""

    test_kernels = ConformanceSuite._judge


class CodecSuite(ConformanceSuite):
    """Codecs (S4, S12)."""

    test_codec = ConformanceSuite._judge


class CollectiveSuite(ConformanceSuite):
    """Collectives between ranks (S3.9)."""

    test_collectives = ConformanceSuite._judge


class CommOpSuite(ConformanceSuite):
    """Bucket operations (S3.1 to S3.5)."""

    test_comm_ops = ConformanceSuite._judge


class AlgorithmSuite(ConformanceSuite):
    """Whole trainings with the algorithms (S2, S5, S9, S10, S11.2, S13)."""

    test_algorithms = ConformanceSuite._judge


class SamplerSuite(ConformanceSuite):
    """Balanced samplers (S7)."""

    test_samplers = ConformanceSuite._judge

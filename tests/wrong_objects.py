"""Wrong objects are handed to the checks as a user would hand in an implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bagua_ref import contrib
from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.targets.reference_target import ReferenceTarget

__all__ = ["Whole", "assert_found"]


@dataclass
class Whole(ReferenceTarget):
    """The package's parts, some of them replaced."""

    samplers: Any = contrib
    communicator: Any = ReferenceTarget.communicator


def assert_found(target: Any, check: str) -> None:
    """Assert that the check of this id, or one of its dtypes, fails for ``target``.

    The other checks need not: a fault may break several clauses.
    """
    suite = check.partition(".")[0]
    report = run_conformance(target, [suite], checks=[check], jobs=0, shrink=False)
    failed = [result for result in report.results if result.status == "failed"]
    assert failed, report
    assert not [result for result in failed if " raised " in result.message], report

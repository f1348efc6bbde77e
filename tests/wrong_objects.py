"""Wrong objects are handed to the checks as a user would hand in an implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from bagua_ref import contrib
from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.targets.reference_target import ReferenceTarget

__all__ = ["Faults", "Whole", "assert_found"]


@dataclass
class Whole(ReferenceTarget):
    """The package's parts, some of them replaced."""

    samplers: Any = contrib
    communicator: Any = ReferenceTarget.communicator


class Faults(list[Any]):
    """A table of targets, or of what makes them, each with the check that must fail for it."""

    def row(self, name: str, make: Callable[[], Any], check: str) -> None:
        """Enter a target."""
        self.append(pytest.param(make, check, id=name))

    def of(self, owner: type, method: str, target: Callable[[type], Any]) -> Any:
        """Return a decorator for a check's id, and then for a function that replaces a method of
        ``owner``: it gets the right method and the arguments. ``target`` makes a target of the
        class with the wrong one.
        """

        def for_check(check: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            def enter(wrong: Callable[..., Any]) -> Callable[..., Any]:
                def replaced(self: Any, *arguments: Any, **options: Any) -> Any:
                    right = getattr(owner, method).__get__(self)
                    return wrong(right, *arguments, **options)

                made = type(wrong.__name__, (owner,), {method: replaced})
                self.row(wrong.__name__, lambda: target(made), check)
                return wrong

            return enter

        return for_check


def assert_found(target: Any, check: str) -> None:
    """Assert that the check of this id, or one of its dtypes, fails for ``target``.

    The other checks need not: a fault may break several clauses.
    """
    suite = check.partition(".")[0]
    report = run_conformance(target, [suite], checks=[check], jobs=0, shrink=False)
    failed = [result for result in report.results if result.status == "failed"]
    assert failed, report
    assert not [result for result in failed if " raised " in result.message], report

"""Each guard against ranks that lose step, and against failing and hostile servers, is removed once, and a test must fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.meta.mutate import copy_of_checkout, planted_in, run_pytest
from tests.meta.planted import GUARDS, Guard
from tests.meta.warm_pytest import WarmPytest


@pytest.fixture(scope="module")
def copy() -> Iterator[Path]:
    with copy_of_checkout() as folder:
        yield folder


@pytest.fixture(scope="module")
def warm_pytest() -> Iterator[WarmPytest]:
    with WarmPytest() as runs:
        yield runs


def test_the_tests_pass_without_a_mutant(copy: Path) -> None:
    code, output = run_pytest(copy, [guard.test for guard in GUARDS], limit=200)
    assert code == 0, output


@pytest.mark.parametrize("guard", GUARDS, ids=[guard.name for guard in GUARDS])
def test_without_the_guard_a_test_fails(copy: Path, warm_pytest: WarmPytest, guard: Guard) -> None:
    with planted_in(copy, guard.where, *guard.edit):
        code, output = warm_pytest.run(copy, ["--timeout=10", "--hypothesis-profile=no_shrinking", guard.test], limit=60)
    assert code in (1, None), output  # None: not even pytest's own time limit ended it

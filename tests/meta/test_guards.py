"""Each guard against ranks that lose step, and against failing and hostile servers, is removed
once, and a test must fail.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.meta.mutate import copy_of_checkout
from tests.meta.planted import GUARDS, Guard
from tests.meta.warm_pytest import WarmPytest


@pytest.fixture(scope="module")
def warm_pytest() -> Iterator[WarmPytest]:
    with copy_of_checkout() as copy, WarmPytest(copy) as runs:
        yield runs


@pytest.mark.parametrize(
    "test", {guard.test.partition("::")[0]: guard.test for guard in GUARDS}.values()
)
def test_a_test_of_each_file_passes_without_a_mutant(warm_pytest: WarmPytest, test: str) -> None:
    """Show that tests run in the forks; that all of them pass is shown where they are."""
    code, output = warm_pytest.run(test, limit=100)
    assert code == 0, output


@pytest.mark.parametrize("guard", GUARDS, ids=[guard.name for guard in GUARDS])
def test_without_the_guard_a_test_fails(warm_pytest: WarmPytest, guard: Guard) -> None:
    code, output = warm_pytest.run(guard.test, guard.where, guard.edit, guard.limit)
    assert code in (1, None), output  # None: not even pytest's own time limit ended it

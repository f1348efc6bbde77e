# ruff: noqa: E501 - a line of the table is a mutant
"""Each guard of the cache against failing and hostile servers is removed once, and a test must fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.meta.mutate import copy_of_checkout, run_pytest

PROTOCOL, ARRAYS, SERVER, REDIS = (
    f"src/bagua_ref/contrib/{name}.py" for name in ("cache/protocol", "cache/arrays", "cache/server", "utils/redis_store")
)
FAULTS = "tests/test_cache_faults.py"
SURVIVES = f"{FAULTS}::test_training_survives"
GUARDS = [
    ("the length of lists", REDIS, " and len(answer) == count", "", f"{SURVIVES}[answer of the wrong shape: too few values]"),
    ("the kinds of values", REDIS, " and all(map(is_right, answer))", "", f"{SURVIVES}[answer of the wrong shape: integers]"),
    ("lists", REDIS, "isinstance(answer, list) and len", "len", f"{SURVIVES}[answer of the wrong shape: an integer]"),
    ("the longest list", PROTOCOL, "if count > self._limit.values:", "if False:", f"{SURVIVES}[foreign server: a list without an end]"),
    ("lists in lists", PROTOCOL, "[self._single(self._line()) for _ in", "[self._answer() for _ in", f"{SURVIVES}[answer of the wrong shape: a list in a list, 5000 deep]"),
    ("the longest line", PROTOCOL, ">= _LONGEST_LINE:", ">= 2**62:", f"{SURVIVES}[foreign server: a line without an end]"),
    ("numbers", PROTOCOL, 'not digits.removeprefix(b"-").isdigit() or', "", f"{SURVIVES}[answer of the wrong shape: a number that is none]"),
    ("the sizes of values", PROTOCOL, "if not 0 <= size <= _LONGEST_VALUE:", "if False:", f"{SURVIVES}[answer of the wrong shape: a value of negative length]"),
    ("the end of values", PROTOCOL, 'if self._arrived[end : end + 2] != b"\\r\\n":', "if False:", f"{SURVIVES}[answer of the wrong shape: a value without its end]"),
    ("the limit for the whole answer", PROTOCOL, "        left = self._until - time.monotonic()", "        left = self.seconds", f"{FAULTS}::test_a_byte_now_and_then_keeps_no_limit_alive"),
    ("the limit of a request that is sent", PROTOCOL, "                self._limit.left()\n", "", f"{FAULTS}::test_a_server_that_reads_too_slowly_is_given_up"),
    ("the limit of the limit", PROTOCOL, "min(self._until + size / _SLOWEST, self._latest)", "self._until + size / _SLOWEST", f"{FAULTS}::test_an_answer_that_keeps_coming_for_ever_is_given_up"),
    ("more time for more bytes", PROTOCOL, "size / _SLOWEST, self", "0, self", f"{FAULTS}::test_a_large_value_may_take_longer_than_the_timeout_if_it_keeps_coming"),
    ("arrays of elements without bytes", ARRAYS, "np.ndarray(shape, dtype, bytearray())", "np.empty(shape, dtype)", "property_tests/test_cache_codec.py::test_S8_3_a_hostile_value_runs_nothing_and_takes_memory_like_its_own_size"),
    ("the job's own port", SERVER, "heard != right and right.startswith(heard) and", "b'+PONG\\r\\n' not in heard and", f"{FAULTS}::test_what_listens_on_the_port_of_a_job_s_own_server_is_told_apart[noise]"),
]  # fmt: skip


@pytest.fixture(scope="module")
def copy() -> Iterator[Path]:
    with copy_of_checkout() as folder:
        yield folder


def test_the_tests_pass_without_a_mutant(copy: Path) -> None:
    code, output = run_pytest(copy, [guard[-1] for guard in GUARDS], limit=200)
    assert code == 0, output


@pytest.mark.parametrize(("file", "old", "new", "test"), [guard[1:] for guard in GUARDS], ids=[guard[0] for guard in GUARDS])
def test_without_the_guard_a_test_fails(copy: Path, file: str, old: str, new: str, test: str) -> None:
    original = (copy / file).read_text()
    assert original.count(old) == 1
    try:
        (copy / file).write_text(original.replace(old, new))
        code, output = run_pytest(copy, ["--timeout=10", test], limit=60)
    finally:
        (copy / file).write_text(original)
    assert code in (1, None), output  # None: not even pytest's own time limit ended it

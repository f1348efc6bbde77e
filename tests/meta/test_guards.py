# ruff: noqa: E501 - a line of the table is a mutant
"""Each guard against ranks that lose step, and against failing and hostile servers, is removed once, and a test must fail."""

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
CACHE = [
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

ROUNDS, WRAPPED, ENGINE, COMPARISON, WAITING, DECENTRALIZED, ASYNC = (
    f"src/bagua_ref/{name}.py"
    for name in (
        "data_parallel/agreed_rounds", "data_parallel/wrapped_module", "scheduling/engine", "agreement/comparison",
        "communicators/waiting", "algorithms/decentralized", "algorithms/async_model_average",
    )
)  # fmt: skip
AGREE, LOST, WAITS = "tests/test_agreement.py", "tests/test_faults.py", "tests/test_waiting.py"
AGREEMENT = [
    ("comparing before a round", ROUNDS, "            training._bagua_backend.before_round = self._open\n", "            pass\n", f"{AGREE}::test_each_rank_says_the_same_and_names_who_differs_in_what"),
    ("optimizer steps", ROUNDS, "                facts.append(", "                str(", f"{AGREE}::test_each_rank_says_the_same_and_names_who_differs_in_what"),
    ("refusing to train on", ROUNDS, "        if self.broken:\n", "        if False:\n", f"{AGREE}::test_no_optimizer_uses_a_gradient_of_a_failed_round"),
    ("refusing to step", WRAPPED, "        self.rounds.check_usable()\n        self._guard", "        self._guard", f"{AGREE}::test_no_optimizer_uses_a_gradient_of_a_failed_round"),
    ("giving up a half-done round", WRAPPED, "            if self._bagua_backend.half_done:\n", "            if False:\n", "tests/test_training.py::test_training_goes_on_after_an_exception_in_backward_alone_or_resynchronized[2]"),
    ("telling the others", ROUNDS, "            self._group.abort(why)\n", "", f"{LOST}::test_a_backward_abandoned_half_way_is_an_error_on_all_ranks_at_once"),
    ("noting that a state was loaded", ROUNDS, "        self._loaded = True\n", "        pass\n", f"{LOST}::test_weights_that_one_rank_loads_are_an_error_where_replicas_are_equal"),
    ("comparing weights that were loaded", COMPARISON, "any(note[0] for note in notes)", "False", f"{LOST}::test_weights_that_one_rank_loads_are_an_error_where_replicas_are_equal"),
    ("running no bucket", ENGINE, "        if self._fate.error is None:\n            try:\n                self.done", "        if True:\n            try:\n                self.done", "tests/test_engine.py::test_no_bucket_runs_in_a_round_that_was_refused_or_after_it"),
    ("backward passes without a step", DECENTRALIZED, '            Fact("{has} run {value} backward passes since the last round", passes),\n', "", f"{LOST}::test_a_backward_without_a_step_is_an_error_where_steps_communicate"),
    ("the number of averages", DECENTRALIZED, '            Fact("{has} averaged weights {value} times", self._rounds),\n', "", f"{LOST}::test_checkpoints_of_different_steps_are_an_error_in_the_next_round"),
    ("leaving the warm-up", ASYNC, '            self.process_group.abort(f"it has', '            str(f"it has', f"{LOST}::test_a_rank_that_leaves_the_warm_up_early_does_not_make_the_others_wait"),
    ("ending waits of which none can end", WAITING, "                    verdict = nobody_can_go_on(said)\n", "                    pass\n", f"{WAITS}::test_ranks_that_wait_in_different_collectives_are_all_interrupted_with_the_same_words"),
    ("a collective that all have reached", WAITING, "if place and all(place in where[member] for member in members):", "if False:", f"{WAITS}::test_a_collective_that_all_have_reached_may_take_its_time"),
    ("a rank that trains on", WAITING, " or all(wait.is_background for wait in long.values())", "", f"{WAITS}::test_a_rank_whose_training_goes_on_beside_a_background_collective_does_not_count_as_waiting"),
    ("taking back a wait", WAITING, "                    self._publish([])\n", "                    pass\n", f"{WAITS}::test_a_wait_that_ends_is_taken_back_at_once"),
    ("who has left", WAITING, '            self._publish([[_LEFT, "", []]])\n', "            pass\n", f"{WAITS}::test_a_rank_that_has_left_never_comes"),
]  # fmt: skip
GUARDS = CACHE + AGREEMENT


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
        code, output = run_pytest(copy, ["--timeout=15", test], limit=60)
    finally:
        (copy / file).write_text(original)
    assert code in (1, None), output  # None: not even pytest's own time limit ended it

"""Ranks that lose step with each other end in an error on every rank, which names who and what;
harmless things stay allowed.
"""

from __future__ import annotations

import os
import signal
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests import failing_ranks as faults
from tests.failing_ranks import named
from tests.launch import launch, outcomes

import bagua_ref
from bagua_ref.communicators import missing
from bagua_ref.errors import CommunicationError

pytestmark = pytest.mark.slow

COUNTED = {
    "local_sgd": named("local_sgd", period=4),
    "hierarchical local_sgd": named("local_sgd", period=4, hierarchical=True),
    "local_sgd in warm-up": named("local_sgd", period=4, warmup_steps=100),
    "diloco": named("diloco", period=4),
    "streaming": named("diloco", period=8, fragments=4, delay=1, mix=0.5),
    "diloco in warm-up": named("diloco", period=4, warmup_steps=100),
}
"""Algorithms that count steps, which a bucket for each layer makes no difference to."""
GRADIENTS = ["gradient_allreduce", "bytegrad", "qadam in warm-up", "qadam", "async in warm-up"]
WEIGHTS = ["decentralized", "decentralized, interval 2", "low_precision_decentralized"]


def run(fault: Any, algorithms: list[str], options: dict[str, Any]) -> Any:
    os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = "4096"
    faults.ALGORITHMS.update(COUNTED)
    return faults.run(fault, algorithms, options)


def texts(fault: Any, algorithms: list[str], **options: Any) -> dict[str, list[list[str]]]:
    """Return the errors of both ranks for each algorithm, after checking that there was no long
    wait.
    """
    ranks = launch(run, 2, fault, algorithms, options)
    for results in ranks:
        for algorithm, (_, seconds, _) in results.items():
            assert seconds < 15, algorithm
    return {algorithm: [results[algorithm][0] for results in ranks] for algorithm in algorithms}


def test_a_backward_abandoned_half_way_is_an_error_on_all_ranks_at_once() -> None:
    for algorithm, (innocent, guilty) in texts(faults.abandons_a_backward, GRADIENTS).items():
        assert len(guilty) == 3, algorithm
        assert all(
            "cannot train on: one of its backward passes failed" in text for text in guilty
        ), algorithm
        assert len(innocent) == 4, algorithm
        assert all(
            "rank 1 gave up: one of its backward passes failed" in text for text in innocent
        ), (algorithm, innocent)


def test_abandoning_a_backward_is_harmless_where_it_communicates_nothing() -> None:
    assert texts(faults.abandons_a_backward, WEIGHTS[:1]) == {"decentralized": [[], []]}


def test_a_skipped_optimizer_step_is_an_error_in_the_next_round() -> None:
    for algorithm, ranks in texts(faults.skips_an_optimizer_step, GRADIENTS).items():
        for errors in ranks:
            assert (
                "rank 0 has taken 4 optimizer steps, rank 1 has taken 3 optimizer steps"
                in errors[0]
            ), algorithm


@pytest.mark.parametrize("fault", [faults.skips_an_optimizer_step, faults.abandons_a_backward])
def test_a_backward_without_a_step_is_an_error_where_steps_communicate(fault: Any) -> None:
    for errors in texts(fault, ["low_precision_decentralized"])["low_precision_decentralized"]:
        assert (
            "rank 0 has run 1 backward passes since the last round, rank 1 has run 2 backward"
            " passes" in errors[0]
        )


def test_the_end_of_a_warm_up_after_a_skipped_step_does_not_make_ranks_wait() -> None:
    for name in ("qadam", "async at the end of its warm-up"):
        for errors in texts(faults.skips_an_optimizer_step, [name])[name]:
            assert errors, name


def test_a_rank_that_leaves_the_warm_up_early_does_not_make_the_others_wait() -> None:
    algorithm = "async at the end of its warm-up"
    early, late = texts(faults.looks_at_a_batch, [algorithm])[algorithm]
    assert not early
    assert "rank 0 gave up: it has left the warm-up, of 5 steps" in late[0]


def test_checkpoints_of_different_steps_are_an_error_in_the_next_round() -> None:
    for algorithm, ranks in texts(faults.loads_another_checkpoint, [*GRADIENTS, *WEIGHTS]).items():
        for errors in ranks:
            assert len(errors) >= 3, (algorithm, errors)
            assert "disagree: " in errors[0], algorithm
            assert "rank 0 has " in errors[0] or "rank 0 is " in errors[0], algorithm


@pytest.mark.parametrize(
    "fault",
    [faults.skips_an_optimizer_step, faults.loads_another_checkpoint, faults.abandons_a_backward],
)
def test_S9_a_rank_that_loses_count_of_steps_is_an_error_on_every_rank(fault: Any) -> None:
    for name, ranks in texts(fault, list(COUNTED)).items():
        for errors in ranks:
            assert errors, name
            assert all(
                "disagree" in text or "gave up" in text or "cannot train on" in text
                for text in errors
            ), (name, errors)


def test_weights_that_one_rank_loads_are_an_error_where_replicas_are_equal() -> None:
    in_warm_up = ["local_sgd in warm-up", "diloco in warm-up"]
    for algorithm, ranks in texts(faults.loads_other_weights, [*GRADIENTS, *in_warm_up]).items():
        for errors in ranks:
            assert "rank 0 has weights and optimizer state of checksum" in errors[0], (
                algorithm,
                errors,
            )


def test_other_buckets_than_before_are_an_error_before_any_is_sent() -> None:
    for algorithm, ranks in texts(
        faults.makes_other_buckets, ["gradient_allreduce", "bytegrad"]
    ).items():
        for errors in ranks:
            assert "disagree: rank 0 has buckets of plan" in errors[0], (algorithm, errors)


def test_a_rank_that_comes_after_the_modules_timeout_is_an_error_on_all_ranks() -> None:
    # collectives of all, and messages to neighbours
    algorithms = ["gradient_allreduce", "low_precision_decentralized"]
    for algorithm, (early, late) in texts(faults.comes_late, algorithms, timeout=1).items():
        assert len(early) == 4, (algorithm, early)
        assert len(late) >= 3, (algorithm, late)


@pytest.mark.parametrize("fault", [faults.forgets_a_batch, faults.looks_at_a_batch])
def test_what_mixes_nothing_stays_allowed(fault: Any) -> None:
    for algorithm, ranks in texts(fault, GRADIENTS).items():
        assert ranks == [[], []], algorithm


def run_until_stuck() -> dict[str, tuple[list[str], float]]:
    missing._PATIENCE, missing._INTERVAL = 0.5, 0.1
    results = {}
    for algorithm in ("gradient_allreduce", "low_precision_decentralized"):
        bagua_ref.init_process_group(timeout=60)
        training = faults.begin(algorithm)
        start = time.monotonic()
        faults.ends_early(training, 1)
        results[algorithm] = training.errors, time.monotonic() - start
        bagua_ref.destroy_process_group()
    return results


def test_ranks_that_wait_for_each_other_learn_it_at_once() -> None:
    """In a round of gradients, and in the exchange of integers that comes before messages."""
    collectives = {"gradient_allreduce": "allreduce", "low_precision_decentralized": "agreement"}
    for results in launch(run_until_stuck, 2, init=False):
        for algorithm, (errors, seconds) in results.items():
            assert seconds < 15
            waits = f"rank 0 waits in {collectives[algorithm]} of group 'default/background"
            assert f"every rank is waiting for another: {waits}" in errors[0], errors
            assert "rank 1 waits in connect of group 'default/global'" in errors[0], errors


CHILDREN = {
    "workers": faults.workers,
    "os.fork": faults.fork,
    "fork of C": faults.fork_unseen,
    "a program": faults.start_a_program,
}


def run_with_children(children: str, algorithm: str) -> tuple[list[str], float]:
    training = faults.begin(algorithm)
    start = time.monotonic()
    faults.dies_before_its_children(training, CHILDREN[children])
    return training.errors, time.monotonic() - start


@pytest.mark.parametrize(
    ("children", "algorithm", "over_gloo"),
    [
        # The first reduces by a collective, the second exchanges messages, which gloo cannot
        # interrupt.
        *product(
            ["fork of C"], ["gradient_allreduce", "low_precision_decentralized"], [False, True]
        ),
        ("workers", "gradient_allreduce", True),
        ("os.fork", "gradient_allreduce", False),
        ("a program", "gradient_allreduce", True),
    ],
)
def test_S2_5_a_killed_rank_is_noticed_and_named_at_once_whoever_holds_its_sockets(
    children: str, algorithm: str, over_gloo: bool
) -> None:
    """Its children live for 20 s, and the timeout is a minute."""
    ended = outcomes(run_with_children, 2, children, algorithm, over_gloo=over_gloo)
    assert ended[1].exitcode == -signal.SIGKILL
    assert ended[0].result is not None, ended[0].traceback
    errors, seconds = ended[0].result
    assert "the process of rank 1 has ended" in errors[0]
    assert seconds < 10


def run_until_the_store_ends() -> tuple[list[str], float]:
    faults.serve_the_store()
    bagua_ref.init_process_group(timeout=60)
    training = faults.begin("gradient_allreduce")
    start = time.monotonic()
    faults.serves_and_dies(training)
    return training.errors, time.monotonic() - start


def lives_on(interrupted: bool, folder: str) -> tuple[float, str]:
    """Let rank 1 get Ctrl-C in a backward pass, or be stopped; return when that was, or when this
    rank noticed, and what it raised.
    """
    os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = "4096"
    training = faults.begin("gradient_allreduce")
    files = [Path(folder, str(rank)) for rank in range(3)]
    if training.rank == 1:
        files[1].write_text(str(os.getpid()))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt = lambda _: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
        training.module[0].weight.register_hook(interrupt)
        begun = time.monotonic()
        if not interrupted:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(KeyboardInterrupt):
            training.step()
        until_exist(files[0], files[2])
        return begun, ""
    with pytest.raises(CommunicationError) as raised:  # noqa: PT012
        while True:
            training.step()
    noticed = time.monotonic()
    files[training.rank].touch()
    if not interrupted and training.rank == 0:
        until_exist(files[2])
        os.kill(int(files[1].read_text()), signal.SIGKILL)
    return noticed, str(raised.value)


def until_exist(*files: Path) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.01)


@pytest.mark.parametrize("over_gloo", [False, True], ids=["memory", "gloo"])
def test_a_rank_that_is_interrupted_in_a_backward_pass_and_lives_on_is_noticed_at_once(
    tmp_path: Path, over_gloo: bool
) -> None:
    ended = launch(lives_on, 3, True, str(tmp_path), over_gloo=over_gloo)
    for noticed, said in (ended[0], ended[2]):
        assert "rank 1 gave up: one of its backward passes failed" in said
        assert noticed - ended[1][0] < 10  # the timeout is a minute


@pytest.mark.parametrize("over_gloo", [False, True], ids=["memory", "gloo"])
def test_S2_5_a_stopped_rank_is_named_when_the_others_time_out(
    tmp_path: Path, over_gloo: bool
) -> None:
    ended = outcomes(lives_on, 3, False, str(tmp_path), over_gloo=over_gloo, collective_timeout=2.0)
    for rank in (0, 2):
        assert "rank 1 did not " in str(ended[rank].result[1])
        assert "its process is stopped" in ended[rank].result[1]


@pytest.mark.parametrize("over_gloo", [False, True], ids=["memory", "gloo"])
def test_S2_5_the_end_of_the_rank_that_serves_the_store_is_noticed_and_named_at_once(
    over_gloo: bool,
) -> None:
    ended = outcomes(run_until_the_store_ends, 2, init=False, over_gloo=over_gloo)[1]
    assert ended.result is not None, ended.traceback
    errors, seconds = ended.result
    assert "the process of rank 0 has ended" in errors[0]
    assert seconds < 10

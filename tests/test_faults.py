"""Ranks that lose step with each other end in an error on every rank, which names who and what;
harmless things stay allowed.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from tests import failing_ranks as faults
from tests.failing_ranks import named
from tests.launch import launch, outcomes

import bagua_ref
from bagua_ref.communicators import missing

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


IN_WARM_UP = ["local_sgd in warm-up", "diloco in warm-up"]
TO_RUN: list[tuple[Any, list[str]]] = [
    (faults.abandons_a_backward, [*GRADIENTS, "decentralized", "low_precision_decentralized"]),
    (
        faults.skips_an_optimizer_step,
        [*GRADIENTS, "async at the end of its warm-up", "low_precision_decentralized"],
    ),
    (faults.looks_at_a_batch, [*GRADIENTS, "async at the end of its warm-up"]),
    (faults.forgets_a_batch, GRADIENTS),
    (faults.loads_another_checkpoint, [*GRADIENTS, *WEIGHTS]),
    (faults.loads_other_weights, [*GRADIENTS, *IN_WARM_UP]),
    (faults.makes_other_buckets, ["gradient_allreduce", "bytegrad"]),
    (faults.skips_an_optimizer_step, [*COUNTED]),
    (faults.loads_another_checkpoint, [*COUNTED]),
    (faults.abandons_a_backward, [*COUNTED]),
]
"""Faults after which ranks go on, and the algorithms that are tried."""


def run() -> dict[tuple[str, str], tuple[list[str], float]]:
    """Return this rank's errors and the seconds for each fault and algorithm."""
    os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = "4096"
    faults.ALGORITHMS.update(COUNTED)
    return {
        (fault.__name__, algorithm): (errors, seconds)
        for fault, algorithms in TO_RUN
        for algorithm, (errors, seconds, _) in faults.run(fault, algorithms, {}).items()
    }


@functools.cache
def texts() -> dict[tuple[str, str], list[list[str]]]:
    """Return the errors of both ranks for each fault and algorithm, after checking that there was
    no long wait.
    """
    ranks = launch(run, 2, limit=240)
    for results in ranks:
        for place, (_, seconds) in results.items():
            assert seconds < 15, place
    return {place: [results[place][0] for results in ranks] for place in ranks[0]}


def each(
    fault: Any, algorithms: Iterable[str] = GRADIENTS
) -> Iterator[tuple[str, list[list[str]]]]:
    for algorithm in algorithms:
        yield algorithm, texts()[fault.__name__, algorithm]


def test_a_backward_abandoned_half_way_is_an_error_on_all_ranks_at_once() -> None:
    for algorithm, (innocent, guilty) in each(faults.abandons_a_backward):
        assert len(guilty) == 3, algorithm
        assert all(
            "cannot train on: one of its backward passes failed" in text for text in guilty
        ), algorithm
        assert len(innocent) == 4, algorithm
        assert all(
            "rank 1 gave up: one of its backward passes failed" in text for text in innocent
        ), (algorithm, innocent)


def test_what_mixes_or_communicates_nothing_stays_allowed() -> None:
    allowed = [
        (faults.abandons_a_backward, ["decentralized"]),
        (faults.forgets_a_batch, GRADIENTS),
        (faults.looks_at_a_batch, GRADIENTS),
    ]
    for fault, algorithms in allowed:
        for algorithm, ranks in each(fault, algorithms):
            assert ranks == [[], []], (fault, algorithm)


def test_a_skipped_optimizer_step_is_an_error_in_the_next_round() -> None:
    for algorithm, ranks in each(faults.skips_an_optimizer_step):
        for errors in ranks:
            assert (
                "rank 0 has taken 4 optimizer steps, rank 1 has taken 3 optimizer steps"
                in errors[0]
            ), algorithm
    for algorithm, ranks in each(
        faults.skips_an_optimizer_step, ["async at the end of its warm-up"]
    ):
        assert all(ranks), algorithm


@pytest.mark.parametrize("fault", [faults.skips_an_optimizer_step, faults.abandons_a_backward])
def test_a_backward_without_a_step_is_an_error_where_steps_communicate(fault: Any) -> None:
    for _, ranks in each(fault, ["low_precision_decentralized"]):
        for errors in ranks:
            assert (
                "rank 0 has run 1 backward passes since the last round, rank 1 has run 2 backward"
                " passes" in errors[0]
            )


def test_a_rank_that_leaves_the_warm_up_early_does_not_make_the_others_wait() -> None:
    for _, (early, late) in each(faults.looks_at_a_batch, ["async at the end of its warm-up"]):
        assert not early
        assert "rank 0 gave up: it has left the warm-up, of 5 steps" in late[0]


def test_checkpoints_of_different_steps_are_an_error_in_the_next_round() -> None:
    for algorithm, ranks in each(faults.loads_another_checkpoint, [*GRADIENTS, *WEIGHTS]):
        for errors in ranks:
            assert len(errors) >= 3, (algorithm, errors)
            assert "disagree: " in errors[0], algorithm
            assert "rank 0 has " in errors[0] or "rank 0 is " in errors[0], algorithm


@pytest.mark.parametrize(
    "fault",
    [faults.skips_an_optimizer_step, faults.loads_another_checkpoint, faults.abandons_a_backward],
)
def test_S9_a_rank_that_loses_count_of_steps_is_an_error_on_every_rank(fault: Any) -> None:
    for name, ranks in each(fault, COUNTED):
        for errors in ranks:
            assert errors, name
            assert all(
                "disagree" in text or "gave up" in text or "cannot train on" in text
                for text in errors
            ), (name, errors)


def test_weights_that_one_rank_loads_are_an_error_where_replicas_are_equal() -> None:
    for algorithm, ranks in each(faults.loads_other_weights, [*GRADIENTS, *IN_WARM_UP]):
        for errors in ranks:
            assert "rank 0 has weights and optimizer state of checksum" in errors[0], (
                algorithm,
                errors,
            )


def test_other_buckets_than_before_are_an_error_before_any_is_sent() -> None:
    for algorithm, ranks in each(faults.makes_other_buckets, ["gradient_allreduce", "bytegrad"]):
        for errors in ranks:
            assert "disagree: rank 0 has buckets of plan" in errors[0], (algorithm, errors)


@dataclass
class Scenario:
    """What one rank of a training does, and what the others then say, at the first error."""

    does: Callable[[faults.Training], None]
    said: str
    """Found in the error of every other rank."""
    algorithm: str = "gradient_allreduce"
    timeout: float = 60.0
    guilty: int = 1
    stops: bool = False
    """Whether rank 0 has to kill it in the end."""


def killed(children: Callable[[], object], **options: Any) -> Scenario:
    """Return the scenario of a rank that is killed, whose ``children`` live on for 20 s."""
    does = partial(faults.dies_before_its_children, children=children)
    return Scenario(does, ENDED, **options)


MESSAGES = {"algorithm": "low_precision_decentralized"}
"""Ranks exchange messages with two others, which gloo cannot interrupt, and no collective."""
ENDED = "the process of rank 1 has ended"
SCENARIOS = {
    "is killed in backward, memory": Scenario(faults.dies_in_backward, ENDED),
    "is killed; a process that C forked lives on, gloo": killed(faults.fork_unseen),
    "is killed; a process that C forked lives on, messages over gloo": killed(
        faults.fork_unseen, **MESSAGES
    ),
    "is killed; a process that C forked lives on, messages in memory": killed(
        faults.fork_unseen, **MESSAGES
    ),
    "is killed; workers of its DataLoader are busy, gloo": killed(faults.workers),
    "is killed; a program that it started lives on, gloo": killed(faults.start_a_program),
    "serves the store and is killed, memory": Scenario(
        faults.serves_and_dies, "the process of rank 0 has ended", guilty=0
    ),
    "is interrupted in backward, and lives on, gloo": Scenario(
        faults.is_interrupted_in_backward, "rank 1 gave up: one of its backward passes failed"
    ),
    "is interrupted between steps, and stays in the handler, memory": Scenario(
        faults.handles_ctrl_c, "rank 1 did not .*, while it handles KeyboardInterrupt", timeout=3.0
    ),
    "gives up, and lives on, messages in memory": Scenario(
        faults.gives_up, "rank 1 gave up: it has had enough$", **MESSAGES
    ),
    "is refused a step, and lives on, gloo": Scenario(
        faults.steps_without_a_forward,
        "rank 1 gave up: SGD was about to step module 'Sequential' with gradients of this rank alone",
    ),
    "is stopped, gloo": Scenario(
        faults.is_stopped, "rank 1 did not .*; its process is stopped", timeout=2.0, stops=True
    ),
    "comes too late, gloo": Scenario(faults.comes_late, "after 3 s.*rank 1 did not", timeout=3.0),
    "comes too late, messages in memory": Scenario(
        faults.comes_late, "after 3 s.*rank 1 did not", timeout=3.0, **MESSAGES
    ),
    "ends by an exception, gloo": Scenario(
        faults.ends_by_an_uncaught_exception, "rank 1 ended with ValueError: no batch 7$"
    ),
    "destroys its groups after an error, memory": Scenario(
        faults.destroys_after_an_error, "rank 1 ended with ValueError: no batch 7$"
    ),
    "destroys its groups, gloo": Scenario(
        faults.destroys, "rank 1 ended normally after 3 steps; if ranks have different numbers"
    ),
    "waits in a barrier, gloo": Scenario(
        faults.waits_in_a_barrier,
        "every rank is waiting for another: rank 0 waits in allreduce of group 'default/background.*"
        "rank 1 waits in connect of group 'default/global'",
    ),
    "waits in a barrier, messages in memory": Scenario(
        faults.waits_in_a_barrier,
        "every rank is waiting for another: rank 0 waits in agreement of group 'default/background.*"
        "rank 1 waits in connect of group 'default/global'",
        **MESSAGES,
    ),
}
"""They happen after three steps, between two steps if not told otherwise."""


def play(name: str) -> tuple[str, float]:
    """Return the first error of this rank, and the seconds after which it came."""
    missing._PATIENCE, missing._INTERVAL = 0.5, 0.1
    scenario = SCENARIOS[name]
    launchers = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    if scenario.guilty == 0:
        faults.serve_the_store()
    bagua_ref.init_process_group(timeout=scenario.timeout)
    training = faults.begin(scenario.algorithm)
    others = [str(rank) for rank in range(3) if rank != scenario.guilty]
    if training.rank == scenario.guilty:
        launchers.set("pid", str(os.getpid()))
    start = time.monotonic()
    scenario.does(training)
    if training.rank == scenario.guilty:
        launchers.wait(others, timedelta(seconds=60))
        os._exit(0)
    launchers.set(str(training.rank), "")
    if training.rank == 0 and scenario.stops:
        launchers.wait(others, timedelta(seconds=60))
        os.kill(int(launchers.get("pid")), signal.SIGKILL)
    return training.errors[0], training.first_error - start


@pytest.mark.parametrize("name", SCENARIOS)
def test_S2_5_the_others_soon_name_the_rank_that_is_missing_and_why(name: str) -> None:
    scenario, over_gloo = SCENARIOS[name], name.endswith("gloo")
    for rank, ended in enumerate(outcomes(play, 3, name, init=False, over_gloo=over_gloo)):
        if rank != scenario.guilty:
            assert ended.result is not None, ended.traceback
            said, seconds = ended.result
            assert re.search(scenario.said, said), said
            assert seconds < 10

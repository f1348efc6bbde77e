"""Every schedule of a small world: the search itself, and faults of a training, which no schedule
may turn into a mixed step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests import failing_ranks as faults
from tests.failing_ranks import ALGORITHMS, Training
from torch import Tensor

import bagua_ref
from bagua_ref.base.runtime import current_world
from bagua_ref.errors import SimulationError
from bagua_ref.simulation import Schedule, Schedules, SimulatedWorld

# The search.


def two_threads(steps: int) -> set[str]:
    """Return the interleavings of two ranks that each say their name so often, and could be
    interrupted before each time.
    """
    found, schedules = [], Schedules()
    for schedule in schedules:
        said: list[str] = []

        def program(comm: Any, said: list[str] = said) -> None:
            for _ in range(steps):
                said.append("ab"[comm.rank()])
                current_world().event().set()  # lets other threads go first

        SimulatedWorld(2, schedule=schedule).run(program)
        found.append("".join(said))
    assert schedules.exhausted
    assert len(found) == schedules.runs
    return set(found)


def test_every_interleaving_of_two_threads_is_found() -> None:
    for steps in (1, 2, 3):
        assert two_threads(steps) == {
            "".join(order) for order in itertools.permutations("a" * steps + "b" * steps)
        }


def lost_update(schedule: Schedule) -> int:
    """Return the value of a counter after two ranks have added one without a lock."""
    counter = [0]

    def program(comm: Any) -> None:
        value = counter[0]
        current_world().event().set()
        counter[0] = value + 1

    SimulatedWorld(2, schedule=schedule).run(program)
    return counter[0]


def test_an_error_that_needs_one_interruption_is_found_with_one_deviation_and_its_schedule_repeats_it() -> (
    None
):
    alone, once = Schedules(0), Schedules(1)
    assert [lost_update(schedule) for schedule in alone] == [2]
    assert (alone.complete, alone.exhausted) == (True, False)
    outcomes = {repr(schedule): lost_update(schedule) for schedule in once}
    assert set(outcomes.values()) == {1, 2}
    lost = next(schedule for schedule, value in outcomes.items() if value == 1)
    assert [lost_update(eval(lost, {"Schedule": Schedule})) for _ in range(3)] == [1, 1, 1]


@pytest.mark.slow
def test_what_comes_before_the_beginning_is_not_varied() -> None:
    def program(comm: Any, schedule: Schedule) -> None:
        for _ in range(5):
            comm.barrier()
        schedule.begin()
        comm.barrier()

    counts = []
    for begins in (True, False):
        schedules = Schedules()
        for schedule in schedules:
            world = SimulatedWorld(2, schedule=schedule)
            world.run(program, schedule if begins else Schedule())
            if schedules.runs > 200:
                break
        counts.append(schedules.runs)
    assert counts[0] < 50
    assert counts[1] > 200


def test_a_schedule_of_another_program_is_an_error() -> None:
    world = SimulatedWorld(2, schedule=Schedule([7]))
    assert repr(world) == "SimulatedWorld(2, nodes=(2,), schedule=Schedule([7]))"
    with pytest.raises(
        SimulationError, match=r"choice 0 of Schedule\(\[7\]\) is 7, but only 2 threads can run"
    ):
        world.run(lambda comm: comm.barrier())


def test_schedules_that_are_not_run_are_an_error() -> None:
    with pytest.raises(SimulationError, match=r"Schedule\(\[\]\) has not been run"):
        list(Schedules())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Schedule([0, -1]), ValueError, r"choices=\[0, -1\] must be ints, 0 or more"),
        (lambda: Schedule([0.5]), ValueError, r"choices=\[0\.5\] must be"),
        (lambda: Schedules(-1), ValueError, "deviations=-1 must be 0 or more, or None"),
        (lambda: Schedules(limit=0), ValueError, "limit=0 must be at least 1"),
        (
            lambda: SimulatedWorld(2, schedule=[0]),
            TypeError,
            r"schedule=\[0\] must be a Schedule, or None",
        ),
    ],
)
def test_bad_arguments(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_program_that_does_not_do_the_same_each_time_is_an_error() -> None:
    runs = itertools.count()

    def program(comm: Any) -> None:
        if next(runs) < 2:
            comm.barrier()

    def search() -> None:
        for schedule in Schedules():
            SimulatedWorld(2, schedule=schedule).run(program)

    with pytest.raises(SimulationError, match="the program behaves differently"):
        search()


# Faults.


@dataclass
class Rank:
    """What one rank of a training brought into rounds, and what its optimizer used."""

    brought: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """For each backward pass: the weights, and what is averaged: this rank's gradients, or the
    weights.
    """
    used: list[tuple[int, Tensor]] = field(default_factory=list)
    """For each step: the number of backward passes before it, and what the optimizer used:
    gradients, or weights.
    """
    errors: list[str] = field(default_factory=list)
    training: Training | None = None
    """Kept until the run has ended: when it is freed, its thread is woken, and so the schedule
    changes.
    """


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).clone() for tensor in tensors])


def watch(training: Training, rank: Rank, averages_weights: bool, schedule: Schedule) -> None:
    """Write down what the training brings and uses."""
    module, parameters = training.module, list(training.module.parameters())
    rank.training, rank.errors = training, training.errors
    local: dict[int, Tensor] = {}

    def begin(*_: Any) -> None:
        if rank.brought:
            schedule.begin()
        rank.brought.append(
            (flat(parameters), flat(parameters) if averages_weights else torch.zeros(0))
        )
        local.clear()

    def keep(place: int, grad: Tensor) -> None:
        local[place] = grad.clone()
        if not averages_weights and len(local) == len(parameters):
            rank.brought[-1] = (
                rank.brought[-1][0],
                flat(local[place] for place in range(len(parameters))),
            )

    def use(*_: Any) -> None:
        schedule.begin()
        values = parameters if averages_weights else [parameter.grad for parameter in parameters]
        rank.used.append((len(rank.brought), flat(values)))

    module.register_forward_pre_hook(begin)
    for place, parameter in enumerate(parameters):
        parameter.register_hook(lambda grad, place=place: keep(place, grad))
    training.optimizer.register_step_pre_hook(use)


def is_mean(value: Tensor, one: Tensor, other: Tensor, algorithm: str) -> bool:
    if len(one) != len(value) or len(other) != len(value):
        return False
    steps = 0.02 if algorithm == "bytegrad" else 1e-6  # of 255 in a bucket's range of values, twice
    return bool(((one + other) / 2 - value).abs().max() <= steps * (value.max() - value.min()))


def check_no_step_is_mixed(ranks: list[Rank], algorithm: str) -> None:
    """Check that all values that optimizers used are means of one pass of each rank, of equal
    weights where replicas are equal.
    """
    for me, rank in enumerate(ranks):
        for passes, value in rank.used:
            weights, mine = rank.brought[passes - 1]
            partners = [
                place
                for place, (_, theirs) in enumerate(ranks[1 - me].brought)
                if is_mean(value, mine, theirs, algorithm)
            ]
            assert partners, (
                f"rank {me} used what is not the mean of its pass {passes} and one of the other rank"
            )
            if algorithm != IN_FORWARD:
                other_weights = ranks[1 - me].brought[partners[0]][0]
                assert torch.equal(weights, other_weights), (
                    f"rank {me} used a gradient that the other rank took at other weights"
                )


def dies(training: Training) -> None:
    """Rank 1's connections close in the middle of a backward pass, and it does nothing more."""
    if training.rank == 1:

        def die(grad: Tensor) -> None:
            for communicator in current_world().transport._communicators:
                communicator.abort("it has died")
            raise SystemExit

        training.module[0].weight.register_hook(die)
        with pytest.raises(SystemExit):
            training.backward()
        training.errors.append("died")
        return
    training.go_on()


def abandons_the_last_bucket(training: Training) -> None:
    """As `faults.abandons_a_backward`, after the first bucket has been sent."""
    faults.abandons_a_backward(training, layer=0)


# Rounds of the first are compared while their buckets run, those of the second before; the others
# send other messages.
ALIKE, COMPARED_FIRST, IN_TWO_PARTS, ASYNC = (
    "gradient_allreduce",
    "qadam in warm-up",
    "bytegrad",
    "async in warm-up",
)
IN_FORWARD = "decentralized"
HARMFUL = [
    faults.abandons_a_backward,
    abandons_the_last_bucket,
    faults.skips_an_optimizer_step,
    faults.loads_other_weights,
    faults.freezes_a_parameter,
    dies,
]
QUICK = [
    (fault, ALIKE) for fault in (faults.abandons_a_backward, faults.skips_an_optimizer_step, dies)
]
PAIRS = [
    *itertools.product(HARMFUL, (ALIKE, COMPARED_FIRST)),
    *itertools.product((abandons_the_last_bucket, dies), (IN_TWO_PARTS, ASYNC)),
]


def explore(
    fault: Callable[[Training], None],
    algorithm: str,
    deviations: int,
    ends: type[Exception] | None = None,
    layers: int = 2,
) -> tuple[Schedules, list[list[Rank]]]:
    """Run a training with a fault under all schedules with so many deviations; return what the
    ranks of each run did.

    Choices vary from the beginning of the fault: of a step that is skipped, after the backward pass
    before it.
    """

    def program(comm: Any, schedule: Schedule, ranks: list[Rank]) -> None:
        bagua_ref.init_process_group()
        torch.default_generator.manual_seed(0)  # torch.manual_seed also formats the stack, for CUDA
        module = faults.network(layers)
        optimizer, made = ALGORITHMS[algorithm](module)
        training = Training(comm.rank(), module, optimizer, steps=2)
        watch(training, ranks[comm.rank()], algorithm == IN_FORWARD, schedule)
        module.with_bagua([optimizer], made)
        assert len(module.bagua_buckets) == (1 if algorithm == IN_FORWARD else layers)
        bagua_ref.barrier()
        if fault is not faults.skips_an_optimizer_step:
            schedule.begin()
        fault(training)

    schedules, found = Schedules(deviations, limit=100_000), []
    for schedule in schedules:
        ranks = [Rank(), Rank()]
        with nullcontext() if ends is None else pytest.raises(ends):
            SimulatedWorld(2, schedule=schedule).run(program, schedule, ranks)
        try:
            check_no_step_is_mixed(ranks, algorithm)
        except AssertionError as error:
            raise AssertionError(f"{error}, under {schedule!r}") from None
        for rank in ranks:
            rank.training = None
        found.append(ranks)
    assert schedules.complete
    return schedules, found


@pytest.fixture(autouse=True)
def _a_bucket_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "4096")


@pytest.mark.parametrize(
    ("fault", "algorithm"),
    [
        pytest.param(*pair, marks=pytest.mark.slow if pair in QUICK else pytest.mark.proof)
        for pair in PAIRS
    ],
)
def test_a_fault_is_an_error_on_both_ranks_in_every_schedule_with_one_deviation(
    fault: Any, algorithm: str
) -> None:
    """Few schedules follow a backward pass that fails before the other rank begins its own: that
    rank is told at once.
    """
    schedules, found = explore(fault, algorithm, 1)
    assert all(rank.errors for ranks in found for rank in ranks)
    assert schedules.runs > 10


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("fault", "layers"),
    [
        (abandons_the_last_bucket, 2),
        (faults.skips_an_optimizer_step, 1),
        (faults.loads_other_weights, 1),
        (dies, 2),
    ],
)
def test_a_fault_is_an_error_on_both_ranks_in_every_schedule_with_two_deviations(
    fault: Any, layers: int
) -> None:
    schedules, found = explore(fault, ALIKE, 2, layers=layers)
    assert all(rank.errors for ranks in found for rank in ranks)
    assert schedules.runs > 500


@pytest.mark.proof
@pytest.mark.parametrize(
    ("fault", "algorithm"),
    [
        *(
            (faults.raises_before_backward, algorithm)
            for algorithm in (ALIKE, COMPARED_FIRST, IN_TWO_PARTS, ASYNC, IN_FORWARD)
        ),
        (faults.looks_at_a_batch, IN_FORWARD),
    ],
)
def test_what_mixes_nothing_is_right_in_every_schedule_with_one_deviation(
    fault: Any, algorithm: str
) -> None:
    for ranks in explore(fault, algorithm, 1)[1]:
        assert [rank.errors for rank in ranks] == [[], []]
        assert max(len(rank.used) for rank in ranks) == 2


@pytest.mark.proof
@pytest.mark.parametrize("algorithm", [ALIKE, COMPARED_FIRST, IN_FORWARD])
@pytest.mark.parametrize(
    ("fault", "error"),
    [(faults.ends_early, SimulationError), (faults.ends_by_an_exception, ValueError)],
)
def test_a_rank_that_ends_ends_the_run_in_every_schedule_with_one_deviation(
    fault: Any, error: Any, algorithm: str
) -> None:
    explore(fault, algorithm, 1, error)


def test_without_the_comparison_of_ranks_a_mixed_step_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bagua_ref.data_parallel.rounds.Comparison._raise", lambda *_: None)
    with pytest.raises(
        AssertionError, match="used a gradient that the other rank took at other weights"
    ):
        explore(faults.skips_an_optimizer_step, "gradient_allreduce", 0)

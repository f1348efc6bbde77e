"""Training inside join(): ranks with different numbers of batches; in the simulated world, then
over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.trainings import batch, by_name, network, on_every_rank, simulate, weights, wrap
from torch import nn

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    AlgorithmImpl,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DemoAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    TopKAlgorithm,
)
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.errors import CommunicationError, SimulationError

Counts = list[int]
"""The number of batches of each rank."""

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "gradient_allreduce": GradientAllReduceAlgorithm,
    "gradient_allreduce, sum": lambda: GradientAllReduceAlgorithm(average=False),
    "gradient_allreduce, hierarchical": lambda: GradientAllReduceAlgorithm(hierarchical=True),
    "bytegrad": lambda: ByteGradAlgorithm(hierarchical=False),
    "bytegrad, hierarchical": ByteGradAlgorithm,
    "bytegrad with memory": lambda: ByteGradAlgorithm(hierarchical=False, error_feedback=True),
    "decentralized": lambda: DecentralizedAlgorithm(hierarchical=False),
    "decentralized, hierarchical, interval 2": lambda: DecentralizedAlgorithm(
        communication_interval=2
    ),
    "decentralized, shift_one": lambda: DecentralizedAlgorithm(
        hierarchical=False, peer_selection_mode="shift_one"
    ),
    "low_precision_decentralized": lambda: LowPrecisionDecentralizedAlgorithm(hierarchical=False),
    "low_precision_decentralized, hierarchical, interval 2": lambda: (
        LowPrecisionDecentralizedAlgorithm(communication_interval=2)
    ),
    "async in warm-up": lambda: AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=100),
    "powersgd": lambda: PowerSGDAlgorithm(warmup_steps=3, min_compression_rate=1.0),
    "topk": lambda: TopKAlgorithm(0.1, warmup_steps=2),
    "demo": lambda: DemoAlgorithm(2, 4, sign=False, warmup_steps=2),
}
REPLICATED = {
    name
    for name in ALGORITHMS
    if name.startswith(("gradient", "bytegrad", "async", "powersgd", "topk", "demo"))
}


def wrapped(
    algorithm: Algorithm, momentum: float = 0.0, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    return wrap(network(), algorithm, 0.1, momentum, **options)


ENDED = (
    r"rank 0 ended normally after 2 steps; if ranks have different numbers of batches, use"
    r" bagua_ref\.join$"
)


def without_join(name: str) -> None:
    """Train on 2 batches on rank 0 and on 4 on each other one, outside of `bagua_ref.join`."""
    algorithm = ALGORITHMS[name]() if name in ALGORITHMS else None
    module = network()
    optimizer, algorithm = (
        (torch.optim.SGD(module.parameters(), 0.1), algorithm)
        if algorithm
        else by_name(name, module)
    )
    module.with_bagua([optimizer], algorithm)  # type: ignore[operator]
    train(module, optimizer, rank := bagua_ref.get_rank(), 4 if rank else 2)


@pytest.mark.parametrize(
    "name", ["gradient_allreduce", "bytegrad, hierarchical", "low_precision_decentralized", "qadam"]
)
def test_an_error_outside_of_join_says_to_use_it(name: str) -> None:
    with pytest.raises(SimulationError, match=ENDED) as raised:
        simulate(2, lambda r: without_join(name))
    assert raised.value.kind == "ended"


def backward(module: nn.Module, rank: int, step: int, factor: float = 1.0) -> None:
    module.zero_grad()
    (factor * module(batch(rank, step)).square().mean()).backward()


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, batches: int, first: int = 0
) -> None:
    for step in range(first, first + batches):
        backward(module, rank, step)
        optimizer.step()


def plainly(counts: list[Counts], by_active: bool) -> torch.Tensor:
    """Return the weights of one module trained with the mean gradient over all ranks, or those that
    have batches, in each step.
    """
    module = network()
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for epoch in counts:
        for step in range(max(epoch)):
            total = torch.zeros_like(weights(module))
            active = [rank for rank, batches in enumerate(epoch) if step < batches]
            for rank in active:
                backward(module, rank, step)
                total += torch.cat([p.grad.reshape(-1) for p in parameters])
            mean = total / (len(active) if by_active else len(epoch))
            for parameter, gradient in zip(
                parameters, mean.split([p.numel() for p in parameters]), strict=True
            ):
                parameter.grad = gradient.view_as(parameter)
            optimizer.step()
    return weights(module)


epochs = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=1, max_size=3)
)


@pytest.mark.slow
@given(counts=epochs, by_active=st.booleans(), flat=st.booleans(), seed=st.integers(0, 2**16))
def test_ranks_without_batches_contribute_zeros_or_do_not_count(
    counts: list[Counts], by_active: bool, flat: bool, seed: int
) -> None:
    def rank(r: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        module, optimizer = wrapped(GradientAllReduceAlgorithm(), momentum=0.9, do_flatten=flat)
        for epoch in counts:
            with bagua_ref.join([module], divide_by_initial_world_size=not by_active):
                train(module, optimizer, r, epoch[r])
        momenta = [
            optimizer.state[p].get("momentum_buffer", torch.zeros(0)).reshape(-1)
            for p in module.parameters()
        ]
        return weights(module), torch.cat(momenta), module._bagua.steps_of_optimizers

    results = simulate(len(counts[0]), rank, seed=seed)
    torch.testing.assert_close(results[0][0], plainly(counts, by_active), rtol=1e-4, atol=1e-6)
    for ours, momenta, steps in results:
        assert torch.equal(ours, results[0][0])
        assert torch.equal(momenta, results[0][1])
        assert steps == [sum(map(max, counts))]


def with_zero_losses(algorithm: str, counts: list[Counts], r: int) -> torch.Tensor:
    """Train without join(): ranks that have run out of batches multiply their loss by zero."""
    module, optimizer = wrapped(ALGORITHMS[algorithm]())
    for epoch in counts:
        for step in range(max(epoch)):
            backward(module, r, step, factor=float(step < epoch[r]))
            optimizer.step()
    return weights(module)


def joined(algorithm: str, counts: list[Counts], r: int) -> torch.Tensor:
    module, optimizer = wrapped(ALGORITHMS[algorithm]())
    for epoch in counts:
        with bagua_ref.join([module]):
            train(module, optimizer, r, epoch[r])
    return weights(module)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_equals_training_in_which_ranks_without_batches_have_a_loss_of_zero(
    algorithm: str,
) -> None:
    nodes = (2, 2) if "hierarchical" in algorithm else (4,)
    counts = [[3, 1, 0, 5], [0, 2, 2, 1], [1, 1, 1, 1]]
    expected = simulate(4, lambda r: with_zero_losses(algorithm, counts, r), nodes=nodes)
    ours = simulate(4, lambda r: joined(algorithm, counts, r), nodes=nodes)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("by_active", [False, True])
def test_a_sum_is_the_same_however_many_ranks_have_batches(by_active: bool) -> None:
    def gradient(r: int) -> torch.Tensor | None:
        module, _ = wrapped(GradientAllReduceAlgorithm(average=False))
        with bagua_ref.join([module], divide_by_initial_world_size=not by_active):
            for _ in range(r):
                backward(module, r, 0)
        return module[0].weight.grad

    alone = network()
    backward(alone, 1, 0)
    zero, one = simulate(2, gradient)
    assert zero is None
    assert torch.equal(one, alone[0].weight.grad)


def qadam(ranks: int, counts: list[Counts]) -> list[torch.Tensor]:
    """Train so that the warm-up of three steps ends while some ranks have no more batches."""

    def rank(r: int) -> torch.Tensor:
        optimizer, algorithm = by_name(
            "qadam", module := network(), warmup_steps=3, hierarchical=False
        )
        module.with_bagua([optimizer], algorithm)
        for epoch in counts:
            with bagua_ref.join([module], divide_by_initial_world_size=False):
                train(module, optimizer, r, epoch[r])
        assert optimizer.step_id == sum(map(max, counts))
        return torch.cat(
            [
                weights(module),
                *(optimizer.state[p]["exp_avg"].reshape(-1) for p in module.parameters()),
            ]
        )

    return simulate(ranks, rank)


@pytest.mark.parametrize("idle", [[0, 0], [1, 0], [2, 0], [3, 0], [4, 3]])
def test_qadam_averages_over_the_ranks_that_have_batches_in_both_phases(idle: Counts) -> None:
    """As two ranks would alone, if the third has no batches; and other ranks' replicas are equal to
    theirs.
    """
    three = qadam(3, [[6, 6, idle[0]], [4, 4, idle[1]]])
    assert all(torch.equal(three[0], other) for other in three)
    if not any(idle):
        two = qadam(2, [[6, 6], [4, 4]])[0]
        start = torch.cat([weights(network()), torch.zeros(len(two) // 2)])
        assert (three[0] - two).norm() < 0.1 * (two - start).norm()


class Own(Algorithm):
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return AlgorithmImpl(process_group)


def refused(
    algorithm: Callable[[nn.Module], tuple[list[Any], Algorithm]],
    by_active: bool,
    error: Any,
    message: str,
) -> None:
    module = network()
    optimizers, made = algorithm(module)
    module.with_bagua(optimizers, made)
    with (
        pytest.raises(error, match=message),
        bagua_ref.join([module], divide_by_initial_world_size=not by_active),
    ):
        raise AssertionError("the context was entered")
    assert module._bagua.rounds.joining is None


def sgd(algorithm: Algorithm) -> Callable[[nn.Module], tuple[list[Any], Algorithm]]:
    return lambda module: ([torch.optim.SGD(module.parameters(), lr=0.1)], algorithm)


def adam(listed: bool = True, **options: Any) -> Callable[[nn.Module], tuple[list[Any], Algorithm]]:
    def make(module: nn.Module) -> tuple[list[Any], Algorithm]:
        optimizer = QAdamOptimizer(module.parameters())
        return [optimizer] if listed else [], QAdamAlgorithm(
            optimizer, hierarchical=False, **options
        )

    return make


REFUSED = [
    (
        sgd(Own()),
        False,
        NotImplementedError,
        r"AlgorithmImpl cannot train inside join\(\): its Traits.without_batch does not say",
    ),
    (
        sgd(LocalSGDAlgorithm(2)),
        False,
        NotImplementedError,
        r"LocalSGDAlgorithmImpl cannot train inside join\(\)",
    ),
    (
        sgd(DiLoCoAlgorithm(2)),
        False,
        NotImplementedError,
        r"DiLoCoAlgorithmImpl cannot train inside join\(\)",
    ),
    (
        sgd(DecentralizedAlgorithm()),
        True,
        ValueError,
        r"divide_by_initial_world_size=False: decentralized averages",
    ),
    (
        sgd(LowPrecisionDecentralizedAlgorithm()),
        True,
        ValueError,
        "False: low_precision_decentralized averages weights",
    ),
    (
        sgd(PowerSGDAlgorithm()),
        True,
        ValueError,
        "divide_by_initial_world_size=False: powersgd also applies what ranks have",
    ),
    (
        sgd(TopKAlgorithm()),
        True,
        ValueError,
        "divide_by_initial_world_size=False: topk also applies what ranks have left out",
    ),
    (
        sgd(ByteGradAlgorithm(error_feedback=True)),
        True,
        ValueError,
        "size=False: bytegrad also applies what ranks have left out",
    ),
    (
        adam(error_feedback=True),
        True,
        NotImplementedError,
        r"QAdamAlgorithmImpl cannot train inside join\(\): with error_feedback=True, ranks without",
    ),
    (
        adam(),
        False,
        ValueError,
        r"divide_by_initial_world_size=True: qadam averages momenta .* use join\(divide",
    ),
    (
        adam(listed=False),
        True,
        NotImplementedError,
        r"only if its optimizer was passed to with_bagua\(\)",
    ),
    (
        adam(grad_scaler=torch.amp.GradScaler("cpu")),
        True,
        NotImplementedError,
        r"QAdamAlgorithmImpl cannot train inside join\(\): with grad_scaler=, an overflow",
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=[case[3][:40] for case in REFUSED])
def test_what_has_no_meaning_is_refused_on_entering(case: Any) -> None:
    simulate(2, lambda r: refused(*case))


@on_every_rank(2)
def test_layers_that_communicate_are_refused(r: int) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    module.with_bagua([], GradientAllReduceAlgorithm())
    with (
        pytest.raises(
            NotImplementedError, match="layer '1' is a SyncBatchNorm, which communicates"
        ),
        bagua_ref.join([module]),
    ):
        pass


JOINABLES = [
    (lambda module: [], ValueError, r"joinables=\[\] must hold at least one wrapped module"),
    (lambda module: [module, module], ValueError, "module 'Sequential' twice"),
    (
        lambda module: [nn.Linear(1, 1)],
        ValueError,
        r"a Linear that is not wrapped; call with_bagua\(\) first",
    ),
    (
        lambda module: [module, 3],
        TypeError,
        "joinables hold 3, which is neither a wrapped module nor an object with a state",
    ),
    (lambda module: module, TypeError, "must be a list of wrapped modules"),
]


@pytest.mark.parametrize(
    ("joinables", "error", "message"), JOINABLES, ids=[case[2][:20] for case in JOINABLES]
)
@on_every_rank(1)
def test_joinables_are_checked(r: int, joinables: Any, error: Any, message: str) -> None:
    module, _ = wrapped(GradientAllReduceAlgorithm())
    with pytest.raises(error, match=message), bagua_ref.join(joinables(module)):
        pass


@on_every_rank(3)
def test_a_module_is_in_one_context_at_a_time_and_in_none_after_an_error(r: int) -> None:
    module, optimizer = wrapped(GradientAllReduceAlgorithm())
    with bagua_ref.join([module]):
        with (
            pytest.raises(
                RuntimeError, match=r"is inside join\(\) already; leave that context first"
            ),
            bagua_ref.join([module]),
        ):
            pass
        train(module, optimizer, r, r)
    with bagua_ref.join([module], enable=False), bagua_ref.join([module]):
        train(module, optimizer, r, 2 - r)


@on_every_rank(2)
def test_wrapping_again_inside_is_an_error_on_leaving(r: int) -> None:
    module, optimizer = wrapped(GradientAllReduceAlgorithm())
    with (
        pytest.raises(RuntimeError, match=r"was wrapped again or resynchronized inside join\(\)"),
        bagua_ref.join([module]),
    ):
        module.with_bagua([optimizer], ByteGradAlgorithm(hierarchical=False))
    train(module, optimizer, r, 1)


def told(
    function: Callable[[nn.Module, torch.optim.Optimizer, int], object],
    ranks: int = 3,
    **options: Any,
) -> list[str]:
    """Return the error of communication that ``function`` raises on each rank, "" if none."""

    def rank(r: int) -> str:
        module, optimizer = wrapped(GradientAllReduceAlgorithm(), **options)
        try:
            function(module, optimizer, r)
        except CommunicationError as error:
            assert module._bagua.rounds.joining is None
            with pytest.raises(CommunicationError, match="cannot train on"):
                module(batch(r, 0))
            return str(error)
        return ""

    return simulate(ranks, rank)


def test_a_rank_outside_and_options_that_differ_are_errors_on_all_ranks() -> None:
    def one_outside(module: nn.Module, optimizer: torch.optim.Optimizer, r: int) -> None:
        with bagua_ref.join([module], enable=r != 1):
            train(module, optimizer, r, r)

    def other_options(module: nn.Module, optimizer: torch.optim.Optimizer, r: int) -> None:
        with bagua_ref.join([module], throw_on_early_termination=r == 1):
            train(module, optimizer, r, 2)

    for error in told(one_outside):
        assert (
            "rank 1 is outside join(), ranks 0, 2 are inside join(divide_by_initial_world_size=True"
            in error
        )
    for error in told(other_options):
        assert (
            "rank 1 is inside join(divide_by_initial_world_size=True,"
            " throw_on_early_termination=True), ranks 0, 2 are" in error
        )


def test_an_exception_inside_ends_the_training_of_all_ranks() -> None:
    def fails(module: nn.Module, optimizer: torch.optim.Optimizer, r: int) -> None:
        try:
            with bagua_ref.join([module]):
                train(module, optimizer, r, 2 * r)
                if r == 1:
                    raise ValueError("a batch is broken")
        except ValueError:
            module(batch(r, 0))

    errors = told(fails)
    assert (
        "rank 1 gave up: an exception left join() there: ValueError: a batch is broken" in errors[0]
    )
    assert (
        "rank 1 gave up: an exception left join() there: ValueError: a batch is broken" in errors[2]
    )
    assert "cannot train on: an exception left join() there: ValueError" in errors[1]


def test_weights_that_a_rank_loads_are_compared_with_those_of_ranks_that_have_batches() -> None:
    def loads(module: nn.Module, optimizer: torch.optim.Optimizer, r: int, factor: float) -> None:
        with bagua_ref.join([module]):
            train(module, optimizer, r, [1, 3, 3][r])
            if r == 1:
                module.load_state_dict(
                    {name: factor * value for name, value in module.state_dict().items()}
                )
            train(module, optimizer, r, [0, 1, 1][r])

    assert told(lambda *args: loads(*args, factor=1.0)) == ["", "", ""]
    for error in told(lambda *args: loads(*args, factor=2.0)):
        assert "rank 1 has weights and optimizer state of checksum" in error
        assert "rank 0" not in error


EARLY = (
    "ranks 0-1 have no more batches, which ends training on all ranks, as"
    " join(throw_on_early_termination=True) asks for"
)


def early(algorithm: str, r: int) -> tuple[list[str], int, torch.Tensor]:
    """Train two epochs of which only the second is even; return the errors, the batches of the
    first, and the weights.
    """
    module, optimizer = wrapped(ALGORITHMS[algorithm]())
    errors, taken = [], 0
    for epoch in ([2, 2, 5], [3, 3, 3]):
        try:
            with bagua_ref.join([module], throw_on_early_termination=True):
                for step in range(epoch[r]):
                    train(module, optimizer, r, 1, first=step)
                    taken += epoch[0] == 2
        except RuntimeError as error:
            errors.append(str(error))
    return errors, taken, weights(module)


@pytest.mark.parametrize(
    "algorithm", [name for name in ALGORITHMS if "interval" not in name and "shift" not in name]
)
def test_training_may_end_on_all_ranks_when_one_has_no_more_batches_and_go_on_in_the_next_epoch(
    algorithm: str,
) -> None:
    results = simulate(3, lambda r: early(algorithm, r))
    for errors, taken, ours in results:
        assert errors == [EARLY]
        assert taken == 2
        assert algorithm not in REPLICATED or torch.equal(ours, results[0][2])


def accumulated(r: int) -> torch.Tensor:
    """Sum the gradients of two batches; rank 0 has an odd number of them, and keeps the last to
    itself.
    """
    module, optimizer = wrapped(GradientAllReduceAlgorithm(), find_unused_parameters=True)
    with bagua_ref.join([module]):
        for step in range([3, 6][r]):
            if step % 2 == 0:
                module.zero_grad()
                with module.no_sync():
                    module(batch(r, step)).square().mean().backward()
            else:
                module(batch(r, step)).square().mean().backward()
                optimizer.step()
    return weights(module)


def test_gradients_may_be_accumulated() -> None:
    zero, one = simulate(2, accumulated)
    assert torch.equal(zero, one)
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(0, 6, 2):
        alone.zero_grad()
        for rank, last in ((0, 2), (1, 6)):
            for part in (step, step + 1) if step < last else ():
                (alone(batch(rank, part)).square().mean() / 2).backward()
        optimizer.step()
    torch.testing.assert_close(zero, weights(alone), rtol=1e-4, atol=1e-6)


@on_every_rank(3)
def test_gradients_of_a_rank_that_has_joined_stay_as_they_are(r: int) -> None:
    module, optimizer = wrapped(GradientAllReduceAlgorithm())
    with bagua_ref.join([module]):
        train(module, optimizer, r, 1 + r)
        before = [p.grad.clone() for p in module.parameters()]
    assert all(map(torch.equal, before, [p.grad for p in module.parameters()]))


def two_modules(r: int) -> list[torch.Tensor]:
    """One module trains on every batch, the other on every third, in another order than they are
    listed.
    """
    (one, first), (two, second) = (
        wrapped(GradientAllReduceAlgorithm(), 0.9),
        wrapped(ByteGradAlgorithm(hierarchical=False)),
    )
    for epoch in ([7, 2, 4], [0, 5, 3]):
        with bagua_ref.join([two, one]):
            for step in range(epoch[r]):
                train(one, first, r, 1, first=step)
                if step % 3 == 2:
                    train(two, second, r, 1, first=step)
    return [weights(one), weights(two)]


def test_several_modules_may_train_at_different_rates() -> None:
    for ours, reference in zip(
        zip(*simulate(3, two_modules), strict=True), ([[7, 2, 4], [0, 5, 3]], None), strict=True
    ):
        assert all(torch.equal(ours[0], other) for other in ours)
        if reference is not None:
            torch.testing.assert_close(
                ours[0], plainly(reference, by_active=False), rtol=1e-4, atol=1e-6
            )


@on_every_rank(3)
def test_other_objects_come_from_the_first_module_s_last_rank(r: int) -> None:
    (one, first), (two, second) = (
        wrapped(GradientAllReduceAlgorithm()),
        wrapped(GradientAllReduceAlgorithm()),
    )
    scheduler = torch.optim.lr_scheduler.StepLR(first, 100)
    with bagua_ref.join([one, scheduler, two]):
        for step in range([7, 8, 2][r]):
            train(one, first, r, 1, first=step)
            scheduler.step()
            if step % 3 == 2:  # for this module, the first two ranks come last
                train(two, second, r, 1, first=step)
    assert scheduler.last_epoch == 8


@pytest.mark.parametrize(("counts", "shares"), [([3, 3], False), ([3, 2], True)])
@on_every_rank(2)
def test_states_are_sent_only_if_a_rank_has_missed_batches(
    r: int, counts: Counts, shares: bool
) -> None:
    module, optimizer = wrapped(GradientAllReduceAlgorithm())
    comm = module.bagua_algorithm.process_group.get_global_communicator()
    with bagua_ref.join([module]):
        train(module, optimizer, r, counts[r])
        before = comm.bytes_sent
    sent = comm.bytes_sent - before
    # a broadcast counts as half of the bytes on each of two ranks
    assert sent > 4 * len(weights(network())) // 2 if shares else sent == 0


@on_every_rank(3)
def test_training_ends_early_for_all_modules(r: int) -> list[torch.Tensor]:
    (one, first), (two, second) = (
        wrapped(GradientAllReduceAlgorithm()),
        wrapped(GradientAllReduceAlgorithm()),
    )

    def epoch() -> None:
        with bagua_ref.join([one, two], throw_on_early_termination=True):
            for step in range([4, 2, 4][r]):
                train(one, first, r, 1, first=step)
                train(two, second, r, 1, first=step)

    with pytest.raises(RuntimeError, match="rank 1 has no more batches"):
        epoch()
    train(one, first, r, 1)
    train(two, second, r, 1)
    return [weights(one), weights(two)]


@on_every_rank(3)
def test_a_failure_of_one_module_ends_the_others_too(r: int) -> None:
    (one, first), (two, second) = (
        wrapped(GradientAllReduceAlgorithm()),
        wrapped(GradientAllReduceAlgorithm()),
    )

    def epoch() -> None:
        with bagua_ref.join([one, two]):
            for step in range([0, 3, 3][r]):
                train(one, first, r, 1, first=step)
                backward(two, r, step)
                if r == 1 or step != 1:
                    second.step()

    with pytest.raises(CommunicationError) as caught:
        epoch()
    for module in (one, two):
        with pytest.raises(CommunicationError, match="cannot train on"):
            module(batch(r, 0))
    said = str(caught.value)
    assert (
        "disagree: rank 1 has taken 2 optimizer steps, rank 2 has taken 1 optimizer steps" in said
        or "gave up" in said
    )


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@on_every_rank(3)
def test_other_objects_are_taken_over_too(r: int) -> float:
    """Overflow and step a scheduler in each batch."""
    module = network()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scaler = bagua_ref.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with bagua_ref.join([model, optimizer, scaler, scheduler]):
        for step in range([0, 5, 1][r]):
            optimizer.zero_grad()
            scaler.scale(
                model(batch(r, step)).square().mean() * (torch.inf if step == 0 else 1)
            ).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert (scaler.get_scale(), optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (
        2.0**11,
        0.1 / 2**5,
        5,
    )
    return sum(
        optimizer.state[p]["momentum_buffer"].double().sum().item() for p in module.parameters()
    )


@on_every_rank(3)
def test_buffers_come_from_a_rank_that_has_batches(r: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in ([1, 4, 2], [3, 0, 0], [2, 2, 2]):
        with model.join():
            train(model, optimizer, r, epoch[r])
            if epoch[r]:
                model(batch(r, 0))  # broadcasts buffers, but begins no round
    buffers = torch.cat([buffer.reshape(-1).double() for buffer in model.buffers()])
    # what num_batches_tracked counts: each epoch's most batches, and the extra forward pass
    assert buffers[-1] == 5 + 4 + 3
    return weights(model), buffers


@pytest.mark.parametrize("counts", [[2, 9, 7], [9, 2, 9], [5, 5, 6], [4, 4, 4], [0, 8, 3]])
def test_async_ranks_finish_their_warm_up_together_and_then_train_alone(counts: Counts) -> None:
    def rank(r: int) -> tuple[int, torch.Tensor, bool]:
        module, optimizer = wrapped(
            AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=5), momentum=0.9
        )
        with bagua_ref.join([module]):
            train(module, optimizer, r, min(counts[r], 5))
            if counts[r] > 5:  # the pass after the warm-up ends it
                module(batch(r, 0))
                seen = weights(module)
        if counts[r] <= 5:
            seen = weights(module)
        with bagua_ref.join([module]):
            train(module, optimizer, r, r)
        return module.bagua_train_step_counter, seen, module.bagua_algorithm.traits.same_forwards

    results = simulate(3, rank)
    assert all(torch.equal(seen, results[0][1]) for _, seen, _ in results)


def test_a_rank_alone_trains_as_ever() -> None:
    (ours,) = simulate(1, lambda r: joined("gradient_allreduce", [[3], [0]], r))
    (plain,) = simulate(1, lambda r: with_zero_losses("gradient_allreduce", [[3]], r))
    assert torch.equal(ours, plain)

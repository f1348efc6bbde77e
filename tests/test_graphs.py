"""Tests of graphs for decentralized averaging: formulas, checks, agreement between ranks, and real processes (S13)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.launch import launch, outcomes
from tests.test_decentralized import like, one_bucket, sgd, train
from tests.trainings import network, simulate, weights

import bagua_ref
from bagua_ref.algorithms import DecentralizedAlgorithm
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.inputs.graph_cases import doubly_stochastic
from bagua_ref.errors import CommunicationError
from bagua_ref.formulas import graphs
from bagua_ref.formulas.graphs import MODES, checked_graph, in_turn
from bagua_ref.formulas.mixing import mixing

GRAPHS = ("one_peer_exponential", "hypercube", "ring", "exponential")


def lazy_ring(t: int, n: int) -> graphs.Graph:
    """A directed ring on which each rank keeps three quarters; it turns round at every step."""
    return [[((r - (-1) ** t) % n, 0.25), (r, 0.75)] for r in range(n)] if n > 1 else [[(0, 1.0)]]


def average(
    x: list[Any], mode: Any, rounds: int = 1, hierarchical: bool = False, nodes: tuple[int, ...] | None = None
) -> list[Any]:
    """Return every rank's tensor after some rounds without training between them."""

    def rank(r: int) -> torch.Tensor:
        tensor = x[r].clone().ensure_bagua_tensor("t")
        bucket = BaguaBucket([tensor], "0", flatten=True)
        op = bucket.append_decentralized_synchronous_op(like(bucket), hierarchical, mode)
        for _ in range(rounds):
            bucket.execute()
            op.copy_back_peer_weight(bucket)
        return tensor

    return simulate(len(x), rank, nodes=nodes)


def numbers(*values: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.tensor([value], dtype=dtype) for value in values]


def found(results: list[torch.Tensor]) -> list[float]:
    return [x.item() for x in results]


# Formulas


def test_S13_1_a_rank_hears_the_one_2_to_the_k_before_it() -> None:
    sources = [[row[1][0] for row in graphs.one_peer_exponential(t, 5)] for t in range(4)]
    assert sources == [[4, 0, 1, 2, 3], [3, 4, 0, 1, 2], [1, 2, 3, 4, 0], [4, 0, 1, 2, 3]]


def test_S13_2_ranks_exchange_along_the_edges_of_a_cube() -> None:
    peers = [[row[1][0] for row in graphs.hypercube(t, 8)] for t in range(3)]
    assert peers == [[1, 0, 3, 2, 5, 4, 7, 6], [2, 3, 0, 1, 6, 7, 4, 5], [4, 5, 6, 7, 0, 1, 2, 3]]


def test_S13_the_results_of_a_round_by_hand() -> None:
    x = numbers(0, 3, 6, 12)
    assert found(average(x, "one_peer_exponential")) == [6, 1.5, 4.5, 9]
    assert found(average(x, "one_peer_exponential", rounds=2)) == [5.25] * 4
    assert found(average(x, "hypercube")) == [1.5, 1.5, 9, 9]
    assert found(average(x, "ring")) == [5, 3, 7, 6]
    assert found(average(x[:2], "ring")) == [1.5, 1.5]
    assert found(average(x, "exponential")) == [6, 5, 3, 7]
    assert found(average(x, lazy_ring)) == [3, 2.25, 5.25, 10.5]
    assert found(average(x, lazy_ring, rounds=2)) == [0.75 * 3 + 0.25 * 2.25, 3, 6.5625, 8.625]


@pytest.mark.parametrize("n", range(1, 34))
@pytest.mark.parametrize("mode", MODES)
def test_S13_every_mode_is_doubly_stochastic_and_repeats_after_its_period(mode: str, n: int) -> None:
    if not MODES[mode].takes(n):
        return
    period = MODES[mode].period(n)
    for t in (*range(period), 10**12):
        graph = MODES[mode].graph(t, n)
        assert checked_graph(graph, n) == graph
        assert [row[0][0] for row in graph] == list(range(n)) or mode == "all"
        assert graph == MODES[mode].graph(t + period, n)


@pytest.mark.parametrize("n", [2, 4, 8, 64])
@pytest.mark.parametrize("first", [0, 1, 5])
@pytest.mark.parametrize("mode", ["one_peer_exponential", "hypercube"])
def test_S13_1_S13_2_log2_n_rounds_are_exact_from_any_step(mode: str, n: int, first: int) -> None:
    rounds = n.bit_length() - 1
    of_these = mixing([MODES[mode].graph(t, n) for t in range(first, first + rounds)])
    assert (of_these.rounds, of_these.exact) == (rounds, True)
    if rounds > 1:
        assert mixing([MODES[mode].graph(t, n) for t in range(first, first + rounds - 1)]).contraction > 0


@pytest.mark.parametrize("n", [3, 5, 6, 7, 9, 12, 24])
def test_S13_1_for_no_other_n(n: int) -> None:
    assert not mixing([graphs.one_peer_exponential(t, n) for t in range(MODES["one_peer_exponential"].period(n))], 1e-12).exact


def test_S13_1_shift_one_never_is_exact_from_8_ranks_on() -> None:
    assert mixing([graphs.shift_one(t, 4) for t in range(2)]).exact
    for n in (8, 16):
        assert not mixing([graphs.shift_one(t, n) for t in range(n // 2)], 1e-12).exact
    start = [torch.tensor([float(r == 0)]) for r in range(16)]
    away = max(abs(x - 1 / 16) for x in found(average(start, "shift_one", rounds=40)))
    assert 0.004 < away < 0.006


@pytest.mark.parametrize("mode", [*GRAPHS, lazy_ring])
@pytest.mark.parametrize("value", [-0.0, 0.0, math.inf, math.nan, 1e-45, 3.4e38])
def test_S13_a_single_rank_keeps_x_to_the_bit(mode: Any, value: float) -> None:
    assert_equal(average(numbers(value), mode, rounds=3)[0], torch.tensor([value]), EXACT)


@pytest.mark.parametrize(
    ("mode", "sign"), [("one_peer_exponential", -1), ("hypercube", -1), ("ring", -1), ("exponential", 1), (lazy_ring, 1)]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_S13_which_sums_start_from_plus_zero(mode: Any, sign: int, ranks: int) -> None:
    for result in average(numbers(*[-0.0] * ranks), mode):
        assert math.copysign(1, result.item()) == sign


def test_S13_3_the_ring_adds_own_then_left_then_right() -> None:
    # Ranks left, own and right of rank 1: (1 + 2^24) loses the 1 in float32, 2^24 - 2^24 does not.
    assert average(numbers(2.0**24, 1.0, -(2.0**24), 0.0), "ring")[1].item() == 0
    assert average(numbers(1.0, 2.0**24, -(2.0**24), 0.0), "ring")[1].item() == 0
    assert average(numbers(-(2.0**24), 2.0**24, 1.0, 0.0), "ring")[1].item() == torch.tensor(1.0).div(3).item()


def test_S13_4_products_are_rounded_and_added_in_the_order_of_the_row() -> None:
    a, b, third = 1 + 2.0**-12, -(1 + 2.0**-11), 0.5
    x = numbers(a, b)

    def graph(t: int, n: int) -> Any:
        return [[(1, third), (0, 1 - third)], [(0, third), (1, 1 - third)]]

    assert found(average(x, graph)) == [(a + b) / 2] * 2
    weight = torch.tensor(0.1)  # not a number of float32; nor is its product with a
    kept = 1 - weight.item()

    def uneven(t: int, n: int) -> Any:
        return [[(1, weight.item()), (0, kept)], [(0, weight.item()), (1, kept)]]

    product, rest = weight * x[1], torch.tensor(kept) * x[0]
    assert_equal(average(x, uneven)[0], torch.zeros(1) + product + rest, EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_S13_sums_in_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    # 1 + eps/2 + eps/2: rounded after each sum, it stays 1; in float32, it is 1 + eps. A third of 3 * (1 + eps/2) ties to 1.
    x = numbers(3.0, 3 * eps / 2, 3 * eps / 2, 0.0, dtype=dtype)
    exact = (3 + 3 * eps) / 3
    assert average([x[1], x[0], x[2], x[3]], "ring")[1].item() == torch.tensor(exact).to(dtype).item()


def test_S13_hierarchical_leaders_average_node_means() -> None:
    x = numbers(0, 2, 4, 8, 16, 12)
    assert found(average(x, "ring", hierarchical=True, nodes=(3, 1, 2))) == [(2 + 14 + 8) / 3] * 6
    assert found(average(x, "one_peer_exponential", hierarchical=True, nodes=(2, 4))) == [(1 + 10) / 2] * 6
    assert found(average(x, "hypercube", hierarchical=True)) == found(average(x, "all", hierarchical=True))  # a single leader
    assert found(average(x, lazy_ring, hierarchical=True, nodes=(2, 4))) == [0.75 + 2.5] * 2 + [0.25 + 7.5] * 4


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("mode", [*GRAPHS, lazy_ring])
def test_S13_a_round_is_one_exchange_of_so_many_bytes(mode: Any, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode == "hypercube" and n & (n - 1):
        return
    from bagua_ref.communicators.simulated import SimulatedCommunicator

    calls = []
    exchange = SimulatedCommunicator.exchange
    monkeypatch.setattr(SimulatedCommunicator, "exchange", lambda *args: (calls.append(args[0].rank()), exchange(*args)))

    def rank(r: int) -> int:
        bucket, _ = one_bucket(float(r))
        group = bagua_ref.groups.communication._get_default_group().for_background()
        bucket.append_decentralized_synchronous_op(like(bucket), False, mode, group)
        before = group.get_global_communicator().bytes_sent
        bucket.execute()
        return group.get_global_communicator().bytes_sent - before

    receivers = {"ring": min(n - 1, 2), "exponential": (n - 1).bit_length()}.get(mode, min(n - 1, 1))
    assert simulate(n, rank) == [12 * receivers] * n
    assert sorted(calls) == (list(range(n)) if n > 1 else [])


# Checks


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ([[(0, 1.0)]], "the graph has 1 rows; it must have 2"),
        ([[(0, 1.0)]] * 3, "the graph has 3 rows; it must have 2"),
        ([[(0, 1.0)], [(1, 0.5)]], r"row 1 \(sources of rank 1\) has weights that sum to 0.5; they must sum to 1"),
        ([[(0, 1.0)], [(1, 1.0 + 2e-6)]], r"row 1 .* sum to 1.000002"),
        (
            [[(0, 1.0)], [(1, 0.5), (0, 0.5)]],
            r"column 0 \(receivers of rank 0\) has weights that sum to 1.5; they must sum to 1",
        ),
        ([[(0, 1.0)], [(1, 0.5), (1, 0.5)]], "row 1 has source 1 twice; each source may appear once"),
        ([[(1, 1.0)], [(0, 1.0)]], r"row 0 has sources \[1\]; rank 0 itself must be one of them"),
        ([[(0, 1.0)], [(2, 0.0), (1, 1.0)]], "row 1 has source 2; sources must be ranks from 0 to 1"),
        ([[(0, 1.0)], [(-1, 0.0), (1, 1.0)]], "row 1 has source -1;"),
        ([[(0, 1.5), (1, -0.5)], [(1, 1.5), (0, -0.5)]], "row 0 has weight -0.5 for source 1; weights must be finite and not neg"),
        ([[(0, 1.0)], [(1, math.nan)]], "row 1 has weight nan for source 1"),
        ([[(0, 1.0)], [(1, math.inf)]], "row 1 has weight inf for source 1"),
        ([[(0, 1.0)], []], r"row 1 has sources \[\]"),
    ],
)
def test_S13_4_what_is_not_doubly_stochastic_is_refused(graph: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_graph(graph, 2)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (None, "the graph is a NoneType; it must be a list with a row for each of the 2 ranks"),
        ([[0, 1], [1]], r"row 0 of the graph is \[0, 1\]; it must be a list of pairs"),
        ([[(0, 1.0)], [(1.0, 1.0)]], "row 1 of the graph"),
        ([[(0, 1.0)], [(1, "one")]], "row 1 of the graph"),
        ([[(0, 1.0)], [(1, 1.0, 1.0)]], "row 1 of the graph"),
        ([[(0, 1.0)], 7], "row 1 of the graph is 7"),
    ],
)
def test_S13_4_what_is_no_graph_is_refused(graph: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        checked_graph(graph, 2)


def test_S13_4_sums_within_a_millionth_and_any_kind_of_number_are_taken() -> None:
    weight = torch.tensor(1 / 3)
    graph = [[(torch.tensor(s), weight) for s in (0, 1, 2)]] * 2 + [((2, 1 / 3 + 9e-7), (1, 1 / 3), (0, 1 / 3))]
    taken = checked_graph(tuple(graph), 3)
    assert taken[2] == [(2, 1 / 3 + 9e-7), (1, 1 / 3), (0, 1 / 3)]
    assert taken[0] == [(s, weight.item()) for s in (0, 1, 2)]


@pytest.mark.parametrize(("t", "n", "error"), [(-1, 4, ValueError), (0, 0, ValueError), (0.0, 4, TypeError), (0, True, TypeError)])
@pytest.mark.parametrize("mode", MODES)
def test_steps_and_sizes_that_do_not_exist_are_refused(mode: str, t: Any, n: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^[tn]=.* must be"):
        MODES[mode].graph(t, n)


def test_S13_2_only_powers_of_two_are_hypercubes() -> None:
    with pytest.raises(ValueError, match="n=6 must be a power of two"):
        graphs.hypercube(0, 6)


@pytest.mark.parametrize(
    ("ranks", "nodes", "hierarchical", "what"),
    [
        (3, None, False, r"this group has 3 \(ranks\)\. Use"),
        (6, (4, 1, 1), True, r"this group has 3 \(leaders of 6 ranks\)\. Use"),
        (4, (2, 1, 1), True, r"this group has 3 \(leaders of 4 ranks; hierarchical=False pairs ranks instead\)\. Use"),
    ],
)
def test_S13_2_other_numbers_are_refused_on_every_rank(ranks: int, nodes: Any, hierarchical: bool, what: str) -> None:
    def rank(r: int) -> None:
        module = network()
        with pytest.raises(ValueError, match=f"'hypercube' pairs ranks, so it needs a power of two of them; {what}"):
            module.with_bagua([], DecentralizedAlgorithm(hierarchical, "hypercube"))
        bucket, _ = one_bucket(float(r))
        with pytest.raises(ValueError, match=what):
            bucket.append_decentralized_synchronous_op(like(bucket), hierarchical, "hypercube")
        bucket.append_decentralized_synchronous_op(like(bucket), hierarchical, "ring")
        bucket.execute()

    simulate(ranks, rank, nodes=nodes)


@pytest.mark.parametrize("mode", ["some", "", None, 3, ["ring"]])
def test_a_mode_is_a_name_or_a_function(mode: Any) -> None:
    with pytest.raises(ValueError, match=r"must be 'all', 'shift_one', .*'exponential' or a function \(t, n\) -> graph"):
        DecentralizedAlgorithm(peer_selection_mode=mode)


def test_graphs_in_turn_need_one() -> None:
    with pytest.raises(ValueError, match="must hold at least one graph"):
        in_turn([])


# Agreement


def wrong_later(t: int, n: int) -> Any:
    return [[(r, 1.0 if t < 2 else 0.5)] for r in range(n)]


def fails_later(t: int, n: int) -> Any:
    if t == 2:
        raise LookupError("no graph for step 2")
    return lazy_ring(t, n)


def test_S13_4_a_graph_that_is_wrong_at_first_is_refused_when_wrapping_and_training_goes_on_without() -> None:
    def rank(r: int) -> None:
        module = network()
        wrong = in_turn([[[(0, 1.0)], [(1, 1.0)], [(1, 1.0), (2, 0.0)]]])
        with pytest.raises(ValueError, match=r"column 1 \(receivers of rank 1\) has weights that sum to 2\.0"):
            module.with_bagua([], DecentralizedAlgorithm(False, wrong))
        with pytest.raises(LookupError, match="no graph at all"):
            module.with_bagua([], DecentralizedAlgorithm(False, lambda t, n: {}["no graph at all"]))
        module.with_bagua([sgd(module)], DecentralizedAlgorithm(False, lazy_ring))
        train(module, module.bagua_optimizers[0], r, range(3))

    simulate(3, rank)


@pytest.mark.parametrize(
    ("function", "message"), [(wrong_later, "ValueError: row 0 (sources of rank 0)"), (fails_later, "LookupError: 'no")]
)
@pytest.mark.parametrize("hierarchical", [False, True])
def test_S13_4_a_graph_that_is_wrong_later_is_an_error_on_every_rank(function: Any, message: str, hierarchical: bool) -> None:
    def rank(r: int) -> str:
        module = network()
        optimizer = sgd(module)
        module.with_bagua([optimizer], DecentralizedAlgorithm(hierarchical, function))
        train(module, optimizer, r, range(2))
        with pytest.raises(CommunicationError) as raised:
            train(module, optimizer, r, range(2, 3))
        with pytest.raises(CommunicationError, match="cannot train on"):
            train(module, optimizer, r, range(3, 4))
        return str(raised.value)

    message = message.replace("'no", "no graph for step 2")
    assert all(message in said for said in simulate(4, rank, nodes=(2, 1, 1)))


def other_on_rank(which: int, from_step: int, how: str) -> Callable[[int], Any]:
    """Return a function that gives each rank its function: one rank's differs from some step on."""

    def of_rank(rank: int) -> Any:
        def function(t: int, n: int) -> Any:
            if rank != which or t < from_step:
                return lazy_ring(t, n)
            if how == "fails":
                raise OSError("no such file")
            if how == "is wrong":
                return [[]] * n
            if how == "has other weights":
                return [[((r - 1) % n, 0.5), (r, 0.5)] for r in range(n)]
            if how == "has another order":
                return [row[::-1] for row in lazy_ring(t, n)]
            return lazy_ring(t + 1, n)

        return function

    return of_rank


HOW = ["fails", "is wrong", "has other weights", "has another order", "is a step ahead"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("which", [0, 1, 3])
def test_S13_4_a_function_that_differs_between_ranks_is_an_error_on_every_rank(how: str, hierarchical: bool, which: int) -> None:
    """Ranks 1 and 2 are on one node: rank 1 leads it, and of rank 3's node rank 3 is the leader; rank 2 only listens."""

    def run(r: int, from_step: int) -> None:
        bucket, _ = one_bucket(float(r))
        function = other_on_rank(which, from_step, how)(r)
        op = bucket.append_decentralized_synchronous_op(like(bucket), hierarchical, function)
        for _ in range(3):
            bucket.execute()
            op.copy_back_peer_weight(bucket)

    def rank(r: int) -> str:
        for from_step in (0, 2):
            message = f"peer_selection_mode must give the same graph on every rank; at step t={from_step} it gave"
            with pytest.raises(ValueError, match=message) as raised:
                run(r, from_step)
        return str(raised.value)

    said = simulate(4, rank, nodes=(1, 2, 1))
    assert len(set(said)) == 1
    assert f"on rank {which or 1}" in said[0]
    if how in HOW[:2]:
        assert "no valid graph" in said[0]


def differ_in_training(how: str, from_step: int) -> list[str]:
    """Train; return the errors of wrapping or of the step in which one rank's function differs, and of the step after it."""
    module = network()
    optimizer = sgd(module)
    rank = bagua_ref.get_rank()
    function = other_on_rank(1, from_step, how)(rank)
    said = []
    for attempt in (
        lambda: module.with_bagua([optimizer], DecentralizedAlgorithm(False, function)),
        lambda: train(module, optimizer, rank, range(4)),
    ):
        try:
            attempt()
        except (ValueError, CommunicationError) as error:
            said.append(f"{type(error).__name__}: {error}")
            break
    return said


@pytest.mark.parametrize("how", ["fails", "has other weights"])
@pytest.mark.parametrize("from_step", [0, 2])
def test_S13_4_real_processes_neither_wait_nor_mix_when_functions_differ(how: str, from_step: int) -> None:
    for ended in outcomes(differ_in_training, 2, how, from_step):
        assert ended.exitcode == 0, ended.traceback
        (said,) = ended.result
        assert said.startswith("CommunicationError: bucket '0', operation Decentralized" if from_step else "ValueError: ")
        assert f"the same graph on every rank; at step t={from_step} it gave" in said


def test_a_name_on_one_rank_and_a_function_on_another_are_refused_when_wrapping() -> None:
    def rank(r: int) -> None:
        with pytest.raises(ValueError, match="settings differ between ranks"):
            network().with_bagua([], DecentralizedAlgorithm(False, lazy_ring if r else "ring"))

    simulate(2, rank)


# Training


def test_S13_a_failed_attempt_to_wrap_again_does_not_restart_the_graphs() -> None:
    def rank(r: int) -> None:
        module = network()
        optimizer = sgd(module)
        module.with_bagua([optimizer], DecentralizedAlgorithm(False, "one_peer_exponential"))
        train(module, optimizer, r, range(4))
        with pytest.raises(ValueError, match="hypercube"):
            module.with_bagua([optimizer], DecentralizedAlgorithm(False, "hypercube"))
        assert module.bagua_algorithm.state_dict()["averaging_steps"] == [4]
        train(module, optimizer, r, range(4, 7))
        assert module.bagua_algorithm.state_dict()["averaging_steps"] == [7]

    simulate(5, rank)


def random_graph(t: int, n: int) -> Any:
    return doubly_stochastic(n, t)


REAL = ["one_peer_exponential", "hypercube", "ring", "exponential", lazy_ring, random_graph]


def train_all(hierarchical: bool, talking: int) -> list[list[torch.Tensor]]:
    """Return the weights after every step, by mode and dtype."""
    seen = []
    for mode in REAL:
        for dtype in (torch.float32, torch.bfloat16):
            if mode == "hypercube" and not MODES[mode].takes(talking):
                continue
            module = network(dtype=dtype)
            optimizer = sgd(module)
            module.with_bagua([optimizer], DecentralizedAlgorithm(hierarchical, mode, 1 + (mode == "ring")))
            steps = []
            for step in range(4):
                optimizer.zero_grad()
                inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * bagua_ref.get_rank() + step)).to(dtype)
                module(inputs).square().mean().backward()
                optimizer.step()
                steps.append(weights(module))
            seen.append(steps)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(1,), (2,), (3,), (4,), (1, 2, 1)])
def test_S13_real_processes_do_what_the_simulation_does(nodes: tuple[int, ...]) -> None:
    hierarchical, ranks = len(nodes) > 1, sum(nodes)
    given = hierarchical, len(nodes) if hierarchical else ranks
    simulated = simulate(ranks, lambda r: train_all(*given), nodes=nodes)
    for result, wanted in zip(launch(train_all, ranks, *given, nodes=nodes), simulated, strict=True):
        for steps, expected_steps in zip(result, wanted, strict=True):
            for actual, expected in zip(steps, expected_steps, strict=True):
                assert_equal(actual, expected, EXACT)

"""Tests of graphs for decentralized averaging: formulas, checks, agreement between ranks, and real
processes (S13).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.test_decentralized import like, one_bucket
from tests.trainings import network, on_every_rank, sgd, simulate, train, wrapped

from bagua_ref.algorithms import DecentralizedAlgorithm
from bagua_ref.errors import CommunicationError
from bagua_ref.formulas import graphs
from bagua_ref.formulas.graphs import MODES, checked_graph, in_turn


def lazy_ring(t: int, n: int) -> graphs.Graph:
    """A directed ring on which each rank keeps three quarters; it turns round at every step."""
    return [[((r - (-1) ** t) % n, 0.25), (r, 0.75)] for r in range(n)] if n > 1 else [[(0, 1.0)]]


# Checks


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ([[(0, 1.0)]], "the graph has 1 rows; it must have 2"),
        ([[(0, 1.0)]] * 3, "the graph has 3 rows; it must have 2"),
        (
            [[(0, 1.0)], [(1, 0.5)]],
            r"row 1 \(sources of rank 1\) has weights that sum to 0.5; they must sum to 1",
        ),
        ([[(0, 1.0)], [(1, 1.0 + 2e-6)]], r"row 1 .* sum to 1.000002"),
        (
            [[(0, 1.0)], [(1, 0.5), (0, 0.5)]],
            r"column 0 \(receivers of rank 0\) has weights that sum to 1.5; they must sum to 1",
        ),
        (
            [[(0, 1.0)], [(1, 0.5), (1, 0.5)]],
            "row 1 has source 1 twice; each source may appear once",
        ),
        ([[(1, 1.0)], [(0, 1.0)]], r"row 0 has sources \[1\]; rank 0 itself must be one of them"),
        (
            [[(0, 1.0)], [(2, 0.0), (1, 1.0)]],
            "row 1 has source 2; sources must be ranks from 0 to 1",
        ),
        ([[(0, 1.0)], [(-1, 0.0), (1, 1.0)]], "row 1 has source -1;"),
        (
            [[(0, 1.5), (1, -0.5)], [(1, 1.5), (0, -0.5)]],
            "row 0 has weight -0.5 for source 1; weights must be finite and not neg",
        ),
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
    graph = [[(torch.tensor(s), weight) for s in (0, 1, 2)]] * 2 + [
        ((2, 1 / 3 + 9e-7), (1, 1 / 3), (0, 1 / 3))
    ]
    taken = checked_graph(tuple(graph), 3)
    assert taken[2] == [(2, 1 / 3 + 9e-7), (1, 1 / 3), (0, 1 / 3)]
    assert taken[0] == [(s, weight.item()) for s in (0, 1, 2)]


@pytest.mark.parametrize(
    ("t", "n", "error"),
    [(-1, 4, ValueError), (0, 0, ValueError), (0.0, 4, TypeError), (0, True, TypeError)],
)
@pytest.mark.parametrize("mode", MODES)
def test_steps_and_sizes_that_do_not_exist_are_refused(
    mode: str, t: Any, n: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"^[tn]=.* must be"):
        MODES[mode].graph(t, n)


def test_S13_2_only_powers_of_two_are_hypercubes() -> None:
    with pytest.raises(ValueError, match="n=6 must be a power of two"):
        graphs.hypercube(0, 6)


@pytest.mark.parametrize(
    ("mode", "ranks", "nodes", "what"),
    [
        ("shift_one", 3, None, r"3 \(ranks\)\. Use"),
        ("shift_one", 1, None, r"1 \(ranks\)\. Use"),
        (
            "shift_one",
            4,
            (4,),
            r"1 \(leaders of 4 ranks; hierarchical=False pairs ranks instead\)\. Use",
        ),
        (
            "shift_one",
            6,
            (1, 2, 3),
            r"3 \(leaders of 6 ranks; hierarchical=False pairs ranks instead\)\. Use",
        ),
        ("shift_one", 5, (2, 2, 1), r"3 \(leaders of 5 ranks\)\. Use"),
        ("hypercube", 3, None, r"3 \(ranks\)\. Use"),
        ("hypercube", 6, (4, 1, 1), r"3 \(leaders of 6 ranks\)\. Use"),
        (
            "hypercube",
            4,
            (2, 1, 1),
            r"3 \(leaders of 4 ranks; hierarchical=False pairs ranks instead\)\. Use",
        ),
    ],
)
def test_S3_4_S13_2_numbers_without_pairs_are_refused_on_every_rank(
    mode: str, ranks: int, nodes: Any, what: str
) -> None:
    needs = {"shift_one": "an even number", "hypercube": "a power of two"}[mode]
    message = f"{mode!r} pairs ranks, so it needs {needs} of them; this group has {what}"

    def rank(r: int) -> None:
        with pytest.raises(ValueError, match=message):
            network().with_bagua([], DecentralizedAlgorithm(nodes is not None, mode))
        bucket, tensor = one_bucket(float(r))
        with pytest.raises(ValueError, match=message):
            bucket.append_decentralized_synchronous_op(like(bucket), nodes is not None, mode)
        bucket.append_decentralized_synchronous_op(like(bucket), nodes is not None, "all")
        bucket.execute()
        bucket._decentralized_op.copy_back_peer_weight(bucket)
        torch.testing.assert_close(tensor, torch.full((3,), (ranks - 1) / 2))

    simulate(ranks, rank, nodes=nodes)


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


@on_every_rank(3)
def test_S13_4_a_graph_that_is_wrong_at_first_is_refused_when_wrapping_and_training_goes_on_without(
    r: int,
) -> None:
    module = network()
    wrong = in_turn([[[(0, 1.0)], [(1, 1.0)], [(1, 1.0), (2, 0.0)]]])
    with pytest.raises(
        ValueError, match=r"column 1 \(receivers of rank 1\) has weights that sum to 2\.0"
    ):
        module.with_bagua([], DecentralizedAlgorithm(False, wrong))
    with pytest.raises(LookupError, match="no graph at all"):
        module.with_bagua([], DecentralizedAlgorithm(False, lambda t, n: {}["no graph at all"]))
    module.with_bagua([sgd(module)], DecentralizedAlgorithm(False, lazy_ring))
    train(module, module.bagua_optimizers[0], r, range(3))


@pytest.mark.parametrize(
    ("function", "message"),
    [(wrong_later, "ValueError: row 0 (sources of rank 0)"), (fails_later, "LookupError: 'no")],
)
@pytest.mark.parametrize("hierarchical", [False, True])
def test_S13_4_a_graph_that_is_wrong_later_is_an_error_on_every_rank(
    function: Any, message: str, hierarchical: bool
) -> None:
    def rank(r: int) -> str:
        module, optimizer = wrapped(DecentralizedAlgorithm(hierarchical, function))
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
def test_S13_4_a_function_that_differs_between_ranks_is_an_error_on_every_rank(
    how: str, hierarchical: bool, which: int
) -> None:
    """Ranks 1 and 2 are on one node: rank 1 leads it, and of rank 3's node rank 3 is the leader;
    rank 2 only listens.
    """

    def run(r: int, from_step: int) -> None:
        bucket, _ = one_bucket(float(r))
        function = other_on_rank(which, from_step, how)(r)
        op = bucket.append_decentralized_synchronous_op(like(bucket), hierarchical, function)
        for _ in range(3):
            bucket.execute()
            op.copy_back_peer_weight(bucket)

    def rank(r: int) -> str:
        for from_step in (0, 2):
            message = (
                f"peer_selection_mode must give the same graph on every rank; at step t={from_step}"
                " it gave"
            )
            with pytest.raises(ValueError, match=message) as raised:
                run(r, from_step)
        return str(raised.value)

    said = simulate(4, rank, nodes=(1, 2, 1))
    assert len(set(said)) == 1
    assert f"on rank {which or 1}" in said[0]
    if how in HOW[:2]:
        assert "no valid graph" in said[0]


# Training


@on_every_rank(5)
def test_S13_a_failed_attempt_to_wrap_again_does_not_restart_the_graphs(r: int) -> None:
    module, optimizer = wrapped(DecentralizedAlgorithm(False, "one_peer_exponential"))
    train(module, optimizer, r, range(4))
    with pytest.raises(ValueError, match="hypercube"):
        module.with_bagua([optimizer], DecentralizedAlgorithm(False, "hypercube"))
    assert module.bagua_algorithm.state_dict()["averagings"] == 4
    train(module, optimizer, r, range(4, 7))
    assert module.bagua_algorithm.state_dict()["averagings"] == 7

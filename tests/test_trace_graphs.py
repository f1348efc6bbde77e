"""Tests of traces of decentralized averaging along graphs: correct ones pass, faults are located and named (S13)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.launch import launch
from tests.test_graphs import lazy_ring
from tests.trace_trainings import simulate, train_each

from bagua_ref.cli import main
from bagua_ref.conformance.trace import TraceError, check_trace
from bagua_ref.formulas import graphs
from bagua_ref.formulas.graphs import MODES

MODES_AND_FUNCTION = ["one_peer_exponential", "hypercube", "ring", "exponential", lazy_ring]


def on_graph(mode: Any, hierarchical: bool = False) -> dict[str, Any]:
    return {"hierarchical": hierarchical, "peer_selection_mode": mode}


def as_recorded(mode: Any, hierarchical: bool = False) -> dict[str, Any]:
    return on_graph(mode if isinstance(mode, str) else "function", hierarchical)


def test_S13_our_training_over_gloo_does_not_diverge(tmp_path: Path) -> None:
    launch(
        train_each, 2, tmp_path, [(str(place), "decentralized", on_graph(mode)) for place, mode in enumerate(MODES_AND_FUNCTION)]
    )
    for place, mode in enumerate(MODES_AND_FUNCTION):
        report = check_trace(tmp_path / str(place))
        assert report.passed, report
        assert report.options == as_recorded(mode)
        assert (len(report.steps), report.not_checked) == (4, [])


@pytest.mark.parametrize("mode", MODES_AND_FUNCTION)
@pytest.mark.parametrize(("nodes", "hierarchical"), [((1,), False), ((4,), False), ((2, 1), True), ((1, 2, 1, 1), True)])
def test_S13_our_training_does_not_diverge_on_any_nodes(
    tmp_path: Path, mode: Any, nodes: tuple[int, ...], hierarchical: bool
) -> None:
    simulate(tmp_path, "decentralized", on_graph(mode, hierarchical), nodes)
    report = check_trace(tmp_path)
    assert report.passed, report
    assert report.options == as_recorded(mode, hierarchical)
    assert (report.steps, report.not_checked) == ([0, 1, 2, 3], [])


def the_wrong_way_round(t: int, n: int) -> graphs.Graph:
    return [[(r, 0.5), ((2 * r - row[1][0]) % n, 0.5)] for r, row in enumerate(graphs.one_peer_exponential(t, n))]


@pytest.mark.parametrize(
    ("mode", "ranks", "change", "kind"),
    [
        ("one_peer_exponential", 5, the_wrong_way_round, "rank 0 had averaged with rank 2, which is not its peer now"),
        (
            "one_peer_exponential",
            5,
            lambda t, n: graphs.one_peer_exponential(t + t % 2, n),
            "rank 0 had averaged with rank 1, which is not its peer now",
        ),
        ("hypercube", 4, lambda t, n: graphs.hypercube(0, n), "rank 0 had averaged with rank 1, which is not its peer now"),
        ("ring", 4, lambda t, n: [[row[0], row[2]] for row in graphs.ring(t, n)], "rank 0 had left out those of rank 3"),
        ("exponential", 5, lambda t, n: [row[:3] for row in graphs.exponential(t, n)], "rank 0 had left out those of rank 1"),
        ("ring", 4, lambda t, n: graphs.exponential(t, n), "like no known cause"),
    ],
)
def test_S13_another_graph_is_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, ranks: int, change: Callable[[int, int], Any], kind: str
) -> None:
    with monkeypatch.context() as planted:
        planted.setattr("bagua_ref.comm_ops.decentralized.MODES", {**MODES, mode: MODES[mode]._replace(graph=change)})
        simulate(tmp_path, "decentralized", on_graph(mode), (ranks,), steps=3)
    report = check_trace(tmp_path)
    assert report.first is not None
    # After wrapping, all ranks have equal weights, so only the rounding of the mean can differ at step 0.
    assert (report.first.step <= 1, report.first.rank) == (True, 0)
    assert any(kind in found for found in report.kinds), report.kinds


def edit(directory: Path, rank: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the info of every record of a rank."""
    index = directory / f"rank{rank}" / "steps.jsonl"
    entries = [json.loads(line) for line in index.read_text().splitlines()]
    for entry in entries:
        for record in entry["records"]:
            change(record["info"])
    index.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (None, "the graph of the function was not recorded on rank 1"),
        ("[]", "rank 1 used another graph than rank 0"),
        (7, "must be a string"),
    ],
)
def test_S13_4_a_function_is_replayed_with_the_graph_that_all_ranks_recorded(tmp_path: Path, graph: Any, message: str) -> None:
    simulate(tmp_path, "decentralized", on_graph(lazy_ring), (3,))
    edit(tmp_path, 1, lambda info: info.update(graph=graph))
    with pytest.raises(TraceError, match=message):
        check_trace(tmp_path)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("[[[0, 1.0]], [[1, 1.0]]]", "the recorded graph cannot be used: the graph has 2 rows; it must have 3"),
        ("[[[0, 1.0]], [[1, 1.0]], [[2, 0.5]]]", r"row 2 \(sources of rank 2\) has weights that sum to 0.5"),
        ("[[[0, 1.0]], [[1, 1.0]], [[2, 1e999]]]", "row 2 has weight inf for source 2"),
        (f"[[[0, 1.0]], [[1, 1.0]], [[2, 1{'0' * 400}]]]", "it must be a list of pairs"),
        ("[" * 100_000, "nested more than 50 levels deep|not valid JSON"),
        ("{", "the recorded graph cannot be used: it is not valid JSON"),
    ],
    ids=["rows", "sum", "inf", "large", "deep", "JSON"],
)
def test_S13_4_a_recorded_graph_that_is_damaged_is_refused(tmp_path: Path, graph: str, message: str) -> None:
    simulate(tmp_path, "decentralized", on_graph(lazy_ring), (3,))
    for rank in range(3):
        edit(tmp_path, rank, lambda info: info.update(graph=graph))
    with pytest.raises(TraceError, match=message):
        check_trace(tmp_path)


def test_S13_a_mode_that_does_not_take_so_many_ranks_is_not_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(tmp_path, "decentralized", on_graph("ring"), (5,), steps=2)
    assert main(["trace", "check", str(tmp_path), "--option", "peer_selection_mode=hypercube"]) == 2
    assert "hypercube needs a power of two of ranks, and there are 5" in capsys.readouterr().err
    assert main(["trace", "check", str(tmp_path), "--option", "peer_selection_mode=exponential"]) == 1
    assert "DIVERGENCE" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["trace", "check", str(tmp_path), "--option", "peer_selection_mode=star"])
    assert "must be one of all, shift_one, one_peer_exponential, hypercube, ring, exponential, function" in capsys.readouterr().err

"""Tests of traces with each algorithm: correct trainings pass, faults are located and named (S3.1
to S3.6, S5, S9 to S11, S13).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch import launch
from tests.test_graphs import lazy_ring
from tests.trace_trainings import record_steps, simulate, train_each

from bagua_ref.algorithms.fragments import FragmentSchedule
from bagua_ref.cli import main
from bagua_ref.comm_ops import LowRank, TopK
from bagua_ref.conformance.expected import compression_numpy
from bagua_ref.conformance.trace import TraceError, TraceReport, check_trace
from bagua_ref.conformance.trace.replay import ALGORITHMS, merged_options, parse_options
from bagua_ref.formulas import graphs
from bagua_ref.formulas.graphs import MODES

Training = tuple[str, dict[str, Any], tuple[int, ...]]
"""An algorithm's name, its options, and the number of ranks on each node."""


def on_graph(mode: Any, hierarchical: bool = False) -> dict[str, Any]:
    return {"hierarchical": hierarchical, "peer_selection_mode": mode}


FLAT, SHIFT_ONE = {"hierarchical": False}, on_graph("shift_one")
MODES_AND_FUNCTION = ["one_peer_exponential", "hypercube", "ring", "exponential", lazy_ring]
EVERY = {"warmup_steps": 0, "min_compression_rate": 0.01}
EACH_STEP: list[Training] = [
    (name, {"hierarchical": hierarchical}, nodes)
    for name in (
        "gradient_allreduce",
        "bytegrad",
        "decentralized",
        "low_precision_decentralized",
        "qadam",
    )
    for nodes, hierarchical in (((1,), False), ((3,), True), ((2, 2), False), ((1, 3), True))
] + [
    ("decentralized", on_graph(mode, hierarchical), nodes)
    for mode in MODES_AND_FUNCTION
    for nodes, hierarchical in (
        ((1,), False),
        ((2, 2), False),
        ((2, 1), True),
        ((1, 2, 1, 1), True),
    )
]
PERIODIC: list[Training] = [
    ("local_sgd", {"period": 2, "warmup_steps": 2}, (2, 1)),
    ("local_sgd", {"period": 3, "offset": 1}, (1,)),
    ("local_sgd", {"period": 2, "warmup_steps": 1, "hierarchical": True}, (2, 1)),
    ("diloco", {"period": 2, "warmup_steps": 1}, (3,)),
    ("diloco", {"period": 4, "fragments": 2, "delay": 1, "mix": 0.5}, (1, 2)),
    (
        "diloco",
        {
            "period": 2,
            "fragments": [["0.weight", "2.bias"], ["2.weight", "0.bias"]],
            "compression": "MinMaxUInt8",
        },
        (2, 3),
    ),
    ("powersgd", {**EVERY, "matrix_approximation_rank": 2}, (2,)),
    (
        "powersgd",
        {
            "warmup_steps": 2,
            "min_compression_rate": 0.5,
            "memory": "averaged",
            "warm_start": False,
            "seed": 5,
        },
        (1, 2),
    ),
    ("powersgd", {**EVERY, "memory": None}, (3,)),
    ("topk", {"ratio": 0.1, "warmup_steps": 1}, (2, 1)),
    ("topk", {"ratio": 0.3, "error_feedback": False}, (2,)),
]
GLOO = [
    ("gradient_allreduce", {}),
    ("bytegrad", FLAT),
    ("bytegrad", {}),
    ("decentralized", FLAT),
    ("decentralized", SHIFT_ONE),
    ("low_precision_decentralized", FLAT),
    ("qadam", FLAT),
    ("async", {"sync_interval_ms": 5, "warmup_steps": 2}),
    *(("decentralized", on_graph(mode)) for mode in MODES_AND_FUNCTION),
    *((name, options) for name, options, _ in PERIODIC if not options.get("hierarchical")),
]
# of 4 steps: the others communicate in each
LEAST_STEPS = {"async": 3, "local_sgd": 1, "diloco": 1}


def names(trainings: list[Any]) -> list[str]:
    return [f"{place}-{name}" for place, (name, *_) in enumerate(trainings)]


def check_ours(directory: Path, name: str, options: dict[str, Any]) -> TraceReport:
    """Return the report of a training of ours, whose trace names its algorithm and options; all of
    it must be right.
    """
    report = check_trace(directory)
    assert report.passed, report
    assert (report.algorithm, report.not_checked, report.notes) == (name, [], [])
    for option in options.keys() & ALGORITHMS[name].keys():
        value = options[option]
        recorded = (
            "function" if callable(value) else len(value) if isinstance(value, list) else value
        )
        assert report.options[option] == recorded, option
    return report


def test_our_training_over_gloo_does_not_diverge(tmp_path: Path) -> None:
    launch(
        train_each,
        2,
        tmp_path,
        [(str(place), name, options) for place, (name, options) in enumerate(GLOO)],
    )
    for place, (name, options) in enumerate(GLOO):
        report = check_ours(tmp_path / str(place), name, options)
        assert len(report.steps) >= LEAST_STEPS.get(name, 4)
    assert check_trace(tmp_path / "2").options["hierarchical"]


@pytest.mark.filterwarnings("ignore:with hierarchical=True")  # which saves no bytes on one node
@pytest.mark.parametrize(("name", "options", "nodes"), EACH_STEP, ids=names(EACH_STEP))
def test_our_training_does_not_diverge_on_any_nodes(
    tmp_path: Path, name: str, options: dict[str, Any], nodes: Any
) -> None:
    simulate(tmp_path, name, options, nodes)
    report = check_ours(tmp_path, name, options)
    assert report.steps == [0, 1, 2, 3]
    assert report.values >= 4 * sum(nodes) * 102


@pytest.mark.parametrize(("name", "options", "nodes"), PERIODIC, ids=names(PERIODIC))
def test_our_training_with_periods_or_memories_does_not_diverge(
    tmp_path: Path, name: str, options: dict[str, Any], nodes: Any
) -> None:
    simulate(tmp_path, name, options, nodes, steps=6)
    check_ours(tmp_path, name, options)


# Faults planted in our trainings


def test_S10_a_memory_that_is_not_updated_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(
            LowRank,
            "_decompress",
            lambda self, name, m, p, q, own: (self._factors[name].copy_(q), m.copy_(p @ q.T)),
        )
        simulate(tmp_path, "powersgd", {**EVERY}, (2,))
    first = check_trace(tmp_path).first
    assert first is not None
    assert (first.tensor, first.expected == first.got) == ("e", False)


def test_S11_2_a_sum_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TopK.__call__

    def summed(self: TopK, x: torch.Tensor) -> None:
        right(self, x)
        x *= self.comm.nranks()

    with monkeypatch.context() as planted:
        planted.setattr(TopK, "__call__", summed)
        simulate(tmp_path, "topk", {"ratio": 0.5}, (2,))
    assert [*check_trace(tmp_path).kinds] == ["as if summed, where a mean was expected"]


def the_wrong_way_round(t: int, n: int) -> graphs.Graph:
    return [
        [(r, 0.5), ((2 * r - row[1][0]) % n, 0.5)]
        for r, row in enumerate(graphs.one_peer_exponential(t, n))
    ]


@pytest.mark.parametrize(
    ("mode", "ranks", "change", "kind"),
    [
        (
            "one_peer_exponential",
            5,
            the_wrong_way_round,
            "rank 0 had averaged with rank 2, which is not its peer now",
        ),
        (
            "one_peer_exponential",
            5,
            lambda t, n: graphs.one_peer_exponential(t + t % 2, n),
            "rank 0 had averaged with rank 1, which is not its peer now",
        ),
        (
            "hypercube",
            4,
            lambda t, n: graphs.hypercube(0, n),
            "rank 0 had averaged with rank 1, which is not its peer now",
        ),
        (
            "ring",
            4,
            lambda t, n: [[row[0], row[2]] for row in graphs.ring(t, n)],
            "rank 0 had left out those of rank 3",
        ),
        (
            "exponential",
            5,
            lambda t, n: [row[:3] for row in graphs.exponential(t, n)],
            "rank 0 had left out those of rank 1",
        ),
        ("ring", 4, lambda t, n: graphs.exponential(t, n), "like no known cause"),
    ],
)
def test_S13_another_graph_is_found_and_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    ranks: int,
    change: Callable[[int, int], Any],
    kind: str,
) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(
            "bagua_ref.comm_ops.decentralized.MODES",
            {**MODES, mode: MODES[mode]._replace(graph=change)},
        )
        simulate(tmp_path, "decentralized", on_graph(mode), (ranks,), steps=3)
    report = check_trace(tmp_path)
    assert report.first is not None
    # After wrapping, all ranks have equal weights, so only the rounding of the mean can differ at
    # step 0.
    assert (report.first.step <= 1, report.first.rank) == (True, 0)
    assert any(kind in found for found in report.kinds), report.kinds


@pytest.mark.parametrize(
    ("ranks", "graph", "message"),
    [
        ([1], None, "info 'graph' was not recorded on rank 1"),
        ([1], "[]", r"rank 1 recorded graph='\[\]', and rank 0 graph="),
        ([1], 7, "must be a string"),
        (
            [0, 1, 2],
            "[[[0, 1.0]], [[1, 1.0]]]",
            "the recorded graph cannot be used: the graph has 2 rows; it must have 3",
        ),
        (
            [0, 1, 2],
            "[[[0, 1.0]], [[1, 1.0]], [[2, 0.5]]]",
            r"row 2 \(sources of rank 2\) has weights that sum to 0.5",
        ),
        ([0, 1, 2], "[[[0, 1.0]], [[1, 1.0]], [[2, 1e999]]]", "row 2 has weight inf for source 2"),
        ([0, 1, 2], f"[[[0, 1.0]], [[1, 1.0]], [[2, 1{'0' * 400}]]]", "it must be a list of pairs"),
        ([0, 1, 2], "[" * 100_000, "nested more than 50 levels deep|not valid JSON"),
        ([0, 1, 2], "{", "the recorded graph cannot be used: it is not valid JSON"),
    ],
    ids=["missing", "differs", "number", "rows", "sum", "inf", "large", "deep", "JSON"],
)
def test_S13_4_a_recorded_graph_must_be_valid_and_the_same_on_all_ranks(
    tmp_path: Path, ranks: list[int], graph: Any, message: str
) -> None:
    simulate(tmp_path, "decentralized", on_graph(lazy_ring), (3,))
    for rank in ranks:
        index = tmp_path / f"rank{rank}" / "steps.jsonl"
        entries = [json.loads(line) for line in index.read_text().splitlines()]
        for entry in entries:
            for record in entry["records"]:
                record["info"]["graph"] = graph
        index.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    with pytest.raises(TraceError, match=message):
        check_trace(tmp_path)


def test_S13_a_mode_that_does_not_take_so_many_ranks_is_not_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(tmp_path, "decentralized", on_graph("ring"), (5,), steps=2)
    assert main(["trace", "check", str(tmp_path), "--option", "peer_selection_mode=hypercube"]) == 2
    assert "hypercube needs a power of two of ranks, and there are 5" in capsys.readouterr().err
    assert (
        main(["trace", "check", str(tmp_path), "--option", "peer_selection_mode=exponential"]) == 1
    )
    assert "DIVERGENCE" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["trace", "check", str(tmp_path), "--option", "peer_selection_mode=star"])
    assert (
        "must be one of all, shift_one, one_peer_exponential, hypercube, ring, exponential,"
        " function" in capsys.readouterr().err
    )


def test_S9_a_schedule_that_is_not_kept_is_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(
            FragmentSchedule,
            "applied_after",
            lambda self, step: None if step % self.gap else step // self.gap % self.count,
        )
        simulate(tmp_path, "diloco", {"period": 2, "fragments": 2}, (2,))
    report = check_trace(tmp_path)
    assert str(report.first).startswith("step 0, rank 0, bucket 'fragment1', tensor 'fragment'[0]")
    assert [*report.kinds] == [
        "as if another fragment had been sent after that step than is due (-1: none)"
    ]
    assert check_trace(tmp_path, options={"period": None}).passed  # values alone are right


def test_S9_1_an_offset_that_is_not_kept_is_found_and_named(tmp_path: Path) -> None:
    simulate(tmp_path, "local_sgd", {"period": 2}, (2,))
    report = check_trace(tmp_path, options={"offset": 1})
    assert report.first is not None
    assert (report.first.tensor, report.first.expected, report.first.got) == ("averages", 0, 1)
    assert [*report.kinds] == [
        "as if weights had been averaged after another step than the period and the offset say"
    ]


# Trainings of outsiders, with faults planted in what they record

Values = dict[str, Any]
Change = Callable[[Values], Values]
N, ROWS, COLUMNS, R = 2, 6, 5, 2


def by_rank(values: Values, names: dict[str, str]) -> list[Values]:
    """Return what each rank records by role; values of both ranks are lists, missing ones None."""
    found = []
    for rank in range(N):
        mine = {
            role: value[rank] if isinstance(value := values[name], list) else value
            for role, name in names.items()
        }
        found.append({role: value for role, value in mine.items() if value is not None})
    return found


def record_diloco(directory: Path, change: Change = lambda values: {}, **options: Any) -> None:
    """Record DiLoCo with period 1, one fragment and a plain outer step."""
    generator, steps, half = np.random.default_rng(0), [], np.float32(0.5)
    g = generator.standard_normal(6).astype(np.float32)
    xs = [g] * N
    for t, gradients in enumerate(generator.standard_normal((4, N, 6)).astype(np.float32), start=1):
        xs = [x - half * gradient for x, gradient in zip(xs, gradients, strict=True)]
        values: Values = {
            "t": t,
            "fragment": 0,
            "g": [g] * N,
            "x": [np.append(g - x, np.zeros(2, np.float32)) for x in xs],
        }
        values |= {"D": sum(values["x"]) / np.float32(N), "weights": xs, "before": xs}
        g = g - half * values["D"][:6]
        xs = [g + np.float32(0.25) * (x - g) for x in xs]
        values |= {"new g": [g] * N, "after": xs}
        values |= change(values)
        applied = by_rank(values, {"x": "D", "g": "new g", "before": "before", "weights": "after"})
        sent = by_rank(values, {"x": "x", "g": "g", "weights": "weights"})
        steps.append((sent, {"t": values["t"], "fragment": values["fragment"]}, applied))
    record_steps(directory, steps, "diloco", **{"mix": 0.25, "period": 1, **options})


def record_powersgd(directory: Path, change: Change = lambda values: {}) -> None:
    """Record powersgd on one matrix after three other elements."""
    generator, steps = np.random.default_rng(0), []
    errors, q = [np.zeros((ROWS, COLUMNS), np.float32)] * N, None
    for k in range(3):
        gradients = list(generator.standard_normal((N, 3 + ROWS * COLUMNS)).astype(np.float32))
        matrices = [g[3:].reshape(ROWS, COLUMNS) for g in gradients]
        done = compression_numpy.power_sgd_round(
            matrices, errors, q, R, memory="local", seed=9, k=k, i=1
        )
        assert done.q is not None
        assert done.errors is not None
        mean = sum(g[:3] for g in gradients) / np.float32(N)
        values: Values = {
            "k": k,
            "matrices": json.dumps([[3, ROWS, COLUMNS, R, 1]]),
            "x": gradients,
            "e": errors,
            "q": [q] * N,
        }
        values |= {
            "result": np.concatenate([mean, done.result.ravel()]),
            "new e": done.errors,
            "new q": [done.q] * N,
        }
        values |= change(values)
        outputs = by_rank(values, {"x": "result", "e": "new e", "q": "new q"})
        info = {"k": values["k"], "matrices": values["matrices"]}
        steps.append((by_rank(values, {"x": "x", "e": "e", "q": "q"}), info, outputs))
        errors, q = done.errors, done.q
    record_steps(directory, steps, "powersgd", memory="local", warm_start=True, seed=9)


def record_topk(directory: Path, change: Change = lambda values: {}) -> None:
    """Record topk on 10 elements."""
    generator, errors, steps = np.random.default_rng(1), [np.zeros(10, np.float32)] * N, []
    for _ in range(3):
        gradients = list(generator.standard_normal((N, 10)).astype(np.float32))
        result, left = compression_numpy.topk_round(gradients, errors, 0.3, "float32")
        assert left is not None
        values: Values = {"x": gradients, "e": errors, "result": result, "new e": left, "info": {}}
        values |= change(values)
        steps.append(
            (
                by_rank(values, {"x": "x", "e": "e"}),
                values["info"],
                by_rank(values, {"x": "result", "e": "new e"}),
            )
        )
        errors = left
    record_steps(directory, steps, "topk", ratio=0.3)


@pytest.mark.parametrize(
    ("record", "compared"),
    [
        # the mean, the difference, g, the mix, x before and the schedule; g and t after a round
        (record_diloco, 4 * 6 + 3 * 2),
        (record_powersgd, 3 * 3),  # the averaged gradients, e and Q
        (record_topk, 3 * 2),
    ],
)
def test_what_an_outsider_records_is_checked(
    tmp_path: Path, record: Callable[[Path], None], compared: int
) -> None:
    record(tmp_path)
    report = check_trace(tmp_path)
    assert report.passed, report
    assert (len(report.executions), report.not_checked) == (compared, [])


@pytest.mark.parametrize(
    ("record", "change", "tensor", "kind"),
    [
        (
            record_diloco,
            lambda v: {"D": sum(v["x"])},
            "x",
            "as if summed, where a mean was expected",
        ),
        (record_diloco, lambda v: {"D": v["x"][0]}, "x", "like no known cause"),
        (record_diloco, lambda v: {"weights": v["g"]}, "difference", ""),
        (record_diloco, lambda v: {"x": [x + (np.arange(8) == 7) for x in v["x"]]}, "x", ""),
        (
            record_diloco,
            lambda v: {"new g": [v["new g"][0], v["new g"][1] * np.float32(1.5)]},
            "g",
            "",
        ),
        (
            record_diloco,
            lambda v: {
                "after": [(x + g) / 2 for x, g in zip(v["before"], v["new g"], strict=True)]
            },
            "weights",
            "like no known cause",
        ),
        (record_diloco, lambda v: {"after": v["new g"]}, "weights", "like no known cause"),
        (
            record_diloco,
            lambda v: {"fragment": 1},
            "fragment",
            "as if another fragment had been sent after that step than is due",
        ),
        (
            record_diloco,
            lambda v: {"t": 0},
            "fragment",
            "as if another fragment had been sent after that step than is due",
        ),
        (record_powersgd, lambda v: {"result": v["result"] * np.float32(N)}, "x", ""),
        (
            record_powersgd,
            lambda v: {"result": np.concatenate([v["result"][:3], v["x"][0][3:]])},
            "x",
            "",
        ),
        (
            record_powersgd,
            lambda v: {"result": np.concatenate([v["x"][0][:3], v["result"][3:]])},
            "x",
            "",
        ),
        (record_powersgd, lambda v: {"new e": [e * np.float32(1.01) for e in v["new e"]]}, "e", ""),
        (
            record_powersgd,
            lambda v: {"new q": [q * np.float32(N) for q in v["new q"]]},
            "factor",
            "",
        ),
        (record_powersgd, lambda v: {"matrices": json.dumps([[3, ROWS, COLUMNS, R, 0]])}, "x", ""),
        (record_topk, lambda v: {"result": np.nextafter(v["result"], np.float32(9))}, "x", ""),
        (
            record_topk,
            lambda v: {"new e": [x + e for x, e in zip(v["x"], v["e"], strict=True)]},
            "e",
            "",
        ),
    ],
    ids=[
        "diloco-sum",
        "diloco-first rank's",
        "diloco-g again",
        "diloco-padding",
        "diloco-g differs",
        "diloco-half",
        "diloco-no mix",
        "diloco-fragment",
        "diloco-step 0",
        "powersgd-sum",
        "powersgd-not compressed",
        "powersgd-others local",
        "powersgd-memory",
        "powersgd-factor",
        "powersgd-place",
        "topk-one ulp",
        "topk-all kept",
    ],
)
def test_a_fault_of_an_outsider_is_found(
    tmp_path: Path, record: Any, change: Change, tensor: str, kind: str
) -> None:
    record(
        tmp_path,
        lambda values: {
            k: np.asarray(v, np.float32) if k == "D" else v for k, v in change(values).items()
        },
    )
    report = check_trace(tmp_path)
    assert report.first is not None
    assert report.first.tensor == tensor
    assert any(found.startswith(kind) for found in report.kinds), report.kinds


def test_S10_another_basis_is_no_fault(tmp_path: Path) -> None:
    turned = np.array([[0.6, -0.8], [0.8, 0.6]], np.float32)
    record_powersgd(tmp_path, lambda v: {"new q": [q @ turned for q in v["new q"]]})
    assert check_trace(tmp_path).passed


@pytest.mark.parametrize(
    ("record", "change", "message"),
    [
        (
            record_diloco,
            lambda v: {"g": [g[:5] for g in v["g"]]},
            "inputs g and weights have 5 and 6 elements, and x has 8",
        ),
        (
            record_diloco,
            lambda v: {"x": [x[:5] for x in v["x"]], "D": v["D"][:5]},
            "inputs g and weights have 6 and 6 elements, and x has 5",
        ),
        (
            record_diloco,
            lambda v: {"new g": [g.astype(np.float64) for g in v["new g"]]},
            "output g of rank 0 has 6 elements of torch.float64",
        ),
        (record_powersgd, lambda v: {"matrices": "[[1, 2"}, "the recorded matrices cannot be used"),
        (
            record_powersgd,
            lambda v: {"matrices": "[[0, 6]]"},
            "the recorded matrices cannot be used",
        ),
        (
            record_powersgd,
            lambda v: {"matrices": json.dumps([[4, ROWS, COLUMNS, R, 0]])},
            "in a bucket of 33 elements",
        ),
        (
            record_powersgd,
            lambda v: {"matrices": json.dumps([[3, ROWS, COLUMNS, 6, 0]])},
            "in a bucket of 33 elements",
        ),
        (
            record_powersgd,
            lambda v: {"e": [e[:2] for e in v["e"]]},
            "input e of rank 0 has 10 elements, and must have 30",
        ),
        (
            record_powersgd,
            lambda v: {"e": [e.astype(np.float64) for e in v["e"]]},
            "input 'e' of rank 0 is torch.float64, and must be torch.float32",
        ),
        (
            record_powersgd,
            lambda v: {"k": v["k"] + 3, "e": None},
            "input 'q' was not recorded on rank 0",
        ),
        (
            record_powersgd,
            lambda v: {"new q": [q[:2] for q in v["new q"]]},
            "output q of rank 0 has 4 elements, and must have 10",
        ),
        (record_topk, lambda v: {"e": None}, "input 'e' was not recorded on rank 0"),
        (record_topk, lambda v: {"info": {"elements": 11}}, "elements=11 of a bucket of 10"),
    ],
    ids=[
        "diloco-g",
        "diloco-x",
        "diloco-dtype",
        "powersgd-text",
        "powersgd-numbers",
        "powersgd-beyond",
        "powersgd-rank",
        "powersgd-e",
        "powersgd-dtype",
        "powersgd-missing",
        "powersgd-q",
        "topk-e",
        "topk-elements",
    ],
)
def test_what_does_not_fit_is_not_replayed(
    tmp_path: Path, record: Any, change: Change, message: str
) -> None:
    record(tmp_path, change)
    with pytest.raises(TraceError, match=message):
        check_trace(tmp_path)


def test_options_of_another_training_do_not_pass(tmp_path: Path) -> None:
    record_diloco(tmp_path / "diloco", fragments=2)
    with pytest.raises(
        TraceError, match="period=1 must be a multiple of the number of fragments, 2"
    ):
        check_trace(tmp_path / "diloco")
    record_topk(tmp_path / "topk", lambda v: {"e": None})
    assert not check_trace(tmp_path / "topk", options={"error_feedback": False}).passed


def test_S9_options_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_diloco(tmp_path)
    assert (
        main(["trace", "check", str(tmp_path), "--option", "mix=0.5", "--option", "period=none"])
        == 1
    )
    assert "tensor 'weights'[0]" in capsys.readouterr().out
    assert parse_options(["compression=none", "period=4"]) == {"compression": None, "period": 4}


def test_options_are_checked() -> None:
    wrong = {
        "diloco": [
            ("period", 0),
            ("fragments", None),
            ("delay", -1),
            ("mix", 2),
            ("compression", "zip"),
            ("mix", True),
        ],
        "local_sgd": [("offset", -1)],
        "powersgd": [("memory", "global"), ("warm_start", 2), ("seed", -1), ("seed", 2**32)],
        "topk": [("ratio", 0), ("ratio", 1.5), ("error_feedback", None)],
    }
    for algorithm, options in wrong.items():
        for option, value in options:
            with pytest.raises(ValueError, match=f"option {option}={value!r} must be"):
                merged_options(algorithm, {}, {option: value})

"""Tests of plans and of ``bagua-ref advise`` and ``measure``: numbers worked out by hand, what is
said, and bad input (S14).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch import launch, run_script
from tests.test_memory import FOR_GOOD

from bagua_ref.algorithms import (
    Algorithm,
    AlgorithmImpl,
    AsyncModelAverageAlgorithm,
    DecentralizedAlgorithm,
    GlobalAlgorithmRegistry,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    QAdamOptimizer,
)
from bagua_ref.backends import KernelBackend
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.cli import main
from bagua_ref.cli.advise import CANDIDATES
from bagua_ref.cli.command import CommandError
from bagua_ref.cli.measure import check_fits
from bagua_ref.comm_ops import CommOp
from bagua_ref.communicators.base import Communicator
from bagua_ref.formulas.costs import LinkCost, LinkCosts
from bagua_ref.formulas.graphs import MODES
from bagua_ref.formulas.mixing import mixing
from bagua_ref.planning import (
    Cluster,
    Estimate,
    Fit,
    Machine,
    MeasuredMachine,
    fit_link,
    median_of,
    module_of,
    plan_of,
    predict,
)
from bagua_ref.planning.advice import compare, error_of, verdict_of
from bagua_ref.planning.measured import exact
from bagua_ref.planning.plans import own_seconds

ROOT = Path(__file__).parents[1]
# sums of such numbers are exact
MACHINE = Machine(LinkCosts(LinkCost(0.5, 2**-10), LinkCost(0.125, 2**-12)), compute=3.0)
BASE = ["--params", "4e6", "--ranks", "4", "--bandwidth", "1Gbit", "--compute", "10ms"]
FEW = [
    word
    for name in ("gradient_allreduce", "local_sgd:period=32", "bytegrad", "decentralized", "async")
    for word in ("--algorithm", name)
]


def linear(inputs: int = 15, outputs: int = 16) -> torch.nn.Module:
    """Return a module of 256 parameters, 1 KiB."""
    return torch.nn.Linear(inputs, outputs, device="meta")


def model() -> torch.nn.Module:
    return torch.nn.Linear(2000, 1000)


def lazy_model() -> torch.nn.Module:
    return torch.nn.LazyLinear(4)


def model_of_values() -> torch.nn.Module:
    return torch.nn.Linear(int(torch.ones(3).sum().item()), 3)


def model_that_exits() -> torch.nn.Module:
    sys.exit(3)


def no_model() -> int:
    return 3


def broken_model() -> None:
    raise RuntimeError("no weights")


def pass_of_a_model() -> Callable[[], None]:
    module = torch.nn.Linear(50, 50)
    return lambda: module(torch.ones(4, 50)).sum().backward()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs ``bagua-ref advise`` and returns the exit code, standard output
    and standard error.
    """
    monkeypatch.setenv("COLUMNS", "120")

    def command(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(["advise", *arguments])
        except SystemExit as ended:
            code = int(str(ended.code))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


# Messages


def test_S3_3_sums_of_16_bits_or_in_order_are_gathered_and_others_reduced() -> None:
    def first_round(name: str, dtype: torch.dtype) -> list[tuple[int, int, int]]:
        plan = plan_of(Algorithm.init(name, hierarchical=True), linear().to(dtype), (4, 1))
        return plan.exchanges(1)[0].operation[0]

    for name, dtype in (
        ("gradient_allreduce", torch.bfloat16),
        ("bytegrad", torch.float16),
        ("bytegrad", torch.float32),
    ):
        # bytegrad's are padded to a multiple of 5 ranks
        nbytes = (260 if name == "bytegrad" else 256) * dtype.itemsize
        assert first_round(name, dtype) == [(rank, 0, nbytes) for rank in (1, 2, 3)], name
    assert first_round("gradient_allreduce", torch.float32) == [(2, 0, 1024), (3, 1, 1024)]


# Times


def test_S14_4_steps_of_two_ranks_are_those_worked_out_by_hand() -> None:
    # An all-reduce is 2 rounds of 512 bytes: 2 * (0.5 + 0.5) s. There is one bucket, ready at the
    # end of backward.
    assert predict(plan_of(GradientAllReduceAlgorithm(), linear(), (1, 1)), MACHINE)[:2] == (
        5.0,
        2.0,
    )
    # Weights are on their way from the start of the forward pass, which hides them.
    assert predict(plan_of(DecentralizedAlgorithm(hierarchical=False), linear(), (1, 1)), MACHINE)[
        :2
    ] == (3.0, 0.0)
    # Every 4th step waits for the weights.
    assert predict(plan_of(LocalSGDAlgorithm(4, warmup_steps=9), linear(), (1, 1)), MACHINE)[
        :2
    ] == (3.5, 0.5)
    # Nothing waits, and a round also takes 2 messages of 4 bytes to agree.
    found = predict(plan_of(AsyncModelAverageAlgorithm(), linear(), (1, 1)), MACHINE)
    assert found == (3.0, 0.0, 2.0 + 2 * (0.5 + 4 * 2**-10))


def test_codecs_take_time_beside_links_by_their_name_or_else_the_common_rate() -> None:
    plan = plan_of(Algorithm.init("bytegrad", hierarchical=False), linear(), (1, 1))
    without = predict(plan, MACHINE).seconds
    elements = 3 * 256 + 128
    assert (
        predict(plan, MACHINE._replace(codec={"": 1.0, "MinMaxUInt8": 0.25})).seconds
        == without + 0.25 * elements
    )
    assert predict(plan, MACHINE._replace(codec={"": 0.5})).seconds == without + 0.5 * elements
    alone = plan_of(Algorithm.init("bytegrad", hierarchical=False), linear(), (1,))
    assert alone.exchanges(1)[0].work == (("MinMaxUInt8", 4 * 256),)
    exact = plan_of(GradientAllReduceAlgorithm(), linear(), (1, 1))
    assert predict(exact, MACHINE._replace(codec={"": 1.0})) == predict(exact, MACHINE)


def test_a_shared_processor_computes_longer_by_what_it_does_for_operations_beside() -> None:
    module = torch.nn.Sequential(*(linear() for _ in range(2)))
    costs: dict[str, Any] = {"operation": {"": 0.25, "OneBit": 0.5}, "codec": {"": 2**-8}}
    beside, shared = MACHINE._replace(**costs), MACHINE._replace(**costs, shared_processor=True)
    # MinMaxUInt8: 128 bytes, and 32 of its scale
    own, wires = 0.25 + 2**-8 * (3 * 256 + 128), 2 * (0.5 + 1 / 8 + 2**-10 * 32)
    compressed = plan_of(Algorithm.init("bytegrad", hierarchical=False), module, (1, 1), 1024)
    assert len(compressed.exchanges(1)) == 2  # of half the bytes each
    assert predict(compressed, beside).seconds == 2.0 + 2 * (own + wires)
    assert (
        predict(compressed, shared).seconds
        == max(2.0 + own / 2 + own + wires, 3.0 + own) + own + wires
    )
    # Nothing is exposed, and yet the processor works.
    passing = plan_of(DecentralizedAlgorithm(hierarchical=False), linear(), (1, 1))
    assert predict(passing, beside).seconds == 3.0
    assert predict(passing, shared) == (3.25, 0.25, 2.25)
    delayed = plan_of(Algorithm.init("diloco", period=4, delay=1), linear(), (1, 1))
    assert predict(delayed, beside).exposed == 0.0
    assert predict(delayed, shared).exposed == 0.25 / 4
    named = plan_of(
        Algorithm.init("bytegrad", hierarchical=False, compression="OneBit", error_feedback=True),
        linear(),
        (1, 1),
    )
    assert own_seconds(named.exchanges(1)[0], shared) == 0.5 + 2**-8 * (4 * 256 + 128)


@pytest.mark.parametrize(
    ("name", "fewer"),
    [("bytegrad", 4), ("topk", 4), ("gradient_allreduce", 0), ("decentralized", 0)],
)
def test_latencies_of_what_is_sent_at_once_do_not_add_up(name: str, fewer: int) -> None:
    plan = plan_of(Algorithm.init(name), linear(), (1,) * 4)
    in_turns, at_once = (
        predict(plan, MACHINE._replace(compute=0.0, at_once=at_once)).seconds
        for at_once in (False, True)
    )
    assert in_turns - at_once == fewer * MACHINE.links.between.alpha
    inside = plan_of(
        Algorithm.init(name, **{"hierarchical": False} if name != "topk" else {}), linear(), (4,)
    )
    in_turns, at_once = (
        predict(inside, MACHINE._replace(compute=0.0, at_once=at_once)).seconds
        for at_once in (False, True)
    )
    assert in_turns - at_once == fewer * MACHINE.links.inside.alpha


def test_a_fragment_that_is_delayed_is_exposed_only_beyond_the_steps_that_hide_it() -> None:
    # An all-to-all and an all-gather of 512 bytes to the other rank, once in 4 steps: 2 s.
    for delay, exposed in ((0, 2.0), (1, 0.0)):
        plan = plan_of(Algorithm.init("diloco", period=4, delay=delay), linear(), (1, 1))
        assert predict(plan, MACHINE).exposed == exposed / 4
    assert predict(plan, MACHINE._replace(compute=0.5)).exposed == 1.5 / 4


def test_slow_ranks_delay_those_that_wait_for_them_and_rare_exchanges_less() -> None:
    slow, uneven = MACHINE._replace(slowest=2.0), MACHINE._replace(jitter=0.5)
    every = plan_of(GradientAllReduceAlgorithm(), linear(), (1, 1))
    rare = plan_of(LocalSGDAlgorithm(16), linear(), (1, 1))
    alone = plan_of(AsyncModelAverageAlgorithm(), linear(), (1, 1))
    assert predict(alone, slow) == predict(alone, uneven) == predict(alone, MACHINE)
    assert predict(every, slow).exposed == predict(every, MACHINE).exposed + 3.0
    late = [
        predict(plan, uneven).exposed - predict(plan, MACHINE).exposed for plan in (every, rare)
    ]
    assert late[0] == pytest.approx(4 * late[1])


def test_a_winner_needs_an_interval_apart_and_prefers_known_quality() -> None:
    plans = {
        "gradient_allreduce": plan_of(GradientAllReduceAlgorithm(), linear(), (1, 1)),
        "local_sgd:period=32": plan_of(LocalSGDAlgorithm(32), linear(), (1, 1)),
        "decentralized": plan_of(DecentralizedAlgorithm(False), linear(), (1, 1)),
    }

    def verdict(compute: float, part: float | None) -> tuple[str | None, str]:
        between, inside = (tuple(map(exact, link)) for link in MACHINE.links)
        costs = MeasuredMachine(between, inside, exact(compute))  # type: ignore[arg-type]
        ranked = compare(plans, costs, error_of(costs, part))
        assert [c.seconds.value for c in ranked] == sorted(c.seconds.value for c in ranked)
        found = verdict_of(ranked, next(c for c in ranked if c.name == "gradient_allreduce"))
        return found.winner, found.text

    # steps of 5, 3.0625 and 3 s
    winner, text = verdict(3.0, 0.5)
    assert winner is None
    assert text.startswith("Keep gradient_allreduce: at most 40% to gain, by decentralized")
    assert verdict(3.0, 0.1)[0] == "decentralized"
    # of 2.25, 0.3125 and 2 s: 1.5 x as many steps of local_sgd
    winner, text = verdict(0.25, None)
    assert winner == "local_sgd:period=32"
    assert "the same loss in 20.8 % of the time of gradient_allreduce" in text


@pytest.mark.parametrize(("name", "options", "expected"), FOR_GOOD)
def test_what_is_kept_is_what_was_measured_in_copies_of_the_weights(
    name: str, options: dict[str, Any], expected: float
) -> None:
    module = torch.nn.Linear(100, 100, device="meta")
    given = (
        {**options, "q_adam_optimizer": QAdamOptimizer(module.parameters())}
        if name == "qadam"
        else options
    )
    kept, scratch = plan_of(Algorithm.init(name, **given), module, (2,)).memory
    # tensors of up to 1024 elements, such as the bias, do not count
    assert kept / (4 * 101 * 100) == pytest.approx(expected, abs=0.05)
    assert scratch >= 0


# Fits


def test_a_fit_finds_the_costs_of_exact_times_and_an_interval_that_noise_widens() -> None:
    sizes = [0.0, 1e3, 1e5, 1e6]
    exact = fit_link([2] * 4, sizes, [2e-3 + size * 1e-8 for size in sizes])
    assert exact.alpha.value == pytest.approx(1e-3)
    assert exact.beta.value == pytest.approx(1e-8)
    noisy = fit_link(
        [2] * 4,
        sizes,
        [
            (2e-3 + size * 1e-8) * part
            for size, part in zip(sizes, (1.1, 0.9, 1.1, 0.9), strict=True)
        ],
    )
    assert noisy.alpha.low < 1e-3 < noisy.alpha.high
    assert max(map(abs, noisy.residuals)) > 0.05
    kinked = fit_link([2] * 4, sizes, [2e-3, 2e-3, 3e-3, 12e-3])  # 1 kB is sent at once
    assert (kinked.alpha.value, kinked.beta.value) == pytest.approx((1e-3, 1e-8))
    assert kinked.residuals == pytest.approx([0.0, 0.005, 0.0, 0.0])
    falling = fit_link([2] * 3, [1.0, 10.0, 100.0], [1.0, 0.9, 0.8])
    assert falling.beta.value == 0.0 < falling.alpha.value
    with pytest.raises(ValueError, match="do not tell alpha from beta"):
        fit_link([2] * 3, [8.0] * 3, [1.0, 1.0, 1.0])


def test_measured_costs_come_back_from_their_json() -> None:
    one = Estimate(1.0, 2.0, 3.0)
    costs = MeasuredMachine((one, one), None, None, {"": one}, {"topk": one}, True, "here")
    assert MeasuredMachine.from_json(json.loads(json.dumps(costs.as_json()))) == costs
    for wrong in ([2.0, 1.0, 3.0], [-1.0, 0.0, 1.0], [0.0, 1.0, float("inf")]):
        for kind in ("codec", "operation"):
            with pytest.raises(
                ValueError, match=rf"{kind} 'x'=.* must be three numbers from 0 on that do not fall"
            ):
                MeasuredMachine.from_json(costs.as_json() | {kind: {"x": wrong}})
    with pytest.raises(
        ValueError,
        match=(
            r"the measured costs\['codec'\]\['x'\]\[2\] must be from -1.79769e\+308 to"
            r" 1.79769e\+308"
        ),
    ):
        MeasuredMachine.from_json(costs.as_json() | {"codec": {"x": [0, 1, 10**400]}})
    with pytest.raises(ValueError, match="not measured: inside, compute"):
        costs.machine(lambda estimate: estimate.low)


def test_measure_refuses_links_that_the_formula_does_not_describe() -> None:
    one = Estimate(1.0, 1.0, 1.0)
    check_fits({"inside": Fit(one, one, [0.1, -0.3])}, 0.3)
    with pytest.raises(
        CommandError, match=r"between nodes.*off by up to 31%, more than 30%.*--repeat"
    ):
        check_fits({"between": Fit(one, one, [0.1, -0.31])}, 0.3)


# The commands


def test_every_registered_algorithm_has_a_plan() -> None:
    names = [
        name
        for name, (kind, _) in GlobalAlgorithmRegistry.items()
        if kind.__module__.startswith("bagua_ref.")
    ]
    assert {text.partition(":")[0] for text in CANDIDATES} <= set(names)
    for name in names:
        options: dict[str, Any] = {"local_sgd": {"period": 2}}.get(name, {})
        if name == "qadam":
            options = {"q_adam_optimizer": QAdamOptimizer(linear().parameters())}
        # of three equal buckets, and a smaller one
        plan = plan_of(Algorithm.init(name, **options), module_of(4 * 2**20), (2, 2))
        steps = range(plan.warmup + 1, plan.warmup + plan.cycle + 1)
        counts = [[rank["between"][:2] for rank in plan.traffic(step)] for step in steps]
        per_rank = [tuple(map(sum, zip(*rank, strict=True))) for rank in zip(*counts, strict=True)]
        mean = [number / plan.cycle for number in max(per_rank)]
        assert plan.sent == pytest.approx(mean, rel=1e-6), name
        assert plan.sent[0] > 0


def test_the_table_is_ranked_and_says_why_what_is_learnt_and_what_to_do(
    run: Any, tmp_path: Path
) -> None:
    picture = tmp_path / "steps.png"
    code, printed, _ = run(*BASE, "--nodes", "2", "--png", str(picture), *FEW)
    assert code == 0
    assert picture.stat().st_size > 10_000
    assert "A training step of 4 ranks on 2 nodes" in printed
    assert len(re.findall(r": busiest rank: .* per step between nodes", printed)) == 5
    assert "  measured: +0.13 ± 0.11 points of accuracy on digits" in printed
    assert "warning: these let weights differ between ranks" in printed
    assert "\n    model.with_bagua(optimizer, " in printed
    assert "\nNext: bagua-ref measure" in printed
    result = json.loads(run(*BASE, "--nodes", "2", "--json", *FEW)[1])
    seconds = [row["seconds"][1] for row in result["rows"]]
    assert seconds == sorted(seconds)
    same = {row["algorithm"]: row["time_to_same_loss"] for row in result["rows"]}
    assert same["gradient_allreduce"] == "100 %"
    assert same["async"] == "unknown"
    assert result["costs"]["codec"]["MinMaxUInt8"][1] == 1.1e-9  # of a CPU


def test_numbers_are_read_as_people_write_them_and_never_cut(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--params", "1M", "--compute", "10ms", "--algorithm", "gradient_allreduce"]
    monkeypatch.setenv("COLUMNS", "40")
    code, printed, _ = run(*given, "--ranks", "2x2", "--bandwidth", "1Gbps")
    assert code == 0
    assert "4 ranks on 2 nodes" in printed
    assert "…" not in printed
    one, other = (
        json.loads(run(*given, *words, "--json")[1])["rows"]
        for words in (
            ["--ranks", "2x2", "--bandwidth", "1Gbps"],
            ["--ranks", "4", "--nodes", "2", "--bandwidth", "1Gbit"],
        )
    )
    assert one == other


def test_odd_ranks_leave_out_what_needs_pairs(run: Any) -> None:
    named = [
        "--algorithm",
        "gradient_allreduce",
        "--algorithm",
        "decentralized:peer_selection_mode='shift_one'",
    ]
    code, printed, _ = run(
        "--params", "1000", "--ranks", "3", "--bandwidth", "1Gbit", "--compute", "1ms", *named
    )
    assert code == 0
    assert (
        "shift_one' is left out: peer_selection_mode='shift_one' pairs ranks, so it needs an even"
        in printed
    )


def test_periods_that_would_take_long_to_add_up_are_left_out(run: Any) -> None:
    code, printed, _ = run(
        *BASE, "--algorithm", "gradient_allreduce", "--algorithm", "local_sgd:period=1000000000000"
    )
    assert code == 0
    assert (
        "local_sgd:period=1000000000000 is left out: LocalSGDAlgorithm repeats after"
        " 1,000,000,000,000 steps" in printed
    )


def test_a_model_is_made_without_memory_and_planned_by_its_own_shapes(run: Any) -> None:
    given = ["--model", "tests.test_planning:model", "--algorithm", "gradient_allreduce", "--json"]
    result = json.loads(run(*given, "--ranks", "2", "--bandwidth", "1Gbit", "--compute", "1ms")[1])
    assert result["parameter_bytes"] == 4 * 2_001_000 == result["rows"][0]["bytes_per_step"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "0"], "argument --ranks: '0' must be a whole number from 1"),
        (["--ranks", "1"], "argument --ranks: '1' must be 2 to 1024 ranks"),
        (["--ranks", "2x"], "argument --ranks: '' must be a whole number"),
        (["--ranks", "2x2", "--nodes", "4"], "nodes=4 and --ranks 2x2 differ"),
        (["--device", "h200"], "argument --device: invalid choice: 'h200'"),
        (["--ranks", "2.5"], "argument --ranks: '2.5' must be a whole number"),
        (["--params", "nan"], "argument --params: 'nan' must be"),
        (["--nodes", "5"], "nodes=5 must be from 1 to the number of ranks, 4"),
        (["--bandwidth", "0Gbit"], "bandwidth '0Gbit' must be a number above 0"),
        (["--bandwidth", "1Gb"], "bandwidth '1Gb' must be"),
        (["--latency=-1ms"], "time '-1ms' must be a number"),
        (["--compute", "0ms"], "time '0ms' must be a number above 0"),
        (["--compute", "nan"], "time 'nan' must be"),
        (["--codec", "1"], "time '1' must be"),
        (["--error", "1.5"], "argument --error: '1.5' must be a number from 0 to 0.99"),
        (["--slowest", "0.5"], "argument --slowest: '0.5' must be a number from 1"),
        (["--jitter=-1"], "argument --jitter: '-1' must be a number from 0"),
        (["--algorithm", "sgd"], "name='sgd' is not a registered algorithm"),
        (["--algorithm", "local_sgd:period=0"], "period=0 must be 1 or more"),
        (["--algorithm", "local_sgd:period"], "must be of the form OPTION=VALUE"),
        (["--algorithm", "local_sgd:period=)"], "'local_sgd:period=)'"),
        (["--algorithm", "local_sgd:period=f()"], "must be of the form OPTION=VALUE"),
        (["--algorithm", "local_sgd:**{}"], "must be of the form OPTION=VALUE"),
        (["--algorithm", "bytegrad:compression=None1"], "compression='None1' is not a known codec"),
        (["--ranks", "1025"], "argument --ranks: '1025' must be a whole number from 1 to 1024"),
        (["--measured", "/nowhere"], "cannot read '/nowhere': No such file"),
    ],
)
def test_bad_input_is_named(run: Any, arguments: list[str], says: str) -> None:
    code, _, error = run(*BASE, *arguments)
    assert code == 2
    assert says in error


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_model", "returned a int; it must return a torch.nn.Module"),
        ("broken_model", "tests.test_planning:broken_model() failed: RuntimeError: no weights"),
        ("nothing", "cannot load tests.test_planning:nothing: AttributeError"),
        (
            "lazy_model",
            (
                "parameter 'weight' has no shape yet; call the module once, or use one that is not"
                " lazy"
            ),
        ),
        (
            "model_of_values",
            "(it is called on torch's device 'meta', where tensors have no values)",
        ),
        ("model_that_exits", "tests.test_planning:model_that_exits() failed: SystemExit: 3"),
    ],
)
def test_a_model_that_cannot_be_made_is_named(run: Any, path: str, says: str) -> None:
    code, _, error = run("--model", f"tests.test_planning:{path}", *BASE[2:])
    assert code == 2
    assert says in error


def test_a_pause_does_not_move_what_was_timed() -> None:
    assert median_of([1.0, 1.0, 10.0, 1.0]).value == 1.0


def test_links_that_were_not_measured_are_asked_for(run: Any, tmp_path: Path) -> None:
    costs = MeasuredMachine(
        None,
        (Estimate(1e-5, 1e-5, 1e-5), Estimate(1e-10, 1e-10, 1e-10)),
        Estimate(0.01, 0.01, 0.01),
    )
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs.as_json()))
    given = [
        "--params",
        "1e4",
        "--ranks",
        "4",
        "--measured",
        str(path),
        "--algorithm",
        "gradient_allreduce",
        "--json",
    ]
    code, _, error = run(*given)
    assert code == 2
    assert "argument --bandwidth is needed, as links between nodes were not measured" in error
    result = json.loads(run(*given, "--nodes", "1")[1])
    assert result["rows"][0]["seconds"][1] == pytest.approx(
        0.01 + 6 * (1e-5 + 1e4 * 1e-10) + 9.7e-4  # of an operation on a CPU
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"steps": 3}, "the measured costs must have the key"),
        ([], "the measured costs must be"),
        ({"links": {}}, "the measured costs must have the key 'codec'"),
    ],
    ids=str,
)
def test_a_file_that_is_no_measurement_is_named(
    run: Any, tmp_path: Path, given: Any, says: str
) -> None:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(given))
    code, _, error = run(*BASE, "--measured", str(path), "--algorithm", "gradient_allreduce")
    assert code == 2
    assert says in error


@pytest.mark.parametrize(
    "command",
    [["advise", *BASE, *FEW[:2]], ["graph", "ring", "--ranks", "4"]],
    ids=["advise", "graph"],
)
def test_a_reader_that_closes_the_output_gets_no_traceback(command: list[str]) -> None:
    script = (
        "import os, sys\nfrom bagua_ref.cli import main\nends ="
        " os.pipe()\nos.close(ends[0])\nos.dup2(ends[1], 1)\n"
    )
    done = run_script(f"{script}sys.exit(main({command!r}))")
    assert (done.returncode, done.stderr) == (1, "")


def test_async_without_rounds_sends_nothing(run: Any) -> None:
    code, printed, _ = run(*BASE, "--algorithm", "async:sync_interval_ms=0")
    assert code == 0
    assert "sends nothing between nodes." in printed


def test_graphs_say_in_how_many_rounds_and_seconds_distances_halve(run: Any) -> None:
    modes = {
        "peer_selection_mode='ring',communication_interval=3": 3,
        "peer_selection_mode='one_peer_exponential'": 1,
    }
    named = [
        word
        for options in modes
        for word in ("--algorithm", f"decentralized:hierarchical=False,{options}")
    ]
    result = json.loads(
        run(
            "--params",
            "1e4",
            "--ranks",
            "8",
            *BASE[4:],
            *named,
            "--algorithm",
            "bytegrad",
            "--json",
        )[1]
    )
    rows = {row["algorithm"].partition(",")[2]: row for row in result["rows"]}
    for options, interval in modes.items():
        mode = MODES[re.search("mode='(.*?)'", options)[1]]  # type: ignore[index]
        rounds = mixing(mode.graphs(8), 0.5).rounds or 0
        assert rows[options]["halving"] == {
            "rounds": rounds,
            "seconds": pytest.approx(rounds * interval * rows[options]["seconds"][1]),
        }
    assert rows[""]["halving"] is None


def measured(path: str) -> int:
    step = "tests.test_planning:pass_of_a_model"
    return main(
        [
            "measure",
            "--output",
            path,
            "--repeat",
            "3",
            "--step",
            step,
            "--residual",
            "1e9",
            "--json",
        ]
    )


@pytest.mark.proof
@pytest.mark.parametrize("nodes", [(2,), (2, 1)], ids=str)
def test_a_measurement_is_read_by_advise(run: Any, tmp_path: Path, nodes: tuple[int, ...]) -> None:
    path, ranks = tmp_path / "costs.json", sum(nodes)
    assert launch(measured, ranks, str(path), init=False, nodes=nodes) == [0] * ranks
    result = json.loads(path.read_text())
    costs = MeasuredMachine.from_json(result)
    assert (costs.between is None) == (len(nodes) == 1)
    for link in filter(None, (costs.inside, costs.between)):
        assert 0 <= link[0].low <= link[0].high < 10
        assert 0 <= link[1].value < 1e-5
    assert len(result["residuals"]) == len(nodes)
    assert all(3 <= len(residuals) <= 6 for residuals in result["residuals"].values())
    assert costs.compute is not None
    assert costs.compute.value > 0
    assert (
        {"MinMaxUInt8", "OneBit", "topk", "powersgd", ""}
        <= costs.codec.keys()
        == costs.operation.keys()
    )
    assert costs.shared_processor
    code, printed, _ = run(
        "--params",
        "1e5",
        "--ranks",
        str(ranks),
        "--nodes",
        str(len(nodes)),
        "--measured",
        str(path),
    )
    assert code == 0
    assert f"measured on {ranks} ranks" in printed


# Bad input of the functions


def test_shapes_refuse_what_cannot_be() -> None:
    for nodes in ((), (2, 0)):
        with pytest.raises(ValueError, match="must be numbers of ranks, each at least 1"):
            Cluster(nodes)
    with pytest.raises(ValueError, match="no parameters that need a gradient"):
        plan_of(GradientAllReduceAlgorithm(), torch.nn.ReLU(), (1, 1))
    with pytest.raises(ValueError, match="params=0 must be a positive number"):
        module_of(0)
    with pytest.raises(TypeError, match="parameter 'weight' is float64; topk takes"):
        plan_of(Algorithm.init("topk"), linear().double(), (1, 1))


# Algorithms of users


class Shared(CommOp):
    """Rank 0 tells all ranks its tensor; then each passes it to the next one, or the last one does
    not.
    """

    def __init__(self, comm: Communicator, kernels: KernelBackend, all_ranks: bool) -> None:
        super().__init__(comm, kernels)
        self.all_ranks = all_ranks

    def __call__(self, x: torch.Tensor) -> None:
        comm, n = self.comm, self.comm.nranks()
        comm.broadcast(x)
        if self.all_ranks or comm.rank() < n - 1:
            received = torch.empty_like(x)
            comm.exchange([(x, (comm.rank() + 1) % n)], [(received, (comm.rank() - 1) % n)])


class Own(Algorithm):
    """Communicates in every third step."""

    period = 3

    def __init__(self, all_ranks: bool = True) -> None:
        self.all_ranks = all_ranks

    def reify(self, process_group: Any) -> AlgorithmImpl:
        return OwnImpl(process_group, self.all_ranks)


class OwnImpl(AlgorithmImpl):
    def __init__(self, process_group: Any, all_ranks: bool) -> None:
        super().__init__(process_group)
        self.all_ranks = all_ranks

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        comm = self.process_group.get_global_communicator()
        bucket.append_op(Shared(comm, bucket.kernels, self.all_ranks), self.process_group)

    def init_backward_hook(self, bagua_ddp: Any) -> Any:
        def hook(name: str, parameter: torch.nn.Parameter) -> None:
            if bagua_ddp.bagua_train_step_counter % 3 == 0:
                bagua_ddp.engine.gradient_ready(name, parameter)

        return hook


def test_an_algorithm_of_a_users_has_a_plan_without_more_code() -> None:
    plan = plan_of(Own(), linear(), (1,) * 3)
    assert [len(plan.exchanges(step)) for step in range(1, 8)] == [0, 0, 1, 0, 0, 1, 0]
    # a tree of two rounds, and all to the next one
    assert plan.exchanges(3)[0].operation == [
        [(0, 1, 1024)],
        [(0, 2, 1024)],
        [(0, 1, 1024), (1, 2, 1024), (2, 0, 1024)],
    ]
    assert plan.sent == (1024.0, 1.0)
    assert predict(plan, MACHINE)[:2] == (3.0 + 3 * 1.5 / 3, 3 * 1.5 / 3)
    with pytest.raises(ValueError, match="ranks of Own do not all communicate alike"):
        plan_of(Own(all_ranks=False), linear(), (1,) * 3)

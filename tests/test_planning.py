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

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    DecentralizedAlgorithm,
    GlobalAlgorithmRegistry,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    QAdamOptimizer,
)
from bagua_ref.cli import main
from bagua_ref.cli.advise import CANDIDATES
from bagua_ref.formulas.costs import LinkCost, LinkCosts
from bagua_ref.formulas.graphs import MODES
from bagua_ref.formulas.mixing import mixing
from bagua_ref.planning import (
    Cluster,
    Estimate,
    Exchange,
    Machine,
    MeasuredMachine,
    Parameters,
    fit_link,
    median_of,
    module_of,
    plan_of,
    predict,
)
from bagua_ref.planning.advice import changed, compare, first_of, turning_point
from bagua_ref.planning.steps import own_seconds
from bagua_ref.runtime import current_world
from bagua_ref.simulation import SimulatedWorld

ROOT = Path(__file__).parents[1]
# sums of such numbers are exact
MACHINE = Machine(LinkCosts(LinkCost(0.5, 2**-10), LinkCost(0.125, 2**-12)), compute=3.0)
TIMES = ("seconds_per_step", "exposed_wait_seconds_per_step", "codec_seconds_per_step")
BASE = ["--params", "4e6", "--ranks", "4", "--bandwidth", "1Gbit", "--compute", "10ms"]


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


def test_S14_2_a_round_counts_its_heaviest_link_of_each_kind() -> None:
    found = Exchange(
        [[(0, 1, 4), (2, 3, 8), (1, 2, 5), (3, 4, 6)], [(0, 1, 9)]], Cluster((2, 2, 1)), 8
    ).rounds
    assert [sorted((wire[0] == "inside", nbytes) for wire, nbytes in loads) for loads in found] == [
        [(False, 6), (True, 8)],
        [(True, 9)],
    ]


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
    exact = plan_of(GradientAllReduceAlgorithm(), linear(), (1, 1))
    assert predict(exact, MACHINE._replace(codec={"": 1.0})) == predict(exact, MACHINE)


def test_a_shared_processor_computes_longer_by_what_it_does_for_operations_beside() -> None:
    module = torch.nn.Sequential(*(linear() for _ in range(2)))
    parameters = Parameters(module)
    parameters._bucket_bytes = 1024  # two buckets, of half the bytes each
    costs: dict[str, Any] = {"operation": {"": 0.25, "OneBit": 0.5}, "codec": {"": 2**-8}}
    beside, shared = MACHINE._replace(**costs), MACHINE._replace(**costs, shared_processor=True)
    # MinMaxUInt8: 128 bytes, and 32 of its scale
    own, wires = 0.25 + 2**-8 * (3 * 256 + 128), 2 * (0.5 + 1 / 8 + 2**-10 * 32)
    compressed = plan_of(Algorithm.init("bytegrad", hierarchical=False), parameters, (1, 1))
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


def test_a_winner_needs_an_interval_apart_and_has_an_assumption_that_would_flip_it() -> None:
    plans = {
        "exact": plan_of(GradientAllReduceAlgorithm(), linear(), (1, 1)),
        "rare": plan_of(LocalSGDAlgorithm(4), linear(), (1, 1)),
    }

    def costs(part: float) -> MeasuredMachine:
        between, inside = (
            tuple(Estimate.within(number, part) for number in link) for link in MACHINE.links
        )
        return MeasuredMachine(between, inside, Estimate.within(3.0, part))  # type: ignore[arg-type]

    near = compare(plans, costs(0.25))
    assert [candidate.name for candidate in near] == ["rare", "exact"]
    assert near[0].seconds == (2.625, 3.5, 4.375)
    assert first_of(near) is None
    assert (
        first_of(compare(plans, costs(0.125))) is near[0]
        or first_of(compare(plans, costs(0.125))).name == "rare"
    )  # type: ignore[union-attr]
    pair = {**plans, "decentralized": plan_of(DecentralizedAlgorithm(False), linear(), (1, 1))}
    ranked = compare(pair, costs(0.01))
    assert ranked[0].name == "decentralized"
    what, factor, name = turning_point(ranked, MACHINE) or ("", 0.0, "")
    assert (what, name) == ("compute", "rare")
    assert (
        predict(pair[name], changed(MACHINE, what, factor)).seconds
        < predict(ranked[0].plan, changed(MACHINE, what, factor)).seconds
    )


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
    kept, scratch = plan_of(Algorithm.init(name, **given), module, (2,)).memory()
    assert kept / (4 * 101 * 100) == pytest.approx(expected, abs=0.0101)
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


# The commands


def test_every_registered_algorithm_has_a_plan_and_is_among_the_candidates() -> None:
    names = [
        name
        for name, (kind, _) in GlobalAlgorithmRegistry.items()
        if kind.__module__.startswith("bagua_ref.")
    ]
    assert {text.partition(":")[0] for text in CANDIDATES} == set(names)
    for name in names:
        options: dict[str, Any] = {"local_sgd": {"period": 2}}.get(name, {})
        if name == "qadam":
            options = {"q_adam_optimizer": QAdamOptimizer(linear().parameters())}
        # of three equal buckets, and a smaller one
        plan = plan_of(Algorithm.init(name, **options), module_of(7 * 2**20), (2, 2))
        steps = range(plan.warmup + 1, plan.warmup + plan.cycle + 1)
        counts = [[rank["between"][:2] for rank in plan.traffic(step)] for step in steps]
        per_rank = [tuple(map(sum, zip(*rank, strict=True))) for rank in zip(*counts, strict=True)]
        assert plan.sent == tuple(number / plan.cycle for number in max(per_rank)), name
        assert plan.sent[0] > 0


def test_the_table_is_ranked_and_says_why_what_is_learnt_and_what_to_know(
    run: Any, tmp_path: Path
) -> None:
    picture = tmp_path / "steps.png"
    code, printed, _ = run(*BASE, "--nodes", "2", "--png", str(picture))
    assert code == 0
    assert picture.stat().st_size > 10_000
    assert "A training step of 4 ranks on 2 nodes" in printed
    assert len(re.findall(r": The busiest rank sends .* a step between nodes", printed)) == len(
        CANDIDATES
    )
    assert "  learnt: +0.13 ± 0.11 points of accuracy on digits" in printed
    assert "Fastest of those with equal weights on all ranks: " in printed
    assert "would come first if" in printed
    assert "warning: weights differ between ranks" in printed
    result = json.loads(run(*BASE, "--nodes", "2", "--json")[1])
    seconds = [row["seconds"][1] for row in result["rows"]]
    assert seconds == sorted(seconds)
    assert result["costs"]["links"]["between"]["beta"] == pytest.approx([7.2e-9, 8e-9, 8.8e-9])


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
        "shift_one' is left out: peer_selection_mode='shift_one' needs an even number of ranks,"
        " not 3" in printed
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
    assert result["rows"][0]["seconds"][1] == pytest.approx(0.01 + 6 * (1e-5 + 1e4 * 1e-10))


def metrics_of_a_job(make: Callable[[], Algorithm], late: float = 0.0) -> list[dict[str, float]]:
    """Return the metrics of four simulated ranks on two nodes, of which the last one is ``late`` in
    each step.
    """

    def train(comm: Any) -> dict[str, float]:
        bagua_ref.init_process_group()
        module = torch.nn.Linear(499, 1000)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        wrapped: Any = module.with_bagua([optimizer], make())  # type: ignore[attr-defined]
        for _ in range(16):
            module(torch.ones(2, 499)).sum().backward()
            current_world().sleep(late * (comm.rank() == 3))
            optimizer.step()
        return wrapped.bagua_metrics()

    return SimulatedWorld(
        4, (2, 2), link=LinkCosts.parse("1Gbit,1ms,100Gbit,5us"), compute=0.03
    ).run(train)


JOB = ["--params", "500000", "--ranks", "4", "--nodes", "2", "--latency", "1ms", "--json"]


@pytest.mark.parametrize(
    ("algorithm", "late", "said"),
    [
        (
            lambda: GradientAllReduceAlgorithm(hierarchical=False),
            0.0,
            "gradient_allreduce:hierarchical=False",
        ),
        (
            lambda: GradientAllReduceAlgorithm(hierarchical=False),
            0.01,
            "gradient_allreduce:hierarchical=False",
        ),
        (lambda: LocalSGDAlgorithm(2), 0.0, "local_sgd:period=2"),
    ],
    ids=["gradient_allreduce", "with a late rank", "local_sgd"],
)
def test_the_metrics_of_a_job_tell_compute_and_the_rate_of_its_links(
    run: Any, tmp_path: Path, algorithm: Callable[[], Algorithm], late: float, said: str
) -> None:
    path, metrics = tmp_path / "metrics.json", metrics_of_a_job(algorithm, late)
    path.write_text(json.dumps(metrics))
    result = json.loads(run(*JOB, "--measured", str(path), "--algorithm", said)[1])
    # 15 steps have 7 exchanges of 8
    assert result["costs"]["compute"][1] == pytest.approx(0.03 + late, rel=0.04)
    low, beta, high = result["costs"]["links"]["between"]["beta"]
    assert beta == pytest.approx(8e-9, rel=0.1)
    assert (low, high) == pytest.approx((0.9 * beta, 1.1 * beta))
    assert result["rows"][0]["seconds"][1] == pytest.approx(
        metrics[3]["seconds_per_step"], rel=0.02
    )
    path.write_text(json.dumps(metrics[3]))
    alone = json.loads(run(*JOB, "--measured", str(path), "--algorithm", said)[1])
    assert alone["costs"]["links"]["between"]["beta"] == [0.0, beta, high]
    assert alone["costs"]["about"].startswith("from the metrics of 1 of 4 ranks")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"steps": 3},
            (
                "neither the costs that bagua-ref measure writes, nor what model.bagua_metrics()"
                " returns"
            ),
        ),
        (
            [],
            "codec_seconds_per_step, which are counted on the CPU from the second step on",
        ),
        ({"bytes_sent": 8, "bytes_sent_per_step": 4}, "the metrics need seconds_per_step"),
        ({"bytes_sent": 8}, "the metrics[0] must have the key 'bytes_sent_per_step'"),
        (
            {"bytes_sent": 8, "bytes_sent_per_step": "4"},
            "the metrics[0]['bytes_sent_per_step'] must be",
        ),
        (
            {"bytes_sent": 8, "bytes_sent_per_step": 4} | dict.fromkeys(TIMES, 0.1),
            "the metrics are not those of GradientAllReduce",
        ),
        (
            {"bytes_sent": 8, "bytes_sent_per_step": float("nan")} | dict.fromkeys(TIMES, 0.1),
            "the metrics are not those of GradientAllReduce",
        ),
        (
            {"bytes_sent": 3e6, "bytes_sent_per_step": 3e6} | dict.fromkeys(TIMES, -0.1),
            "the metrics need seconds_per_step",
        ),
        (
            {"bytes_sent": 3e6, "bytes_sent_per_step": 3e6} | dict.fromkeys(TIMES, 0.0),
            "argument --bandwidth is needed",
        ),
        ({"links": {}}, "the measured costs must have the key 'codec'"),
    ],
    ids=str,
)
def test_a_file_that_is_no_measurement_is_named(
    run: Any, tmp_path: Path, given: Any, says: str
) -> None:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(given))
    code, _, error = run(*JOB, "--measured", str(path), "--algorithm", "gradient_allreduce")
    assert code == 2
    assert says in error


@pytest.mark.parametrize(
    "command", [["advise", *BASE], ["graph", "ring", "--ranks", "4"]], ids=["advise", "graph"]
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
    assert "Sends nothing between nodes." in printed


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
        rounds = mixing(mode.graphs(8), 0.5).rounds
        assert rows[options]["halving"] == {
            "rounds": rounds,
            "seconds": pytest.approx(rounds * interval * rows[options]["seconds"][1]),
        }
    assert rows[""]["halving"] is None


def measured(path: str) -> int:
    step = "tests.test_planning:pass_of_a_model"
    return main(["measure", "--output", path, "--repeat", "3", "--step", step, "--json"])


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
        assert 0 < link[1].value < 1e-5
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
        Parameters(torch.nn.ReLU())
    with pytest.raises(ValueError, match="params=0 must be a positive number"):
        module_of(0)

    class Own(GradientAllReduceAlgorithm):
        pass

    with pytest.raises(
        ValueError,
        match="algorithm=Own has no plan; there are plans for GradientAllReduceAlgorithm, ",
    ):
        plan_of(Own(), linear(), (1, 1))
    with pytest.raises(
        TypeError, match="parameter 'weight' is float64, which TopKAlgorithm does not take"
    ):
        plan_of(Algorithm.init("topk"), linear().double(), (1, 1))

"""Tests of plans, prices and ``bagua-ref advise`` and ``measure`` (S14)."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import device_costs
from tests.launch import launch, run_script
from tests.test_memory import FOR_GOOD

from bagua_ref.algorithms import (
    Algorithm,
    AlgorithmImpl,
    DecentralizedAlgorithm,
    GlobalAlgorithmRegistry,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    QAdamOptimizer,
)
from bagua_ref.backends import KernelBackend
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.cli import main
from bagua_ref.cli.advise import candidates, devices
from bagua_ref.cli.command import CommandError
from bagua_ref.cli.measure import check_fits
from bagua_ref.comm_ops import CommOp
from bagua_ref.communicators.base import Communicator
from bagua_ref.formulas.costs import LinkCost, LinkCosts
from bagua_ref.planning import Cluster, Machine, fit_link, module_of, plan_of, predict
from bagua_ref.planning.advice import compare, error_of, verdict_of

# sums of such numbers are exact
MACHINE = Machine(LinkCosts(LinkCost(0.5, 2**-10), LinkCost(0.125, 2**-12)), compute=3.0)
BASE = ["--params", "1M", "--ranks", "4", "--bandwidth", "1Gbit", "--compute", "10ms"]


def linear(inputs: int = 15, outputs: int = 16) -> torch.nn.Module:
    """Return a module of 256 parameters, 1 KiB."""
    return torch.nn.Linear(inputs, outputs, device="meta")


def model() -> torch.nn.Module:
    return torch.nn.Linear(2000, 1000)


def model_of_values() -> torch.nn.Module:
    return torch.nn.Linear(int(torch.ones(3).sum().item()), 3)


def no_model() -> int:
    return 3


def broken_model() -> None:
    raise SystemExit(3)


def pass_of_a_model() -> Callable[[], None]:
    module = torch.nn.Linear(50, 50)
    return lambda: module(torch.ones(4, 50)).sum().backward()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs ``bagua-ref advise`` and returns the exit code, standard output
    and standard error.
    """

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main(["advise", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


def made(name: str, module: torch.nn.Module, **options: Any) -> Algorithm:
    if name == "qadam":
        options["q_adam_optimizer"] = QAdamOptimizer(module.parameters())
    return Algorithm.init(name, **options)


# Plans and prices


def test_predictions_are_those_of_the_planner_that_spelled_out_each_algorithm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", str(1 << 20))
    costs = {"codec": {"": 2e-9, "MinMaxUInt8": 1e-9}, "operation": {"": 1e-3}}
    links = LinkCosts.parse("100Mbit,1ms,10Gbit,5us")
    machine = Machine(links, 0.05, 0.002, **costs, shared_processor=True, at_once=True)
    sizes = (96, 1000, 700, 700, 10)
    layers = [torch.nn.Linear(*pair, device="meta") for pair in pairwise(sizes)]
    module = torch.nn.Sequential(*layers)
    rows = json.loads(Path(__file__).with_name("planned_before.json").read_text())
    assert len(rows) == 40
    for row in rows:
        algorithm = made(row["algorithm"], module, **row["options"])
        predicted = predict(plan_of(algorithm, module, tuple(row["nodes"])), machine).seconds
        assert predicted == pytest.approx(row["seconds"], rel=0.02), row


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_costs_of_devices_are_those_of_committed_results(device: str) -> None:
    costs, expected = devices()[device], getattr(device_costs, device)()
    expected["codec"][""] = max(expected["codec"][name] for name in device_costs.CODECS)
    for kind, values in expected.items():
        assert costs[kind] == pytest.approx(values, rel=0.01)


def test_a_winner_needs_an_interval_apart_and_prefers_known_quality() -> None:
    plans = {
        "gradient_allreduce": plan_of(GradientAllReduceAlgorithm(), linear(), (1, 1)),
        "local_sgd:period=32": plan_of(LocalSGDAlgorithm(32), linear(), (1, 1)),
        "decentralized": plan_of(DecentralizedAlgorithm(False), linear(), (1, 1)),
    }

    def verdict(compute: float, part: float | None) -> Any:
        machine = MACHINE._replace(compute=compute)
        ranked = compare(plans, machine, error_of(machine, part))
        assert [c.seconds for c in ranked] == sorted(c.seconds for c in ranked)
        return verdict_of(ranked, next(c for c in ranked if c.name == "gradient_allreduce"))

    # steps of 5, 3.0625 and 3 s
    kept = verdict(3.0, 0.5)
    assert kept.winner is None
    assert kept.text.startswith("Keep gradient_allreduce: at most 40% to gain, by decentralized")
    assert verdict(3.0, 0.1).winner == "decentralized"
    # of 2.25, 0.3125 and 2 s: 1.5 x as many steps of local_sgd
    found = verdict(0.25, None)
    assert found.winner == "local_sgd:period=32"
    assert "the same loss in 20.8 % of the time of gradient_allreduce" in found.text
    assert found.line == 'model.with_bagua(optimizer, Algorithm.init("local_sgd", period=32))'


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


def test_every_registered_algorithm_has_a_plan() -> None:
    names = [
        name
        for name, (kind, _) in GlobalAlgorithmRegistry.items()
        if kind.__module__.startswith("bagua_ref.")
    ]
    assert {text.partition(":")[0] for text in candidates()} >= set(names)
    module = module_of(2**20 + 100)
    for name in names:
        plan = plan_of(
            made(name, module, **{"period": 2} if name == "local_sgd" else {}), module, (2, 2)
        )
        steps = range(plan.warmup + 1, plan.warmup + len(plan.cycle) + 1)
        counts = [[rank["between"][:2] for rank in plan.traffic(step)] for step in steps]
        per_rank = [tuple(map(sum, zip(*rank, strict=True))) for rank in zip(*counts, strict=True)]
        mean = [total / len(plan.cycle) for total in max(per_rank)]
        assert plan.sent == pytest.approx(mean, rel=1e-6), name
        assert plan.sent[0] > 0


def test_shapes_refuse_what_cannot_be_trained() -> None:
    for nodes in ((), (2, 0)):
        with pytest.raises(ValueError, match="must be numbers of ranks, each at least 1"):
            Cluster(nodes)
    with pytest.raises(ValueError, match="no parameters that need a gradient"):
        plan_of(GradientAllReduceAlgorithm(), torch.nn.ReLU(), (1, 1))
    with pytest.raises(
        ValueError, match="parameter 'weight' has no shape yet; call the module once"
    ):
        plan_of(GradientAllReduceAlgorithm(), torch.nn.LazyLinear(4), (1, 1))
    with pytest.raises(TypeError, match="parameter 'weight' is float64; topk takes"):
        plan_of(Algorithm.init("topk"), linear().double(), (1, 1))


# Fits


def test_a_fit_finds_the_costs_of_exact_times_and_ignores_one_odd_size() -> None:
    sizes = [0.0, 1e3, 1e5, 1e6]
    link, residuals = fit_link([2] * 4, sizes, [2e-3, 2e-3, 3e-3, 12e-3])  # 1 kB is sent at once
    assert link == pytest.approx((1e-3, 1e-8))
    assert residuals == pytest.approx([0.0, 0.005, 0.0, 0.0])
    falling, _ = fit_link([2] * 3, [1.0, 10.0, 100.0], [1.0, 0.9, 0.8])
    assert falling.beta == 0.0 < falling.alpha
    with pytest.raises(ValueError, match="do not tell alpha from beta"):
        fit_link([2] * 3, [8.0] * 3, [1.0, 1.0, 1.0])


def test_measure_refuses_links_that_the_formula_does_not_describe() -> None:
    check_fits({"inside": [0.1, -0.3]}, 0.3)
    message = r"between nodes.*off by up to 31%, more than 30%.*--repeat"
    with pytest.raises(CommandError, match=message):
        check_fits({"between": [0.1, -0.31]}, 0.3)


# The commands


def test_advise_ranks_and_says_why_what_is_learnt_and_what_to_do(run: Any) -> None:
    names = ("gradient_allreduce", "local_sgd:period=32", "bytegrad", "decentralized", "async")
    few = [word for name in names for word in ("--algorithm", name)]
    code, printed, _ = run(*BASE, "--nodes", "2", *few)
    assert code == 0
    assert "A training step of 4 ranks on 2 nodes" in printed
    assert printed.count(": busiest rank: ") == 5
    assert "  measured: +0.13 ± 0.11 points of accuracy on digits" in printed
    assert "warning: these let weights differ between ranks" in printed
    assert "\n    model.with_bagua(optimizer, " in printed
    assert "\nNext: bagua-ref measure" in printed
    result = json.loads(run(*BASE, "--nodes", "2", "--json", *few)[1])
    seconds = [row["seconds"][1] for row in result["rows"]]
    assert seconds == sorted(seconds)
    same = {row["algorithm"]: row["time_to_same_loss"] for row in result["rows"]}
    assert same["gradient_allreduce"] == "100 %"
    assert same["async"] == "unknown"
    assert result["costs"]["codec"]["MinMaxUInt8"] == devices()["cpu"]["codec"]["MinMaxUInt8"]


def test_advise_reads_numbers_as_people_write_them(run: Any) -> None:
    given = ["--compute", "10ms", "--algorithm", "gradient_allreduce", "--json"]
    one, *others = (
        json.loads(run(*given, *words)[1])["rows"]
        for words in (
            ["--params", "1M", "--ranks", "2x2", "--bandwidth", "1Gbps"],
            ["--params", "1m", "--ranks", "2X2", "--bandwidth", "1 Gbit/s"],
            ["--params", "1e6", "--ranks", "4", "--nodes", "2", "--bandwidth", "125MB"],
        )
    )
    assert all(other == one for other in others)


def test_advise_leaves_out_what_cannot_be_planned_and_says_why(run: Any) -> None:
    names = (
        "async:sync_interval_ms=0",
        "decentralized:peer_selection_mode=shift_one",
        "local_sgd:period=1000000000000",
    )
    few = [word for name in names for word in ("--algorithm", name)]
    code, printed, _ = run(*BASE, "--ranks", "3", *few)
    assert code == 0
    assert "sends nothing between nodes." in printed
    assert "peer_selection_mode='shift_one' pairs ranks, so it needs an even" in printed
    assert "is left out: LocalSGDAlgorithm repeats after 1,000,000,000,000 steps" in printed


def test_advise_plans_a_model_by_its_own_shapes(run: Any) -> None:
    given = ["--model", "tests.test_planning:model", "--algorithm", "gradient_allreduce", "--json"]
    result = json.loads(run(*given, "--ranks", "2", "--bandwidth", "1Gbit", "--compute", "1ms")[1])
    assert result["parameter_bytes"] == 4 * 2_001_000 == result["rows"][0]["bytes_per_step"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--ranks", "1"],
            "argument --ranks: '1' must be 2 to 1024 ranks: a rank alone sends nothi",
        ),
        (["--ranks", "2x"], "argument --ranks: '' must be an integer"),
        (["--ranks", "2x2", "--nodes", "4"], "--nodes 4 and --ranks 2x2 differ"),
        (["--ranks", "1025"], "argument --ranks: '1025' must be an integer from 1 to 1,024"),
        (["--params", "nan"], "argument --params: 'nan' must be"),
        (["--nodes", "5"], "--nodes 5 must be at most the number of ranks, 4"),
        (["--bandwidth", "0Gbit"], "bandwidth '0Gbit' must be a number above 0"),
        (["--compute", "0ms"], "time '0ms' must be a number above 0"),
        (["--error", "1.5"], "argument --error: '1.5' must be a number from 0 to 0.99"),
        (["--algorithm", "local_sgd:period=0"], "period=0 must be 1 or more"),
        (["--algorithm", "local_sgd:period"], "must be of the form NAME:OPTION=VALUE"),
        (["--algorithm", "local_sgd:period=)"], "must be of the form NAME:OPTION=VALUE"),
        (["--algorithm", "local_sgd:period=f()"], "must be of the form NAME:OPTION=VALUE"),
        (["--measured", "/nowhere"], "cannot read '/nowhere': No such file"),
        (["--measured", __file__], "it is not valid JSON"),
        (["--model", "m:f"], "argument --model: not allowed with argument --params"),
    ],
)
def test_advise_names_bad_input(run: Any, arguments: list[str], expected: str) -> None:
    code, _, error = run(*BASE, *arguments)
    assert code == 2
    assert expected in error


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_model", "returned a int; it must return a torch.nn.Module"),
        ("broken_model", "tests.test_planning:broken_model() failed: SystemExit: 3"),
        ("nothing", "cannot load tests.test_planning:nothing: AttributeError"),
        (
            "model_of_values",
            "(it is called on torch's device 'meta', where tensors have no values)",
        ),
    ],
)
def test_advise_names_a_model_that_cannot_be_made(run: Any, name: str, expected: str) -> None:
    code, _, error = run("--model", f"tests.test_planning:{name}", *BASE[2:])
    assert code == 2
    assert expected in error


def test_advise_takes_measured_costs_and_asks_for_missing_ones(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs: dict[str, Any] = {"inside": [1e-5, 1e-10], "compute": 0.01, "codec": {}, "operation": {}}
    costs |= {"shared_processor": True, "about": "here"}
    given = ["--params", "1e4", "--ranks", "4", "--measured", str(path), "--json"]
    given += ["--algorithm", "gradient_allreduce"]
    path.write_text(json.dumps(costs))
    code, _, error = run(*given)
    assert code == 2
    assert "argument --bandwidth is needed, as links between nodes were not measured" in error
    seconds = json.loads(run(*given, "--nodes", "1")[1])["rows"][0]["seconds"][1]
    fixed = devices()["cpu"]["operation"][""]
    assert seconds == pytest.approx(0.01 + 6 * (1e-5 + 1e4 * 1e-10) + fixed)
    for wrong, expected in (
        ({"codec": {"x": -1.0}}, "the measured costs have -1.0; they must be seconds"),
        ({"inside": [1.0]}, "the measured costs['inside'] must have 2 items, not 1"),
        ({"codec": None}, "the measured costs['codec'] must be"),
    ):
        path.write_text(json.dumps(costs | wrong))
        code, _, error = run(*given)
        assert code == 2
        assert expected in error


def test_a_reader_that_closes_the_output_gets_no_traceback() -> None:
    script = (
        "import os, sys\nfrom bagua_ref_cli import main\nends ="
        " os.pipe()\nos.close(ends[0])\nos.dup2(ends[1], 1)\n"
    )
    done = run_script(f"{script}sys.exit(main({['graph', 'ring', '--ranks', '4']!r}))")
    assert (done.returncode, done.stderr) == (1, "")


def measured(path: str) -> int:
    words = ["--repeat", "3", "--step", "tests.test_planning:pass_of_a_model", "--json"]
    return main(["measure", "--output", path, "--residual", "1e9", *words])


@pytest.mark.proof
def test_a_measurement_is_read_by_advise(run: Any, tmp_path: Path) -> None:
    path, nodes = tmp_path / "costs.json", (2, 1)
    assert launch(measured, 3, str(path), init=False, nodes=nodes) == [0] * 3
    costs = json.loads(path.read_text())
    for kind in ("inside", "between"):
        alpha, beta = costs[kind]
        assert 0 <= alpha < 10
        assert 0 <= beta < 1e-5
        assert 3 <= len(costs["residuals"][kind]) <= 6
    assert costs["compute"] > 0
    assert {"MinMaxUInt8", "OneBit", "topk", "powersgd", ""} <= costs["codec"].keys()
    assert costs["codec"].keys() == costs["operation"].keys()
    shape = ["--params", "1e5", "--ranks", "3", "--nodes", "2"]
    code, printed, _ = run(*shape, "--measured", str(path))
    assert code == 0
    assert "measured on 3 ranks" in printed


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
    with pytest.raises(ValueError, match="Own has no plan: its ranks do not all communicate"):
        plan_of(Own(all_ranks=False), linear(), (1,) * 3)

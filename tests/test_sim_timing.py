"""Time on simulated ranks: operations take that of S14, and compute hides those beside it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import torch_programs
from tests.same import assert_same
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bagua_ref.cli import main
from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import LinkCost, LinkCosts, operation_seconds
from bagua_ref.simulation import SimulatedWorld
from bagua_ref.simulation.timing import Timeline

# sums of such numbers are exact
LINKS = LinkCosts(between=LinkCost(0.5, 2**-10), inside=LinkCost(0.125, 2**-12))
FREE = LinkCosts(LinkCost(0.0, 0.0), LinkCost(0.0, 0.0))


def timed(
    program: Callable[[], Any],
    nodes: tuple[int, ...] = (4,),
    link: Any = LINKS,
    compute: Any = None,
) -> SimulatedWorld:
    def start() -> Any:
        dist.init_process_group("gloo")
        return program()

    world = SimulatedWorld(sum(nodes), nodes, torch_distributed=True, link=link, compute=compute)
    world.run(start)
    return world


def ones(elements: int) -> torch.Tensor:
    return torch.ones(elements)


def parts(elements: int) -> list[torch.Tensor]:
    return [ones(elements) for _ in range(dist.get_world_size())]


def root_only(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    return tensors if dist.get_rank() == 1 else None


CHUNKS = costs.chunk_bytes(10, 4, 4)
CASES: dict[str, tuple[Callable[[], Any], costs.Operation]] = {
    "all_reduce": (lambda: dist.all_reduce(ones(10)), costs.all_reduce(CHUNKS)),
    "barrier": (lambda: dist.barrier(), costs.all_reduce([0] * 4)),
    "monitored_barrier": (lambda: dist.monitored_barrier(), costs.all_reduce([0] * 4)),
    "reduce": (lambda: dist.reduce(ones(10), dst=1), costs.reduce(40, 4, 1)),
    "broadcast": (lambda: dist.broadcast(ones(10), src=3), costs.broadcast(40, 4, 3)),
    "all_gather": (lambda: dist.all_gather(parts(5), ones(5)), costs.all_gather([20] * 4)),
    "all_gather_into_tensor": (
        lambda: dist.all_gather_into_tensor(ones(20), ones(5)),
        costs.all_gather([20] * 4),
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter(ones(5), parts(5)),
        costs.reduce_scatter([20] * 4),
    ),
    "reduce_scatter_tensor": (
        lambda: dist.reduce_scatter_tensor(ones(5), ones(20)),
        costs.reduce_scatter([20] * 4),
    ),
    "all_to_all": (lambda: dist.all_to_all(parts(5), parts(5)), costs.all_to_all([[20] * 4] * 4)),
    "all_to_all_single": (
        lambda: dist.all_to_all_single(ones(20), ones(20)),
        costs.all_to_all([[20] * 4] * 4),
    ),
    "gather": (lambda: dist.gather(ones(5), root_only(parts(5)), dst=1), costs.gather([20] * 4, 1)),
    "scatter": (
        lambda: dist.scatter(ones(5), root_only(parts(5)), src=1),
        costs.scatter([20] * 4, 1),
    ),
    "send": (
        lambda: [
            lambda: dist.send(ones(5), 2),
            lambda: None,
            lambda: dist.recv(ones(5), 0),
            lambda: None,
        ][dist.get_rank()](),
        costs.one_round([(0, 2, 20)]),
    ),
}


@pytest.mark.parametrize("nodes", [(4,), (2, 2), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_an_operation_takes_the_time_of_its_formula(name: str, nodes: tuple[int, ...]) -> None:
    program, operation = CASES[name]
    node_of = [node for node, size in enumerate(nodes) for _ in range(size)]
    assert timed(program, nodes).virtual_time == operation_seconds(operation, node_of, LINKS) > 0


def pairs_at_once(second_starts: float = 0.0) -> Callable[[], None]:
    """Let ranks 0 and 2, and ranks 1 and 3, all-reduce 256 elements each."""

    def program() -> None:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        own = dist.get_rank() % 2
        time.sleep(own * second_starts)
        dist.all_reduce(ones(256), group=groups[own])

    return program


def test_two_collectives_at_once_share_the_nodes_link_and_not_those_of_pairs() -> None:
    assert timed(pairs_at_once(), (2, 2)).virtual_time == 2 * (0.5 + 2 * 512 * 2**-10)
    assert timed(pairs_at_once(), (4,)).virtual_time == 2 * (0.125 + 512 * 2**-12)


def test_a_collective_is_slower_only_while_another_is_under_way() -> None:
    # Alone, a round takes 1 s, and both together 1.5 s each. From 0.25 s on the first is 1.5 times
    # as slow as before.
    world = timed(pairs_at_once(second_starts=0.25), (2, 2))
    spans = {span.rank: span for span in world.timeline.spans if span.kind == "communication"}  # type: ignore[union-attr]
    first, second = spans[0], spans[1]
    assert (first.began, second.began) == (0.0, 0.25)
    assert first.ended == pytest.approx(0.25 + 1.75 * 1.5)
    # The second has 2 rounds; 2.625 s pass for 1.75 of them, and the rest is alone.
    assert second.ended == pytest.approx(2.875 + 0.25)


def test_a_program_sees_the_time_and_a_work_under_way_is_not_completed() -> None:
    def program() -> None:
        work = dist.all_reduce(ones(4), async_op=True)
        assert not work.is_completed()
        began = time.perf_counter()
        while not work.is_completed():
            pass
        assert time.perf_counter() - began == pytest.approx(2 * (0.5 + 8 * 2**-10), rel=1e-3)

    timed(program, (1, 1))


def test_a_link_that_is_too_slow_for_the_timeout_ends_in_it() -> None:
    def program() -> None:
        with pytest.raises(RuntimeError, match=r"timed out after 1\.0 s|was given up"):
            dist.all_reduce(
                ones(10_000), group=dist.new_group([0, 1], timeout=dist.default_pg_timeout / 1800)
            )
        # and not when the transfer's next round begins
        assert time.monotonic() == pytest.approx(1.0, rel=1e-3)

    timed(program, (1, 1))


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))


def ddp(steps: int = 5) -> Callable[[], None]:
    """Train with one bucket per layer."""

    def program() -> None:
        model = DistributedDataParallel(layers(), bucket_cap_mb=0.25)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()

    return program


@pytest.mark.parametrize("compute", [0.12, 12.0])
def test_S14_4_ddp_takes_the_time_of_overlapped_buckets(compute: float) -> None:
    links = LinkCosts.parse("1Gbit,10ms")
    world = timed(ddp(), (1, 1), links, compute)
    nbytes = [256 * 256 * 4] * 4
    seconds = [
        operation_seconds(costs.all_reduce([size // 2] * 2), [0, 1], links) for size in nbytes
    ]
    step, exposed = costs.overlap(compute / 3, 2 * compute / 3, nbytes, seconds)
    assert world.timeline is not None
    assert world.timeline.per_step() == (pytest.approx(step), pytest.approx(exposed))
    # all but the last bucket are hidden
    assert (exposed == pytest.approx(seconds[-1])) == (compute > 1)


def test_compute_of_parameters_without_gradients_passes_before_the_step() -> None:
    def program() -> None:
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 256))  # no backward
        with torch.no_grad():
            model(torch.ones(1, 256))  # takes none
        optimizer.step()

    world = timed(program, link=FREE, compute=3.0)
    assert world.timeline is not None
    assert world.timeline.per_step() == (pytest.approx(3.0), 0.0)
    assert [span.kind for span in world.timeline.spans] == ["compute"] * 8


def test_a_forward_that_backward_repeats_belongs_to_the_same_pass() -> None:
    def program() -> None:
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hidden = torch.ones(1, 256, requires_grad=True)
        checkpoint(model, hidden, use_reentrant=False).sum().backward()
        optimizer.step()

    world = timed(program, link=FREE, compute=3.0)
    assert world.virtual_time == pytest.approx(3.0)


def test_measured_compute_passes_and_results_do_not_depend_on_it() -> None:
    def program() -> float:
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass
        dist.all_reduce(ones(1))
        return time.monotonic()

    world = timed(program, link=FREE, compute="measured")
    assert 0.05 <= world.virtual_time < 5.0
    assert timed(program, link=FREE).virtual_time < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "first"), [(0.25, 0), ("measured", 1)])
def test_results_of_programs_do_not_depend_on_time(compute: Any, first: int) -> None:
    """Every other program takes the compute that is given, and the rest what is measured."""
    names = [name for name in torch_programs.PROGRAMS if "compiled" not in name][first::2]
    plain = SimulatedWorld(2, torch_distributed=True).run(torch_programs.run, names, True)
    world = SimulatedWorld(2, (1, 1), torch_distributed=True, link="1Gbit,1ms", compute=compute)
    assert_same(world.run(torch_programs.run, names, True), plain)
    assert world.virtual_time > 0.1


def test_the_trace_has_a_lane_for_each_rank_and_the_durations_of_spans() -> None:
    world = timed(ddp(), (1, 1), "1Gbit,10ms", 0.12)
    assert isinstance(world.timeline, Timeline)
    events = json.loads(json.dumps(world.timeline.chrome_trace()))["traceEvents"]
    assert {(event["pid"], event["tid"]) for event in events} == {(0, 0), (1, 1)}
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank]
        lane = sorted((event["ts"], event["dur"]) for event in own if event["ph"] == "X")
        assert all(ts + dur <= following + 1e-3 for (ts, dur), (following, _) in pairwise(lane))
        # it computes or waits all the time
        assert sum(dur for _, dur in lane) == pytest.approx(world.virtual_time * 1e6)
        reduced = [
            event for event in own if event["name"].startswith("all_reduce(SUM) of float32[65536]")
        ]
        begun, ended = ({e["id"] for e in reduced if e["ph"] == phase} for phase in "be")
        assert begun == ended != set()
        assert {"name": f"rank {rank}"} in [event.get("args") for event in own]


SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group()
model = DistributedDataParallel(torch.nn.Linear(256, 256, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
"""


COMMAND = ["sim", "train.py", "--nodes", "1,1", "--schedule", "default", "--link", "1Gbit,10ms"]


@pytest.fixture
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("_script")
def test_the_command_reports_times_and_writes_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--compute", "120ms", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    exposed = operation_seconds(
        costs.all_reduce([131072] * 2), [0, 1], LinkCosts.parse("1Gbit,10ms")
    )
    assert (result["verdict"], result["trace"]) == ("agree", "sim-trace.json")
    assert result["seconds_per_step"] == pytest.approx(0.12 + exposed)
    assert result["exposed_seconds_per_step"] == pytest.approx(exposed)
    assert {
        event["tid"] for event in json.loads(Path("sim-trace.json").read_text())["traceEvents"]
    } == {0, 1}


@pytest.mark.slow
@pytest.mark.usefixtures("_script")
def test_the_command_measures_compute_in_a_run_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*COMMAND, "--trace", "other.json"]) == 0
    told = capsys.readouterr().out
    seconds, exposed = (float(found) for found in re.findall(r"([\d.]+) s ", told)[-2:])
    assert 0 < exposed < seconds < 5
    assert "s of it exposed communication; trace: other.json" in told
    spans = [
        event
        for event in json.loads(Path("other.json").read_text())["traceEvents"]
        if event["ph"] == "X"
    ]
    assert {event["cat"] for event in spans} == {"compute", "wait"}

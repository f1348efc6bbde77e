"""Tests of what a training counts: `bagua_metrics`, its log, and the flight recorder."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch import launch, on_every_process, outcomes
from tests.trainings import batch, by_name, network, on_every_rank, simulate, wrap
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm, GradientAllReduceAlgorithm, LocalSGDAlgorithm
from bagua_ref.backends.reference.backend import ReferenceBackend
from bagua_ref.backends.reference.codecs import MinMaxUInt8
from bagua_ref.base.runtime import current_world
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError
from bagua_ref.integrations.metrics_logger import MetricsLogger
from bagua_ref.observe import flight_recorder
from bagua_ref.planning import plan_of

SIZE = 24  # parameters of `line`; divides by 2, 3 and 4
SENT: list[tuple[str, dict[str, Any], int]] = [
    ("gradient_allreduce", {}, 5),
    ("bytegrad", {"hierarchical": False}, 5),
    ("decentralized", {"hierarchical": False}, 5),
    *(
        ("decentralized", {"hierarchical": False, "peer_selection_mode": mode}, 5)
        for mode in ("shift_one", "one_peer_exponential", "hypercube", "ring", "exponential")
    ),
    ("low_precision_decentralized", {"hierarchical": False}, 5),
    ("qadam", {"hierarchical": False}, 3),
    ("local_sgd", {"period": 2}, 2),
    ("diloco", {"period": 2}, 2),
    ("diloco", {"period": 2, "compression": "MinMaxUInt8"}, 2),
    ("topk", {"ratio": 0.1}, 5),
]
"""Algorithms, and how many of 5 steps send something after a warm-up."""


def line() -> Any:
    torch.manual_seed(0)
    return nn.Linear(SIZE, 1, bias=False)


def trained(name: str, options: dict[str, Any], steps: int = 5) -> dict[str, Any]:
    """Return the metrics after some steps."""
    optimizer, algorithm = by_name(name, module := line(), lr=0.01, **options)
    module.with_bagua([optimizer], algorithm)
    assert module.bagua_metrics()["bytes_sent"] == 0
    for step in range(steps):
        optimizer.zero_grad()
        with module.no_sync():
            module(torch.ones(1, SIZE)).sum().backward()
        module(torch.full((2, SIZE), float(step))).square().mean().backward()
        optimizer.step()
    metrics: dict[str, Any] = module.bagua_metrics()
    return metrics


@pytest.mark.parametrize(("name", "options", "rounds"), SENT)
def test_bytes_sent_are_those_of_the_plan(name: str, options: dict[str, Any], rounds: int) -> None:
    ranks, steps = 4, range(1, 6)
    _, algorithm = by_name(name, line(), lr=0.01, **options)
    plan = plan_of(algorithm, line(), (1,) * ranks)
    for rank, metrics in enumerate(simulate(ranks, lambda r: trained(name, options))):
        sent = sum(plan.traffic(step)[rank]["between"].bytes_sent for step in steps)
        assert metrics["bytes_sent"] == sent
        assert metrics["bytes_sent_per_step"] == sent / 5
        assert metrics["steps"] == 5
        assert metrics["rounds"] == rounds + 2 * (name == "qadam")


def test_a_rank_alone_agrees_with_itself_and_sends_nothing() -> None:
    (metrics,) = simulate(1, lambda r: trained("bytegrad", {}))
    assert (metrics["bytes_sent"], metrics["steps"], metrics["steps_in_agreement"]) == (0, 5, 5)


def test_hierarchical_bytes_differ_between_leaders_and_others() -> None:
    def rank(r: int) -> int:
        sent: int = trained("bytegrad", {"hierarchical": True})["bytes_sent"]
        return sent

    def inside(r: int) -> int:
        # gathered at the leader; the broadcast counts as the mean over ranks
        return 4 * SIZE if r else 0

    block = 32 + 32
    for r, sent in enumerate(simulate(4, rank, nodes=(2, 2))):
        leader = 2 * block if r in (0, 2) else 0
        assert sent == 5 * (inside(r % 2) + leader + 4 * SIZE // 2)


@on_every_rank(2)
def test_steps_in_agreement_stand_still_between_rounds(r: int) -> None:
    for steps, agreed in ((2, 0), (3, 3), (4, 3), (6, 6)):
        assert trained("local_sgd", {"period": 3}, steps)["steps_in_agreement"] == agreed
    assert trained("gradient_allreduce", {})["steps_in_agreement"] == 4


def test_the_exposed_wait_is_the_time_that_another_rank_is_late() -> None:
    def rank(r: int) -> dict[str, Any]:
        module, optimizer = wrap(line(), GradientAllReduceAlgorithm(), lr=0.01)
        for _ in range(4):
            loss = module(torch.ones(2, SIZE)).sum()
            current_world().sleep(0.5 if r == 1 else 0.125)
            loss.backward()
            optimizer.step()
        current_world().sleep(2)
        metrics: dict[str, Any] = module.bagua_metrics()
        return metrics

    first, second = simulate(2, rank)
    assert (first["exposed_wait_seconds"], second["exposed_wait_seconds"]) == (1.5, 0)
    assert first["exposed_wait_seconds_per_step"] == 0.375
    assert (first["seconds"], first["seconds_per_step"]) == (1.5, 0.5)
    assert first["seconds_since_last_exchange"] == second["seconds_since_last_exchange"] == 2


@on_every_rank(2)
def test_waiting_for_buffers_counts_and_so_do_their_bytes(r: int) -> None:
    model: Any = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    current_world().sleep(0.25 * (1 - r))
    model(torch.ones(2, 3))
    metrics, half_of_7_numbers = model.bagua_metrics(), (2 * 3 * 4 + 8) // 2
    assert (metrics["exposed_wait_seconds"], metrics["bytes_sent"]) == (0.25 * r, half_of_7_numbers)


def test_waiting_for_weights_that_a_round_changes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    change = ReferenceBackend.async_average_

    def slowly(*arguments: Any) -> None:
        current_world().sleep(0.25)
        change(*arguments)

    monkeypatch.setattr(ReferenceBackend, "async_average_", slowly)
    for metrics in simulate(2, asynchronous):
        assert 0.2 < metrics["exposed_wait_seconds"] <= 0.25 * (metrics["async_rounds"] + 1)


def test_codec_seconds_are_those_that_codecs_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = MinMaxUInt8._compress_in_steps

    def slow(self: Any, *args: Any) -> Any:
        for size in steps(self, *args):
            current_world().sleep(0.25)
            yield size

    monkeypatch.setattr(MinMaxUInt8, "_compress_in_steps", slow)
    blocks = len(
        list(
            steps(
                bagua_ref.get_codec("MinMaxUInt8"),
                torch.ones(12),
                1,
                None,
                torch.empty(64, dtype=torch.uint8),
            )
        )
    )
    for metrics in simulate(2, lambda r: trained("bytegrad", {"hierarchical": False})):
        assert metrics["codec_seconds"] == 5 * 2 * blocks * 0.25
    for metrics in simulate(2, lambda r: trained("gradient_allreduce", {})):
        assert metrics["codec_seconds"] == 0


def test_the_drifts_of_two_ranks_to_their_mean_are_equal() -> None:
    def rank(r: int) -> list[float]:
        found = []
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            module, optimizer = wrap(
                nn.Sequential(line(), nn.Linear(1, 2)).to(dtype),
                LocalSGDAlgorithm(period=2),
                lr=0.5,
            )
            assert "drift" not in module.bagua_metrics()
            for _ in range(2):
                module(torch.full((1, SIZE), 1.0 + r, dtype=dtype)).sum().backward()
                optimizer.step()
            found.append(module.bagua_metrics()["drift"])
        return found

    first, second = simulate(2, rank)
    assert first[:2] == pytest.approx(second[:2], rel=1e-6)
    assert first[2] == pytest.approx(second[2], rel=1e-2)
    assert min(first) > 0


@on_every_rank(2)
def test_the_drift_of_diloco_and_local_sgd_is_exact(r: int) -> None:
    found = []
    for name in ("local_sgd", "diloco"):
        module: Any = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(module.weight)
        _, optimizer = wrap(module, Algorithm.init(name, period=1), lr=1.0)
        module(torch.full((1, 4), 1.0 + 2 * r)).sum().backward()  # rank 0 moves by 1, rank 1 by 3
        optimizer.step()
        found.append(module.bagua_metrics()["drift"])
    assert found == [[2, 2], [2, 6]][r]  # 4 elements: to the mean -2, both 1 away; to the global 0


def asynchronous(r: int) -> dict[str, Any]:
    module, optimizer = wrap(line(), Algorithm.init("async", sync_interval_ms=100), lr=0.01)
    for _ in range(20):
        module(torch.ones(1, SIZE)).sum().backward()
        optimizer.step()
        current_world().sleep(0.05)
    metrics: dict[str, Any] = module.bagua_metrics()
    module.bagua_algorithm.abort(module)
    return metrics


def test_rounds_of_asynchronous_averaging_are_counted() -> None:
    first, second = simulate(2, asynchronous)
    assert first["exposed_wait_seconds"] == second["exposed_wait_seconds"] == 0
    assert first["seconds_since_last_exchange"] <= 0.1
    assert abs(first["async_rounds"] - second["async_rounds"]) <= 1
    assert first["async_rounds"] >= 5
    # An all-reduce of the weights and of a flag of 4 bytes for each round, and perhaps of one that
    # is under way.
    per_round = 4 * SIZE + 4
    assert first["bytes_sent"] // per_round - first["async_rounds"] in (0, 1)


def over_gloo() -> list[dict[str, Any]]:
    return [trained(name, options) for name, options, _ in SENT]


@pytest.mark.slow
def test_the_counts_over_gloo_are_those_of_the_simulation() -> None:
    for found, expected in zip(
        launch(over_gloo, 2), simulate(2, lambda r: over_gloo()), strict=True
    ):
        for (name, options, _), real, simulated in zip(SENT, found, expected, strict=True):
            assert real.keys() == simulated.keys()
            for key in (
                "steps",
                "rounds",
                "steps_in_agreement",
                "bytes_sent",
                "bytes_sent_per_step",
            ):
                assert real[key] == simulated[key], (name, key)
            assert real["exposed_wait_seconds"] > 0
            compresses = (
                name in ("bytegrad", "low_precision_decentralized", "qadam", "topk")
                or "compression" in options
            )
            assert (real["codec_seconds"] > 0) is compresses, name
            assert all(type(value) in (int, float) for value in real.values())


def test_only_wrapped_modules_have_metrics() -> None:
    with pytest.raises(ValueError, match="not wrapped"):
        line().bagua_metrics()


class Writer:
    """As `torch.utils.tensorboard.SummaryWriter`."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


def test_the_logger_writes_every_few_steps_with_means_over_these() -> None:
    def rank(r: int) -> tuple[list[tuple[dict[str, Any], int]], Writer]:
        module, writer = line(), Writer()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        logged: list[tuple[dict[str, Any], int]] = []
        with bagua_ref.train(module, [optimizer], LocalSGDAlgorithm(period=4)):
            logs = [
                MetricsLogger(module, lambda metrics, step: logged.append((metrics, step)), every=2)
            ]
            logs.append(MetricsLogger(module, writer, every=3))
            for _ in range(6):
                module(torch.ones(1, SIZE)).sum().backward()
                optimizer.step()
                for log in logs:
                    log()
            logs[0](100)
            logs[0](200)
        return logged, writer

    logged, writer = simulate(2, rank)[0]
    assert [step for _, step in logged] == [2, 4, 6, 200]
    assert [metrics["bagua/bytes_sent"] for metrics, _ in logged] == [
        0,
        4 * SIZE,
        4 * SIZE,
        4 * SIZE,
    ]
    assert [metrics["bagua/bytes_sent_per_step"] for metrics, _ in logged] == [0, 2 * SIZE, 0, 0]
    assert [(value, step) for name, value, step in writer.scalars if name == "bagua/steps"] == [
        (3, 3),
        (6, 6),
    ]
    with pytest.raises(ValueError, match="every=0"):
        MetricsLogger(line(), print, every=0)
    with pytest.raises(TypeError, match="write=3"):
        MetricsLogger(line(), 3)


def test_a_disagreement_is_written_by_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flight_recorder.FOLDER, str(tmp_path / "new"))

    def rank(r: int) -> str:
        module, optimizer = wrap(network(), GradientAllReduceAlgorithm(), lr=0.01)
        for step in range(3):
            module(batch(r, step)).sum().backward()
            optimizer.step()
        module._bagua.steps_of_optimizers[0] += r
        with pytest.raises(CommunicationError, match="disagree") as raised:
            module(batch(r, 3)).sum().backward()
        with pytest.raises(CommunicationError, match="cannot train on") as again:
            module(batch(r, 4))
        assert "this rank's last operations" not in str(again.value)  # it is written once
        return str(raised.value)

    for r, message in enumerate(simulate(3, rank)):
        path = tmp_path / "new" / f"rank{r}.json"
        assert message.endswith(f"; this rank's last operations are in {path}")
        written = json.loads(path.read_text())
        assert (written["rank"], written["world_size"]) == (r, 3)
        assert "disagree" in written["error"]
        *before, last = written["operations"]
        assert [o["kind"] for o in before] == [
            *["agreement", "CentralizedFullPrecision", "end of round"] * 3,
            "agreement",
            "CentralizedFullPrecision",
        ]
        assert all(o["ended"] >= o["started"] for o in before)
        assert (before[1]["bytes"], before[1]["bucket"], before[1]["round"]) == (
            4 * (7 * 8 + 9 * 3),
            "0",
            1,
        )
        assert (last["kind"], last["round"], last["ended"]) == ("end of round", 4, None)
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_nothing_is_written_unasked_and_a_folder_that_cannot_be_written_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = CommunicationError("why")
    monkeypatch.delenv(flight_recorder.FOLDER, raising=False)
    flight_recorder.explain(error)
    assert str(error) == "why"
    (tmp_path / "file").touch()
    monkeypatch.setenv(flight_recorder.FOLDER, str(tmp_path / "file"))
    flight_recorder.explain(error)
    assert str(error).startswith("why; this rank's last operations could not be written (")
    assert [flight_recorder.dump(tmp_path).name for _ in range(3)] == [
        "rank0.json",
        "rank0-1.json",
        "rank0-2.json",
    ]


@on_every_rank(2)
def test_the_record_is_bounded(r: int) -> None:
    trained("gradient_allreduce", {}, steps=200)
    assert len(flight_recorder.record()["operations"]) == 256


def come_late(folder: str, timeout: float | None) -> None:
    """Let rank 2 come to its third step when the others have timed out."""
    os.environ[flight_recorder.FOLDER] = folder
    module, optimizer = wrap(line(), GradientAllReduceAlgorithm(), lr=0.01, timeout=timeout)
    for step in range(3):
        if step == 2 and bagua_ref.get_rank() == 2:
            while not all(Path(folder, f"rank{other}.json").exists() for other in (0, 1)):
                time.sleep(0.01)
        module(torch.ones(1, SIZE)).sum().backward()
        optimizer.step()


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_in_the_files_of_the_others(tmp_path: Path) -> None:
    ended = outcomes(come_late, 3, str(tmp_path), None, collective_timeout=2.0)
    assert all(isinstance(outcome.error, CommunicationError) for outcome in ended)
    for r in (0, 1):
        assert isinstance(ended[r].error, CommunicationTimeoutError)
        assert str(ended[r].error).endswith(
            f"this rank's last operations are in {tmp_path}/rank{r}.json"
        )
    written = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(3)]
    started = [
        [o["started"] for o in one["operations"] if o["kind"] == "agreement"] for one in written
    ]
    assert [len(one) for one in started] == [3, 3, 3]
    assert started[2][2] - started[0][2] > 2  # the clocks of a machine's ranks can be compared
    unfinished = [
        [(o["kind"], o["round"]) for o in one["operations"] if o["ended"] is None]
        for one in written
    ]
    # the late rank's note may still be sent to ranks that close their connections just then
    late = unfinished[2][0][0]
    assert late in ("agreement", "CentralizedFullPrecision")
    assert unfinished == [
        [(kind, 3)] for kind in ("CentralizedFullPrecision", "CentralizedFullPrecision", late)
    ]


@pytest.mark.slow
def test_the_files_say_what_a_rank_still_waits_for(tmp_path: Path) -> None:
    ended = outcomes(come_late, 3, str(tmp_path), 2.0, collective_timeout=30.0)
    assert "timed out after 2 s" in str(ended[0].error)
    (wait,) = json.loads((tmp_path / "rank0.json").read_text())["waits"]
    assert wait["for"].startswith("in allreduce of group")
    assert wait["ranks"] == [0, 1, 2]


@pytest.mark.slow
@on_every_process(2)
def test_a_communication_hook_writes_what_was_last_too(tmp_path: Path) -> None:
    os.environ[flight_recorder.FOLDER] = str(tmp_path)
    model = nn.parallel.DistributedDataParallel(line())
    state, hook = bagua_ref.ddp_comm_hook("bytegrad", hierarchical=False)
    model.register_comm_hook(state, hook)
    model(torch.ones(1, SIZE)).sum().backward()
    state.steps_of_optimizers[0] += bagua_ref.get_rank()
    file = tmp_path / f"rank{bagua_ref.get_rank()}.json"
    with pytest.raises(RuntimeError, match=rf"disagree.*{file}"):
        model(torch.ones(1, SIZE)).sum().backward()
    written = json.loads(file.read_text())
    assert [o["kind"] for o in written["operations"]] == [
        "agreement",
        "CentralizedLowPrecision",
        "agreement",
    ]


@on_every_rank(2)
def test_a_failure_of_asynchronous_averaging_is_written(
    r: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flight_recorder.FOLDER, str(tmp_path))
    module, optimizer = wrap(line(), Algorithm.init("async", sync_interval_ms=100), lr=0.01)

    def train() -> None:
        for step in range(20):
            module(torch.ones(1, SIZE)).sum().backward()
            optimizer.step()
            current_world().sleep(0.05)
            if step == 10:
                module.bagua_algorithm._rounds._group.abort("a test")

    with pytest.raises(
        CommunicationError, match=f"this rank's last operations are in {tmp_path}/rank{r}"
    ):
        train()

"""Tests of traces of whole trainings: correct ones pass, faults are located exactly (S3.1 to S3.6,
S5).
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch import launch, outcomes
from tests.scripts import load_script, run_python
from tests.trace_trainings import learn, network, record_steps, simulate, train, train_and_die
from tests.trainings import wrap
from torch import Tensor

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.backends import get_codec
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.backends.reference.codecs import MinMaxUInt8
from bagua_ref.base.not_provided import install_command
from bagua_ref.base.runtime import current_world
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.cli import main
from bagua_ref.comm_ops import LowPrecisionDecentralized, decentralized, shift_one_peer
from bagua_ref.comm_ops.base import reduce_to_leader
from bagua_ref.conformance.formats import read_safetensors, write_safetensors
from bagua_ref.conformance.trace import (
    Divergence,
    Recorder,
    TraceError,
    TraceReport,
    check_trace,
    read_trace,
)
from bagua_ref.errors import CommunicationError
from bagua_ref.simulation import SimulatedWorld

FLAT = {"hierarchical": False}
SHIFT_ONE = {"hierarchical": False, "peer_selection_mode": "shift_one"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_do_not_diverge(tmp_path: Path, dtype: torch.dtype) -> None:
    cases = [("gradient_allreduce", {}), ("decentralized", SHIFT_ONE)]
    cases += (
        [("bytegrad", {}), ("low_precision_decentralized", FLAT)]
        if dtype is not torch.float64
        else []
    )
    cases += [
        (
            "powersgd",
            {"warmup_steps": 0, "min_compression_rate": 0.01, "matrix_approximation_rank": 2},
        )
    ]
    cases += [("topk", {"ratio": 0.1, "warmup_steps": 1})] if dtype is not torch.float64 else []
    for number, (name, options) in enumerate(cases):
        simulate(tmp_path / str(number), name, options, (2,), dtype=dtype)
        report = check_trace(tmp_path / str(number))
        assert report.passed, report
        assert read_trace(tmp_path / str(number))[0].records(0)["0"].outputs["x"].dtype is dtype


def first_of(report: TraceReport) -> Divergence:
    assert report.first is not None
    return report.first


def run_example(directory: str, hook: str) -> str:
    """Run the example on a rank of a launcher's; return what it prints."""
    sys.argv[1:] = [directory, "--hook", hook]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        load_script("examples/trace_ddp.py").main()
    return printed.getvalue()


def test_the_example_records_torchs_ddp_whose_fp16_hook_diverges_by_rounding_to_float16(
    tmp_path: Path,
) -> None:
    assert launch(run_example, 2, str(tmp_path), "fp16", init=False)[0].startswith("10 steps, ")
    report = check_trace(tmp_path, "gradient_allreduce")
    first = first_of(report)
    assert (report.passed, first.step, first.rank, first.bucket) == (False, 0, 0, "0")
    assert first.ulps is not None
    assert 1 < first.ulps < 2**14  # float16 has 13 bits fewer
    ((kind, count),) = report.kinds.items()
    assert kind.startswith("as if rounded to float16: all values are numbers of float16")
    assert count == len(report.executions) >= 10


def test_torchs_ddp_without_it_is_gradient_allreduce(tmp_path: Path) -> None:
    launch(run_example, 2, str(tmp_path), "allreduce", init=False)
    report = check_trace(tmp_path, "gradient_allreduce")
    assert report.passed, report
    assert report.steps == [*range(10)]


class NextChunk(MinMaxUInt8):
    """Compresses the chunk after the one that was reduced."""

    def compress(
        self, x: Tensor, num_chunks: int, target_chunk: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        if target_chunk is None:
            return super().compress(x, num_chunks, out=out)
        size = x.numel() // num_chunks
        moved = x.clone()
        moved[target_chunk * size :][:size] = x[(target_chunk + 1) % num_chunks * size :][:size]
        return super().compress(moved, num_chunks, target_chunk, out)


class OffByOneChunk(ReferenceBackend):
    codecs = {"MinMaxUInt8": NextChunk}


def test_bytegrad_with_a_planted_off_by_one_chunk_is_located(tmp_path: Path) -> None:
    simulate(tmp_path, "bytegrad", FLAT, (4,), backend=OffByOneChunk())
    report = check_trace(tmp_path, "bytegrad", FLAT)
    first = first_of(report)
    assert (first.step, first.rank, first.bucket) == (0, 0, "0")
    recorded = read_trace(tmp_path)[0].records(0)["0"].outputs["x"]
    expected = simulate_once(tmp_path)
    assert first.element == int((recorded != expected).nonzero()[0])
    assert first.got == recorded[first.element].item()
    assert first.expected == expected[first.element].item()
    assert first.chunks == "chunk 0, 1, 2, 3 of 4 chunks of 26 elements, reduced by rank 0, 1, 2, 3"
    assert "tensor '2.bias'[" in str(report)  # the last layer comes first


def test_the_example_finds_the_rank_that_has_the_fault(capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = load_script("examples/trace_off_by_one.py").main()
    assert right.passed
    assert wrong.first is not None
    assert (wrong.first.step, wrong.first.bucket) == (0, "0")
    assert wrong.first.chunks == "chunk 2 of 4 chunks of 262 elements, reduced by rank 2"
    assert 2 * 262 <= wrong.first.element < 3 * 262
    assert "NO DIVERGENCE" in capsys.readouterr().out


def simulate_once(tmp_path: Path) -> Tensor:
    """Return the first step's result without a planted fault."""
    simulate(tmp_path / "right", "bytegrad", FLAT, (4,), steps=1)
    return read_trace(tmp_path / "right")[0].records(0)["0"].outputs["x"]


def peer_off_by_one_at_odd_steps(rank: int, nranks: int, step: int) -> int:
    return shift_one_peer(rank, nranks, step + step % 2)


def test_a_peer_formula_that_is_off_by_one_at_odd_steps_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as planted:
        planted.setattr("bagua_ref.formulas.graphs.shift_one_peer", peer_off_by_one_at_odd_steps)
        # what it keeps, later tests would get
        planted.setattr(decentralized, "_named", decentralized._named.__wrapped__)
        simulate(tmp_path, "decentralized", SHIFT_ONE, (6,), steps=3)
    report = check_trace(tmp_path)
    first = first_of(report)
    assert (first.step, first.rank, first.element) == (1, 0, 0)
    # At step 1 rank 0 must meet rank 4, but meets rank 5.
    assert report.kinds == {"as if rank 0 had averaged with rank 5, which is not its peer now": 1}


class ForgetfulRing(LowPrecisionDecentralized):
    """Does not keep its left replica."""

    def __call__(self, x: Tensor) -> None:
        left = self.left_peer_weight.clone()
        super().__call__(x)
        self.left_peer_weight.copy_(left)


def test_a_replica_that_is_not_kept_is_found_at_the_step_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as planted:
        planted.setattr("bagua_ref.buckets.bucket.LowPrecisionDecentralized", ForgetfulRing)
        simulate(tmp_path, "low_precision_decentralized", FLAT, (4,))
    report = check_trace(tmp_path, "low_precision_decentralized", FLAT)
    assert (first_of(report).step, first_of(report).rank, report.steps) == (1, 0, [0, 1, 2, 3])


def test_a_mean_that_divides_by_the_wrong_number_on_uneven_nodes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mean_of_node(
        x: Tensor, intra: Any, kernels: Any, divisor: float | None, in_rank_order: bool
    ) -> None:
        reduce_to_leader(x, intra, kernels, float(intra.nranks()), in_rank_order)

    with monkeypatch.context() as planted:
        planted.setattr("bagua_ref.comm_ops.base.reduce_to_leader", mean_of_node)
        simulate(tmp_path / "even", "bytegrad", {}, (2, 2))
        simulate(tmp_path / "uneven", "bytegrad", {}, (1, 3))
    assert check_trace(tmp_path / "even").passed
    report = check_trace(tmp_path / "uneven")
    first = first_of(report)
    assert (first.step, first.rank, first.bucket) == (0, 0, "0")


def alter(directory: Path, rank: int, step: int, change: Any, tensor: str = "0:out:x") -> None:
    path = directory / f"rank{rank}" / f"{step:08d}.safetensors"
    tensors = read_safetensors(path)
    change(tensors[tensor])
    write_safetensors(path, tensors)


def one_ulp_up(x: Tensor, element: int) -> None:
    x[element] = torch.nextafter(x[element], torch.tensor(math.inf))


EXACT_CASES = [
    ("bytegrad", FLAT),
    ("bytegrad", {}),
    ("decentralized", SHIFT_ONE),
    ("low_precision_decentralized", FLAT),
    ("low_precision_decentralized", {}),
    ("qadam", FLAT),
]


@pytest.mark.parametrize(("name", "options"), EXACT_CASES)
@pytest.mark.parametrize(("rank", "step", "element"), [(0, 3, 0), (3, 2, 101), (2, 3, 57)])
def test_one_ulp_in_one_output_is_found_at_its_place(
    tmp_path: Path, name: str, options: dict[str, Any], rank: int, step: int, element: int
) -> None:
    simulate(tmp_path, name, options, (4,))
    alter(tmp_path, rank, step, lambda x: one_ulp_up(x, element))
    report = check_trace(tmp_path, name)
    found = report.first
    assert found is not None
    assert (found.rank, found.step, found.bucket, found.element, found.ulps) == (
        rank,
        step,
        "0",
        element,
        1,
    )
    wrong = [execution for execution in report.executions if any(execution.wrong)]
    assert sum(wrong[0].wrong) == 1
    # A ring's results are also its next step's replicas; elsewhere only the result changes.
    assert {execution.step for execution in wrong} <= (
        {step, step + 1} if "low" in name else {step}
    )
    if "low" not in name:
        assert report.diverging == 1


@pytest.mark.parametrize("name", ["gradient_allreduce", "decentralized"])
def test_a_sum_may_differ_in_the_last_bit_but_not_by_more(tmp_path: Path, name: str) -> None:
    simulate(tmp_path, name, FLAT, (4,))
    alter(tmp_path, 2, 1, lambda x: one_ulp_up(x, 7))
    assert check_trace(tmp_path).passed
    alter(tmp_path, 2, 1, lambda x: x[7].mul_(1.001).add_(1e-4))
    report = check_trace(tmp_path)
    assert report.first is not None
    assert (report.first.rank, report.first.step, report.first.element, report.diverging) == (
        2,
        1,
        7,
        1,
    )


def test_a_wrong_peer_is_named(tmp_path: Path) -> None:
    simulate(tmp_path, "decentralized", SHIFT_ONE, (4,))
    xs = [rank.records(2)["0"].inputs["x"] for rank in read_trace(tmp_path)]
    # At step 2 rank 1 meets rank 3, as at step 0; the altered trace has rank 2 instead.
    alter(tmp_path, 1, 2, lambda x: x.copy_((xs[2] + xs[1]) / 2))
    report = check_trace(tmp_path)
    first = first_of(report)
    assert (first.step, first.rank, first.element) == (2, 1, 0)
    assert report.kinds == {"as if rank 1 had averaged with rank 2, which is not its peer now": 1}


@pytest.mark.parametrize(
    ("name", "options"),
    [*EXACT_CASES, ("gradient_allreduce", {}), ("decentralized", FLAT)],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_belongs_to_another_step_is_found(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    simulate(tmp_path, name, options, (4,))
    other = read_trace(tmp_path)[1].records(2)["0"].outputs["x"]
    alter(tmp_path, 1, 3, lambda x: x.copy_(other))
    report = check_trace(tmp_path)
    assert report.first is not None
    assert (report.first.rank, report.first.step) == (1, 3)


def test_other_usual_causes_are_named(tmp_path: Path) -> None:
    simulate(tmp_path / "a", "gradient_allreduce", {}, (2,))
    ranks = read_trace(tmp_path / "a")

    def kind(number: int, change: Any) -> str:
        directory = tmp_path / str(number)
        shutil.copytree(tmp_path / "a", directory)
        for rank in (0, 1):
            alter(directory, rank, 1, lambda x, rank=rank: x.copy_(change(rank, x.clone())))
        (found,) = check_trace(directory).kinds
        return found

    assert kind(1, lambda rank, x: 2 * x) == "as if summed, where a mean was expected"
    assert (
        kind(2, lambda rank, x: ranks[rank].records(1)["0"].inputs["x"])
        == "as if nothing had been communicated: the outputs equal the inputs"
    )
    assert kind(3, lambda rank, x: x.bfloat16().float()).startswith("as if rounded to bfloat16")
    assert (
        kind(4, lambda rank, x: x + rank)
        == "as if ranks had ended with different values, where all must have the same"
    )


def test_a_mean_taken_for_bytegrad_is_named(tmp_path: Path) -> None:
    simulate(tmp_path, "gradient_allreduce", {}, (4,))
    assert check_trace(tmp_path, "bytegrad", FLAT).kinds == {
        "as if it had been communicated in full precision, not compressed": 4
    }


@pytest.mark.parametrize("name", ["bytegrad", "qadam"])
def test_operations_with_error_memory_are_not_checked(tmp_path: Path, name: str) -> None:
    simulate(tmp_path, name, {**FLAT, "error_feedback": True}, (2,))
    why = "error memories, which the result depends on, are not recorded"
    if name == "bytegrad":
        with pytest.raises(
            TraceError, match=f"nothing could be replayed: step 0, bucket '0': {why}"
        ):
            check_trace(tmp_path)
    else:  # its warm-up is checked
        assert {reason for _, _, reason in check_trace(tmp_path).not_checked} == {why}


def test_an_asynchronous_round_is_checked_whole_where_x_is_recorded(tmp_path: Path) -> None:
    steps = []
    for step in range(3):
        snapshots = [torch.full((5,), float(rank + step)) for rank in range(3)]
        reduced = snapshots[0] + snapshots[1] + snapshots[2]
        before = [snapshot + 0.5 for snapshot in snapshots]
        after = [
            x + (reduced / 3 - snapshot) + (step == 2) * 1e-3
            for x, snapshot in zip(before, snapshots, strict=True)
        ]
        outputs = [
            {"reduced": reduced, "before": x, "x": y} for x, y in zip(before, after, strict=True)
        ]
        steps.append(([{"snapshot": snapshot} for snapshot in snapshots], {}, outputs))
    record_steps(tmp_path, steps)
    report = check_trace(tmp_path, "async")
    first = first_of(report)
    assert (first.step, first.rank, first.tensor, first.element) == (2, 0, "x", 0)
    assert len(report.executions) == 6


def test_qadams_update_of_the_momentum_is_checked_where_it_is_recorded(tmp_path: Path) -> None:
    momentum, grad = torch.tensor([0.5, -1.0]), torch.tensor([0.25, 3.0])
    kernels, steps = ReferenceBackend(), []
    codec = get_codec("MinMaxUInt8", kernels)
    for beta1 in (0.5, 0.9):
        x = momentum.clone()
        kernels.update_momentum_(x, grad, beta1)
        for _ in range(2):  # on the way to the rank that reduces, and back
            codec.decompress(codec.compress(x, 1), 1, out=x)
        steps.append(([{"momentum": momentum, "grad": grad}], {"beta1": 0.5}, [x]))
    record_steps(tmp_path, steps)
    report = check_trace(tmp_path, "qadam", {"hierarchical": False, "warmup_steps": 0})
    assert [any(execution.wrong) for execution in report.executions] == [False, True]


# Recording, and its end


def test_sampled_steps_and_buckets_can_all_be_replayed(tmp_path: Path) -> None:
    for name, options in (
        ("low_precision_decentralized", FLAT),
        ("decentralized", SHIFT_ONE),
        ("bytegrad", {}),
    ):
        simulate(tmp_path / name, name, options, (2,), steps=9, every=3)
        report = check_trace(tmp_path / name)
        assert report.passed
        assert (report.steps, report.not_checked) == ([0, 3, 6], [])
    simulate(
        tmp_path / "share", "low_precision_decentralized", FLAT, (2,), steps=20, buckets=0.5, seed=3
    )
    report = check_trace(tmp_path / "share")
    assert report.passed
    assert not report.not_checked
    assert 3 < len(report.steps) < 17
    assert any(b == a + 1 for a, b in zip(report.steps, report.steps[1:], strict=False))


def test_a_ring_whose_replicas_are_unknown_is_not_checked_and_says_so(tmp_path: Path) -> None:
    simulate(tmp_path, "low_precision_decentralized", FLAT, (2,))
    for rank in (0, 1):
        index = tmp_path / f"rank{rank}" / "steps.jsonl"
        index.write_text(index.read_text().replace('["x", "weight", "left", "right"]', '["x"]'))
    report = check_trace(tmp_path)
    assert report.passed
    assert report.steps == [1, 2, 3]
    assert report.not_checked[0][:2] == (0, "0")
    assert "replicas" in report.not_checked[0][2]


def test_the_limit_stops_recording_with_one_warning_and_training_goes_on(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"max_bytes=3000.*Training continues") as warned:
        (recorder,) = simulate(tmp_path, "gradient_allreduce", {}, (1,), steps=9, max_bytes=3000)
    assert len(warned) == 1
    assert 0 < recorder.bytes_written <= 3000
    report = check_trace(tmp_path)
    assert report.passed
    assert len(report.steps) == recorder.steps_written == 3
    assert report.notes == ["rank 0 stopped recording: step 3 would exceed max_bytes=3000"]


def test_a_disk_that_fails_stops_recording_not_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bagua_ref.conformance.trace import rank_recorder

    def full(path: Path, tensors: Any) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank_recorder, "write_safetensors", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        (recorder,) = simulate(tmp_path, "gradient_allreduce", {}, (1,))
    assert recorder.steps_written == 0


def test_a_rank_that_dies_leaves_its_whole_steps(tmp_path: Path) -> None:
    survivor, dead = outcomes(train_and_die, 2, tmp_path, collective_timeout=5, limit=60)
    assert isinstance(survivor.error, CommunicationError)
    assert dead.exitcode == 3
    report = check_trace(tmp_path)
    assert report.passed
    assert report.steps == [0, 1]
    assert [rank.steps.keys() for rank in read_trace(tmp_path)] == [{0, 1}] * 2
    assert len(report.notes) == 2


def test_an_operation_that_is_none_of_ours_runs_and_is_not_recorded(tmp_path: Path) -> None:
    def rank(comm: Any) -> list[float]:
        bagua_ref.init_process_group()
        bucket = BaguaBucket([torch.ones(2).ensure_bagua_tensor("t")], "0", flatten=True)  # type: ignore[attr-defined]
        bucket._ops.append(lambda flat: flat.mul_(3))
        with Recorder(tmp_path) as recorder:
            bucket.execute()
        assert recorder.steps_written == 0
        return bucket.tensors[0].tolist()

    assert SimulatedWorld(1).run(rank) == [[3.0, 3.0]]


def test_a_crash_leaves_all_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # restored later, as the recorder is never left
    monkeypatch.setattr(current_world(), "observers", ())
    recorder = Recorder(tmp_path, rank=0, world_size=1)
    recorder.__enter__()
    for _ in range(3):
        recorder.before_op("0", torch.ones(2))
        recorder.after_op("0", torch.ones(2))
        recorder.step()
    recorder.before_op("0", torch.ones(2))  # the last record: the process dies here
    (tmp_path / "rank0" / "00000003.safetensors.partial").write_bytes(b"half a fi")
    with (tmp_path / "rank0" / "steps.jsonl").open("a") as index:
        index.write('{"step": 3, "file": "00000')
    report = check_trace(tmp_path, "gradient_allreduce")
    assert report.steps == [0, 1, 2]
    assert "did not finish recording" in report.notes[0]


def test_an_exception_drops_the_step_that_is_not_whole(tmp_path: Path) -> None:
    def fail() -> None:
        with Recorder(tmp_path, rank=0, world_size=1) as recorder:
            for step in range(3):
                for bucket in (0, 1):
                    if (step, bucket) == (2, 1):
                        raise ZeroDivisionError
                    recorder.before_op(bucket, torch.ones(2))
                    recorder.after_op(bucket, torch.ones(2))

    with pytest.raises(ZeroDivisionError):
        fail()
    # without step(): a bucket that comes again begins a new step
    assert sorted(read_trace(tmp_path)[0].steps) == [0, 1]


def test_a_bucket_that_comes_late_is_in_its_step(tmp_path: Path) -> None:
    with Recorder(tmp_path, rank=0, world_size=1) as recorder:
        for step in range(4):
            # bucket 1 is in every second step only
            for bucket in (0, 1) if step % 2 == 0 else (0,):
                recorder.before_op(bucket, torch.ones(2))
                recorder.after_op(bucket, torch.ones(2))
            recorder.step()
    assert recorder.steps_written == 4
    (rank,) = read_trace(tmp_path)
    assert [list(rank.records(step)) for step in range(4)] == [["0", "1"], ["0"], ["0", "1"], ["0"]]


def test_ranks_that_ended_at_different_steps_are_checked_as_far_as_all_went(tmp_path: Path) -> None:
    record_steps(tmp_path, [([np.ones(4, np.float32)] * 2, {}, [np.ones(4, np.float32)] * 2)] * 4)
    index = tmp_path / "rank0" / "steps.jsonl"
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:3]))
    report = check_trace(tmp_path, "gradient_allreduce")
    assert report.passed
    assert report.steps == [0, 1, 2]
    assert report.notes == [
        "1 steps, from step 3 on, were recorded by some ranks only (rank 1) and are not checked"
    ]


def test_nothing_is_observed_after_the_recorder_has_ended(tmp_path: Path) -> None:
    def rank(comm: Any) -> int:
        bagua_ref.init_process_group()
        train(tmp_path, "bytegrad", {}, steps=2)
        return len(current_world().observers)

    assert SimulatedWorld(2).run(rank) == [0, 0]


@pytest.mark.proof
def test_recording_needs_nothing_that_is_optional_and_checking_only_safetensors(
    tmp_path: Path,
) -> None:
    simulate(tmp_path / "ours", "bytegrad", FLAT, (2,), steps=1)
    ours, alone = str(tmp_path / "ours"), str(tmp_path / "alone")
    ended = run_python(
        "-c",
        "import sys, torch\nabsent = ['hypothesis', 'jsonschema', 'matplotlib', 'rich',"
        " 'sklearn']\nassert not sys.modules.keys() & {*absent,"
        " 'bagua_ref.conformance.trace'}\nsys.modules.update(dict.fromkeys(absent))\nfrom"
        f" bagua_ref.conformance.trace import *\nprint(check_trace({ours!r}))\nwith"
        f" Recorder({alone!r}, rank=0, world_size=1) as r: r.before_op(0, torch.ones(3));"
        " r.after_op(0, torch.ones(3))\nprint(r.steps_written)\nsys.modules.update({name: None"
        " for name in sys.modules if name.partition('.')[0] == 'safetensors'})\ntry:"
        f" check_trace({alone!r}, 'bytegrad')\nexcept TraceError as error: print(error)\n",
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(
        r"NO DIVERGENCE(.|\n)*\n1\n.*install safetensors: pip install", ended.stdout
    ), ended.stdout


def test_recording_changes_no_weight(tmp_path: Path) -> None:
    def weights(recorded: bool) -> Tensor:
        def rank(comm: Any) -> Tensor:
            bagua_ref.init_process_group()
            model, optimizer = wrap(network(), Algorithm.init("bytegrad"), lr=0.1)
            if recorded:
                with Recorder(tmp_path):
                    learn(model, optimizer, comm.rank(), 3)
            else:
                learn(model, optimizer, comm.rank(), 3)
            return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

        return SimulatedWorld(2).run(rank)[0]

    assert torch.equal(weights(recorded=True), weights(recorded=False))


def test_two_modules_in_one_training_do_not_mix(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        bagua_ref.init_process_group()
        with Recorder(tmp_path):
            models = [network(), network()]
            for model in models:
                model.with_bagua([], Algorithm.init("bytegrad"))
            for _ in range(2):
                for model in models:
                    model(torch.randn(4, 7)).sum().backward()

    SimulatedWorld(2).run(rank)
    report = check_trace(tmp_path)
    assert report.passed
    assert {execution.bucket for execution in report.executions} == {"0", "1/0"}
    assert len(check_trace(tmp_path, buckets=["1/0"]).executions) == 2


def test_two_operations_of_one_bucket_do_not_mix(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        bagua_ref.init_process_group()
        bucket = BaguaBucket([torch.randn(6).ensure_bagua_tensor("x")], "0", flatten=True)
        bucket.append_centralized_synchronous_op(average=False)
        bucket.append_centralized_synchronous_op(scattergather=True, compression="MinMaxUInt8")
        with Recorder(tmp_path):
            for _ in range(3):
                bucket.execute()

    SimulatedWorld(2).run(rank)
    assert sorted(read_trace(tmp_path)[0].steps) == [0, 1, 2]
    assert check_trace(tmp_path, "gradient_allreduce", {"average": False}, buckets=["0"]).passed
    assert check_trace(
        tmp_path, "bytegrad", {"average": True, "hierarchical": False}, buckets=["0#2"]
    ).passed


def test_numpy_arrays_of_any_kind_are_recorded(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    backwards = np.arange(6, dtype=np.float32).reshape(2, 3)[::-1]
    fixed = np.ones(3, np.float32)
    fixed.setflags(write=False)
    with Recorder(tmp_path, rank=0, world_size=1) as recorder:
        recorder.before_op(0, (backwards, fixed))
        recorder.after_op(0, [torch.from_numpy(backwards.copy()), fixed])
    assert not recwarn.list
    assert check_trace(tmp_path, "gradient_allreduce").passed
    (rank,) = read_trace(tmp_path)
    assert rank.records(0)["0"].inputs["x"].tolist() == [3, 4, 5, 0, 1, 2, 1, 1, 1]
    assert rank.manifest["buckets"]["0"]["tensors"] == [
        {"name": "0", "shape": [2, 3]},
        {"name": "1", "shape": [3]},
    ]


def test_a_trace_of_a_group_that_is_not_all_ranks_says_what_to_do(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        bagua_ref.init_process_group()
        group = bagua_ref.groups.communication.new_group([1, 3])
        for directory, named in (
            (tmp_path / "a", {}),
            (tmp_path / "b", {"rank": comm.rank() // 2, "world_size": 2}),
        ):
            if named and comm.rank() not in (1, 3):
                continue
            with Recorder(directory, **named):
                if comm.rank() in (1, 3):
                    model = network()
                    model.with_bagua(
                        [], Algorithm.init("bytegrad", hierarchical=False), process_group=group
                    )
                    model(torch.randn(4, 7)).sum().backward()

    SimulatedWorld(4).run(rank)
    with pytest.raises(TraceError, match="no step was recorded by all ranks"):
        check_trace(tmp_path / "a", "bytegrad")
    assert check_trace(tmp_path / "b").passed
    for number, other in ((0, 1), (2, 3)):  # as if these ranks had recorded something, too
        shutil.rmtree(tmp_path / "a" / f"rank{number}")
        shutil.copytree(tmp_path / "a" / f"rank{other}", tmp_path / "a" / f"rank{number}")
        manifest = tmp_path / "a" / f"rank{number}" / "manifest.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "rank": number}))
    with pytest.raises(
        TraceError, match="a group of 2 ranks, but the trace has 4: pass the rank, world_size"
    ):
        check_trace(tmp_path / "a", "bytegrad")


# Bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every=0 must be 1 or more"),
        ({"every": 1.5}, TypeError, "every=1.5 must be an int"),
        ({"buckets": 0.0}, ValueError, "buckets=0.0 must be a fraction above 0"),
        ({"buckets": "0"}, TypeError, "a list of bucket names"),
        ({"buckets": []}, ValueError, "at least one"),
        ({"max_bytes": 0}, ValueError, "max_bytes=0 must be 1 or more"),
        ({"max_bytes": "1G"}, TypeError, "max_bytes='1G' must be an int"),
        ({"options": {"x": [1]}}, TypeError, r"options: x=\[1\] must be a number, a string"),
        ({"options": {"x": math.nan}}, ValueError, "options: x=nan must be finite"),
        ({"algorithm": 3}, TypeError, "algorithm=3 must be a name"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank=2 must be from 0 to world_size - 1 = 1"),
        (
            {"rank": 0, "world_size": 3, "nodes": [2, 2]},
            ValueError,
            r"nodes=\[2, 2\] must be .* sum to world_size=3",
        ),
        ({"rank": 0, "world_size": 0}, ValueError, "world_size=0 must be 1 or more"),
    ],
)
def test_a_recorder_refuses(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message), Recorder(tmp_path, **arguments):
        pass


def test_the_three_calls_refuse(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="with Recorder"):
        recorder.step()
    with recorder:
        with pytest.raises(ValueError, match="bucket='a': after_op was called without before_op"):
            recorder.after_op("a", torch.ones(1))
        recorder.before_op("a", torch.ones(1))
        with pytest.raises(ValueError, match="before_op was called twice"):
            recorder.before_op("a", torch.ones(1))
        for bad, error, message in (
            ([], ValueError, "at least one tensor, all of one dtype"),
            ([torch.ones(1), torch.ones(1).half()], ValueError, "of one dtype"),
            ({}, ValueError, "at least one tensor"),
            ({"a b": torch.ones(1)}, ValueError, "must be an identifier"),
            (3.0, TypeError, "must be a torch.Tensor or a NumPy array, not float"),
            (torch.ones(1, dtype=torch.complex64), TypeError, "complex64 is not supported"),
        ):
            with pytest.raises(error, match=message):
                recorder.before_op("b", bad)
        with pytest.raises(TypeError, match="bucket=None must be a name or a number"):
            recorder.before_op(None, torch.ones(1))
        with pytest.raises(TypeError, match=r"info: at=.* must be a number"):
            recorder.before_op("c", torch.ones(1), at=torch.ones(1))
    with (
        pytest.raises(ValueError, match="already holds a trace of this rank"),
        Recorder(tmp_path, rank=0, world_size=1),
    ):
        pass


def test_traces_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is not a folder"):
        check_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="holds no trace"):
        check_trace(tmp_path)
    simulate(tmp_path, "bytegrad", FLAT, (3,))

    def broken(what: str, path: str, change: Any, message: str) -> None:
        directory = tmp_path / "broken" / what
        for rank in range(3):
            shutil.copytree(tmp_path / f"rank{rank}", directory / f"rank{rank}")
        change(directory / path)
        with pytest.raises((TraceError, ValueError), match=message):
            check_trace(directory, "bytegrad")

    broken(
        "a",
        "rank2",
        shutil.rmtree,
        r"rank2/manifest.json' is missing; a trace of 3 ranks needs rank0 to rank2",
    )
    broken("b", "rank1/manifest.json", lambda p: p.write_text("{"), "is not valid JSON")
    broken(
        "c", "rank1/manifest.json", lambda p: p.write_text("{}"), "is not the manifest of a trace"
    )
    broken(
        "d",
        "rank1/00000001.safetensors",
        Path.unlink,
        "00000001.safetensors' cannot be read: No such file",
    )
    broken(
        "e",
        "rank1/00000001.safetensors",
        lambda p: p.write_bytes(p.read_bytes()[:-1]),
        "not a complete",
    )
    broken(
        "f",
        "rank1/steps.jsonl",
        lambda p: p.write_text("what\n"),
        "line 1 is not a valid entry of a step",
    )
    far = json.dumps({"step": 0, "file": "../x", "records": []})
    broken(
        "j",
        "rank1/steps.jsonl",
        lambda p: p.write_text(f"{far}\n"),
        "file='../x' must be a name in this folder",
    )
    broken(
        "k",
        "rank1/steps.jsonl",
        lambda p: p.write_text('{"step": 0, "file": "x", "records": [{}]}\n'),
        "must have the key 'bucket'",
    )
    broken(
        "g",
        "rank0/steps.jsonl",
        lambda p: p.write_text(""),
        "nothing could be replayed: no step was recorded by all ranks",
    )
    change = json.loads((tmp_path / "rank1/manifest.json").read_text())
    broken(
        "h",
        "rank1/manifest.json",
        lambda p: p.write_text(json.dumps({**change, "nodes": [1, 2]})),
        r"nodes=\[1, 2\]",
    )
    broken(
        "i",
        "rank1/manifest.json",
        lambda p: p.write_text(json.dumps({**change, "trace_version": "9"})),
        "trace_version '9'",
    )
    with pytest.raises(ValueError, match="algorithm='bytgrad' must be one of gradient_allreduce"):
        check_trace(tmp_path, "bytgrad")
    with pytest.raises(
        ValueError, match="option 'interval' is unknown; bytegrad has hierarchical, average"
    ):
        check_trace(tmp_path, "bytegrad", {"interval": 2})
    with pytest.raises(ValueError, match="option hierarchical='no' must be true or false"):
        check_trace(tmp_path, "bytegrad", {"hierarchical": "no"})
    with pytest.raises(ValueError, match="buckets: '7' is not in the trace, which has 0"):
        check_trace(tmp_path, buckets=["7"])
    with pytest.raises(
        TraceError, match="shift_one needs an even number of ranks, and there are 3"
    ):
        check_trace(tmp_path, "decentralized", SHIFT_ONE)


# The command line


def test_trace_check_exits_0_1_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "trace"
    simulate(directory, "bytegrad", FLAT, (2,))
    assert main(["trace", "check", str(directory), "--algorithm", "bytegrad"]) == 0
    captured = capsys.readouterr()
    assert "NO DIVERGENCE" in captured.out
    assert "replaying: 4 of 4 steps" in captured.err
    alter(directory, 1, 2, lambda x: one_ulp_up(x, 30))
    report, picture = tmp_path / "report.json", tmp_path / "errors.png"
    command = [
        "trace",
        "check",
        str(directory),
        "--algorithm",
        "bytegrad",
        "--option",
        "hierarchical=false",
    ]
    assert main([*command, "--json-file", str(report), "--png", str(picture)]) == 1
    assert (
        "First divergence: step 2, rank 1, bucket '0', tensor '0.bias'[0] (element 30"
        in capsys.readouterr().out
    )
    found = json.loads(report.read_text())
    assert (found["passed"], found["diverging"], found["first"]["element"]) == (False, 1, 30)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == found
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--option", "nonsense"])
    assert "option 'nonsense' must be name=value" in capsys.readouterr().err
    assert main([*command, "--json-file", str(tmp_path / "no" / "such")]) == 2
    assert main([*command, "--png", str(tmp_path / "no" / "such.png")]) == 2
    assert main(["trace", "check", str(tmp_path / "nothing")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_picture_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(tmp_path / "trace", "bytegrad", FLAT, (2,))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = ["trace", "check", str(tmp_path / "trace"), "--png", str(tmp_path / "errors.png")]
    assert main(command) == 2
    assert capsys.readouterr().err.endswith(
        f"--png needs matplotlib; install with: {install_command('demo')}\n"
    )
    monkeypatch.undo()
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--algorithm", "bytgrad"])
    assert "'bytgrad' must be one of" in capsys.readouterr().err


def test_trace_show_says_what_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(tmp_path, "decentralized", SHIFT_ONE, (2,))
    assert main(["trace", "show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert (
        "decentralized(hierarchical=False, peer_selection_mode=shift_one) on 2 ranks, nodes [2]"
        in shown
    )
    assert shown.count("complete") == 2
    assert main(["trace", "show", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["algorithm"] == "decentralized"
    assert found["options"]["peer_selection_mode"] == "shift_one"
    assert [rank["complete"] for rank in found["ranks"]] == [True, True]
    assert [bucket["recorded"] for bucket in found["buckets"].values()] == [
        len(found["ranks"][0]["steps"])
    ]
    assert main(["trace", "show", str(tmp_path / "rank0")]) == 2


def test_the_picture_of_a_long_trace_with_infinite_errors_can_be_drawn(tmp_path: Path) -> None:
    if "CI" not in os.environ:  # CI must have it
        pytest.importorskip("matplotlib")
    from bagua_ref.conformance.trace.report import Divergence, Execution, TraceReport, draw_errors

    report = TraceReport("bytegrad", {}, (3,), [])
    report.executions = [Execution(step, "0", [4] * 3, [0] * 3, [0.0] * 3) for step in range(1000)]
    report.executions[500] = Execution(500, "0", [4] * 3, [0, 2, 0], [0.0, math.inf, 0.0])
    report.executions[500].first = Divergence(
        500, 1, "0", "w", [0], 0, 1.0, math.nan, None, "EXACT"
    )
    draw_errors(report).savefig(tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000

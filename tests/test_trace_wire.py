"""Tests of traces with lossy exchanges: torch's own hooks pass with their declared format, faults
are found (S3.1, S10).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.launch import launch, let_gloo_end
from tests.outside_compressed import Bucket
from tests.trace_trainings import network, record_steps
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from bagua_ref.conformance.trace import Recorder, TraceError, check_trace

HOOKS = {"float16": default_hooks.fp16_compress_hook, "bfloat16": default_hooks.bf16_compress_hook}
STEPS, ELEMENTS = 3, 300


def train_with_hooks(directory: Path) -> None:
    """Train with torch's DistributedDataParallel and each of its hooks, recorded around it."""
    for wire in HOOKS:
        train_with_hook(directory / wire, wire)
    let_gloo_end()


def train_with_hook(directory: Path, wire: str) -> None:
    model = torch.nn.parallel.DistributedDataParallel(network())
    with Recorder(directory) as recorder:

        def recorded(state, bucket):  # torch inspects annotations, which are strings in this file
            recorder.before_op(bucket.index(), bucket.buffer())
            result = HOOKS[wire](None, bucket).wait()
            recorder.after_op(bucket.index(), result)
            future = torch.futures.Future()
            future.set_result(result)
            return future

        model.register_comm_hook(None, recorded)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(STEPS):
            model(torch.randn(8, 7, generator=generator)).square().mean().backward()


def test_torchs_hooks_pass_with_their_format_only(tmp_path: Path) -> None:
    launch(train_with_hooks, 2, tmp_path)
    for wire in HOOKS:
        report = check_trace(tmp_path / wire, "gradient_allreduce", {"wire": wire})
        assert report.passed, report
        assert report.not_checked == []
        assert not check_trace(tmp_path / wire, "gradient_allreduce").passed


Exchange = Callable[[torch.Tensor], torch.Tensor]


def mean_on_wire(xs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mean as the hooks compute it: cast, divided, added one by one in 16 bits."""
    total = xs[0].to(dtype) / len(xs)
    for x in xs[1:]:
        total = total + x.to(dtype) / len(xs)
    return total.to(xs.dtype)


def record(
    directory: Path,
    ranks: int,
    exchange: Exchange,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> None:
    """Record means of gradients whose sizes span twelve orders of magnitude."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.logspace(-9, 3, ELEMENTS)
    steps = [
        (torch.randn(ranks, ELEMENTS, generator=generator) * spread * scale).to(dtype)
        for _ in range(STEPS)
    ]
    record_steps(directory, [(xs, {}, [exchange(xs)] * ranks) for xs in steps])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("wire", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)]
)
def test_every_order_of_rounding_passes(
    tmp_path: Path, ranks: int, wire: str, dtype: torch.dtype
) -> None:
    exchanges: list[Exchange] = [
        lambda xs: mean_on_wire(xs, dtype),
        lambda xs: mean_on_wire(xs.flip(0), dtype),
        lambda xs: xs.to(dtype).float().mean(0).to(xs.dtype),
        lambda xs: xs.mean(0).to(dtype).to(xs.dtype),
    ]
    for place, (exchange, of) in enumerate(
        zip(exchanges, (torch.float32, torch.float64) * 2, strict=True)
    ):
        record(tmp_path / str(place), ranks, exchange, of)
        assert check_trace(tmp_path / str(place), "gradient_allreduce", {"wire": wire}).passed


@pytest.mark.parametrize(
    ("wire", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)]
)
@pytest.mark.parametrize(
    "fault",
    [
        lambda mean, xs: mean * 2,
        lambda mean, xs: xs[0],
        lambda mean, xs: mean.to(torch.float8_e4m3fn).float(),
        lambda mean, xs: mean.to(torch.float8_e5m2).float(),
        lambda mean, xs: torch.where(torch.arange(ELEMENTS) == ELEMENTS - 1, xs[1], mean),
        lambda mean, xs: mean.roll(1),
        lambda mean, xs: torch.where(torch.arange(ELEMENTS) == 200, torch.inf, mean),
    ],
    ids=[
        "sum",
        "own",
        "float8_e4m3fn",
        "float8_e5m2",
        "one element of another rank",
        "shifted",
        "inf",
    ],
)
def test_faults_are_found(
    tmp_path: Path,
    wire: str,
    dtype: torch.dtype,
    fault: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    record(tmp_path, 2, lambda xs: fault(mean_on_wire(xs, dtype), xs))
    first = check_trace(tmp_path, "gradient_allreduce", {"wire": wire}).first
    assert first is not None
    assert first.tolerance == f"SUM(2) in {wire}"


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("wire", "eps"), [("float16", 2**-10), ("bfloat16", 2**-7)])
def test_the_bound_is_the_documented_one(tmp_path: Path, ranks: int, wire: str, eps: float) -> None:
    for share in (0.99, 1.01):
        record(
            tmp_path / str(share),
            ranks,
            lambda xs, share=share: xs.mean(0) + share * (ranks + 2) / 2 * eps * xs.abs().mean(0),
        )
        assert check_trace(tmp_path / str(share), "gradient_allreduce", {"wire": wire}).passed is (
            share < 1
        )


def test_bfloat16_is_no_float16(tmp_path: Path) -> None:
    record(tmp_path, 2, lambda xs: mean_on_wire(xs, torch.bfloat16))
    (kind,) = check_trace(tmp_path, "gradient_allreduce", {"wire": "float16"}).kinds
    assert kind.startswith("as if rounded to bfloat16")


def test_what_exceeds_the_format_may_become_infinite(tmp_path: Path) -> None:
    record(tmp_path, 2, lambda xs: mean_on_wire(xs, torch.float16), scale=1e3)
    assert check_trace(tmp_path, "gradient_allreduce", {"wire": "float16"}).passed
    assert not check_trace(tmp_path, "gradient_allreduce", {"wire": "bfloat16"}).passed


def test_what_is_refused(tmp_path: Path) -> None:
    record(tmp_path, 2, lambda xs: xs.float().mean(0).to(xs.dtype), torch.bfloat16)
    with pytest.raises(
        TraceError,
        match=r"wire=float16 is for values of float32 and float64, and these are torch\.bfloat16",
    ):
        check_trace(tmp_path, "gradient_allreduce", {"wire": "float16"})
    with pytest.raises(ValueError, match="option wire='float8' must be float16 or bfloat16"):
        check_trace(tmp_path, "gradient_allreduce", {"wire": "float8"})


ROWS, COLUMNS, R, OTHERS = 12, 10, 2, 5


FAULTS = ("right", "sum", "rank")


def train_with_powersgd(directory: Path) -> None:
    for fault in FAULTS:
        record_powersgd(directory / fault, fault)


def record_powersgd(directory: Path, fault: str) -> None:
    """Run torch's PowerSGD hook on a matrix after other elements, recorded from its second round
    on.
    """
    state = powerSGD_hook.PowerSGDState(None, R, start_powerSGD_iter=2, min_compression_rate=1)
    state.iter = 2
    generator = torch.Generator().manual_seed(dist.get_rank())
    matrices = json.dumps([[OTHERS, ROWS, COLUMNS, R, 0]])
    with Recorder(directory, algorithm="powersgd", options={"memory": "averaged"}) as recorder:
        for k in range(4):
            bucket = Bucket(
                [torch.randn(*shape, generator=generator) for shape in ((OTHERS,), (ROWS, COLUMNS))]
            )
            given = bucket.buffer().clone()
            # The memory of what is not compressed is no part of S10: it is left out.
            if k:
                state.error_dict[0][:OTHERS] = 0
                kept = {
                    "e": state.error_dict[0][OTHERS:].clone(),
                    "q": state.q_memory_dict[0].reshape(-1).clone(),
                }
            result = powerSGD_hook.powerSGD_hook(state, bucket).wait()
            if fault == "sum":
                result = result * 2
            if fault == "rank":
                result = torch.where(torch.arange(len(given)) < OTHERS, given, result)
            if k:
                recorder.before_op("all", {"x": given, **kept}, k=k, matrices=matrices)
                recorder.after_op("all", {"x": result, "e": state.error_dict[0][OTHERS:].clone()})
                recorder.step()


def test_S10_torchs_powersgd_is_judged_round_by_round(tmp_path: Path) -> None:
    launch(train_with_powersgd, 2, tmp_path)
    for fault in FAULTS:
        report = check_trace(tmp_path / fault)
        assert len(report.executions) == 3 * 2
        assert report.not_checked == []
        assert report.passed is (fault == "right"), report

"""torch's hooks for DDP that round gradients: fp16, bf16 and quantization, judged by the trace and
by their own levels.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from findings.common import Row, judged, on_ranks
from tests.outside_compressed import Bucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks

from bagua_ref.conformance.trace import Recorder, check_trace

PEER = "torch==2.13.0"
GIVEN = "2 ranks, 3 buckets of {} float32, N(0, 1) gradients"
HOOKS = {
    "allreduce_hook": (default_hooks.allreduce_hook, {}),
    "fp16_compress_hook": (default_hooks.fp16_compress_hook, {"wire": "float16"}),
    "bf16_compress_hook": (default_hooks.bf16_compress_hook, {"wire": "bfloat16"}),
}


def record(folder: Path, name: str, size: int) -> None:
    """Record three rounds of a hook on the calling rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    with Recorder(folder) as recorder:
        for _ in range(3):
            bucket = Bucket([torch.randn(size, generator=generator)])
            recorder.before_op("all", bucket.buffer())
            recorder.after_op("all", HOOKS[name][0](None, bucket).wait())
            recorder.step()


def trace_complaint(name: str, size: int, options: dict[str, Any]) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(record, Path(folder), name, size)
        report = check_trace(folder, "gradient_allreduce", options)
        return None if report.passed else str(report)


def quantized(name: str, size: int, stacked: bool) -> tuple[torch.Tensor, torch.Tensor | str, int]:
    """Run a quantization hook; return the gradient, the result or its error, and how many elements
    were sent as bytes.

    Args:
        name: of the hook.
        size: of the gradient.
        stacked: whether an all-gather's future has one tensor of all ranks' values, which the hook
            expects, or gloo's, one of each.
    """
    sent, real = 0, dist.all_gather

    def all_gather(out: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Any:
        nonlocal sent
        sent += tensor.numel() * (tensor.dtype is torch.uint8)
        if not stacked:
            return real(out, tensor, **options)
        real(out, tensor)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([torch.stack(out)])
        return SimpleNamespace(get_future=lambda: future)

    dist.all_gather = all_gather
    x = torch.randn(size, generator=torch.Generator().manual_seed(dist.get_rank()))
    try:
        result = getattr(quantization_hooks, name)(None, Bucket([x.clone()])).wait()
    except RuntimeError as error:
        result = str(error).splitlines()[0].rpartition("callback: ")[2]
    finally:
        dist.all_gather = real
    return x, result, sent


def level_complaint(found: list[tuple[torch.Tensor, torch.Tensor, int]], row: int) -> str | None:
    """Return where the mean is further away than one level of 256 of each rank's row, which
    includes zero.
    """
    xs, size = torch.stack([x for x, _, _ in found]), len(found[0][0])
    bound = torch.zeros(size)
    for start in range(0, size, row):
        part = xs[:, start : start + row]
        levels = (part.amax(1).clamp(min=0) - part.amin(1).clamp(max=0)) / 255
        bound[start : start + row] = levels.mean()
    for rank, (_, result, _) in enumerate(found):
        error = (result - xs.mean(0)).abs()
        if not bool((error <= bound).all()):
            place = int((error - bound).nan_to_num(math.inf).argmax())
            return (
                f"rank {rank}, element {place}: {result[place]} instead of {xs.mean(0)[place]}"
                f" within {bound[place]}"
            )
    return None


def find() -> Iterator[Row]:
    for name, (_, options) in HOOKS.items():
        declared = (
            ", ".join(f"{option}={value}" for option, value in options.items())
            or "in full precision"
        )
        complaint = trace_complaint(name, 300, options)
        yield judged(f"torch {name} ({PEER})", "S3.1", declared, complaint, given=GIVEN.format(300))
    for name, row in (("quantization_pertensor_hook", 1024), ("quantization_perchannel_hook", 512)):
        implementation = f"torch {name} ({PEER})"
        error = on_ranks(quantized, name, 1000, False)[0][1]
        yield judged(
            implementation,
            "S3.2",
            "over gloo",
            error if isinstance(error, str) else None,
            why=(
                "The hook takes the first value of an all-gather's future for the values of all"
                " ranks. Over gloo the future holds a tensor of each rank, and backward raises."
                " With NCCL it was not run."
            ),
            promise="The hook is described as experimental; which backends it needs is not said.",
            given="2 ranks, 1,000 float32 of N(0, 1)",
            effect="Training over gloo ends with an error in its first backward.",
        )
        for size in (1000, 1024):
            found, given = (
                on_ranks(quantized, name, size, True),
                f"2 ranks, {size:,} float32 of N(0, 1), futures with one tensor of all ranks",
            )
            case = f"{size:,} elements, the mean within one of 256 levels"
            yield judged(implementation, "S3.2", case, level_complaint(found, row), given=given)
            if row == 512:
                needed = -(-size // row) * row
                yield judged(
                    implementation,
                    "S2.2",
                    f"{size:,} elements, padding",
                    (
                        None
                        if found[0][2] == needed
                        else f"{found[0][2]:,} bytes sent instead of {needed:,}"
                    ),
                    why="A length that the row divides is padded by a whole row of zeros.",
                    promise=(
                        "The gradient is split into rows of `bucket_size` elements, 512 by default."
                    ),
                    given=given,
                    effect="Values are right; a row of bytes and its scale are sent in vain.",
                )

"""Training steps per second on one card against torch's DistributedDataParallel.

    python benchmarks/gpu_training.py [--quick] [--json PATH]

It needs a CUDA device. One rank trains over NCCL, which shows what wrapping costs: with a single
rank, DDP and gradient_allreduce have nothing to send, bytegrad compresses all the same. Two ranks
share the card over gloo, as NCCL refuses to serve two ranks on
one card: every gradient goes through the host's memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import allreduce_step
import common  # beside this file
import torch
from allreduce_step import DDP, WRAPPERS, Contest, Loss, Times, measure, stepper
from torch import nn

AIM = common.at_least(0.97)


def transformer() -> tuple[nn.Module, Loss]:
    """Return an encoder of GPT-2's width and depth, 85e6 elements in 144 parameters, and its loss
    on one random batch.
    """
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    x = torch.randn(8, 256, 768)
    return nn.TransformerEncoder(layer, 12), lambda module: module(x).square().mean()


ONE = {"transformer, 85e6 elements in 144": 6, "perceptron, 25e6 elements in 8": 30}
"""Models of one rank, and steps in a turn."""
TWO = {"perceptron, 25e6 elements in 8": 1}
"""Models of two ranks."""


def against_ddp(model: str, steps: int, rounds: int) -> Times:
    torch.cuda.set_device(0)
    torch.set_default_device("cuda")
    torch.set_float32_matmul_precision("high")
    allreduce_step.MODELS["transformer, 85e6 elements in 144"] = (transformer, 0.97, 10, 15)
    return measure({name: stepper(model, wrap) for name, wrap in WRAPPERS.items()}, steps, rounds)


def rows_of(models: dict[str, int], ranks: int, title: str, quick: bool) -> Iterator[common.Row]:
    for model, steps in models.items():
        contest = Contest(against_ddp, model, 1 if quick else steps, 2 if quick else 7, ranks=ranks)
        for name in ("ours", "bytegrad"):
            peers = [peer for peer in contest.rates if peer not in ("ours", "bytegrad")]
            limit = AIM if name == "ours" else common.NO_LIMIT
            yield contest.row(
                f"{'gradient_allreduce' if name == 'ours' else name}, {title}, {model}",
                name,
                peers,
                DDP,
                limit,
            )


def main() -> int:
    args = common.arguments(__doc__.partition("\n\n")[0])
    if not torch.cuda.is_available():
        print("There is no CUDA device here; nothing was measured.")
        return 0
    rows = [
        *rows_of(ONE, 1, "one rank over NCCL", args.quick),
        *rows_of(TWO, 2, "two ranks over gloo", args.quick),
    ]
    return common.report("gpu_training", rows, args)


if __name__ == "__main__":
    sys.exit(main())

"""A small language model, trained by DistributedDataParallel with every token weighing the same."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel

IGNORED = -100
"""The label of a token that does not count, such as padding."""


def make_model() -> DistributedDataParallel:
    """Return a model of 64 words, wrapped."""
    return DistributedDataParallel(nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64)))


def step(model: DistributedDataParallel, microbatches: list[dict[str, torch.Tensor]]) -> None:
    """Make one optimizer step on this rank's microbatches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = sum((batch["labels"] != IGNORED).sum() for batch in microbatches)
    count = torch.as_tensor(tokens, dtype=torch.float32)
    # DDP averages gradients over ranks, so each divides by the mean number of tokens of a rank.
    dist.all_reduce(count)
    count /= dist.get_world_size()
    for number, batch in enumerate(microbatches, 1):
        is_last = number == len(microbatches)
        with contextlib.nullcontext() if is_last else model.no_sync():
            logits = model(batch["x"]).flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
            (loss / count).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> float:
    """Train for three steps; return the sum of the weights."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = make_model()
    for _ in range(3):
        x = torch.randint(64, (4, 8))
        step(model, [{"x": x, "labels": x.roll(-1, 1)}])
    dist.destroy_process_group()
    return sum(float(p.sum()) for p in model.parameters())


if __name__ == "__main__":
    main()

"""Fuse a third-party optimizer: Lion from the package lion-pytorch.

    pip install lion-pytorch
    python examples/fuse_third_party.py

fuse_optimizer tests it on small clones first. Then two equal models take the same steps, one with
step(), one with fuse_step().
"""

from __future__ import annotations

import copy
import sys
import time

import torch

from bagua_ref.contrib import fuse_optimizer

try:
    from lion_pytorch import Lion
except ImportError:
    sys.exit("this needs lion-pytorch: pip install lion-pytorch")


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, fused: bool, steps: int
) -> float:
    """Return the seconds that all steps of the optimizer took."""
    generator, seconds = torch.Generator().manual_seed(1), 0.0
    for _ in range(steps):
        inputs = torch.randn(32, 16, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), inputs.flip(1)).backward()
        start = time.perf_counter()
        if fused:
            optimizer.fuse_step()
        else:
            optimizer.step()
        seconds += time.perf_counter() - start
    return seconds


def main() -> bool:
    torch.manual_seed(0)
    blocks = [
        module for _ in range(60) for module in (torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))
    ]
    ours = torch.nn.Sequential(*blocks)
    theirs = copy.deepcopy(ours)
    fused = fuse_optimizer(Lion(ours.parameters(), lr=1e-3, weight_decay=1e-2))
    plain = Lion(theirs.parameters(), lr=1e-3, weight_decay=1e-2)
    train(ours, fused, True, 3), train(theirs, plain, False, 3)
    fast, slow = train(ours, fused, True, 50), train(theirs, plain, False, 50)
    equal = all(
        torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    print(f"{len(list(ours.parameters()))} parameters, {fused._bagua_fused_count} fused steps")
    print(
        f"step() {20 * slow:.2f} ms, fuse_step() {20 * fast:.2f} ms, weights"
        f" {'equal in every bit' if equal else 'DIFFER'}"
    )
    return equal


if __name__ == "__main__":
    sys.exit(not main())

"""Train with restarts: if a rank dies, torchrun restarts all of them, and they resume from the newest checkpoint.

torchrun --nproc_per_node=2 --max-restarts=1 examples/elastic.py --folder checkpoints --kill-rank 1 --kill-step 13

Rank 1 kills itself after step 13, once. The final weights are those of a run without --kill-rank, bit for bit; with async, whose
ranks average in the background at intervals of time, no two runs are equal, and it resumes from the weights that it had saved.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bagua_ref
from bagua_ref.algorithms import Algorithm, GlobalAlgorithmRegistry, QAdamOptimizer
from bagua_ref.contrib import LoadBalancingDistributedSampler


def make_algorithm(name: str, model: nn.Module) -> tuple[torch.optim.Optimizer, Algorithm]:
    if name == "qadam":
        adam = QAdamOptimizer(model.parameters(), lr=1e-2, warmup_steps=8)
        return adam, Algorithm.init(name, q_adam_optimizer=adam, hierarchical=False)
    options = {"async": {"sync_interval_ms": 5}, "decentralized": {"hierarchical": False, "peer_selection_mode": "shift_one"}}
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return sgd, Algorithm.init(name, **options.get(name, {"hierarchical": False}))


def main(argv: Sequence[str] | None = None) -> tuple[int, str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="gradient_allreduce", choices=list(GlobalAlgorithmRegistry))
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints; on a disk that all nodes share")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--kill-rank", type=int, help="the rank that kills itself, once")
    parser.add_argument("--kill-step", type=int, default=13)
    arguments = parser.parse_args(argv)

    bagua_ref.init_process_group()
    rank = bagua_ref.get_rank()
    generator = torch.Generator().manual_seed(0)
    inputs, lengths = torch.randn(96, 16, generator=generator), torch.randint(1, 100, (96,), generator=generator)
    targets = inputs.square().mean(1, keepdim=True)

    torch.manual_seed(rank)  # a dropout of its own on each rank; the checkpoint keeps the state of the generator
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer, algorithm = make_algorithm(arguments.algorithm, model)
    model = model.with_bagua([optimizer], algorithm)
    sampler = LoadBalancingDistributedSampler(lengths, None, complexities=lengths)
    # With a generator of its own: beginning to iterate draws a number, which would change the dropout after it.
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, sampler=sampler, generator=torch.Generator())

    found = bagua_ref.checkpoint.load(arguments.folder, model, optimizer, sampler=sampler)
    step = begun = found.step if found else 0
    if found and rank == 0:
        print(f"resuming from step {step}", flush=True)
    while step < arguments.steps:
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), target).backward()
            optimizer.step()
            step += 1
            if step % arguments.save_every == 0:
                bagua_ref.checkpoint.save(arguments.folder, model, optimizer, step=step, sampler=sampler, keep=2)
            if rank == arguments.kill_rank and step == arguments.kill_step:
                kill_once(arguments.folder / "killed")
            if step == arguments.steps:
                break
        sampler.set_epoch(sampler.epoch + 1)

    if arguments.algorithm == "async":
        model.bagua_algorithm.abort(model)  # ends averaging in the background
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"rank {rank}: weights {digest} after step {step}", flush=True)
    bagua_ref.destroy_process_group()
    return begun, digest


def kill_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()

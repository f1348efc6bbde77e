"""Train with restarts: if a rank dies, torchrun restarts all of them, and they resume from the
newest checkpoint.

torchrun --nproc_per_node=2 --max-restarts=1 examples/elastic.py --folder checkpoints --kill-rank 1
--kill-step 13

Rank 1 kills itself after step 13, once. The final weights are those of a run without --kill-rank,
bit for bit; with async, whose ranks average in the background at intervals of time, no two runs are
equal, and it resumes from the weights that it had saved.

The job may come back with another number of ranks, such as 3 or 4, in the middle of an epoch: the
samples that are left are shared anew, and an optimizer step still uses 24 samples, so that the
learning rate needs no change. At the end, the script checks that every epoch has used every sample.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    options: dict[str, dict[str, Any]] = {
        "async": {"sync_interval_ms": 5},
        "bytegrad": {"hierarchical": False},
        "decentralized": {"hierarchical": False, "peer_selection_mode": "shift_one"},
        "diloco": {"period": 4},
        "local_sgd": {"period": 4},
        "low_precision_decentralized": {"hierarchical": False},
        "powersgd": {"warmup_steps": 4},
        "topk": {"ratio": 0.1},
    }
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return sgd, Algorithm.init(name, **options.get(name, {}))


def main(argv: Sequence[str] | None = None) -> tuple[int, str]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithm", default="gradient_allreduce", choices=list(GlobalAlgorithmRegistry)
    )
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="of the checkpoints; on a disk that all nodes share",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument(
        "--global-batch",
        type=int,
        default=24,
        help="samples of an optimizer step, on all ranks together",
    )
    parser.add_argument(
        "--micro-batch", type=int, default=4, help="samples that a rank computes at once, at most"
    )
    parser.add_argument("--kill-rank", type=int, help="the rank that kills itself, once")
    parser.add_argument("--kill-step", type=int, default=13)
    arguments = parser.parse_args(argv)

    bagua_ref.init_process_group()
    rank, ranks = bagua_ref.get_rank(), bagua_ref.get_world_size()
    share, rest = divmod(arguments.global_batch, ranks)
    if rest:
        parser.error(
            f"{ranks} ranks cannot share {arguments.global_batch} samples equally: choose another"
            " --global-batch"
        )
    generator = torch.Generator().manual_seed(0)
    inputs, lengths = (
        torch.randn(96, 16, generator=generator),
        torch.randint(1, 100, (96,), generator=generator),
    )
    targets = inputs.square().mean(1, keepdim=True)

    # a dropout of its own on each rank; the checkpoint keeps the state of the generator
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer, algorithm = make_algorithm(arguments.algorithm, model)
    model = model.with_bagua([optimizer], algorithm)
    sampler = LoadBalancingDistributedSampler(lengths, None, complexities=lengths)
    # With a generator of its own: beginning to iterate draws a number, which would change the
    # dropout after it.
    dataset = TensorDataset(inputs, targets, torch.arange(len(inputs)))
    loader = DataLoader(dataset, batch_size=share, sampler=sampler, generator=torch.Generator())

    # After a change of ranks, each takes the first one's weights; the random states of single ranks
    # cannot be continued.
    found = bagua_ref.checkpoint.load(
        arguments.folder, model, optimizer, sampler=sampler, drop_rank_state=True
    )
    step, used = (found.step, found.extra) if found else (0, [])
    begun = step
    if found and rank == 0:
        print(f"resuming from step {step} on {ranks} ranks: {sampler}", flush=True)
    while step < arguments.steps:
        for batch, target, numbers in loader:
            optimizer.zero_grad()
            train(model, batch, target, arguments.micro_batch)
            optimizer.step()
            step += 1
            used = used + [(sampler.epoch, number) for number in on_all_ranks(numbers)]
            if step % arguments.save_every == 0:
                bagua_ref.checkpoint.save(
                    arguments.folder,
                    model,
                    optimizer,
                    step=step,
                    sampler=sampler,
                    extra=used,
                    keep=2,
                )
            if rank == arguments.kill_rank and step == arguments.kill_step:
                kill_once(arguments.folder / "killed")
            if step == arguments.steps:
                break
        else:
            check_epoch(sampler.epoch, used, len(inputs), loud=rank == 0)
            sampler.set_epoch(sampler.epoch + 1)

    if arguments.algorithm == "async":
        model.bagua_algorithm.abort(model)  # ends averaging in the background
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"rank {rank}: weights {digest} after step {step}", flush=True)
    bagua_ref.destroy_process_group()
    return begun, digest


def train(model: nn.Module, batch: torch.Tensor, target: torch.Tensor, micro_batch: int) -> None:
    """Accumulate the gradient of the mean loss of a batch, some samples at a time; only the last
    backward communicates.
    """
    parts = list(zip(batch.split(micro_batch), target.split(micro_batch), strict=True))
    for place, (part, wanted) in enumerate(parts):
        with model.no_sync() if place < len(parts) - 1 else contextlib.nullcontext():
            (nn.functional.mse_loss(model(part), wanted) * len(part) / len(batch)).backward()


def on_all_ranks(numbers: torch.Tensor) -> list[int]:
    """Return the numbers of all ranks, which have equally many."""
    everyones = numbers.new_empty(bagua_ref.get_world_size() * len(numbers))
    bagua_ref.communication.allgather(numbers, everyones)
    return everyones.tolist()


def check_epoch(epoch: int, used: Sequence[tuple[int, int]], samples: int, loud: bool) -> None:
    numbers = [number for of, number in used if of == epoch]
    missing = set(range(samples)).difference(numbers)
    if missing:
        raise RuntimeError(f"epoch {epoch} has not used the samples {sorted(missing)}")
    if loud:
        print(
            f"epoch {epoch}: all {samples} samples used, {len(numbers) - samples} of them twice",
            flush=True,
        )


def kill_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()

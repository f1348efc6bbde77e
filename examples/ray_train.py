"""Train with Ray Train: TorchTrainer starts the workers and connects them, and bagua_ref
communicates in the group that it made.

python examples/ray_train.py --workers 2 --algorithm bytegrad --folder /a/disk/that/all/nodes/share
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bagua_ref
from bagua_ref.algorithms import Algorithm

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "local_sgd": {"period": 4},
    "diloco": {"period": 4},
}


def share(rank: int, world_size: int) -> DataLoader[Any]:
    """Return the batches of one worker; every worker has as many."""
    digits = load_digits()
    each = len(digits.target) // world_size
    images = torch.tensor(digits.data[rank::world_size][:each], dtype=torch.float32) / 16
    return DataLoader(
        TensorDataset(images, torch.tensor(digits.target[rank::world_size][:each])),
        batch_size=32,
        drop_last=True,
    )


def train(settings: dict[str, Any]) -> dict[str, Any]:
    bagua_ref.init_process_group()  # takes torch's group, which Ray has made
    rank = bagua_ref.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    name = settings["algorithm"]
    model = model.with_bagua([optimizer], Algorithm.init(name, **ALGORITHMS[name]))
    loader = share(rank, bagua_ref.get_world_size())

    # If a worker dies, Ray starts all of them again, and they resume.
    found = bagua_ref.checkpoint.load(settings["checkpoints"], model, optimizer)
    for epoch in range(found.step if found else 0, settings["epochs"]):
        if rank == settings["kill_rank"] and epoch == 1 and not found:
            os._exit(1)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        bagua_ref.checkpoint.save(settings["checkpoints"], model, optimizer, step=epoch + 1, keep=2)
        ray.train.report(
            {
                "epoch": epoch + 1,
                "loss": loss.item(),
                "bytes_sent": model.bagua_metrics()["bytes_sent"],
            }
        )
    bagua_ref.destroy_process_group()
    return {
        "loss": loss.item(),
        "weights": digest(model),
        "resumed_after": found.step if found else 0,
    }


def digest(model: nn.Module) -> str:
    """Return what differs if one bit of the weights does."""
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", default="bytegrad", choices=ALGORITHMS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="of results and checkpoints; on a disk that all nodes share",
    )
    parser.add_argument(
        "--kill-rank", type=int, help="the worker that dies in the second epoch, once"
    )
    arguments = parser.parse_args(argv)
    folder = arguments.folder.resolve()

    trainer = TorchTrainer(
        train,
        train_loop_config={
            "algorithm": arguments.algorithm,
            "epochs": arguments.epochs,
            "checkpoints": str(folder / "checkpoints"),
            "kill_rank": arguments.kill_rank,
        },
        # use_gpu=True: one GPU for each worker
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(
            name="bagua", storage_path=str(folder), failure_config=FailureConfig(max_failures=1)
        ),
    )
    reached = trainer.fit().return_value  # what train() returns on the first worker
    print(f"{arguments.algorithm}, {arguments.workers} workers: {json.dumps(reached)}")


if __name__ == "__main__":
    main()

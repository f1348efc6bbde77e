"""Train with Ray Train: TorchTrainer starts the workers and connects them, and bagua_ref communicates in the group that it made.

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

import bagua_ref
from bagua_ref.algorithms import Algorithm

OPTIONS = {"local_sgd": {"period": 4}, "diloco": {"period": 4}, "bytegrad": {"hierarchical": False}}


def train(settings: dict[str, Any]) -> None:
    """Train on one worker. Do not call prepare_model, which would wrap the model in torch's DistributedDataParallel as well."""
    bagua_ref.init_process_group()  # uses torch's group, which Ray has made
    rank, world_size = bagua_ref.get_rank(), bagua_ref.get_world_size()

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32)[rank::world_size] / 16
    labels = torch.tensor(digits.target)[rank::world_size]
    steps = len(digits.target) // world_size // 32  # the same on every rank

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    name = settings["algorithm"]
    model = model.with_bagua([optimizer], Algorithm.init(name, **OPTIONS.get(name, {})))

    # If a worker dies, Ray starts all of them again, and they resume.
    found = bagua_ref.checkpoint.load(settings["checkpoints"], model, optimizer)
    for epoch in range(found.step if found else 0, settings["epochs"]):
        if (rank, epoch) == (settings["kill_rank"], 1) and not found:
            os._exit(1)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(32)[:steps]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        bagua_ref.checkpoint.save(settings["checkpoints"], model, optimizer, step=epoch + 1, keep=2)
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        metrics = {"epoch": epoch + 1, "loss": loss.item(), "bytes_sent": model.bagua_metrics()["bytes_sent"]}
        ray.train.report(metrics | {"weights": hashlib.sha256(weights).hexdigest()[:16], "resumed": found is not None})
    bagua_ref.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="bytegrad", choices=["gradient_allreduce", *OPTIONS])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", type=Path, required=True, help="of results and checkpoints; on a disk that all nodes share")
    parser.add_argument("--kill-rank", type=int, help="the worker that dies in the second epoch, once")
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
        scaling_config=ScalingConfig(num_workers=arguments.workers),  # use_gpu=True: one GPU for each worker
        run_config=RunConfig(name="bagua", storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
    )
    metrics = trainer.fit().metrics
    print(f"{arguments.algorithm}, {arguments.workers} workers: {json.dumps(metrics)}")
    return metrics


if __name__ == "__main__":
    main()

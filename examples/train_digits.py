"""Train on scikit-learn's handwritten digits with any of bagua_ref's algorithms.

torchrun --nproc_per_node=2 examples/train_digits.py --algorithm bytegrad
python examples/train_digits.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from sklearn.datasets import load_digits
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm, GlobalAlgorithmRegistry


def make_algorithm(name: str, model: nn.Module) -> tuple[torch.optim.Optimizer, Algorithm]:
    """Return an optimizer for the model, and the algorithm; its hierarchical form only helps on
    several nodes.
    """
    if name == "qadam":  # it has an optimizer of its own, whose momentum it compresses
        from bagua_ref.algorithms.q_adam import QAdamOptimizer

        adam = QAdamOptimizer(model.parameters(), lr=2e-3, warmup_steps=20)
        return adam, Algorithm.init(name, q_adam_optimizer=adam, hierarchical=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {
        "async": {},
        "local_sgd": {"period": 8},
        "diloco": {"period": 8, "fragments": 4, "delay": 1, "mix": 0.5},
        "powersgd": {"matrix_approximation_rank": 4, "warmup_steps": 10},
        "topk": {"ratio": 0.05, "warmup_steps": 10},
    }
    return sgd, Algorithm.init(name, **options.get(name, {"hierarchical": False}))


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithm", default="gradient_allreduce", choices=list(GlobalAlgorithmRegistry)
    )
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args(argv)

    bagua_ref.init_process_group()
    rank, world_size = bagua_ref.get_rank(), bagua_ref.get_world_size()

    digits = load_digits()
    # they are sorted by writer
    shuffled = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[shuffled] / 16
    labels = torch.tensor(digits.target)[shuffled]
    # each rank trains on a share of the first 1440; the rest are the test set
    mine = range(rank, 1440, world_size)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer, algorithm = make_algorithm(arguments.algorithm, model)
    model = model.with_bagua([optimizer], algorithm)

    batch_size = max(1, 64 // world_size)
    steps = 1440 // world_size // batch_size  # the same on every rank
    for epoch in range(arguments.epochs):
        order = torch.tensor(mine)[
            torch.randperm(len(mine), generator=torch.Generator().manual_seed(epoch))
        ]
        for batch in order.split(batch_size)[:steps]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    if arguments.algorithm == "async":
        model.bagua_algorithm.abort(model)  # ends averaging in the background
    model.eval()
    # With diloco, the weights that count are those that all ranks share.
    shared = (
        model.bagua_algorithm.global_weights() if arguments.algorithm == "diloco" else nullcontext()
    )
    with torch.no_grad(), shared:
        accuracy = (model(images[1440:]).argmax(1) == labels[1440:]).float().mean().reshape(1)
    bagua_ref.allreduce_inplace(accuracy, bagua_ref.ReduceOp.AVG)
    if rank == 0:
        print(
            f"{arguments.algorithm}, {world_size} rank{'s'[: world_size > 1]}: test accuracy"
            f" {accuracy.item():.1%}"
        )
    bagua_ref.destroy_process_group()
    return accuracy.item()


if __name__ == "__main__":
    main()

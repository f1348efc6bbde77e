"""Train on texts of very different lengths, the docstrings of Python's standard library, with and
without balancing.

torchrun --nproc_per_node=2 examples/balanced_text.py
python examples/balanced_text.py --write-lengths docstring-lengths.txt    # then: bagua-ref balance
--lengths ... --ranks 4
"""

from __future__ import annotations

import argparse
import ast
import os
import sysconfig
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.contrib import LoadBalancingDistributedSampler

KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef)
LONGEST = 2000


def documentation_strings() -> list[tuple[str, int]]:
    """Return each text with the kind of object that it documents: 0 a module, 1 a class, 2 a
    function.
    """
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library's own sources
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, KINDS) and (text := ast.get_docstring(node)):
                found.append((text, [isinstance(node, kind) for kind in KINDS].index(True)))
    return found


def encode(text: str) -> Tensor:
    return torch.tensor(list(text.encode()[:LONGEST]))


def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    texts, kinds = zip(*samples, strict=True)
    return (
        pad_sequence(texts, batch_first=True),
        torch.tensor([len(text) for text in texts]),
        torch.tensor(kinds),
    )


class Reader(nn.Module):
    """Reads a text byte by byte, so its work grows with the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.classes = nn.Linear(64, len(KINDS))

    def forward(self, texts: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(texts))
        return self.classes(states[torch.arange(len(texts)), lengths - 1])


def train(
    dataset: list[tuple[Tensor, int]],
    sampler: DistributedSampler | LoadBalancingDistributedSampler,
    steps: int,
) -> float:
    """Train for one epoch of at most ``steps`` steps; return the seconds it took."""
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model = model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=collate)
    sampler.set_epoch(0)
    bagua_ref.barrier()
    start = time.perf_counter()
    for _, (texts, lengths, kinds) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(texts, lengths), kinds).backward()
        optimizer.step()
    bagua_ref.barrier()
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=150,
        metavar="N",
        help="maximum number of steps (default: %(default)s)",
    )
    parser.add_argument(
        "--write-lengths",
        type=Path,
        metavar="FILE",
        help="only write the lengths of the texts to FILE",
    )
    arguments = parser.parse_args(argv)

    dataset = [(encode(text), kind) for text, kind in documentation_strings()]
    lengths = [len(text) for text, _ in dataset]
    if arguments.write_lengths:
        arguments.write_lengths.write_text("".join(f"{length}\n" for length in lengths))
        print(
            f"{len(lengths)} lengths from {min(lengths)} to {max(lengths)} in"
            f" {arguments.write_lengths}"
        )
        return

    torch.set_num_threads(1)  # ranks of one machine share its cores
    bagua_ref.init_process_group()
    rank, world_size = bagua_ref.get_rank(), bagua_ref.get_world_size()
    for sampler in (
        DistributedSampler(dataset, world_size, rank),
        LoadBalancingDistributedSampler(dataset, None, complexities=lengths),
    ):
        seconds = train(dataset, sampler, arguments.steps)
        if rank == 0:
            print(
                f"{type(sampler).__name__}: {seconds:.1f} s on {world_size}"
                f" rank{'s'[: world_size > 1]}"
            )
    bagua_ref.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

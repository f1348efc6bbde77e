"""Train for two epochs on a dataset whose samples are slow to produce: the second epoch takes them
from the cache.

    pip install '.[cache]'
    python examples/cached_dataset.py                       # starts a server
    python examples/cached_dataset.py --backend fakeredis   # in this process
    python examples/cached_dataset.py --host cache.example.org --port 6379

Each sample is a text, compressed as it might lie on disk, that is unpacked, cut into tokens and
counted: some milliseconds.
"""

from __future__ import annotations

import argparse
import os
import re
import time
import zlib
from collections.abc import Sequence

import torch
from torch.utils.data import DataLoader, Dataset

from bagua_ref.contrib import CachedDataset

VOCABULARY = 2048


class Texts(Dataset):
    """Compressed texts on three subjects, and which subject each is on."""

    WORDS = (
        ["ship", "sail", "sea", "wind", "port", "crew"],
        ["loaf", "oven", "flour", "bread", "yeast", "crust"],
        ["goal", "ball", "team", "score", "pitch"],
    )

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.subjects = torch.randint(3, (size,), generator=generator).tolist()
        self.packed = []
        for subject in self.subjects:
            words = self.WORDS[subject]
            picks = torch.randint(len(words), (6000,), generator=generator).tolist()
            self.packed.append(zlib.compress(" ".join(words[pick] for pick in picks).encode()))

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        text = zlib.decompress(self.packed[index]).decode()
        tokens = torch.tensor(
            [zlib.crc32(word.encode()) % VOCABULARY for word in re.findall(r"\w+", text)]
        )
        return (
            torch.bincount(tokens, minlength=VOCABULARY).float() / len(tokens),
            self.subjects[index],
        )


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="redis", choices=["redis", "fakeredis"])
    parser.add_argument(
        "--host",
        help=(
            "host of an existing Redis server; its password is read from the variable"
            " REDIS_PASSWORD"
        ),
    )
    parser.add_argument("--port", type=int, default=6379)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args(arguments)

    where = {}
    if args.host is not None:
        where["hosts"] = [
            {"host": args.host, "port": args.port, "password": os.environ.get("REDIS_PASSWORD")}
        ]
    dataset = CachedDataset(
        Texts(args.samples), backend=args.backend, dataset_name="texts", **where
    )

    torch.manual_seed(0)
    model = torch.nn.Linear(VOCABULARY, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    seconds = []
    with dataset:
        loader = DataLoader(
            dataset,
            batch_size=32,
            shuffle=True,
            num_workers=args.workers,
            persistent_workers=args.workers > 0,
        )
        for epoch in range(args.epochs):
            start, right = time.perf_counter(), 0
            for counts, subjects in loader:
                scores = model(counts)
                loss = torch.nn.functional.cross_entropy(scores, subjects)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += (scores.argmax(dim=1) == subjects).sum().item()
            seconds.append(time.perf_counter() - start)
            print(
                f"epoch {epoch + 1}: {seconds[-1]:.2f} s, accuracy {right / len(dataset):.1%},"
                f" {dataset.stats()}"
            )
    if len(seconds) > 1:
        print(f"the second epoch was {seconds[0] / seconds[1]:.1f} times as fast")
    return seconds


if __name__ == "__main__":
    main()

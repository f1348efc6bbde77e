"""The cache on a real server: warm epochs against one get and pickle per sample and against
bare mget; a cold epoch.

    python benchmarks/cache.py [--quick] [--json PATH] [--workers N]

All read from the same server through a DataLoader with batches of 64, with redis-py and hiredis;
medians of 5 alternating epochs. "get + pickle" requests one sample at a time and unpickles it.
"mget" returns the same encoded bytes that ours reads, without
decoding and collating: the floor. The cold epoch is compared with the dataset itself, whose samples
take 1 ms to compute.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import common  # beside this file
import redis
import redis.connection
import torch
from torch.utils.data import DataLoader, Dataset

from bagua_ref.contrib import CachedDataset
from bagua_ref.contrib.utils.redis_store import bootstrap_redis_server

BATCH = 64
CAPACITY = 8 * 1024**3


class Tensors(Dataset):
    """Images of 3x64x64 float32."""

    def __init__(self, size: int, seconds: float = 0.0) -> None:
        self.size, self.seconds = size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        until = time.perf_counter() + self.seconds
        sample = torch.full((3, 64, 64), float(index))
        # busy waiting, as decoding uses the core; sleeping would leave it to the server
        while time.perf_counter() < until:
            pass
        return sample


class Bytes(Tensors):
    """Strings of 10 KB."""

    def __getitem__(self, index: int) -> Any:
        return index.to_bytes(4, "little") * 2500


class GetAndPickle(Dataset):
    """A simple cache that requests one sample at a time and stores it as a pickle."""

    def __init__(self, inner: Tensors, address: dict[str, Any]) -> None:
        self.inner, self.address, self.client = inner, address, None

    def __len__(self) -> int:
        return len(self.inner)

    def connect(self) -> None:
        self.client = self.client or redis.Redis(**self.address)

    def fill(self) -> None:
        self.connect()
        for index in range(len(self)):
            self.client.set(f"pickle_{index}", pickle.dumps(self.inner[index]))
        self.client = None

    def __getitem__(self, index: int) -> Any:
        self.connect()
        return pickle.loads(self.client.get(f"pickle_{index}"))


class Mget(GetAndPickle):
    """The floor: a batch is one mget of the encoded values."""

    def __init__(self, inner: Tensors, address: dict[str, Any], name: str) -> None:
        super().__init__(inner, address)
        self.name = name

    def __getitems__(self, indices: list[int]) -> Any:
        self.connect()
        return self.client.mget([f"{self.name}_{index}" for index in indices])


def identity(batch: Any) -> Any:
    return batch


def epoch(dataset: Dataset, workers: int, collate: Callable | None = None) -> Callable[[], None]:
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
    )

    def run() -> None:
        for _ in loader:
            pass

    return run


def warm(
    inner: Tensors, name: str, workers: int, rounds: int, bars: tuple[float, float]
) -> list[common.Row]:
    cached = CachedDataset(inner, dataset_name=name, capacity_per_node=CAPACITY)
    cached.prefill(progress=False)
    (address,) = bootstrap_redis_server(CAPACITY)
    one_by_one = GetAndPickle(inner, address)
    one_by_one.fill()
    peers = {
        "ours": epoch(cached, workers),
        "get + pickle": epoch(one_by_one, workers),
        "mget": epoch(Mget(inner, address, name), workers, identity),
    }
    medians = {
        peer: len(inner) / seconds for peer, seconds in common.alternate(peers, rounds).items()
    }
    stats = cached.stats()
    assert stats.errors == 0, stats
    assert workers or stats.hits == (rounds + 1) * len(inner), stats  # workers count for themselves
    ours = medians.pop("ours")
    work = f"warm epoch, {name}, {workers} workers"
    extra = {"samples": len(inner), "batch": BATCH, "workers": workers}
    judged = not workers
    return [
        common.Row(
            work,
            "samples/s",
            ours,
            medians,
            "get + pickle",
            common.at_least(bars[0]) if judged else common.NO_LIMIT,
            extra,
        ),
        common.Row(
            work,
            "samples/s",
            ours,
            medians,
            "mget",
            common.at_least(bars[1]) if judged else common.NO_LIMIT,
            extra,
        ),
    ]


def cold(size: int, rounds: int) -> common.Row:
    inner = Tensors(size, seconds=0.001)
    cached = CachedDataset(inner, dataset_name="cold", capacity_per_node=CAPACITY)
    ours, bare = epoch(cached, 0), epoch(inner, 0)
    times: dict[str, list[float]] = {"ours": [], "dataset alone": []}
    for _ in range(rounds):
        cached.cache_loader.store.clear()
        for name, run in (("ours", ours), ("dataset alone", bare)):
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start) / size)
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    assert cached.stats().hits == 0
    return common.Row(
        "cold epoch, 1 ms a tensor",
        "ms/sample",
        medians["ours"],
        {"dataset alone": medians["dataset alone"]},
        "dataset alone",
        common.at_most(1.15),
        {"samples": size, "batch": BATCH, "workers": 0},
    )


def main() -> int:
    args = common.arguments(
        "The cache on a real server.",
        workers={"type": int, "default": 2, "help": "of the second pair of runs"},
    )
    torch.set_num_threads(1)
    if not redis.connection.HIREDIS_AVAILABLE:
        raise SystemExit(
            "hiredis is missing, and the peers would be slowed down: pip install '.[bench]'"
        )
    size, rounds = (256, 1) if args.quick else (2048, 5)
    rows = []
    for workers in (0, args.workers):
        rows += warm(Bytes(size), "10 KB of bytes", workers, rounds, (6.0, 0.6))
        rows += warm(Tensors(size), "3x64x64 float32", workers, rounds, (6.0, 0.4))
    rows.append(cold(size // 2, rounds))
    return common.report("cache", rows, args)


if __name__ == "__main__":
    sys.exit(main())

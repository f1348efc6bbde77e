"""Hours of training in small: memory, threads, open files and the cache's keys after 20,000 steps,
and 200 launches in a row.

    python benchmarks/soak.py [--minutes N] [--only NAME] [--quick] [--json PATH]

4 processes train with each algorithm on samples from a Redis server, 20,000 steps or more: until N
minutes have passed for all algorithms together. Then examples/train_digits.py is launched 200 times
with 2 ranks.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import common
import torch
import workers
from torch import nn
from torch.utils.data import DataLoader, Dataset

import bagua_ref
from bagua_ref.cli.recipes import RECIPES, make_optimizer
from bagua_ref.contrib import CachedDataset

ROOT = Path(__file__).parents[1]
RANKS, SAMPLES, WIDTH, BATCH = 4, 512, 32, 8
STEPS, BASELINE, EVERY, LAUNCHES = 20_000, 2_000, 1_000, 200
GROWTH = 1.03
LIMIT = 600  # seconds for a launch
ALGORITHMS = tuple(RECIPES)
UNITS = ("MiB", "threads", "open files", "keys in Redis")
Usage = dict[str, float]


class Vectors(Dataset):
    """Random vectors, and which half of each has the larger sum."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return vector, int(vector[: WIDTH // 2].sum() > vector[WIDTH // 2 :].sum())


def usage(dataset: CachedDataset) -> Usage:
    """Return what this process uses now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    found = (
        pages * resource.getpagesize() / 2**20,
        threads,
        files,
        dataset.cache_loader.num_keys(),
    )
    return dict(zip(UNITS, found, strict=True))


def train(name: str, steps: int, every: int, seconds: float) -> list[Usage]:
    """Train for at least ``steps`` and ``seconds``; return the usage after each ``every`` steps."""
    os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = "4096"  # two buckets
    torch.manual_seed(0)
    rank, start = bagua_ref.get_rank(), time.monotonic()
    dataset = CachedDataset(Vectors(), dataset_name="vectors")
    loader = DataLoader(
        dataset, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(rank)
    )
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    optimizer = make_optimizer(name, module.parameters())
    RECIPES[name].wrap(module, [optimizer])
    found: list[Usage] = []
    goes_on = torch.ones(1)
    bagua_ref.broadcast(goes_on)  # connects the group that is used below
    while goes_on:
        for vectors, halves in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(vectors), halves).backward()
            optimizer.step()
            steps -= 1
            if steps % every == 0:
                while name == "async" and not module.bagua_metrics()["async_rounds"]:
                    time.sleep(0.01)  # the first round opens sockets
                found.append(usage(dataset))
                if rank == 0:
                    numbers = ", ".join(f"{value:.5g} {unit}" for unit, value in found[-1].items())
                    print(
                        f"{name}: {len(found) * every} steps in {time.monotonic() - start:.0f} s,"
                        f" {numbers}",
                        flush=True,
                    )
                goes_on = torch.tensor([float(steps > 0 or time.monotonic() - start < seconds)])
                bagua_ref.broadcast(goes_on)  # all ranks end at the same step
                if not goes_on:
                    break
    if name == "async":
        module.bagua_algorithm.abort(module)
    bagua_ref.barrier()  # no rank needs the server any more
    dataset.close()
    dataset.cache_loader.store.shutdown()
    return found


def rows(name: str, ranks: list[list[Usage]], baseline: int, every: int) -> list[common.Row]:
    """Return what the ranks of a training used, each row that of its worst rank."""
    steps, found = len(ranks[0]) * every, []
    for what in UNITS:
        series = [[usage[what] for usage in rank] for rank in ranks]
        later = [values[baseline // every - 1 :] for values in series]
        if what == "MiB":
            peer, limit, pairs = (
                f"after {baseline:,} steps",
                GROWTH,
                [(values[-1], values[0]) for values in later],
            )
        elif what == "keys in Redis":
            peer, limit, pairs = "samples", 1.0, [(max(values), SAMPLES) for values in series]
        else:
            peer, limit, pairs = "least", 1.0, [(max(values), min(values)) for values in later]
        ours, theirs = max(pairs, key=lambda pair: pair[0] / pair[1])
        extra = {"steps": steps, "every": every, "ranks": series}
        found.append(
            common.Row(name, what, ours, {peer: theirs}, peer, common.at_most(limit), extra)
        )
    return found


def launched(place: int) -> tuple[str, int, str]:
    """Launch the example with 2 ranks; return its algorithm, exit status and complaints."""
    name = ALGORITHMS[place % len(ALGORITHMS)]
    command = (
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "examples/train_digits.py",
        f"--algorithm={name}",
        "--epochs=1",
    )
    with tempfile.TemporaryDirectory() as folder:  # torchrun leaves its own there
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
        }
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                complaints = process.communicate(timeout=LIMIT)[1]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                complaints = f"it had not ended after {LIMIT} s"
    return name, process.returncode, complaints


def launches(count: int) -> common.Row:
    """Launch the example ``count`` times, two at a time."""
    failures = []
    with ThreadPoolExecutor(2) as pool:
        for done, future in enumerate(
            as_completed([pool.submit(launched, place) for place in range(count)]), start=1
        ):
            name, status, complaints = future.result()
            if status != 0:
                failures.append({"algorithm": name, "status": status, "stderr": complaints[-4000:]})
                print(f"a launch with {name} ended with {status}:\n{complaints}")
            if done % 10 == 0 or done == count:
                print(f"{done} of {count} launches, {len(failures)} failed", flush=True)
    succeeded, extra = count - len(failures), {"failures": failures}
    return common.Row(
        "launches",
        "exit 0",
        succeeded,
        {"launches": count},
        "launches",
        common.at_least(1.0),
        extra,
    )


def main() -> int:
    args = common.arguments(
        "Memory, threads and open files of long trainings.",
        minutes={
            "type": float,
            "default": 0.0,
            "metavar": "N",
            "help": "train for N minutes at least, all algorithms together",
        },
        only={
            "default": "",
            "choices": ("", *ALGORITHMS, "launches"),
            "help": "an algorithm, or launches; keep the other rows",
        },
    )
    ranks, steps, baseline, every, count = RANKS, STEPS, BASELINE, EVERY, LAUNCHES
    names = [name for name in (*ALGORITHMS, "launches") if args.only in ("", name)]
    if args.quick:
        ranks, steps, baseline, every, count, names = (
            2,
            60,
            20,
            20,
            1,
            [args.only] if args.only else ["async", "launches"],
        )
    found: list[common.Row] = []
    for name in names:
        if name == "launches":
            new = [launches(count)]
        else:
            new = rows(
                name,
                workers.launch(
                    train, ranks, name, steps, every, 60 * args.minutes / len(ALGORITHMS)
                ),
                baseline,
                every,
            )
        found += new
        order = [*itertools.product(ALGORITHMS, UNITS), ("launches", "exit 0")]
        common.keep("soak", new, args, ("work", "unit"), order)
    common.show(found)
    return 0 if args.quick else int(not all(row.limit.holds(row.ratio) for row in found))


if __name__ == "__main__":
    sys.exit(main())

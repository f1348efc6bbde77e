"""The overhead of torch.distributed in a simulated world, beside torch's threaded process group and
processes over gloo.

Time for each collective and rank, of all ranks together, and that of a data-parallel training of
many ranks, by the system's clock: Python's other clocks are virtual in a simulated world.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import common
import torch
import torch._dynamo  # DDP and optimizers do at their first use, which takes seconds
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import multi_threaded_pg

from bagua_ref.simulation import SimulatedWorld

KINDS = {"blocking all_reduce": False, "async all_reduce, waited for": True}
LIMITS = {"blocking all_reduce": 0.3, "async all_reduce, waited for": 0.8}
"""Milliseconds a collective and rank at 8 ranks."""


def clock() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def reduce(calls: int, asynchronous: bool) -> None:
    x = torch.ones(4)
    for _ in range(calls):
        work = dist.all_reduce(x, async_op=asynchronous)
        if asynchronous:
            work.wait()


def train(steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()


def simulated(ranks: int, calls: int, asynchronous: bool) -> float:
    def main() -> float:
        dist.init_process_group("gloo")
        start = clock()
        reduce(calls, asynchronous)
        return clock() - start

    return max(SimulatedWorld(ranks, torch_distributed=True).run(main))


def trained(ranks: int, steps: int) -> float:
    start = clock()
    SimulatedWorld(ranks, torch_distributed=True).run(train, steps)
    return clock() - start


def threaded(ranks: int, calls: int, asynchronous: bool) -> float:
    seconds, store = {}, dist.HashStore()

    def main(rank: int) -> None:
        dist.init_process_group("threaded", store=store, rank=rank, world_size=ranks)
        start = clock()
        reduce(calls, asynchronous)
        seconds[rank] = clock() - start
        dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    return max(seconds.values())


def gloo(ranks: int, calls: int, asynchronous: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _gloo, (folder, ranks, calls, asynchronous), nprocs=ranks, start_method="fork"
        )
        return max(
            float(path.read_text(encoding="utf-8")) for path in Path(folder).glob("seconds*")
        )


def _gloo(rank: int, folder: str, ranks: int, calls: int, asynchronous: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    dist.barrier()
    start = clock()
    reduce(calls, asynchronous)
    Path(folder, f"seconds{rank}").write_text(str(clock() - start), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    args = common.arguments(__doc__ or "")
    torch.set_num_threads(1)
    ranks, calls, rounds = (2, 20, 1) if args.quick else (8, 300, 5)
    rows = []
    for work, asynchronous in KINDS.items():
        contenders: dict[str, Callable[[int, int, bool], float]] = {
            "ours": simulated,
            "threaded PG": threaded,
            "gloo": gloo,
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, run in contenders.items():
                times[name].append(run(ranks, calls, asynchronous))
        milliseconds = {
            name: 1e3 * statistics.median(seconds) / calls / ranks
            for name, seconds in times.items()
        }
        peers = {name: value for name, value in milliseconds.items() if name != "ours"} | {
            "allowed": LIMITS[work]
        }
        rows.append(
            common.Row(
                f"{work}, {ranks} ranks",
                "ms",
                milliseconds["ours"],
                peers,
                "allowed",
                common.at_most(1.0),
            )
        )
    ranks, steps = (8, 2) if args.quick else (256, 4)
    seconds = statistics.median(trained(ranks, steps) for _ in range(1 if args.quick else 3))
    rows.append(
        common.Row(
            f"DDP, {ranks} ranks x {steps} steps",
            "s",
            seconds,
            {"allowed": 5.0},
            "allowed",
            common.at_most(1.0),
        )
    )
    return common.report("sim_torch_distributed", rows, args)


if __name__ == "__main__":
    sys.exit(main())

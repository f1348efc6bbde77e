"""Script that two ranks run to the end in one of several manners, each of which must exit cleanly.

``python leaving.py MANNER READ WRITE`` is one rank, configured by RANK and the other environment
variables; READ and WRITE are the ends of a pipe. With ``TIMES MANNER...`` it forks TIMES pairs of
ranks per manner, one pair at a time, which end as interpreters do, and prints the exit codes of
each pair.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time

import torch
import torch._dynamo  # the first optimizer would import it, in each process
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import bagua_ref

MANNERS = (
    "destroys",
    "forgets",
    "keeps references",
    "leaves early",
    "leaves a thread behind",
    "forks",
    "brings torch's group",
    *(
        f"trains {algorithm} beside DDP, {end}"
        for algorithm in ("bytegrad", "low_precision_decentralized")
        for end in ("destroys torch's group", "forgets both groups")
    ),
)
kept = []  # survives the script's last line


def script(manner: str) -> None:
    """Use the default group, another group and a background group, then leave."""
    torch.set_num_threads(1)
    if manner == "brings torch's group" or manner.startswith("trains"):
        dist.init_process_group("gloo")
    bagua_ref.init_process_group(timeout=30)
    rank = bagua_ref.get_rank()
    groups = [
        bagua_ref.new_group(),
        bagua_ref.new_group([0]),
        bagua_ref.new_group().for_background(),
    ]
    for size in (10, 300_000):
        for group in groups:
            x = torch.full((size,), rank + 1.0)
            comm = group.get_global_communicator()
            bagua_ref.allreduce_inplace(x, comm=comm)
            assert x[0].item() == (3 if comm.nranks() == 2 else rank + 1)
    if manner == "keeps references":
        cycle = [groups, [group.get_global_communicator() for group in groups]]
        cycle.append(cycle)
        kept.append(cycle)
    elif manner == "leaves early":
        if rank == 1:
            time.sleep(0.05)
        x = torch.full((100_000,), float(rank))
        bagua_ref.broadcast(x, 0)
        assert x[0].item() == 0
    elif manner == "leaves a thread behind":
        threading.Thread(
            target=go_on, args=(groups[2].get_global_communicator(),), daemon=True
        ).start()
        time.sleep(0.02)
    elif manner.startswith("trains"):
        train(manner.split()[1])
        if manner.endswith("destroys torch's group"):
            dist.destroy_process_group()
    elif manner == "forks":
        if (child := os.fork()) == 0:
            sys.exit()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for group in groups:
            bagua_ref.allreduce_inplace(torch.ones(10), comm=group.get_global_communicator())
    if manner in ("destroys", "brings torch's group"):
        bagua_ref.destroy_process_group()
        if manner == "brings torch's group":
            dist.destroy_process_group()


def train(algorithm: str) -> None:
    """Train a model beside another one in DDP, whose step is the last."""
    models = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 10)) for _ in "12"]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    chosen = bagua_ref.algorithms.Algorithm.init(algorithm, hierarchical=False)
    models[0].with_bagua([optimizers[0]], chosen)
    models[1] = DistributedDataParallel(models[1])
    for _ in range(10):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()


def go_on(comm) -> None:
    x = torch.ones(100_000)
    try:
        while True:
            comm.allreduce_inplace(x, bagua_ref.ReduceOp.AVG)
    except bagua_ref.errors.CommunicationError as error:
        assert x[0].item() == 1
        kept.append(error)


def find_port(read: int, write: int) -> None:
    """Let rank 0 find a port just before it serves there, and tell rank 1: another process may take
    it soon.
    """
    if os.environ["RANK"] == "0":
        os.environ["MASTER_PORT"] = str(bagua_ref.env.find_free_network_port())
        os.write(write, os.environ["MASTER_PORT"].encode())
    os.close(write)
    if os.environ["RANK"] == "1":
        os.environ["MASTER_PORT"] = os.read(read, 8).decode()


def fork_pairs(times: int, manners: list[str]) -> None:
    """Fork from a process without threads, a store's included: a child could not end them."""
    # a child collects what it makes itself, and not all of torch's objects once more as it ends
    gc.freeze()
    for manner in manners * times:
        read, write = os.pipe()
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
                find_port(read, write)
                script(manner)
                return  # Lives until the interpreter exits, as in a script.
            children.append(child)
        os.close(read)
        os.close(write)
        print(
            manner,
            *[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children],
            sep=", ",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        fork_pairs(int(sys.argv[1]), sys.argv[2:])
    else:
        find_port(int(sys.argv[2]), int(sys.argv[3]))
        script(sys.argv[1])

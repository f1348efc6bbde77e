"""Programs of torch.distributed with planted bugs, and their mended twins, for `bagua-ref sim`.

In a program, a line that ends with ``# BUG`` stands only in the broken version, and one with ``#
MENDED`` only in the mended one.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

_START = """
import os, random, time, threading
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()


def batch(step, rank=rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
"""


@dataclass(frozen=True)
class Script:
    """A program: its name, the kinds of findings that name the bug, its ranks, and the body.

    Attributes:
        name: of the bug.
        kinds: any of them is right; empty: a hint with the words ``hint``.
        body: follows the common start.
        ranks: the number of ranks.
        hint: words of the hint, if the bug is no error.
    """

    name: str
    kinds: tuple[str, ...]
    body: str
    ranks: int = 2
    hint: str = ""

    def text(self, broken: bool) -> str:
        """Return the broken or mended program."""
        left_out = "# MENDED" if broken else "# BUG"
        lines = (_START + textwrap.dedent(self.body)).strip().splitlines()
        return "\n".join(line for line in lines if not line.endswith(left_out)) + "\n"

    def bug_lines(self) -> set[int]:
        """Return the numbers of the broken program's lines that are marked, or that stand next to
        one that is left out.
        """
        lines = self.text(True).splitlines()
        return {
            number for number, line in enumerate(lines, 1) if line.endswith(("# BUG", "# HERE"))
        }


SCRIPTS = [
    Script(
        "rank_dependent_branch",
        ("ended", "deadlock"),
        """
        x = torch.ones(2)
        if rank == 0:  # BUG
            dist.all_reduce(x)  # BUG
        dist.all_reduce(x)  # MENDED
    """,
    ),
    Script(
        "different_operations",
        ("mismatch",),
        """
        x = torch.ones(2)
        if rank == 0:  # BUG
            dist.broadcast(x, src=0)  # BUG
        else:  # BUG
            dist.all_reduce(x)  # BUG
        dist.all_reduce(x)  # MENDED
    """,
    ),
    Script(
        "different_shapes",
        ("mismatch",),
        """
        x = torch.ones(2 + rank)  # BUG
        x = torch.ones(2)  # MENDED
        dist.all_reduce(x)  # HERE
    """,
    ),
    Script(
        "different_dtypes",
        ("mismatch",),
        """
        x = torch.ones(2, dtype=torch.float64 if rank else torch.float32)  # BUG
        x = torch.ones(2)  # MENDED
        dist.all_reduce(x)  # HERE
    """,
    ),
    Script(
        "wrong_root",
        ("mismatch",),
        """
        x = torch.full((2,), float(rank))
        dist.broadcast(x, src=rank)  # BUG
        dist.broadcast(x, src=0)  # MENDED
    """,
    ),
    Script(
        "wrong_group",
        (),
        """
        pair = dist.new_group([0, 1])
        x = torch.ones(2)
        dist.all_reduce(x, group=pair)  # BUG
        if rank < 2:  # MENDED
            dist.all_reduce(x, group=pair)  # MENDED
    """,
        ranks=3,
        hint="on a group that it is not in",
    ),
    Script(
        "group_made_on_some_ranks",
        ("mismatch", "deadlock", "ended"),
        """
        if rank < 2:  # BUG
            pair = dist.new_group([0, 1])  # BUG
        pair = dist.new_group([0, 1])  # MENDED
        everyone = dist.new_group()  # HERE
        dist.all_reduce(torch.ones(1), group=everyone)  # HERE
    """,
        ranks=3,
    ),
    Script(
        "swapped_order_of_messages",
        ("deadlock",),
        """
        x, y = torch.ones(2), torch.zeros(2)
        if rank == 0:  # MENDED
            dist.send(x, 1)  # MENDED
            dist.recv(y, 1)  # MENDED
        else:  # MENDED
            dist.recv(y, 0)  # MENDED
            dist.send(x, 0)  # MENDED
        dist.recv(y, 1 - rank)  # BUG
        dist.send(x, 1 - rank)  # BUG
    """,
    ),
    Script(
        "two_groups_in_opposite_order",
        ("deadlock",),
        """
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        x = torch.ones(2)
        for group in (first, second) if rank == 0 else (second, first):  # BUG
        for group in (first, second):  # MENDED
            dist.all_reduce(x, group=group)  # HERE
    """,
    ),
    Script(
        "uneven_batches",
        ("ended", "deadlock"),
        """
        model = DDP(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3 + rank):  # BUG
        for step in range(3):  # MENDED
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()  # HERE
            optimizer.step()
    """,
    ),
    Script(
        "exception_on_one_rank",
        ("exception",),
        """
        for step in range(3):
            if rank == 1 and step == 2:  # BUG
                raise ValueError("bad batch")  # BUG
            dist.all_reduce(torch.ones(1))
    """,
    ),
    Script(
        "seed_per_rank",
        ("replicas",),
        """
        torch.manual_seed(rank)  # BUG
        torch.manual_seed(0)  # MENDED
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()  # HERE
    """,
    ),
    Script(
        "no_seed_at_all",
        ("replicas",),
        """
        torch.manual_seed(0)  # MENDED
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()  # HERE
    """,
    ),
    Script(
        "parameters_changed_on_one_rank",
        ("replicas",),
        """
        model = DDP(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            if rank == 1 and step == 2:  # BUG
                model.module.weight.data.clamp_(-0.01, 0.01)  # BUG
            optimizer.step()  # HERE
    """,
    ),
    Script(
        "shard_changed_in_one_replica",
        ("replicas",),
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = torch.nn.Linear(3, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            if rank == 2 and step == 1:  # BUG
                model.weight.to_local().data.clamp_(-0.01, 0.01)  # BUG
            optimizer.step()  # HERE
    """,
        ranks=4,
    ),
    Script(
        "step_skipped_on_one_rank",
        ("replicas",),
        """
        model = DDP(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            if rank == 0 or step != 1:  # BUG
                optimizer.step()  # BUG
            optimizer.step()  # MENDED
    """,
    ),
    Script(
        "clipping_before_synchronization",
        ("replicas",),
        """
        model = DDP(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():  # BUG
                model(batch(step)).square().mean().backward()  # BUG
            optimizer.step()  # BUG
            model(batch(step)).square().mean().backward()
            optimizer.step()  # HERE
    """,
    ),
    Script(
        "unused_parameters_on_one_rank",
        ("ended", "deadlock", "exception", "mismatch"),
        """
        class Two(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

            def forward(self, x):
                return self.a(x) if rank == 1 else self.a(x) + self.b(x)  # BUG
                return self.a(x) + self.b(x)  # MENDED

        model = DDP(Two())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()  # HERE
            optimizer.step()  # HERE
    """,
    ),
    Script(
        "use_before_wait",
        ("early_use",),
        """
        x = torch.full((2,), float(rank))
        work = dist.all_reduce(x, async_op=True)  # HERE
        model = torch.nn.Linear(2, 1)
        model.weight.data.copy_(x)  # BUG
        work.wait()
        model.weight.data.copy_(x)  # MENDED
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    """,
    ),
    Script(
        "sent_on_before_wait",
        ("early_use",),
        """
        x = torch.full((2,), float(rank))
        work = dist.all_reduce(x, async_op=True)  # HERE
        y = x * 2  # BUG
        work.wait()
        y = x * 2  # MENDED
        dist.all_reduce(y)
    """,
    ),
    Script(
        "changed_before_wait",
        ("early_use", "schedule"),
        """
        x, y = torch.full((2,), float(rank)), torch.zeros(2)
        works = [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]  # HERE
        x.zero_()  # BUG
        for work in works:
            work.wait()
        x.zero_()  # MENDED
        model = torch.nn.Linear(2, 1)
        model.weight.data.copy_(y)
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # HERE
    """,
    ),
    Script(
        "missing_barrier",
        ("exception",),
        """
        if rank == 0:
            time.sleep(1)
            open("data.txt", "w").write("1 2 3")
        dist.barrier()  # MENDED
        values = open("data.txt").read()  # HERE
        dist.all_reduce(torch.ones(1))
    """,
    ),
    Script(
        "race_on_a_file",
        ("exception", "schedule"),
        """
        if rank == 0:
            with open("data.txt", "w") as file:
                file.write("0")
        dist.barrier()
        if rank == 0:
            with open("data.txt", "w") as file:
                file.write("1")
        dist.barrier()  # MENDED
        value = float(open("data.txt").read())
        model = torch.nn.Linear(1, 1)
        model.weight.data.fill_(value)
        dist.all_reduce(torch.ones(1))
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # HERE
    """,
    ),
    Script(
        "race_on_a_global",
        ("schedule",),
        """
        total = [0.0]
        lock = threading.Lock()

        def race():
            for _ in range(2):
                value = total[0]
                time.sleep(0)
                total[0] = value + 1

        def add():
            for _ in range(2):
                with lock:
                    value = total[0]
                    time.sleep(0)
                    total[0] = value + 1

        threads = [threading.Thread(target=race) for _ in range(2)]  # BUG
        threads = [threading.Thread(target=add) for _ in range(2)]  # MENDED
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        model = torch.nn.Linear(1, 1)
        model.weight.data.fill_(total[0])
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # HERE
    """,
    ),
    Script(
        "first_come_first_served",
        ("schedule",),
        """
        x = torch.full((2,), float(rank))
        order = torch.zeros(2)
        if rank == 0:
            for place in range(2):
                y = torch.zeros(2)
                dist.recv(y)  # BUG
                dist.recv(y, place + 1)  # MENDED
                order = order * 2 + y
        else:
            dist.send(x, 0)
        model = torch.nn.Linear(2, 1)
        model.weight.data.copy_(order)
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # HERE
    """,
        ranks=3,
    ),
    Script(
        "set_ordered_collectives",
        ("hash_seed",),
        """
        values = {str(i): torch.ones(i + 1) for i in range(10)}
        for name in set(values):  # BUG
        for name in sorted(values):  # MENDED
            dist.all_reduce(values[name])  # HERE
    """,
    ),
    Script(
        "checkpoint_read_too_early",
        ("exception",),
        """
        model = DDP(torch.nn.Linear(3, 1))
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        if rank == 0:
            time.sleep(1)
            torch.save(model.state_dict(), "model.pt")
        dist.barrier()  # MENDED
        model.load_state_dict(torch.load("model.pt"))  # HERE
        dist.barrier()
    """,
    ),
    Script(
        "forgotten_no_sync",
        (),
        """
        from contextlib import nullcontext
        model = DDP(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(3):
                with nullcontext():  # BUG
                with nullcontext() if part == 2 else model.no_sync():  # MENDED
                    model(batch(3 * step + part)).square().mean().backward()  # HERE
            optimizer.step()
    """,
        hint="no_sync()",
    ),
    Script(
        "message_never_received",
        (),
        """
        if rank == 0:  # BUG
            dist.isend(torch.ones(2), 1)  # BUG
        dist.barrier()
    """,
        hint="nothing received",
    ),
    Script(
        "work_never_waited_for",
        (),
        """
        x = torch.ones(2)
        dist.all_reduce(x, async_op=True)  # BUG
        dist.all_reduce(x, async_op=True).wait()  # MENDED
        dist.barrier()
    """,
        hint="nothing waited",
    ),
]

RIGHT = {
    "broadcast_whose_root_reads": (
        """
        x = torch.full((2,), float(rank))
        work = dist.broadcast(x, src=0, async_op=True)
        model = torch.nn.Linear(2, 1)
        if rank == 0:
            model.weight.data.copy_(x)
        work.wait()
        model.weight.data.copy_(x)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    """
    ),
    "source_of_isend_is_read": (
        """
        x, y = torch.full((2,), float(rank)), torch.zeros(2)
        works = [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]
        total = x + 1
        for work in works:
            work.wait()
        model = torch.nn.Linear(2, 1)
        model.weight.data.copy_(total + y)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    """
    ),
    "is_completed_is_polled": (
        """
        x = torch.full((2,), float(rank))
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            pass
        model = torch.nn.Linear(2, 1)
        model.weight.data.copy_(x)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    """
    ),
    "local_steps_then_averaging": (
        """
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            if step % 2:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.data /= world
    """
    ),
}
"""Programs without an error that look like some with one."""


def right(*names: str) -> str:
    """Return programs without an error, one after the other."""
    return "".join([_START.lstrip(), *(textwrap.dedent(RIGHT[name]) for name in names)])


def mended(ranks: int) -> str:
    """Return all mended programs of this number of ranks, and those without an error, one after the
    other.
    """
    parts = [script.text(broken=False) for script in SCRIPTS if script.ranks == ranks]
    return right(*(RIGHT if ranks == 2 else ())) + "".join(
        part.removeprefix(_START.strip()) for part in parts
    )

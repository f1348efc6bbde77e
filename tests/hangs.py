"""Programs of torch.distributed that hang or do not match, of public reports, and healthy ones, for
`bagua-ref explain`: they run over gloo, and on simulated ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import runpy
import sys
import textwrap
from dataclasses import dataclass

import bagua_ref

_START = """
import datetime, os, sys, threading, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
limit = datetime.timedelta(seconds=5)
rank, world, x, y = dist.get_rank(), dist.get_world_size(), torch.ones(4), torch.zeros(4)
dist.all_reduce(x)
"""


@dataclass(frozen=True)
class Hang:
    """A program.

    Attributes:
        name: of the error.
        ranks: the number of ranks.
        body: follows the common start; lines that may be named end with ``# HERE``.
        kind: of the finding over gloo.
        words: of the message or the cause.
        simulated: whether simulated ranks show it, too, and name the same line.
    """

    name: str
    ranks: int
    body: str
    kind: str
    words: str
    simulated: bool = True

    def text(self) -> str:
        """Return the program."""
        return (_START + textwrap.dedent(self.body)).strip() + "\n"

    def lines(self) -> set[int]:
        """Return the numbers of the lines that may be named."""
        lines = self.text().splitlines()
        return {number for number, line in enumerate(lines, 1) if line.endswith("# HERE")}


HANGS = [
    Hang(
        "rank_dependent_branch",
        2,
        """
        if rank == 0:
            dist.all_reduce(x)  # HERE
        """,
        "absent",
        "rank 1 has ended",
    ),
    Hang(
        "barrier_on_rank_0",
        3,
        """
        for step in range(3):
            dist.all_reduce(x)  # HERE
            if rank == 0 and step == 1:
                dist.barrier()  # HERE
        """,
        "mismatch",
        "rank 0 calls barrier",
    ),
    Hang(
        "early_return",
        3,
        """
        def train():
            for step in range(4):
                if rank == 2 and step == 2:
                    return
                dist.all_reduce(x)  # HERE
        train()
        """,
        "absent",
        "rank 2 has ended",
    ),
    Hang(
        "uneven_batches",
        2,
        """
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        for step in range(3 + rank):
            loss = model(torch.ones(2, 4)).sum()  # HERE
            loss.backward()  # HERE
        """,
        "absent",
        "uneven batches",
    ),
    Hang(
        "other_operation",
        2,
        """
        if rank == 0:
            dist.broadcast(x, 0)  # HERE
            dist.barrier()
        else:
            dist.all_reduce(x)  # HERE
        """,
        "mismatch",
        "a branch that depends on the rank",
    ),
    Hang(
        "other_size",
        2,
        """
        dist.broadcast(torch.ones(4 + 2 * rank), 0)  # HERE
        """,
        "mismatch",
        "sizes that depend on the rank",
    ),
    Hang(
        "other_dtype",
        2,
        """
        dist.broadcast(x.double() if rank else x, 0)  # HERE
        """,
        "mismatch",
        "float64",
    ),
    Hang(
        "all_to_all_splits",
        3,
        """
        given = [[1, 2, 1], [2, 2, 0], [1, 1, 2]]
        taken = [row[rank] for row in given]
        if rank == 1:
            taken[0] += 5
        if rank == 2:
            time.sleep(9)
        dist.all_to_all_single(torch.empty(sum(taken)), x, taken, given[rank])  # HERE
        """,
        "mismatch",
        "rank 0 sends 2 elements to rank 1",
    ),
    Hang(
        "splits_at_which_gloo_aborts",
        2,
        """
        given = [[1, 3], [2, 2]]
        taken = [row[rank] for row in given]
        taken[0] -= rank
        dist.all_to_all_single(torch.empty(sum(taken)), x, taken, given[rank])  # HERE
        dist.barrier()
        """,
        "exception",
        "native code ended the process",
    ),
    Hang(
        "sizes_at_which_gloo_aborts",
        2,
        """
        dist.all_gather([torch.zeros(3 + rank)] * 2, torch.ones(3 + rank))  # HERE
        """,
        "exception",
        "native code ended the process",
    ),
    Hang(
        "groups_in_another_order",
        3,
        """
        pairs = [[0, 1], [1, 2]]
        made = [dist.new_group(pair, timeout=limit) for pair in (pairs if rank != 1 else pairs[::-1])]  # HERE
        """,
        "groups",
        "another order",
    ),
    Hang(
        "group_made_on_some_ranks",
        3,
        """
        if rank < 2:
            pair = dist.new_group([0, 1], timeout=limit)
        everyone = dist.new_group(timeout=limit)  # HERE
        dist.all_reduce(x, group=everyone)  # HERE
        """,
        "groups",
        "another order",
    ),
    Hang(
        "two_groups_in_opposite_order",
        2,
        """
        first, second = dist.new_group([0, 1], timeout=limit), dist.new_group([0, 1], timeout=limit)
        for group in (first, second) if rank == 0 else (second, first):
            dist.all_reduce(x, group=group)  # HERE
        """,
        "deadlock",
        "different orders",
    ),
    Hang(
        "circle_over_three_groups",
        3,
        """
        groups = [dist.new_group(pair, timeout=limit) for pair in ([0, 1], [1, 2], [0, 2])]
        mine = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]
        for number in mine:
            dist.all_reduce(x, group=groups[number])  # HERE
        """,
        "deadlock",
        "different orders",
    ),
    Hang(
        "send_and_send",
        2,
        """
        dist.send(x, 1 - rank)  # HERE
        dist.recv(y, 1 - rank)
        """,
        "deadlock",
        "send(dst=1) of float32[4] for rank 1",
    ),
    Hang(
        "recv_and_recv",
        2,
        """
        dist.recv(y, 1 - rank)  # HERE
        dist.send(x, 1 - rank)
        """,
        "deadlock",
        "recv(src=0)",
    ),
    Hang(
        "pipeline_in_another_order",
        3,
        """
        if rank == 0:
            dist.send(x, 1)
            dist.recv(y, 1)  # HERE
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(y, 0)
            dist.send(y, 2)
            dist.recv(y, 0)  # HERE
            dist.recv(y, 2)
            dist.send(y, 0)
        else:
            dist.recv(y, 1)
            dist.send(y, 1)  # HERE
        """,
        "deadlock",
        "messages",
    ),
    Hang(
        "message_without_partner",
        2,
        """
        if rank == 0:
            dist.recv(y, 1)  # HERE
        """,
        "absent",
        "recv(src=1)",
    ),
    Hang(
        "asymmetric_batch",
        2,
        """
        operations = [dist.P2POp(dist.irecv, y, 1 - rank)]
        if rank == 1:
            operations.append(dist.P2POp(dist.isend, x, 0))
        for work in dist.batch_isend_irecv(operations):
            work.wait()  # HERE
        """,
        "absent",
        "irecv(src=0)",
    ),
    Hang(
        "wrong_root_in_a_subgroup",
        4,
        """
        pairs = [dist.new_group([0, 1], timeout=limit), dist.new_group([2, 3], timeout=limit)]
        source = {0: 1, 1: 0, 2: 2, 3: 2}[rank]
        dist.broadcast(x, source, group=pairs[rank // 2])  # HERE
        """,
        "mismatch",
        "broadcast(src=1)",
    ),
    Hang(
        "root_outside_of_the_subgroup",
        4,
        """
        pairs = [dist.new_group([0, 1], timeout=limit), dist.new_group([2, 3], timeout=limit)]
        dist.broadcast(x, 0, group=pairs[rank // 2])  # HERE
        dist.barrier()
        """,
        "exception",
        "is not part of group",
    ),
    Hang(
        "exception_on_one_rank",
        3,
        """
        for step in range(3):
            if rank == 1 and step == 1:
                raise KeyError("label")  # HERE
            dist.all_reduce(x)
        """,
        "exception",
        "KeyError",
    ),
    Hang(
        "rank_that_died",
        2,
        """
        if rank == 1:
            os.kill(os.getpid(), 9)
        dist.all_reduce(x)  # HERE
        """,
        "absent",
        "rank 1 has no dump",
        simulated=False,
    ),
    Hang(
        "rank_that_sleeps",
        2,
        """
        if rank == 1:
            time.sleep(9)
        dist.all_reduce(x)  # HERE
        """,
        "absent",
        "rank 1 sleeps",
        simulated=False,
    ),
    Hang(
        "data_loader_stuck",
        2,
        """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                if rank == 1 and index == 2:
                    threading.Event().wait(9)
                return torch.ones(4)

        for batch in torch.utils.data.DataLoader(Data()):
            dist.all_reduce(batch)  # HERE
        """,
        "absent",
        "rank 1 waits for its data",
        simulated=False,
    ),
    Hang(
        "checkpoint_longer_than_the_timeout",
        2,
        """
        def save_checkpoint():
            threading.Event().wait(9)

        if rank == 0:
            save_checkpoint()
        dist.barrier()  # HERE
        """,
        "absent",
        "rank 0 writes a checkpoint",
        simulated=False,
    ),
    Hang(
        "checkpoint_in_a_thread",
        2,
        """
        def save():
            dist.barrier(group=group)  # HERE

        group = dist.new_group(timeout=limit)
        if rank == 0:
            thread = threading.Thread(target=save, name="checkpoint")
            thread.start()
            thread.join()
        dist.all_reduce(x)  # HERE
        """,
        "deadlock",
        "barrier",
    ),
]

HEALTHY = {
    "ends": "",
    "training": """
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        for step in range(5):
            model(torch.ones(2, 4)).sum().backward()
    """,
    "same_operation_on_two_lines": """
        for step in range(3):
            if rank == 0:
                dist.all_reduce(x)
            else:
                dist.all_reduce(x)
    """,
    "subgroups": """
        pairs = [dist.new_group([0, 1], timeout=limit), dist.new_group([2, 3], timeout=limit)]
        for step in range(3 + rank // 2):
            dist.all_reduce(x, group=pairs[rank // 2])
    """,
    "messages": """
        if rank % 2:
            dist.recv(y, rank - 1)
        else:
            dist.send(x, rank + 1)
    """,
    "uneven_all_to_all": """
        given = [[0, 1, 1, 2], [1, 1, 1, 1], [2, 2, 0, 0], [0, 0, 3, 1]]
        taken = [row[rank] for row in given]
        dist.all_to_all_single(torch.empty(sum(taken)), x, taken, given[rank])
    """,
    "objects": """
        dist.all_gather_object([None] * world, "x" * rank)
        dist.broadcast_object_list([rank], 0)
    """,
    "groups_made_and_destroyed": """
        for step in range(3):
            group = dist.new_group([step, 3])
            if rank in (step, 3):
                dist.all_reduce(torch.ones(step + 1), group=group)
                dist.destroy_process_group(group)
    """,
    "stopped_while_one_computes": """
        if rank == 0:
            time.sleep(0.5)
        watch.dump("SIGTERM")
        dist.barrier()
        os._exit(0)
    """,
    "asynchronous_and_rooted": """
        works = [dist.all_reduce(torch.ones(9), async_op=True) for _ in range(3)]
        dist.gather(x, [torch.zeros(4) for _ in range(world)] if rank == 0 else None)
        dist.broadcast(y, 2)
        for work in works:
            work.wait()
    """,
}
"""Healthy programs for four ranks; ``watch`` is the watch over the process."""


def healthy(name: str) -> str:
    """Return a healthy program."""
    return (_START + textwrap.dedent(HEALTHY[name])).strip() + "\n"


def run(script: str, folder: str) -> None:
    """Run a script as the main program of this rank, under `bagua_ref.explain_hangs`."""
    sys.argv = [script]
    faulthandler.disable()  # pytest's, of which this process may be a fork
    watch = bagua_ref.explain_hangs(folder)
    try:
        runpy.run_path(script, {"watch": watch}, "__main__")
    except Exception as error:
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        watch.close("exit")

"""The environment variables by which torchrun, Open MPI, other MPIs and Slurm give a process its
rank (S1).
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_PORT, PORTS = 20_000, 8_000
"""The range from which MASTER_PORT is derived."""

_TORCHRUNS_PORT = 29_500

_BY_HAND = (
    "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun"
    " does"
)


@dataclass(frozen=True)
class Identity:
    """Identity of a rank: its rank and the number of ranks, in the job and on its node (S1)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int

    @staticmethod
    def from_environment() -> Identity:
        """Return the identity given by the launcher's environment variables; without any, that of a
        world of one rank.

        Raises:
            ValueError: variables are incomplete or contradictory.
        """
        launch = read_launch(os.environ)
        if launch is not None:
            return launch.identity
        read = _Variables("torchrun", os.environ).number
        return Identity(
            rank=read("RANK", 0),
            world_size=read("WORLD_SIZE", 1),
            local_rank=read("LOCAL_RANK", 0),
            local_world_size=read("LOCAL_WORLD_SIZE", 1),
            node_rank=read("GROUP_RANK" if "GROUP_RANK" in os.environ else "NODE_RANK", 0),
        )


@dataclass(frozen=True)
class Launch:
    """A process of an mpirun or srun job: its rank numbers and the address of rank 0.

    Attributes:
        launcher: the launcher's name, for messages.
        identity: identity of this rank. MPI does not number nodes, so ranks on a node are assumed
            to be consecutive until they connect.
        address: the address of rank 0; None: unknown.
        port: the port on which rank 0 listens.
    """

    launcher: str
    identity: Identity
    address: str | None
    port: int

    def master_address(self) -> str:
        """Return the address of rank 0.

        Raises:
            ValueError: the address is unknown.
        """
        if self.address is None:
            raise ValueError(
                f"{self.launcher} started {self.identity.world_size} processes on several nodes and"
                " does not say where rank 0 runs; set MASTER_ADDR to the host name or address of"
                " rank 0's node, on all ranks (mpirun -x MASTER_ADDR=...)"
            )
        return self.address


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """Return this process's launch data from the variables of MPI or Slurm; None if there are none,
    or if torchrun's take precedence.

    The first of these that is set counts: RANK and WORLD_SIZE, set by torchrun or a user;
    OMPI_COMM_WORLD_RANK and related ones (Open MPI); PMI_RANK (MPICH, Intel MPI) or PMIX_RANK;
    SLURM_STEP_NUM_TASKS above 1 (srun). Slurm's come last, because mpirun inside a Slurm allocation
    sets them, too, for the processes that start the ranks. A batch script or a shell in an
    allocation has no step of several tasks, so it is a world of one rank.

    Raises:
        ValueError: variables are incomplete or contradictory.
    """
    if {"RANK", "WORLD_SIZE"} & environment.keys():
        return None
    if {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"} & environment.keys():
        return _mpi(_Variables("Open MPI", environment), "OMPI_COMM_WORLD_")
    slurm = _Variables("Slurm", environment)
    tasks = slurm.number("SLURM_STEP_NUM_TASKS", 0)
    task = environment.get("SLURM_PROCID")
    # with srun --mpi=pmi2, both are set and agree, and Slurm's say more
    if {"PMI_RANK", "PMI_SIZE"} & environment.keys() and (
        tasks <= 1
        or (environment.get("PMI_RANK"), environment.get("PMI_SIZE")) != (task, str(tasks))
    ):
        return _mpi(_Variables("PMI", environment), "PMI_")
    # else of an mpirun that says no more than this
    if "PMIX_RANK" in environment and (tasks < 1 or environment["PMIX_RANK"] != task):
        raise ValueError(
            f"PMIX_RANK={environment['PMIX_RANK']} is set, but no variable says how many ranks there"
            f" are; {_BY_HAND}"
        )
    return _slurm(slurm, tasks) if tasks > 1 else None


class _Variables:
    """The environment variables set by ``launcher`` for this process."""

    def __init__(self, launcher: str, values: Mapping[str, str]) -> None:
        self.launcher, self.values = launcher, values

    def text(self, *names: str) -> str:
        """Return the first of these variables that is set; raise ValueError if none is."""
        for name in names:
            if name in self.values:
                return self.values[name]
        raise ValueError(
            f"{self.launcher} started this process, but {' or '.join(names)} is not set; {_BY_HAND}"
        )

    def number(self, name: str, default: int | None = None) -> int:
        """Return a variable as an int, or its default; raise ValueError if it is not an integer, or
        is unset without a default.
        """
        if name not in self.values and default is not None:
            return default
        text = self.text(name)
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"environment variable {name}={text!r} must be an integer") from None

    def refuse(self, *names: str) -> ValueError:
        """Return the ValueError for variables that contradict each other."""
        listed = ", ".join(f"{name}={self.values.get(name)}" for name in names)
        return ValueError(f"{listed} of {self.launcher} contradict each other; {_BY_HAND}")

    def launch(self, identity: Identity, address: str | None, port: int) -> Launch:
        """Return the launch data of this process; MASTER_ADDR and MASTER_PORT take precedence."""
        address = self.values.get("MASTER_ADDR", address)
        return Launch(self.launcher, identity, address, self.number("MASTER_PORT", port))


def _mpi(variables: _Variables, prefix: str) -> Launch:
    local = f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE"
    if prefix == "PMI_" and {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"} & variables.values.keys():
        local = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    names = f"{prefix}RANK", f"{prefix}SIZE", *local
    rank, size = map(variables.number, names[:2])
    local_rank, local_size = (0, 1) if size == 1 else map(variables.number, local)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise variables.refuse(*names)
    identity = Identity(rank, size, local_rank, local_size, max(0, rank - local_rank) // local_size)
    job = variables.values.get("PMIX_NAMESPACE")
    port = _TORCHRUNS_PORT if job is None else FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    return variables.launch(identity, "127.0.0.1" if local_size == size else None, port)


def _slurm(variables: _Variables, size: int) -> Launch:
    names = "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"
    rank, node, local_rank, _ = map(variables.number, names)
    # such as 4(x2),3: four on each of two consecutive nodes, three on the next one
    text = variables.text("SLURM_STEP_TASKS_PER_NODE")
    runs = re.findall(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", text)
    tasks = [int(count) for count, times in runs for _ in range(int(times or 1))]
    if not (
        sum(tasks) == size
        and 0 <= rank < size
        and 0 <= node < len(tasks)
        and 0 <= local_rank < tasks[node]
    ):
        raise variables.refuse(*names, "SLURM_STEP_TASKS_PER_NODE")
    address: str | None = "127.0.0.1"
    if len(tasks) > 1 and "MASTER_ADDR" not in variables.values:
        lists = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
        address = first_host(variables.text(*lists))
        if rank == 0 and node != 0:
            raise ValueError(
                f"rank 0 runs on node {node} of the step, not on the first, {address}; set"
                " MASTER_ADDR to its host name"
            )
    job, step = variables.number("SLURM_JOB_ID", 0), variables.number("SLURM_STEP_ID", 0)
    identity = Identity(rank, size, local_rank, tasks[node], node)
    return variables.launch(identity, address, FIRST_PORT + (1009 * job + step) % PORTS)


def first_host(nodes: str) -> str:
    """Return the first host of a host list in Slurm's notation.

    >>> first_host("node[01-03,7],login1")
    'node01'
    """
    first = re.match(r"(\[[^\]]*\]|[^,\[])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])

"""Tests of reading ranks from the variables of torchrun, mpirun and srun, never silently a world of
one (S1).
"""

from __future__ import annotations

import os

import pytest

import bagua_ref
from bagua_ref.base.launch_environment import FIRST_PORT, PORTS, Identity, first_host, read_launch


def open_mpi(rank: int, size: int, local_rank: int, local_size: int, **more: str) -> dict[str, str]:
    values = {
        "RANK": rank,
        "SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": local_size,
        "NODE_RANK": local_rank,
    }
    return (
        {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}
        | {
            "PMIX_RANK": str(rank),
            "PMIX_NAMESPACE": "1130954753",
        }
        | more
    )


def hydra(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": str(local_size),
    }


def slurm(
    rank: int, size: int, local_rank: int, node: int, tasks: str, **more: str
) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "3",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NODELIST": "node[01-03,7],login1",
        "SLURM_NODELIST": "other[1-9]",
    } | more


BATCH_SCRIPT = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "node[01-02]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
INTERACTIVE_SHELL = slurm(0, 1, 0, 0, "1")
SLURM_PORT = FIRST_PORT + (1009 * 4711 + 3) % PORTS


@pytest.mark.parametrize(
    ("environment", "launcher", "identity", "address", "port"),
    [
        (open_mpi(1, 2, 1, 2), "Open MPI", Identity(1, 2, 1, 2, 0), "127.0.0.1", 20957),
        (open_mpi(3, 4, 1, 2), "Open MPI", Identity(3, 4, 1, 2, 1), None, 20957),
        (
            open_mpi(3, 4, 1, 2, MASTER_ADDR="head", MASTER_PORT="1234"),
            "Open MPI",
            Identity(3, 4, 1, 2, 1),
            "head",
            1234,
        ),
        (hydra(0, 2, 0, 2), "PMI", Identity(0, 2, 0, 2, 0), "127.0.0.1", 29500),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
            "PMI",
            Identity(1, 2, 1, 2, 0),
            "127.0.0.1",
            29500,
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "PMI", Identity(0, 1, 0, 1, 0), "127.0.0.1", 29500),
        (slurm(1, 2, 1, 0, "2"), "Slurm", Identity(1, 2, 1, 2, 0), "127.0.0.1", SLURM_PORT),
        (slurm(6, 7, 0, 3, "2(x3),1"), "Slurm", Identity(6, 7, 0, 1, 3), "node01", SLURM_PORT),
        (
            slurm(6, 7, 0, 3, "2(x3),1", MASTER_ADDR="node7"),
            "Slurm",
            Identity(6, 7, 0, 1, 3),
            "node7",
            SLURM_PORT,
        ),
        # mpirun inside an allocation: srun started only its daemons.
        (
            slurm(1, 2, 0, 1, "1(x2)") | open_mpi(3, 4, 1, 4),
            "Open MPI",
            Identity(3, 4, 1, 4, 0),
            "127.0.0.1",
            20957,
        ),
        (
            slurm(1, 2, 0, 1, "1(x2)") | hydra(3, 4, 3, 4),
            "PMI",
            Identity(3, 4, 3, 4, 0),
            "127.0.0.1",
            29500,
        ),
        (
            BATCH_SCRIPT | open_mpi(1, 2, 1, 2),
            "Open MPI",
            Identity(1, 2, 1, 2, 0),
            "127.0.0.1",
            20957,
        ),
        # srun --mpi=pmi2 and --mpi=pmix: Slurm's own variables take precedence.
        (
            slurm(1, 2, 1, 0, "2") | {"PMI_RANK": "1", "PMI_SIZE": "2"},
            "Slurm",
            Identity(1, 2, 1, 2, 0),
            "127.0.0.1",
            SLURM_PORT,
        ),
        (
            slurm(1, 2, 1, 0, "2") | {"PMIX_RANK": "1"},
            "Slurm",
            Identity(1, 2, 1, 2, 0),
            "127.0.0.1",
            SLURM_PORT,
        ),
    ],
)
def test_S1_what_mpirun_and_srun_say(
    environment: dict[str, str], launcher: str, identity: Identity, address: str | None, port: int
) -> None:
    launch = read_launch(environment)
    assert launch is not None
    assert (launch.launcher, launch.identity, launch.address, launch.port) == (
        launcher,
        identity,
        address,
        port,
    )


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH_SCRIPT,
        INTERACTIVE_SHELL,
        INTERACTIVE_SHELL | {"PMIX_RANK": "0"},
        INTERACTIVE_SHELL | {"PMI_RANK": "0", "PMI_SIZE": "1"},
        open_mpi(1, 2, 1, 2) | slurm(1, 2, 1, 0, "2") | {"RANK": "5", "WORLD_SIZE": "6"},
    ],
    ids=[
        "nothing",
        "batch script",
        "interactive shell",
        "with PMIx",
        "with PMI",
        "torchrun comes first",
    ],
)
def test_S1_no_launch_of_mpi_or_slurm(environment: dict[str, str]) -> None:
    launch = read_launch(environment)
    assert launch is None or launch.identity.world_size == 1


def without(environment: dict[str, str], name: str) -> dict[str, str]:
    return {other: value for other, value in environment.items() if other != name}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            without(open_mpi(0, 2, 0, 2), "OMPI_COMM_WORLD_SIZE"),
            "OMPI_COMM_WORLD_SIZE is not set; set RANK, WORLD_SIZE",
        ),
        (
            without(open_mpi(0, 2, 0, 2), "OMPI_COMM_WORLD_LOCAL_SIZE"),
            "OMPI_COMM_WORLD_LOCAL_SIZE is not set",
        ),
        (
            open_mpi(2, 2, 0, 2),
            "OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=2, .* of Open MPI contradict",
        ),
        (open_mpi(0, 2, 0, 3), "SIZE=2, .*OMPI_COMM_WORLD_LOCAL_SIZE=3 of Open MPI contradict"),
        (
            open_mpi(0, 2, 0, 2, OMPI_COMM_WORLD_RANK="first"),
            "OMPI_COMM_WORLD_RANK='first' must be an integer",
        ),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not set"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_LOCAL_RANK is not set"),
        (
            {"PMIX_RANK": "0"},
            "PMIX_RANK=0 is set, but no variable says how many ranks there are; set RANK",
        ),
        (BATCH_SCRIPT | {"PMIX_RANK": "0"}, "PMIX_RANK=0 is set, but no variable says"),
        (INTERACTIVE_SHELL | {"PMIX_RANK": "1"}, "PMIX_RANK=1 is set, but no variable says"),
        (without(slurm(1, 2, 1, 0, "2"), "SLURM_PROCID"), "SLURM_PROCID is not set"),
        (
            without(slurm(1, 2, 1, 0, "2"), "SLURM_STEP_TASKS_PER_NODE"),
            "SLURM_STEP_TASKS_PER_NODE is not set",
        ),
        (slurm(1, 2, 1, 0, "two"), "SLURM_STEP_TASKS_PER_NODE=two of Slurm contradict"),
        (
            slurm(1, 3, 1, 0, "2"),
            "SLURM_STEP_NUM_TASKS=3, SLURM_STEP_TASKS_PER_NODE=2 of Slurm contradict",
        ),
        (slurm(1, 2, 1, 1, "2"), "SLURM_NODEID=1, SLURM_LOCALID=1, .* contradict"),
        (
            slurm(0, 2, 0, 1, "1(x2)"),
            "rank 0 runs on node 1 of the step, not on the first, node01; set MASTER_ADDR",
        ),
        (
            {
                name: value
                for name, value in slurm(1, 2, 0, 1, "1(x2)").items()
                if "NODELIST" not in name
            },
            "SLURM_STEP_NODELIST or SLURM_NODELIST or SLURM_JOB_NODELIST is not set",
        ),
    ],
)
def test_S1_incomplete_and_contradictory_variables_are_named(
    environment: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read_launch(environment)


def test_S1_several_nodes_of_mpirun_need_an_address(clean: pytest.MonkeyPatch) -> None:
    for name, value in open_mpi(3, 4, 1, 2).items():
        clean.setenv(name, value)
    assert bagua_ref.get_rank() == 3
    for call in (bagua_ref.init_process_group, bagua_ref.env.get_master_addr):
        with pytest.raises(
            ValueError, match="set MASTER_ADDR to the host name or address of rank 0's node"
        ):
            call()
    assert not bagua_ref.is_initialized()


@pytest.mark.parametrize(("name", "other"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_S1_a_rank_without_a_world_size_is_no_world_of_one(
    name: str, other: str, clean: pytest.MonkeyPatch
) -> None:
    for variable, value in slurm(1, 2, 1, 0, "2").items():
        clean.setenv(variable, value)
    clean.setenv(name, "1")
    with pytest.raises(
        ValueError,
        match=rf"{name} \(or the argument .*\) is set, but {other} \(or the argument .*\) is not",
    ):
        bagua_ref.init_process_group()
    assert not bagua_ref.is_initialized()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-03,7]", "node01"),
        ("node[7,01-03],other", "node7"),
        ("a,b", "a"),
        ("gpu-3", "gpu-3"),
        ("rack[2-3]-n[004-128],x", "rack2-n004"),
        ("n[09-10].cluster.org", "n09.cluster.org"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_ports_of_a_job_and_its_neighbours_differ_and_stay_in_the_documented_range() -> None:
    def port(job: int, step: int) -> int:
        launch = read_launch(slurm(0, 2, 0, 0, "2", SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)))
        assert launch is not None
        return launch.port

    ports = [port(job, step) for job in range(10**6, 10**6 + 50) for step in range(10)]
    assert len(set(ports)) == len(ports)
    assert all(20_000 <= p < 28_000 for p in ports)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in inherited():
        monkeypatch.delenv(name)
    return monkeypatch


def inherited() -> list[str]:
    prefixes = (
        "SLURM_",
        "OMPI_",
        "PMI_",
        "PMIX_",
        "MPI_LOCAL",
        "MASTER_",
        "LOCAL_",
        "GROUP_RANK",
        "NODE_RANK",
    )
    return [
        name for name in os.environ if name.startswith(prefixes) or name in ("RANK", "WORLD_SIZE")
    ]

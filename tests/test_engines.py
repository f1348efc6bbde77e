"""Tests of the files in examples/ that Slurm and Kubernetes run, with their programs and variables
emulated on this machine.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.launch import launch
from tests.scripts import ROOT, load_script

import bagua_ref

EXAMPLES = ROOT / "examples"
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "PET_", "MASTER_", "LOCAL_", "TORCHELASTIC_")


def environment(folder: Path, **variables: object) -> dict[str, str]:
    """Return this environment without a launcher's variables, with this Python's torchrun, and with
    ``variables``.
    """
    clean = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(LAUNCHERS) and name not in ("RANK", "WORLD_SIZE")
    }
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    if not (programs / "torchrun").exists():  # it may be running
        program(programs / "torchrun", f'exec "{sys.executable}" -m torch.distributed.run "$@"')
    path = f"{programs}{os.pathsep}{clean['PATH']}"
    return {**clean, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(folder)} | {
        name: str(value) for name, value in variables.items()
    }


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def by_hand(steps: int, folder: str) -> str:
    """Return the digest of the weights that `examples/elastic.py` reaches without any engine."""
    return load_script("examples/elastic.py").main(["--folder", folder, "--steps", str(steps)])[1]


def digests(printed: str) -> dict[int, str]:
    """Return the digest of the weights that each rank has printed."""
    return {
        int(rank): digest
        for rank, digest in re.findall(r"rank (\d+): weights (\w+) after step", printed)
    }


# Slurm


SRUN = """
for node in 0 1; do
    SLURM_PROCID=$node SLURM_NODEID=$node SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE='1(x2)' \\
        SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST SLURM_STEP_ID=0 "$@" &
    started+=($!)
done
for task in "${started[@]}"; do wait "$task" || failed=1; done
exit "${failed:-0}"
"""
"""What srun does on two nodes, with both on this machine."""


def allocation(folder: Path) -> dict[str, str]:
    """Return the environment of a batch script on two nodes that are both this machine, with
    emulations of Slurm's programs.
    """
    for job in range(os.getpid() % 1000, 8000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20_000 + job)) != 0:
                break
    slurm = {"SLURM_JOB_ID": job, "SLURM_NNODES": 2, "SLURM_JOB_NODELIST": "localhost,localhost"}
    # this machine's name may have no address
    found = environment(folder, PET_LOCAL_ADDR="127.0.0.1", **slurm)
    program(folder / "programs" / "srun", SRUN)
    program(
        folder / "programs" / "scontrol", '[[ "$1 $2" = "show hostnames" ]] && tr , "\\n" <<< "$3"'
    )
    return found


def test_the_slurm_script_asks_for_one_launcher_per_node() -> None:
    options = dict(
        re.findall(
            r"^#SBATCH --([\w-]+)=(\S+)$", (EXAMPLES / "slurm.sbatch").read_text(), re.MULTILINE
        )
    )
    assert int(options["nodes"]) > 1
    assert options["ntasks-per-node"] == "1"


@pytest.mark.proof
def test_the_slurm_script_trains_on_two_nodes_and_restarts_when_a_rank_dies(tmp_path: Path) -> None:
    copy = tmp_path / "slurm.sbatch"
    copy.write_text(
        (EXAMPLES / "slurm.sbatch").read_text().replace("checkpoints/", f"{tmp_path}/checkpoints/")
    )
    command = (
        "bash",
        str(copy),
        "--steps",
        "8",
        "--save-every",
        "2",
        "--kill-rank",
        "1",
        "--kill-step",
        "5",
    )
    ended = subprocess.run(
        command, env=allocation(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    assert "resuming from step 4" in ended.stdout
    expected = launch(by_hand, 2, 8, str(tmp_path / "by hand"), init=False)[0]
    assert digests(ended.stdout) == {0: expected, 1: expected}


@pytest.mark.proof
def test_srun_alone_starts_ranks_that_find_each_other(tmp_path: Path) -> None:
    command = (
        "srun",
        sys.executable,
        "examples/elastic.py",
        "--folder",
        str(tmp_path / "checkpoints"),
        "--steps",
        "4",
    )
    ended = subprocess.run(
        command, env=allocation(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    expected = launch(by_hand, 2, 4, str(tmp_path / "by hand"), init=False)[0]
    assert digests(ended.stdout) == {0: expected, 1: expected}


# Kubernetes


def manifest(name: str) -> dict[str, Any]:
    (found,) = yaml.safe_load_all((EXAMPLES / name).read_text())
    return found


def replicas() -> list[dict[str, Any]]:
    """Return the pods that the operator makes of the PyTorchJob, the first one first."""
    specs = manifest("kubernetes_pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    return [
        specs[kind]["template"]["spec"]
        for kind in ("Master", "Worker")
        for _ in range(specs[kind]["replicas"])
    ]


def test_the_pytorchjob_has_what_the_operator_and_torchrun_need() -> None:
    job = manifest("kubernetes_pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert specs.keys() == {"Master", "Worker"}
    assert specs["Master"]["replicas"] == 1
    assert {spec["restartPolicy"] for spec in specs.values()} == {"OnFailure"}
    assert isinstance(job["spec"]["nprocPerNode"], str)  # as the API has it
    for pod in replicas():
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"  # which is what the operator gives its variables to
        assert container["command"][0] == "torchrun"
        assert (ROOT / container["command"][1]).is_file()
        # torchrun sets them
        assert not {"RANK", "WORLD_SIZE"} & {entry["name"] for entry in container.get("env", [])}
        folders = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        claimed = [volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        saved = container["command"][container["command"].index("--folder") + 1]
        assert any(saved.startswith(folders[name]) for name in claimed)


def test_the_trainjob_has_what_the_runtime_and_torchrun_need() -> None:
    job = manifest("kubernetes_trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert trainer["command"][0] == "torchrun"
    assert (ROOT / trainer["command"][1]).is_file()
    assert trainer["numNodes"] > 1
    assert "env" not in trainer  # the runtime refuses variables of torchrun


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_two_pods_with_the_variables_of_the_operator_train_together(
    kind: str, tmp_path: Path
) -> None:
    port = bagua_ref.env.find_free_network_port()
    torchruns = {
        "PET_NNODES": 2,
        "PET_NPROC_PER_NODE": 1,
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
    }
    if kind == "PyTorchJob":
        commands = [pod["containers"][0]["command"] for pod in replicas()]
        torchruns |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}
    else:
        commands = [manifest("kubernetes_trainjob.yaml")["spec"]["trainer"]["command"]] * 2
    pods = []
    for rank, command in enumerate(commands):
        variables = (
            torchruns | {"PET_NODE_RANK": rank} | ({"RANK": rank} if kind == "PyTorchJob" else {})
        )
        here = [part.replace("/checkpoints", f"{tmp_path}/checkpoints") for part in command]
        settings = {
            "env": environment(tmp_path, **variables),
            "cwd": ROOT,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        pods.append(subprocess.Popen(["/usr/bin/env", *here], text=True, **settings))
    ended = [pod.communicate(timeout=200) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], ended
    printed = "".join(out for out, _ in ended)
    if kind == "PyTorchJob":
        expected = launch(by_hand, 2, 20, str(tmp_path / "by hand"), init=False)[0]
        assert digests(printed) == {0: expected, 1: expected}
    else:
        assert "bytegrad, 2 ranks: test accuracy 9" in printed

"""Tests of the examples that train inside trainers and engines, on two processes."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.launch import launch
from tests.scripts import load_script, run_python

RESULT = re.compile(
    r"^(\w+): .*held-out loss ([\d.]+)\D* ([\d.]+) MB sent by each rank$", re.MULTILINE
)


def run(*command: str, temporary: Path) -> str:
    ended = run_python(*command, limit=240, TMPDIR=str(temporary), RAY_USAGE_STATS_ENABLED="0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def torchrun(*command: str, temporary: Path) -> dict[str, tuple[float, float]]:
    """Return the loss and the megabytes of each algorithm that the script prints."""
    printed = run(
        "-m", "torch.distributed.run", "--nproc_per_node=2", *command, temporary=temporary
    )
    return {
        name: (float(loss), float(megabytes)) for name, loss, megabytes in RESULT.findall(printed)
    }


def is_a_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


def test_gpt2_in_the_trainer_learns_with_each_algorithm_and_draws(tmp_path: Path) -> None:
    found = torchrun(
        "examples/gpt2_hf_trainer.py",
        "--steps",
        "40",
        "--plot",
        str(tmp_path / "gpt2.png"),
        temporary=tmp_path,
    )
    exact, compressed, local = (
        found[name] for name in ("gradient_allreduce", "bytegrad", "local_sgd")
    )
    assert max(exact[0], compressed[0], local[0]) < 3.5  # 5.5 without learning anything
    assert exact[1] > 3 * compressed[1] > 3 * local[1]
    assert is_a_picture(tmp_path / "gpt2.png")


def test_timm_in_lightning_learns_with_each_algorithm_and_draws(tmp_path: Path) -> None:
    script = (
        "tests/integrations/with_torchvision.py",
        "examples/timm_lightning.py",
        "--epochs",
        "3",
    )
    found = torchrun(*script, "--plot", str(tmp_path / "timm.png"), temporary=tmp_path)
    exact, compressed, local = (
        found[name] for name in ("gradient_allreduce", "bytegrad", "local_sgd")
    )
    assert max(exact[0], compressed[0], local[0]) < 1.0  # 2.3 without learning anything
    assert exact[1] > 3 * compressed[1] > local[1]
    assert is_a_picture(tmp_path / "timm.png")


def by_hand(algorithm: str, folder: str) -> dict[str, Any]:
    """Return what the training function of the example returns when it is called without Ray."""
    script = load_script("examples/ray_train.py")
    script.ray.train.report = lambda metrics: None
    return script.train(
        {"algorithm": algorithm, "epochs": 3, "checkpoints": folder, "kill_rank": None}
    )


def test_ray_train_trains_to_the_weights_of_a_loop_by_hand_though_a_worker_dies(
    tmp_path: Path,
) -> None:
    options = ("--algorithm", "local_sgd", "--epochs", "3", "--kill-rank", "1")
    # Ray makes sockets there, whose paths may not be long
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:
        printed = run(
            "examples/ray_train.py", *options, "--folder", str(tmp_path), temporary=Path(short)
        )
    found = json.loads(printed.splitlines()[-1].split("workers: ")[1])
    expected = launch(by_hand, 2, "local_sgd", str(tmp_path / "by hand"), init=False)[0]
    assert found == expected | {"resumed_after": 1}

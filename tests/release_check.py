"""Release rehearsal: build, check, install and use the package as the README says, outside this
checkout.

    python tests/release_check.py

Works in a temporary folder, which is removed at the end. Prints each step and exits with code 1 at
the first failure.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
TOOLS = ("build>=1.2", "twine>=6.1")


class ReleaseError(Exception):
    """The reason why this must not be released."""


def step(title: str) -> None:
    print(f"== {title}", flush=True)


def run(folder: Path, python: Path, *command: str | Path, expect: int = 0) -> str:
    """Run ``command`` in ``folder`` with the programs beside ``python``; print and return what it
    prints.
    """
    ours = ("PYTHON", "VIRTUAL_ENV", "BAGUA_", "MAKE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    words = list(map(str, command))
    print(f"$ {shlex.join(words)}", flush=True)
    with subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            printed += line
    if process.returncode != expect:
        raise ReleaseError(f"exit code {process.returncode}, not {expect}: {shlex.join(words)}")
    return printed


def new_environment(folder: Path) -> Path:
    """Create a virtual environment and return its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def install(folder: Path, python: Path, *what: str | Path) -> None:
    run(
        folder,
        python,
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "-c",
        CONSTRAINTS,
        *what,
    )


def quick_start() -> str:
    """Return the README's first Python block."""
    block = re.search(
        r"^## Quick start\n.*?^```python\n(.*?)^```$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    if block is None:
        raise ReleaseError("README.md has no Python under 'Quick start'")
    return block[1]


def check(folder: Path) -> None:
    step("Build the sdist, and the wheel from it")
    tools = new_environment(folder / "tools")
    install(folder, tools, *TOOLS)
    run(folder, tools, tools, "-m", "build", "--outdir", folder / "dist", ROOT)
    built = sorted((folder / "dist").iterdir())
    if [path.suffix for path in built] != [".whl", ".gz"]:
        raise ReleaseError(f"built {', '.join(path.name for path in built)}")
    step("Check their metadata")
    run(folder, tools, tools, "-m", "twine", "--no-color", "check", "--strict", *built)
    step("Install the wheel into a new environment")
    python = new_environment(folder / "user")
    pin = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    install(folder, python, pin)
    install(folder, python, built[0])
    run(folder, python, python, "-m", "pip", "--disable-pip-version-check", "check")
    place = run(folder, python, python, "-c", "import bagua_ref; print(bagua_ref.__file__)")
    if not Path(place.strip()).is_relative_to(folder):
        raise ReleaseError("that is not the package that was installed")
    run(folder, python, "bagua-ref", "doctor")
    step("Run the README's quick start")
    (folder / "train.py").write_text(quick_start())
    run(folder, python, "python", "train.py")
    run(folder, python, "torchrun", "--nproc_per_node=2", "train.py")
    step("Check a backend, by pytest and by the command")
    install(folder, python, f"{built[0]}[conformance]")
    options = ["--bagua-backend", "reference", "--bagua-suite", "kernels", "-p", "no:cacheprovider"]
    printed = run(folder, python, "pytest", "--pyargs", "bagua_ref_pytest", *options)
    if not re.search(r"\b\d\d passed", printed):
        raise ReleaseError("pytest has run no checks")
    run(folder, python, "bagua-ref", "verify", "--backend", "reference", "--check", "S4.1")
    step("Install what the demo asks for, and run it")
    complaint = run(folder, python, "bagua-ref", "demo", "--quick", expect=2)
    command = shlex.split(complaint.partition("install with: ")[2])
    if command[:2] != ["pip", "install"]:
        raise ReleaseError("bagua-ref demo does not say what to install")
    install(folder, python, *command[2:])
    run(folder, python, "bagua-ref", "demo", "--quick")
    if not (folder / "demo-report" / "index.html").is_file():
        raise ReleaseError("the demo wrote no report")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="bagua-ref-release-") as folder:
        try:
            check(Path(folder))
        except ReleaseError as failure:
            print(f"== FAILED: {failure}", flush=True)
            return 1
    print("== This could be released")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Builds of the C client, unchanged or with a planted fault."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "examples" / "oracle_c"
VECTORS = ROOT / "vectors" / "v3"


def need_compiler() -> None:
    """Skip the test without a C compiler or make; fail it in CI, which has both."""
    missing = [program for program in ("cc", "make") if shutil.which(program) is None]
    if missing and os.environ.get("CI"):
        pytest.fail(f"CI must build the client in C, but lacks {', '.join(missing)}")
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def build(folder: Path, fault: tuple[str, str, str] | None = None) -> Path:
    """Build in ``folder`` and return the program; ``fault`` is a file name, a text in it and its
    replacement.
    """
    for path in (*SOURCE.glob("*.[ch]"), SOURCE / "Makefile"):
        shutil.copy(path, folder)
    if fault is not None:
        name, old, new = fault
        text = (folder / name).read_text()
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {name}"
        (folder / name).write_text(text.replace(old, new))
    made = subprocess.run(
        ["make", "-C", str(folder), "serve"], capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr
    return folder / "serve"

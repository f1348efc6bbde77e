"""Imports of this checkout's scripts, which belong to no package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def run_python(
    *arguments: object, limit: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Return the exit code and output of Python in the root of the checkout, which can import the
    package and the tests.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=limit
    )


def load_script(path: str) -> ModuleType:
    """Import ``path``, relative to the root of the checkout, anew."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    # dataclasses look their module up
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

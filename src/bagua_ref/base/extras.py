"""Commands that install optional dependencies."""

from __future__ import annotations

import shlex
from pathlib import Path

__all__ = ["install_command"]

_FOLDER = Path(__file__).parents[3]
"""The root of the checkout, if this file is in one."""


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra of bagua_ref, depending on how bagua_ref is installed.

    For a checkout, it installs the checkout again, in place. Otherwise, it names the packages, as bagua_ref may have been installed
    from a file that is gone, and may not be on any package index.

    Args:
        extra: a name under ``project.optional-dependencies`` in pyproject.toml.
    """
    if (_FOLDER / "pyproject.toml").is_file() and (_FOLDER / "src" / "bagua_ref").is_dir():
        return f"pip install -e {shlex.quote(f'{_FOLDER}[{extra}]')}"
    from importlib.metadata import requires  # not needed to import bagua_ref

    named = [line.partition(";") for line in requires("bagua_ref") or ()]
    packages = [name.strip() for name, _, marker in named if marker.strip().replace('"', "'") == f"extra == '{extra}'"]
    return f"pip install {shlex.join(packages)}"

"""A mkdocs hook: the API pages, one per room of the package, made from the sources so that none is missing or stale."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

SOURCE = Path(__file__).parents[1] / "src" / "bagua_ref"

# From what users call first down to what only contributors read.
ROOMS = (
    "distributed", "data_parallel", "algorithms", "communication", "process_group", "simulation", "contrib",
    "backends", "communicators", "bucket", "tensor", "comm_ops", "scheduling", "env", "runtime", "types", "errors",
    "utils", "cli", "conformance",
)  # fmt: skip


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and list them in the navigation."""
    entries = []
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()} - {"__init__"}
    for room in sorted(rooms, key=lambda room: (ROOMS.index(room) if room in ROOMS else len(ROOMS), room)):
        documented = [path for path in _modules(room) if ast.get_docstring(ast.parse(path.read_text()))]
        if not documented:
            continue
        page = "\n\n".join([f"# {room}", *(f"## `{name}` {{ #{name}-module }}\n\n::: {name}" for name in map(_name, documented))])
        files.append(File.generated(config, f"api/{room}.md", content=page))
        entries.append({f"bagua_ref.{room}": f"api/{room}.md"})
    config.nav.append({"API": entries})
    return files


def _modules(room: str) -> list[Path]:
    folder = SOURCE / room
    found = sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{room}.py"]
    return [path for path in found if not path.name.startswith("_") or path.name == "__init__.py"]


def _name(path: Path) -> str:
    parts = ("bagua_ref", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

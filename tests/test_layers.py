"""Tests of the layers: imports go down only. They read the source with ast, so nothing needs to be
installed or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "bagua_ref"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE


@dataclass(frozen=True)
class Floor:
    """Rooms of one layer, as patterns of module names without the package's, and the layers they
    may import.
    """

    layer: int
    rooms: tuple[str, ...]
    may_import: frozenset[int]


def layers(*parts: int | range) -> frozenset[int]:
    return frozenset(
        layer for part in parts for layer in (part if isinstance(part, range) else (part,))
    )


MOVED = (
    "bucket",
    "communication",
    "flight_recorder",
    "graphs",
    "low_rank",
    "mixing",
    "runtime",
    "tensor",
    "utils",
)
"""Public names of modules that are in a room; nothing inside uses them."""

# The architecture's table. A room may always import its own layer, but not in circles.
HOUSE = (
    Floor(
        0,
        ("errors", "env", "types", "base", "base.*", "observe", "observe.*"),
        layers(0),
    ),
    Floor(
        1,
        (
            "backends.base",
            "backends.codec",
            "backends.chunks",
            "communicators.base",
            "communicators.collectives",
            "communicators.pipelining",
            "formulas",
            "formulas.*",
        ),
        layers(range(2)),
    ),
    Floor(
        2,
        (
            "backends",
            "backends.reference",
            "backends.reference.*",
            "backends.cuda",
            "backends.cuda.*",
            "communicators",
            "communicators.torch_distributed",
            "communicators.connection",
            "communicators.rendezvous",
            "communicators.job_store",
            "communicators.missing",
            "communicators.pipelining",
            "communicators.sockets",
            "communicators.shared_memory",
            "communicators.gloo_sockets",
            "communicators.processes",
        ),
        layers(range(3)),
    ),
    Floor(3, ("comm_ops", "comm_ops.*"), layers(range(2), 3)),
    Floor(4, ("buckets", "buckets.*"), layers(range(5))),
    Floor(5, ("scheduling", "scheduling.*"), layers(0, 4, 5)),
    Floor(6, ("groups", "groups.*"), layers(range(3), 6)),
    Floor(7, ("algorithms", "algorithms.*"), layers(range(2), range(3, 8))),
    Floor(8, ("data_parallel", "data_parallel.*", "distributed"), layers(range(9))),
    Floor(9, ("contrib", "contrib.*"), layers(range(10))),
    Floor(9, ("integrations", "integrations.*"), layers(range(10))),
    Floor(9, ("checkpoint", "checkpoint.*"), layers(range(10))),
    Floor(9, ("record", "record.*"), layers(0, 9)),
    Floor(9, ("simulation", "simulation.*"), layers(range(3), 9)),
    Floor(9, ("explain", "explain.*"), layers(range(2), 9)),
    Floor(9, ("planning", "planning.*"), layers(range(10))),
    Floor(10, ("", *MOVED), layers(range(11))),  # the public names
    Floor(
        11,
        (
            "conformance.clauses",
            "conformance.expected",
            "conformance.expected.*",
            "conformance.cases.answers",
        ),
        layers(11),
    ),
    Floor(
        12,
        (
            "conformance.cases",
            "conformance.cases.*",
            "conformance.targets",
            "conformance.targets.*",
        ),
        layers(range(13)),
    ),
    Floor(13, ("conformance.lab", "conformance.lab.*"), layers(range(14))),
    Floor(14, ("conformance.checks", "conformance.checks.*"), layers(range(15))),
    Floor(15, ("conformance.run", "conformance.run.*"), layers(range(16))),
    Floor(16, ("conformance.vectors", "conformance.vectors.*"), layers(range(13), 16)),
    Floor(18, ("conformance",), layers(range(19))),
    Floor(19, ("cli", "cli.*"), layers(range(20))),
)


@dataclass(frozen=True)
class Import:
    """One import statement's target, as a full module name."""

    target: str
    line: int
    in_function: bool


@cache
def floor_of(module: str) -> Floor | None:
    """Return the layer of ``module`` (a full name); the most specific pattern decides."""
    inner = module.removeprefix(PACKAGE).removeprefix(".")
    found = [
        (len(room), floor) for floor in HOUSE for room in floor.rooms if fnmatchcase(inner, room)
    ]
    return max(found, key=lambda entry: entry[0])[1] if found else None


def module_name(path: Path) -> str:
    parts = (PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


parse = cache(ast.parse)


def sources() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports_of(
    source: str, module: str, is_package: bool, modules: set[str], *, for_types: bool = False
) -> Iterator[Import]:
    """Yield what ``source`` imports; names taken from a package count as the submodule where there
    is one.
    """

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        if (
            isinstance(node, ast.If)
            and not for_types
            and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        ):
            for child in node.orelse:
                yield from visit(child, in_function)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, in_function)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join(here[: len(here) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield Import(submodule if submodule in modules else base, node.lineno, in_function)
        inside = in_function or isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(parse(source), False)


def is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def complaint(module: str, imported: Import) -> str | None:
    """Return what is wrong with an import, or None."""
    here, there = floor_of(module), floor_of(imported.target)
    where = f"{module} line {imported.line}"
    if imported.target.split(".")[0] == "cupy" and module != f"{PACKAGE}.backends.cuda.launcher":
        return f"{where} imports cupy; only backends/cuda/launcher.py may"
    if not is_ours(imported.target) or here is None:
        return None
    if there is None:
        return f"{where} imports {imported.target}, which is in no known room"
    rooms = {name.split(".")[1] for name in (module, imported.target) if "." in name}
    if rooms == {"backends", "communicators"}:
        return (
            f"{where} imports {imported.target}; backends and communicators never import each other"
        )
    if there.layer not in here.may_import:
        return (
            f"{where} (layer {here.layer}) imports {imported.target} (layer {there.layer});"
            f" allowed: {sorted(here.may_import)}"
        )
    return None


def package_imports(*, for_types: bool = False) -> dict[str, list[Import]]:
    found = sources()
    return {
        module: list(
            imports_of(
                path.read_text(),
                module,
                path.name == "__init__.py",
                set(found),
                for_types=for_types,
            )
        )
        for module, path in found.items()
    }


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """Return the modules along one cycle, or None."""
    finished: set[str] = set()

    def walk(module: str, trail: list[str]) -> list[str] | None:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in finished:
            return None
        for target in sorted(graph.get(module, ())):
            if cycle := walk(target, [*trail, module]):
                return cycle
        finished.add(module)
        return None

    for start in sorted(graph):
        if cycle := walk(start, []):
            return cycle
    return None


def test_every_module_lives_in_a_known_room() -> None:
    homeless = [module for module in sources() if floor_of(module) is None]
    assert sources(), f"no sources under {SOURCE}"
    assert not homeless, "modules without a layer in the table above: add them"


def test_the_table_names_only_modules_that_exist() -> None:
    modules = {module.removeprefix(PACKAGE).removeprefix(".") for module in sources()}
    assert [
        room
        for floor in HOUSE
        for room in floor.rooms
        if not any(fnmatchcase(module, room) for module in modules)
    ] == []


def test_imports_go_down_only() -> None:
    wrong = [
        found
        for module, imports in package_imports().items()
        for entry in imports
        if (found := complaint(module, entry))
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_no_cycles() -> None:
    graph = {
        module: {
            entry.target for entry in imports if is_ours(entry.target) and entry.target != module
        }
        for module, imports in package_imports(for_types=True).items()
    }
    assert find_cycle(graph) is None


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("scheduling.engine", "def f():\n    from ..groups.communication import send", "layer 6"),
        ("backends.base", "import bagua_ref.communicators.collectives", "never import each other"),
        ("backends.reference.kernels", "def f():\n    import cupy.cuda", "only backends/cuda"),
        ("buckets.bucket", "from bagua_ref.attic import chest", "no known room"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str, expected: str) -> None:
    modules = {*sources(), f"{PACKAGE}.communication"}
    found = [
        complaint(f"{PACKAGE}.{module}", entry)
        for entry in imports_of(source, f"{PACKAGE}.{module}", False, modules)
    ]
    assert len(found) == 1
    assert expected in found[0]

"""Tests that oracles import nothing they judge: expected values must not share the package's
faults.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CONFORMANCE = Path(__file__).parents[2] / "src/bagua_ref/conformance"
ORACLES = [*sorted((CONFORMANCE / "expected").glob("*.py")), CONFORMANCE / "vectors/answers.py"]


def forbidden(source: str) -> Iterator[str]:
    """Yield a module's imports from the package, and from tests that may import the package."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if not node.level else ["relative import"]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            names = ["import by name"]
        for name in names:
            outside = (
                name.split(".")[0] not in ("bagua_ref", "tests", "property_tests", "benchmarks")
                and " " not in name
            )
            if not (outside or f"{name}.".startswith("bagua_ref.conformance.expected.")):
                yield name


@pytest.mark.parametrize("path", ORACLES, ids=lambda path: path.stem)
def test_an_oracle_imports_nothing_of_what_it_judges(path):
    assert list(forbidden(path.read_text(encoding="utf-8"))) == []


def test_there_are_oracles():
    assert {"algorithms_numpy", "codecs_scalar", "kernels_scalar"} <= {
        path.stem for path in ORACLES
    }


@pytest.mark.parametrize(
    "source",
    [
        "import bagua_ref",
        "import numpy, bagua_ref.types as t",
        "def f():\n    from bagua_ref.backends.reference import codec",
        "from . import kernels_scalar",
        "import importlib\nimportlib.import_module('bagua_' + 'ref')",
        "from tests.launch import run",
    ],
)
def test_the_reading_finds_a_planted_import(source):
    assert list(forbidden(source))

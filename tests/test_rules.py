"""Rules that a test can hold: a check never returns early, and tests quote no source text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = {path: path.read_text() for path in (ROOT / "src" / "bagua_ref").rglob("*.py")}


def own_returns(node: ast.AST) -> Iterator[ast.Return]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield from own_returns(child)


def is_made_by(node: ast.AST, *makers: str) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(decorator).partition("(")[0] in makers for decorator in node.decorator_list
    )


def test_a_check_never_returns_early() -> None:
    """One that trains returns the arguments of the training at its end."""
    nodes = [
        (path, node)
        for path, text in SOURCE.items()
        if path.parent.name == "checks"
        for node in ast.walk(ast.parse(text))
    ]
    checks = [row for row in nodes if is_made_by(row[1], "check", "only_minmax", "for_each")]
    trainings = [row for row in nodes if is_made_by(row[1], "trains")]
    assert len(checks) + len(trainings) > 80
    early = [(path, found.lineno) for path, node in checks for found in own_returns(node)]
    early += [
        (path, found.lineno)
        for path, node in trainings
        for found in own_returns(node)
        if found is not node.body[-1]
    ]
    assert early == []


def test_tests_quote_no_source_text() -> None:
    """A line of the package could not be simplified without a test that quotes it."""
    statements = (ast.Assign, ast.AugAssign, ast.Return, ast.If, ast.For)
    code = set[str]()
    for text in SOURCE.values():
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, statements):
                code.add(lines[node.lineno - 1].strip())
    code = {line for line in code if len(line) >= 24}
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    # Parsing takes seconds, and most files have no such line at all.
    suspect = {
        path: text
        for path, text in texts.items()
        if code & {part.strip("\"'f( ),") for part in re.split(r"\n|\\n", text)}
        or code & {part.strip() for part in re.split(r"\n|\\n", text)}
    }
    quoted = [
        (path, node.lineno)
        for path, text in suspect.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if any(line.strip() in code for line in node.value.split("\n"))
    ]
    assert quoted == []

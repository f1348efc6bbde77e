"""Tests of docs/troubleshooting.md: its messages, variables and loggers are those of the
sources.
"""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from tests.scripts import ROOT

SOURCES = ROOT / "src/bagua_ref"
TEXT = (ROOT / "docs/troubleshooting.md").read_text()
SECTIONS = dict(re.findall(r"^##+ (.*?)\n(.*?)(?=^##+ |\Z)", TEXT, re.MULTILINE | re.DOTALL))

PATHS = [str(path.relative_to(SOURCES)) for path in sorted(SOURCES.rglob("*.py"))]


@cache
def trees() -> dict[str, ast.Module]:
    return {path: ast.parse((SOURCES / path).read_text()) for path in PATHS}


def template(node: ast.AST) -> str:
    """Return a string with … for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(
        template(part) if isinstance(part, ast.Constant) else "…"
        for part in getattr(node, "values", ())
    )


@cache
def strings() -> list[str]:
    return [
        text for tree in trees().values() for node in ast.walk(tree) if (text := template(node))
    ]


def fragments() -> list[str]:
    rows = [
        row
        for section in SECTIONS.values()
        for row in re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
        if "message" in section
    ]
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("fragment", fragments())
def test_a_message_of_the_page_is_one_of_the_sources(fragment: str) -> None:
    assert any(fragment in text for text in strings())


def test_the_tables_of_variables_and_loggers_are_complete() -> None:
    read = {text for text in strings() if re.fullmatch(r"BAGUA_[A-Z_]*[A-Z]", text)}
    listed = set(re.findall(r"`(BAGUA_\w+)`", SECTIONS["Environment variables"]))
    assert read == listed
    others = set(re.findall(r"`([A-Z][A-Z_]+)`", SECTIONS["Environment variables"])) - listed
    asked = "\n".join(path.read_text() for path in sorted(SOURCES.rglob("*.py")))
    assert {
        name
        for name in re.findall(r'environ(?:\.get\(|\[)"(\w+)"', asked)
        if not name.startswith("BAGUA_")
    } - {
        "PYTHONHASHSEED"  # which simulated programs are given
    } <= others
    loggers = {
        ast.unparse(node.args[0])
        .strip("'")
        .replace("__name__", "bagua_ref." + path.removesuffix(".py").replace("/", "."))
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and re.match(r"logging\.getLogger\((__name__|'bagua_ref\.)", ast.unparse(node))
    }
    assert loggers == set(re.findall(r"`(bagua_ref\.[\w.]+)`", SECTIONS["Loggers"]))

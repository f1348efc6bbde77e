"""The house stays one that a person can carry: lines per room, one owner per name, and rules that
keep it so.

A commit that raises a number of lines says why in the comment beside it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bagua_ref"

LINES: dict[str, int] = {
    "algorithms": 4029,
    "backends": 888,
    "backends/cuda": 879,
    "backends/reference": 639,
    "base": 1359,
    "buckets": 1152,
    "checkpoint": 1180,
    # the command sim, with links; trace diff; measure times operations by short trainings
    "cli": 3186,
    "comm_ops": 1158,
    # the core on which simulated threads wake; bytes before rounding; whether a rank has drawn a
    # number
    "communicators": 4694,
    "conformance": 294,  # formats, a folder before, and digests of traces
    "conformance/expected": 1776,  # what suites and traces said twice of PowerSGD's rounds
    "conformance/inputs": 1235,  # a value of each kind in every input
    "conformance/lab": 1967,  # tensors of a journal as bytes; an end to worlds that no target fits
    "conformance/run": 1274,
    "conformance/suites": 4507,  # scripts of twins, which only they use
    "conformance/targets": 1591,  # which sizes are beyond a target's tiles
    # records of whole trainings, and their comparison; nouns in the singular
    "conformance/trace": 3486,
    "conformance/vectors": 2055,
    "contrib": 1638,  # the buffer of the cache's loader, which only it uses
    "contrib/cache": 1442,
    "contrib/fuse": 862,
    "contrib/utils": 514,
    "data_parallel": 2924,  # how any trainer's loop wraps a module
    "distributed": 155,
    "formulas": 747,
    "groups": 733,  # bytes before rounding
    "integrations": 919,
    "observe": 242,
    "package": 496,  # RankCall, what errors of simulated ranks tell; bytes before rounding
    # what is sent at once; work of the processor that computes; words of a wrapped model
    "planning": 1266,
    "property_tests": 3041,  # one row more of an oracle's options; names that only proofs try
    "scheduling": 613,
    "simulation": 3552,  # torch.distributed on simulated ranks, and the judge of bagua-ref sim
    # faults that dropped tests alone had found; worlds that no target fits; tests that faults name
    # exist
    "tests": 39840,
    "tests/cuda_emulation": 487,
    "tests/integrations": 1171,  # trainers are imported once, by the server that forks ranks
    # guards and faults are planted in forks of processes that have collected or imported all
    "tests/meta": 1309,
    "tests/outside": 246,
    "tests/proof": 716,  # scripts of a suite run in forks of one process
}
"""The most lines of each room of src, and of the folders of tests."""

FILES = 255
"""The most files of src; public names of modules that have moved into a room do not count."""

OTHER_IMPLEMENTER = {
    "Event": "threading.Event",
    "Group": "groups are above the rooms that use them",
}
"""Protocols with one implementer in the package."""

SAME_NAME = {"MXFP4", "MXFP8", "MXINT8", "MinMaxUInt8", "OneBit"}
"""Classes that several backends have: the contract of a codec and its implementations."""


def room(path: Path) -> str:
    """Return the room of a file: its package, of conformance and contrib the part; of tests the
    folder.
    """
    parts = path.relative_to(ROOT).parts[:-1]
    if parts[0] != "src":
        return "/".join(parts[:2])
    inner = parts[2:]
    return (
        "/".join(
            inner[:2] if inner[:1] in (("conformance",), ("contrib",), ("backends",)) else inner[:1]
        )
        or "package"
    )


def files() -> list[Path]:
    found = [
        path
        for folder in (SOURCE, ROOT / "tests", ROOT / "property_tests")
        for path in folder.rglob("*.py")
    ]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def is_public_name(path: Path) -> bool:
    """Return whether a module only stands for one that is in a room, or raises that it is not
    provided.
    """
    text = path.read_text()
    return "sys.modules[__name__]" in text or "\nraise not_provided(" in text


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in SOURCE.rglob("*.py")]


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Return all statements and what they consist of."""
    return [(path, node) for path, tree in trees() for node in ast.walk(tree)]


def lines_by_room() -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for path in files():
        if not is_public_name(path):
            counts[room(path)] += len(path.read_text().splitlines())
    return counts


def test_rooms_have_no_more_lines_than_allowed() -> None:
    counts = lines_by_room()
    assert {name: count for name, count in counts.items() if count > LINES.get(name, 0)} == {}
    assert set(LINES) == set(counts)


def test_there_are_few_files() -> None:
    assert len([path for path in SOURCE.rglob("*.py") if not is_public_name(path)]) <= FILES


def test_each_class_name_has_one_owner() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(str(path.relative_to(SOURCE)))
    assert {
        name: where for name, where in owners.items() if len(where) > 1 and name not in SAME_NAME
    } == {}


def members(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, ast.FunctionDef)} | {
        ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)
    }


def test_a_protocol_has_two_implementers() -> None:
    classes = {node.name: node for _, node in nodes() if isinstance(node, ast.ClassDef)}

    @cache
    def all_members(name: str) -> set[str]:
        node = classes.get(name)
        own = (
            {item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute)}
            if node
            else set()
        )
        return (
            set()
            if node is None
            else members(node)
            | own
            | {m for base in node.bases for m in all_members(ast.unparse(base))}
        )

    few = []
    for name, node in classes.items():
        if any(ast.unparse(base).startswith("Protocol") for base in node.bases):
            having = [
                other for other in classes if other != name and members(node) <= all_members(other)
            ]
            few += [(name, having)] * (len(having) + (name in OTHER_IMPLEMENTER) < 2)
    assert few == []


def test_a_check_never_returns_early() -> None:
    def own_returns(node: ast.AST) -> Iterator[ast.Return]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Return):
                yield child
            elif not isinstance(child, ast.FunctionDef | ast.Lambda):
                yield from own_returns(child)

    early = [
        f"{path.relative_to(SOURCE)}:{returned.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(d).startswith("check(") for d in node.decorator_list)
        for returned in own_returns(node)
    ]
    assert early == []


def test_tests_quote_no_source_text() -> None:
    """A planted fault names what it changes (tests/meta/edit.py), or a line could not be simplified
    without a test.
    """
    lines = {path: path.read_text().splitlines() for path, _ in trees()}
    plain = (
        (path, node)
        for path, node in nodes()
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Return | ast.If | ast.For)
    )
    code = {line for path, node in plain if len(line := lines[path][node.lineno - 1].strip()) >= 24}
    quoted = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files()
        if path.is_relative_to(ROOT / "tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if any(line.strip() in code for line in node.value.split("\n"))
    ]
    assert quoted == []


@pytest.mark.parametrize("name", ["conformance/suites", "algorithms", "tests/meta"])
def test_the_rooms_are_found(name: str) -> None:
    assert lines_by_room()[name] > 100

"""Mutation runner: ``python -m tests.meta.mutate`` changes one statement at a time and runs the
tests that execute it.

The first run traces which test executes which line, child processes included; this takes minutes.
Each mutant is then planted in a copy of this checkout and its tests run, quickest first, up to the
first failure. A surviving mutant is a line that no test checks: write the test, and plant the
mutant in planted.jsonl. The log is build/mutation_run.json.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.meta import edit

ROOT = Path(__file__).parents[2]
LOG = ROOT / "build/mutation_run.json"
LINES = ROOT / "build/traced_lines.json"
ROOMS = (
    "base",
    "buckets",
    "groups",
    "scheduling",
    "algorithms",
    "data_parallel",
    "communicators",
    "contrib",
)
TESTS = (
    "engine",
    "bucket",
    "gloo",
    "gloo_training",
    "async",
    "ddp",
    "communication",
    "collectives",
    "decentralized",
    "flat_storage",
    "functional",
    "qadam",
    "rendezvous",
    "simulated",
    "scheduler",
    "state_broadcast",
    "streams",
    "tensor",
    "training",
    "trace",
    "rank_world",
    "checkpoint",
    "simulation",
    "samplers",
    "cache_codec",
    "cache_faults",
    "cache_life",
    "cache_loader",
    "cache_stores",
    "cached_dataset",
    "fork",
    "fuse",
    "fuse_interplay",
    "fuse_verdicts",
    "bypassing",
    "job_store",
    "timeout",
    "torch_checkpoint",
    "every_algorithm",
    "algorithm_options",
)
"""Files of tests/ that exercise the rooms; the rooms' own doctests are added."""
UNTRACED = {"contrib/cache/watchdog.py": "tests/test_cache_life.py"}
"""Programs that Python runs without `site`, and a test file that starts them."""
LIMIT = 20
"""Seconds after which no further test of a mutant is started."""
BUDGET, LONGEST = 10.0, 3.0
"""Time limits for a mutant's tests, in seconds under the slow tracer: for all together, and for
each where there is a choice.
"""

SWAPS = {
    "==": "!=",
    "!=": "==",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
    "and": "or",
    "or": "and",
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "//": "*",
    "%": "//",
}
WORDING = ("__repr__", "describe")
"""Functions that only produce text."""


@dataclass(frozen=True)
class Mutant:
    """One change, as `tests.meta.edit` names it."""

    room: str
    where: str
    function: tuple[int, int]
    lines: tuple[int, int]
    operator: str
    part: str
    new: str

    @property
    def id(self) -> str:
        return f"{self.where} | {self.part} | {self.new}"

    @property
    def file(self) -> str:
        return f"{self.where.partition(':')[0]}.py"


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the possible changes of ``node`` itself: the operator, the part to replace and its
    replacement.
    """
    match node:
        case ast.Compare(ops=[op]) if (symbol := edit.SYMBOLS[type(op).__name__]) in SWAPS:
            yield "comparison", node, f"$1 {SWAPS[symbol]} $2"
        case ast.BoolOp(op=op):
            other = SWAPS[type(op).__name__.lower()]
            yield (
                "and/or",
                node,
                f" {other} ".join(f"${place}" for place in range(1, len(node.values) + 1)),
            )
        case ast.BinOp(op=op) if (symbol := edit.SYMBOLS[type(op).__name__]) in SWAPS:
            yield "arithmetic", node, f"$1 {SWAPS[symbol]} $2"
        case ast.Constant(value=bool()):
            yield "constant", node, repr(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", node, repr(node.value + 1)
        case (
            ast.If(test=test)
            | ast.While(test=test)
            | ast.IfExp(test=test)
            | ast.comprehension(ifs=[test])
        ) if not negated_by_swap(test):
            yield "condition", test, "not $"
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete() | ast.Break() | ast.Continue():
            yield "dropped", node, ""
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield "dropped", node, ""
        case ast.Return(value=ast.expr() as value) if not (
            isinstance(value, ast.Constant) and value.value is None
        ):
            yield "result", node, "return None"
        case ast.With(items=[ast.withitem(optional_vars=None, context_expr=manager)]):
            yield "with", manager, "__import__('contextlib').nullcontext()"


def negated_by_swap(test: ast.expr) -> bool:
    """Return whether the swapped comparison already is the negated condition."""
    return isinstance(test, ast.Compare) and type(test.ops[0]) in (
        ast.Eq,
        ast.NotEq,
        ast.Is,
        ast.IsNot,
        ast.In,
        ast.NotIn,
    )


def mutable(
    node: ast.AST, where: str = "", function: Any = None, statement: Any = None
) -> Iterator[tuple[str, Any, Any, ast.AST]]:
    """Yield changeable nodes inside functions: the function's full name, the function, the
    enclosing statement and the node.
    """
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        where, function, statement = (
            f"{where}.{node.name}".lstrip("."),
            node if isinstance(node, ast.FunctionDef) else None,
            None,
        )
        children = [] if node.name in WORDING else node.body
    else:
        statement = node if isinstance(node, ast.stmt) else statement
        if function is not None:
            yield where, function, statement, node
        wording = isinstance(node, (ast.Raise, ast.JoinedStr)) or ast.unparse(node).startswith(
            "logger."
        )
        children = [] if wording else list(ast.iter_child_nodes(node))
    for child in children:
        yield from mutable(child, where, function, statement)


def mutants_of(file: Path, room: str) -> Iterator[Mutant]:
    """Yield every mutant of ``file``."""
    module = str(file.relative_to(edit.PACKAGE).with_suffix(""))
    for name, function, statement, node in mutable(edit.tree_of(module)):
        for operator, part, new in changes(node):
            first, last = part.lineno, part.end_lineno
            # A statement with a body spans more than its own lines.
            if not isinstance(statement, (ast.If, ast.While, ast.For, ast.With, ast.Try)):
                first, last = statement.lineno, statement.end_lineno
            lines, whole = (first, last), (function.lineno + 1, function.end_lineno)
            yield Mutant(
                room, f"{module}:{name}", whole, lines, operator, edit.name_of(function, part), new
            )


def all_mutants(room: str) -> dict[str, Mutant]:
    """Return the mutants of a room, a file or a folder of the package, by id."""
    files = (
        [edit.PACKAGE / f"{room}.py"]
        if (edit.PACKAGE / f"{room}.py").exists()
        else sorted((edit.PACKAGE / room).rglob("*.py"))
    )
    return {mutant.id: mutant for file in files for mutant in mutants_of(file, room)}


@contextmanager
def copy_of_checkout() -> Iterator[Path]:
    """Yield a copy of this checkout, so that no mutant is ever in the checkout itself."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        left_out = shutil.ignore_patterns(".*", "build", "site", "dist", "demo-report")
        yield Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=left_out))


def run_pytest(
    copy: Path, arguments: list[str], limit: float | None, **environment: str
) -> tuple[int | None, str]:
    """Run pytest in ``copy``; return its exit code, None at the time limit, and its output."""
    paths = [environment.pop("more_path", ""), str(copy / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-rfE",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *arguments,
    ]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")


def trace(copy: Path) -> dict[str, Any]:
    """Return each passing test's duration and executed lines; from the last run if the sources are
    the same.
    """
    files = [*sorted(edit.PACKAGE.rglob("*.py")), *sorted((ROOT / "tests").glob("*.py"))]
    version = hashlib.sha1(b"".join(file.read_bytes() for file in files)).hexdigest()
    if LINES.exists() and (known := json.loads(LINES.read_text()))["version"] == version:
        return known
    print("tracing which test executes which line; this takes minutes ...", flush=True)
    doctests = [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in edit.PACKAGE.glob(f"{room}*")
        if path.stem == room
    ]
    result = copy / "traced.json"
    _, output = run_pytest(
        copy,
        [
            "-p",
            "sitecustomize",
            "--timeout=60",
            *(f"tests/test_{name}.py" for name in TESTS),
            *doctests,
        ],
        None,
        more_path=str(copy / "tests/meta/line_trace"),
        TRACED_PACKAGE=f"{copy / 'src/bagua_ref'}/",
        TRACED_HITS=str(copy / "hits"),
        TRACED_RESULT=str(result),
    )
    print(output.splitlines()[-1])
    LINES.parent.mkdir(exist_ok=True)
    LINES.write_text(json.dumps({"version": version, **json.loads(result.read_text())}))
    return json.loads(LINES.read_text())


def tests_for(mutant: Mutant, traced: dict[str, Any]) -> list[str]:
    """Return the tests that execute the statement, quickest first, within the time limit; if none,
    those of its function.
    """
    hits, seconds = traced["tests_of"].get(mutant.file, {}), traced["seconds"]
    for first, last in (mutant.lines, mutant.function):
        if found := {test for line in range(first, last + 1) for test in hits.get(str(line), ())}:
            break
    else:
        found = {test for test in seconds if test.startswith(UNTRACED.get(mutant.file, "nothing"))}
    cases: Counter[str] = Counter()
    order = []
    for test in sorted(found, key=lambda test: (seconds[test], test)):
        function = test.split("[")[0]
        # all first cases before any second one
        order.append((cases[function], seconds[test], test))
        cases[function] += 1
    chosen, total = [], 0.0
    for _, taken, test in sorted(order):
        if not chosen or (taken <= LONGEST and total + taken <= BUDGET):
            chosen.append(test)
            total += taken
    return chosen


def write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
        # Python would reuse the old bytecode if both texts have the same size and came in the same
        # second
        compiled.unlink()


@contextmanager
def planted_in(copy: Path, where: str, *changes: str) -> Iterator[None]:
    """Plant a fault in ``copy``, as `tests.meta.edit` names it."""
    file = copy / edit.path_of(where).relative_to(ROOT)
    original, changed = file.read_text(encoding="utf-8"), edit.planted(where, *changes)
    try:
        write(file, changed)
        yield
    finally:
        write(file, original)


def run_mutant(
    copy: Path, mutant: Mutant, tests: list[str], limit: float = LIMIT
) -> tuple[str, str]:
    """Return "killed", "timeout", "survived" or "not covered", and the test that killed the mutant.

    A kill counts only if the test also fails alone, as tests can time out on a busy machine.
    """
    if not tests:
        return "not covered", ""
    with planted_in(copy, mutant.where, mutant.part, mutant.new):
        while tests:
            code, output = run_pytest(
                copy, ["-x", f"--session-timeout={limit}", "--timeout=10", *tests], limit + 30
            )
            if code == 4:
                raise RuntimeError(f"pytest did not find the tests:\n{output}")
            if code is None:  # not even pytest could end the hanging test
                return (
                    "timeout",
                    re.findall(r"^(\S+::.*?)(?: PASSED.*)?$", output, re.MULTILINE)[-1].strip(),
                )
            failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
            if failed is None:
                return "survived", ""
            by = failed[1]
            if (
                len(tests) == 1
                or by not in tests
                or run_pytest(copy, ["--timeout=30", by], 60)[0] != 0
            ):
                return "killed", by
            tests = tests[tests.index(by) + 1 :]
        return "survived", ""


def table(rows: list[dict[str, Any]]) -> str:
    """Return, for each room, how many mutants there were, and how many no test killed."""
    lines = [f"{'room':16}{'mutants':>9}{'alive':>9}"]
    for room in (*ROOMS, "all"):
        outcomes = [row["outcome"] for row in rows if room in ("all", row["room"])]
        lines.append(
            f"{room:16}{len(outcomes):>9}{sum(outcome in ('survived', 'not covered') for outcome in outcomes):>9}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=200, help="mutants, divided evenly over the rooms"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--rooms",
        nargs="+",
        default=list(ROOMS),
        help="only these; the log keeps its rows of other rooms",
    )
    parser.add_argument("--only", metavar="ID", help="run this mutant, print it, and write nothing")
    parser.add_argument(
        "--tests", nargs="+", help="with --only: run these tests instead of the traced ones"
    )
    parser.add_argument("--log", type=Path, default=LOG)
    arguments = parser.parse_args()
    with copy_of_checkout() as copy:
        if arguments.only:
            mutant = next(
                found[arguments.only]
                for room in ROOMS
                if arguments.only in (found := all_mutants(room))
            )
            print(
                *run_mutant(
                    copy, mutant, arguments.tests or tests_for(mutant, trace(copy)), limit=120
                )
            )
            return
        traced = trace(copy)
        import torch

        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        rows = json.loads(arguments.log.read_text())["mutants"] if arguments.log.exists() else []
        rows = [row for row in rows if row["room"] not in arguments.rooms]
        todo = []
        for room in arguments.rooms:
            found = all_mutants(room)
            todo += random.Random(f"{arguments.seed} {room}").sample(
                list(found.values()), arguments.count // len(arguments.rooms)
            )
        head = {"date": str(datetime.date.today()), "seed": arguments.seed}
        head |= {"torch": torch.__version__, "python": platform.python_version()}
        start = time.monotonic()
        for place, mutant in enumerate(todo, 1):
            tests = tests_for(mutant, traced)
            outcome, by = run_mutant(copy, mutant, tests)
            row = {
                "id": mutant.id,
                **asdict(mutant),
                "commit": commit,
                "outcome": outcome,
                "by": by,
                "tests": len(tests),
            }
            rows = sorted([*rows, row], key=lambda row: ROOMS.index(row["room"]))
            arguments.log.parent.mkdir(exist_ok=True)
            arguments.log.write_text(json.dumps({**head, "mutants": rows}, indent=1) + "\n")
            left = (time.monotonic() - start) / place * (len(todo) - place) / 60
            print(
                f"{place}/{len(todo)}, {left:.0f} min left: {outcome:11} {mutant.id} {by}",
                flush=True,
            )
        print(table(rows))


if __name__ == "__main__":
    main()

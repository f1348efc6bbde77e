"""Planted faults that the checks must find: ``python -m tests.meta.mutants`` prints the table of
what killed each.

A mutant is the package with one module changed. It runs in a separate process, a fork in which the
changed function gets its new code, or which imports the changed package anew; the checks of the
clause that it breaks must find it with any seed, in the quick profile or, where it says so, in the
large one.

Left out, as no input distinguishes them from the reference:

- (x + y) * 0.5 for (x + y) / 2: halving is exact either way.
- scale divided in float64 and rounded: 53 bits are more than 2 * 24 + 2.
- no minimum with upper before lower is subtracted: rounding is monotonic, so x <= max gives x*scale
  <= upper.
- 16-bit floats combined in 16 bits by a collective, or in another order: libraries may do so, and
  the tolerance allows it.
- the node's sum by the library's reduce before compression: the simulated world's reduce also adds
  in rank order.
- the two messages of a ring of two ranks swapped: both have the same bytes.
- NaN accepted where complexities are read: sorting checks again.
- no check of min*scale for overflow: it overflows only where max*scale does, in chunks of one
  value.
- a parameter whose gradient comes later stays out of its run: it is stepped separately, with the
  same result.
- a full store that is not used for a while, even for reading: S8.3 lets load_fn serve all values.
- a cached value's length not checked: its checksum covers whatever is left of it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import multiprocessing
import sys
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.meta import edit
from tests.meta.planted import FAULTS, Fault, note

FEW = (4, 12)
"""Inputs of each check that are tried first: most faults need few, and the checks before the one
that finds them would try all.
"""


@dataclass(frozen=True)
class Kill:
    """The fate of a mutant; ``by`` is empty if it survived."""

    mutant: str
    suite: str
    clause: str
    by: str
    examples: int
    seconds: float
    message: str


class _Patched(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Loads one module of the package from changed source."""

    def __init__(self, module: str, path: str, source: str) -> None:
        super().__init__(module, path)
        self.source = source

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        locations = [str(Path(self.path).parent)] if self.path.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(
            fullname, self.path, loader=self, submodule_search_locations=locations
        )

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.path, "exec")


def _import_anew(mutant: Fault, text: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "bagua_ref"]:
        del sys.modules[name]
    sys.meta_path.insert(
        0, _Patched(edit.module_of(mutant.where), str(edit.path_of(mutant.where)), text)
    )


def _try_in_child(mutant: Fault, text: str, seed: int, checks: list[str], outbox: Any) -> None:
    found = edit.change_code(mutant.where, text) and _failure(
        mutant, seed, checks, alone=bool(mutant.by)
    )
    # other functions of the module may have been built with the old code when it was imported
    if not found:
        _import_anew(mutant, text)
        found = _failure(mutant, seed, checks)
    outbox.send(found)


def _failure(
    mutant: Fault, seed: int, checks: list[str], alone: bool = False
) -> tuple[str, int, str] | None:
    """Return the first check that fails, the inputs that it needed and its message.

    The check that has found the fault before is tried first, and unless it is tried ``alone`` all
    are then, with few inputs first.
    """
    from bagua_ref.conformance.run.runner import OneByOne, reason_to_skip, row_id
    from bagua_ref.conformance.run.search import PROFILES, Search
    from bagua_ref.conformance.suites.checks import checks_of, variants
    from bagua_ref.conformance.targets.reference_target import ReferenceTarget

    table, tried, ran = checks_of([mutant.suite]), dict[str, int](), False
    rows = [(table[name], dtype) for name in checks for dtype in variants(table[name])]
    known = [row for row in rows if row_id(*row) == f"{mutant.suite}.{mutant.clause}.{mutant.by}"]
    assert known or not mutant.by, f"{mutant.name}: no check is called {mutant.by}"
    numbers = (*FEW, PROFILES[mutant.profile])
    for chosen, inputs in itertools.product([known] if alone else [known, rows], numbers):
        PROFILES[mutant.profile] = inputs
        runs = OneByOne()
        target = runs.resolve(ReferenceTarget())
        for check, dtype in chosen:
            name = row_id(check, dtype)
            before, tried[name] = tried.get(name, 0), max(1, round(inputs * check.effort))
            if before < tried[name] and not reason_to_skip(target, check, dtype):
                outcome = runs.run(target, check, dtype, Search(mutant.profile, seed, shrink=False))
                ran |= not outcome.skipped
                if not outcome.passed:
                    return name, outcome.examples, outcome.message
        runs.stop()
    assert ran, f"{mutant.name}: all checks were skipped"
    return None


def run(mutant: Fault, seed: int = 0) -> Kill:
    """Run the checks of the mutant's clause, first those that are quick and have found many of the
    earlier mutants.
    """
    from bagua_ref.conformance.suites.checks import checks_of

    with _parsing:
        text = edit.planted(mutant.where, *mutant.edit)
    checks = [
        check.id for check in checks_of([mutant.suite]).values() if check.clause == mutant.clause
    ]
    assert checks, f"{mutant.name}: no check of {mutant.suite} is about {mutant.clause}"
    checks.sort(key=lambda name: _seconds[name] / (1 + _found_by[name]))
    context = multiprocessing.get_context("fork")
    inbox, outbox = context.Pipe(duplex=False)
    begun = time.perf_counter()
    process = context.Process(target=_try_in_child, args=(mutant, text, seed, checks, outbox))
    process.start()
    outbox.close()
    try:
        by, examples, message = inbox.recv() or ("", 0, "")
    except EOFError:
        raise RuntimeError(f"{mutant.name}: its process ended without a verdict") from None
    finally:
        process.join(timeout=60)
    _found_by[by.partition("[")[0]] += 1
    return Kill(
        mutant.name, mutant.suite, mutant.clause, by, examples, time.perf_counter() - begun, message
    )


_parsing = threading.Lock()
"""As Python 3.11 counts the depth of a tree that it makes once for all threads."""

_found_by = Counter[str]()
"""Check -> number of mutants that it has found."""

_seconds: dict[str, float] = {}
"""Check -> duration with one input."""


def warm_up(suites: list[str]) -> None:
    """Let each check try an input in this process, so that children need not import, compile and
    cache the same again.
    """
    from bagua_ref.conformance.lab.journal import Journal
    from bagua_ref.conformance.run.search import PROFILES, Search, search
    from bagua_ref.conformance.suites.checks import checks_of, prepare, variants
    from bagua_ref.conformance.targets.reference_target import ReferenceTarget
    from bagua_ref.conformance.targets.target import resolve

    target, journal = resolve(ReferenceTarget()), Journal()
    with mock.patch.dict(PROFILES, quick=1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for suite in suites:
            prepare(suite)
        for check in checks_of(suites).values():
            _seconds[check.id] = search(
                check, variants(check)[0], target, Search(shrink=False), journal
            ).seconds
    gc.collect()
    gc.freeze()  # no child traverses what it shares with this process


def table(kills: list[Kill]) -> str:
    lines = ["| mutant | clause | killed by | inputs needed | seconds |", "|---|---|---|---|---|"]
    for kill in kills:
        lines.append(
            f"| {kill.mutant} | {kill.clause} | {kill.by or '**lives**'} | {kill.examples} |"
            f" {kill.seconds:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--suite", action="append", help="only mutants of this suite; may be repeated"
    )
    parser.add_argument(
        "--name", action="append", help="only mutants whose name contains this; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the table there too")
    parser.add_argument(
        "--note",
        action="store_true",
        help="write into planted.jsonl which check has found each fault",
    )
    arguments = parser.parse_args()
    chosen = [
        m
        for m in FAULTS
        if m.suite in (arguments.suite or [m.suite])
        and any(name in m.name for name in arguments.name or [""])
    ]
    warm_up(sorted({mutant.suite for mutant in chosen}))
    begun = time.perf_counter()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        kills = list(pool.map(lambda mutant: run(mutant, arguments.seed), chosen))
    print(table(kills))
    alive = [kill.mutant for kill in kills if not kill.by]
    print(
        f"\n{len(kills) - len(alive)} of {len(kills)} killed in {time.perf_counter() - begun:.0f}"
        f" s, seed {arguments.seed}"
    )
    for name in alive:
        print(f"alive: {name}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(kill) for kill in kills], indent=1) + "\n")
    if arguments.note:
        note({kill.mutant: kill.by.removeprefix(f"{kill.suite}.{kill.clause}.") for kill in kills})
    return bool(alive)


if __name__ == "__main__":
    sys.path.insert(0, str(edit.PACKAGE.parent))
    raise SystemExit(main())

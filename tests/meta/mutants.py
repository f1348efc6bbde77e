"""Planted faults that the checks must find: ``python -m tests.meta.mutants`` prints the table of what killed each.

A mutant is the package with one module changed. It runs in a separate process, a fork in which the changed function gets its new
code, or which imports the changed package anew; the checks of the clause that it breaks must find it with any seed, in the quick
profile or, where it says so, in the large one.

Left out, as no input distinguishes them from the reference:

- (x + y) * 0.5 for (x + y) / 2: halving is exact either way.
- scale divided in float64 and rounded: 53 bits are more than 2 * 24 + 2.
- no minimum with upper before lower is subtracted: rounding is monotonic, so x <= max gives x*scale <= upper.
- 16-bit floats combined in 16 bits by a collective, or in another order: libraries may do so, and the tolerance allows it.
- the node's sum by the library's reduce before compression: the simulated world's reduce also adds in rank order.
- the two messages of a ring of two ranks swapped: both have the same bytes.
- NaN accepted where complexities are read: sorting checks again.
- no check of min*scale for overflow: it overflows only where max*scale does, in chunks of one value.
- a parameter whose gradient comes later stays out of its run: it is stepped separately, with the same result.
- a full store that is not used for a while, even for reading: S8.3 lets load_fn serve all values.
- a cached value's length not checked: its checksum covers whatever is left of it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.meta import edit
from tests.meta.planted import FAULTS, Fault

FEW = (4, 12)
"""Inputs of each check that are tried first: most faults need few, and the checks before the one that finds them would try all."""


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
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self, submodule_search_locations=locations)

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.path, "exec")


def _import_anew(mutant: Fault) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "bagua_ref"]:
        del sys.modules[name]
    source = edit.planted(mutant.where, *mutant.edit)
    sys.meta_path.insert(0, _Patched(edit.module_of(mutant.where), str(edit.path_of(mutant.where)), source))


def _try_in_child(mutant: Fault, seed: int, outbox: Any) -> None:
    found = edit.change_code(mutant.where, edit.planted(mutant.where, *mutant.edit)) and _failures(mutant, seed)
    if not found:  # other functions of the module may have been built with the old code when it was imported
        _import_anew(mutant)
        found = _failures(mutant, seed)
    outbox.send(found)


def _failures(mutant: Fault, seed: int) -> list[tuple[str, int, str]]:
    """Return the checks that fail, the inputs that they needed and their messages."""
    from bagua_ref.conformance import run_conformance
    from bagua_ref.conformance.run.search import PROFILES
    from bagua_ref.conformance.suites.checks import checks_of
    from bagua_ref.conformance.targets.reference_target import ReferenceTarget

    checks = [check.id for check in checks_of([mutant.suite]).values() if check.clause == mutant.clause]
    assert checks, f"{mutant.name}: no check of {mutant.suite} is about {mutant.clause}"
    for inputs in (*FEW, PROFILES[mutant.profile]):
        PROFILES[mutant.profile] = inputs
        report = run_conformance(
            ReferenceTarget(), [mutant.suite], checks=checks, profile=mutant.profile, seed=seed,
            fail_fast=True, shrink=False, jobs=1, time_limit=10,
        )  # fmt: skip
        if report.failures():
            break
    assert report.ran, f"{mutant.name}: all checks were skipped"
    return [(result.id, result.examples, result.message) for result in report.failures()]


def run(mutant: Fault, seed: int = 0) -> Kill:
    """Run the checks of the mutant's clause."""
    edit.planted(mutant.where, *mutant.edit)  # an error here says more
    context = multiprocessing.get_context("fork")
    inbox, outbox = context.Pipe(duplex=False)
    begun = time.perf_counter()
    process = context.Process(target=_try_in_child, args=(mutant, seed, outbox))
    process.start()
    outbox.close()
    try:
        failures = inbox.recv()
    except EOFError:
        raise RuntimeError(f"{mutant.name}: its process ended without a verdict") from None
    finally:
        process.join(timeout=60)
    by, examples, message = failures[0] if failures else ("", 0, "")
    return Kill(mutant.name, mutant.suite, mutant.clause, by, examples, time.perf_counter() - begun, message)


def table(kills: list[Kill]) -> str:
    lines = ["| mutant | clause | killed by | inputs needed | seconds |", "|---|---|---|---|---|"]
    for kill in kills:
        lines.append(f"| {kill.mutant} | {kill.clause} | {kill.by or '**lives**'} | {kill.examples} | {kill.seconds:.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", action="append", help="only mutants of this suite; may be repeated")
    parser.add_argument("--name", action="append", help="only mutants whose name contains this; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the table there too")
    arguments = parser.parse_args()
    chosen = [
        m for m in FAULTS if m.suite in (arguments.suite or [m.suite]) and any(name in m.name for name in arguments.name or [""])
    ]
    begun = time.perf_counter()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        kills = list(pool.map(lambda mutant: run(mutant, arguments.seed), chosen))
    print(table(kills))
    alive = [kill.mutant for kill in kills if not kill.by]
    print(f"\n{len(kills) - len(alive)} of {len(kills)} killed in {time.perf_counter() - begun:.0f} s, seed {arguments.seed}")
    for name in alive:
        print(f"alive: {name}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(kill) for kill in kills], indent=1) + "\n")
    return bool(alive)


if __name__ == "__main__":
    sys.path.insert(0, str(edit.PACKAGE.parent))
    from bagua_ref.conformance.clauses import SUITES
    from bagua_ref.conformance.suites.checks import prepare
    from bagua_ref.conformance.targets.reference_target import ReferenceTarget  # noqa: F401 - once, here, not in every child

    for suite in SUITES:
        prepare(suite)
    gc.freeze()  # no child traverses what it shares with this process
    raise SystemExit(main())

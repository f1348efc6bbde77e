"""A pair of recordings, aligned by step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bagua_ref.record.files import Entry, RecordingError, read_recording

KINDS = (
    "start",
    "buffer",
    "batch",
    "input",
    "output",
    "loss",
    "local",
    "grad",
    "option",
    "state",
    "weight",
    "buffer_after",
)
"""Kinds of values; each depends on the preceding ones in its step. Random states ("rng", "drawn")
and settings of modules are excluded: their differences do not count by themselves, but may be
causes.
"""


class Mismatch(NamedTuple):
    """A value that differs between runs; None: missing in a run."""

    rank: int
    name: str
    a: Entry | None
    b: Entry | None

    def distance(self) -> float | None:
        """Return the relative difference of norms, inf if one is not finite; None if they are not
        recorded.
        """
        if self.a is None or self.b is None or self.a.norm is None or self.b.norm is None:
            return None
        a, b = self.a.norm, self.b.norm
        return abs(a - b) / (max(abs(a), abs(b)) or 1.0) if math.isfinite(a + b) else math.inf


class Pair:
    """Two recordings, aligned by step.

    Args:
        a: folder of the first recording.
        b: folder of the second recording.

    Attributes:
        runs: the ranks' recordings of each run.
        ranks: rank numbers.
        steps: steps that both runs have.

    Raises:
        RecordingError: one cannot be read, or they have other numbers of ranks or no step in common.
    """

    def __init__(self, a: Path, b: Path) -> None:
        self.runs = read_recording(a), read_recording(b)
        counts = [len(run) for run in self.runs]
        if counts[0] != counts[1]:
            raise RecordingError(
                f"{str(a)!r} is of {counts[0]} ranks and {str(b)!r} of {counts[1]}; only recordings"
                " of equally many can be compared"
            )
        self.ranks = [*range(counts[0])]
        of_runs = [
            set.intersection(*(set(run[rank].steps) for rank in self.ranks)) for run in self.runs
        ]
        self.steps = sorted(of_runs[0] & of_runs[1])
        if not self.steps:
            ranges = [f"{min(steps)} to {max(steps)}" if steps else "none" for steps in of_runs]
            raise RecordingError(
                f"{str(a)!r} and {str(b)!r} have no step in common: {ranges[0]} and {ranges[1]}"
            )

    def at(self, run: int, rank: int, step: int) -> dict[str, Entry]:
        """Return a run's entries of a step, empty if not recorded."""
        found = self.runs[run][rank].steps.get(step)
        return {} if found is None else found.entries

    def digest(self, run: int, rank: int, step: int, name: str) -> int | None:
        """Return a run's digest, if it is recorded."""
        entry = self.at(run, rank, step).get(name)
        return None if entry is None else entry.digest

    def mismatches(self, step: int) -> dict[str, list[Mismatch]]:
        """Return the values that differ in a step, grouped by kind in order of dependence."""
        found: dict[str, list[Mismatch]] = {kind: [] for kind in KINDS}
        for rank in self.ranks:
            a, b = (run[rank].steps[step] for run in self.runs)
            starts = [self._start(run, rank, step) for run in range(2)]
            if (a.start or b.start) and all(starts):
                found["start"] += _unequal(rank, *starts)
            for mismatch in _unequal(rank, a.entries, b.entries):
                lacks = (mismatch.a is None and a.partial) or (mismatch.b is None and b.partial)
                if kind_of(mismatch.name) in found and not lacks:
                    found[kind_of(mismatch.name)].append(mismatch)
        return {kind: listed for kind, listed in found.items() if listed}

    def _start(self, run: int, rank: int, step: int) -> dict[str, Entry]:
        """Return weights and state at the start of the step: recorded then, or at the end of the
        previous step.
        """
        return self.runs[run][rank].steps[step].start or {
            name: entry
            for name, entry in self.at(run, rank, step - 1).items()
            if kind_of(name) in ("state", "weight")
        }


def kind_of(name: str) -> str:
    """Return the kind of an entry: "grad" of "grad:layer.weight"."""
    return name.partition(":")[0]


def _unequal(rank: int, a: dict[str, Entry], b: dict[str, Entry]) -> Iterator[Mismatch]:
    for name in dict.fromkeys([*a, *b]):
        mismatch = Mismatch(rank, name, a.get(name), b.get(name))
        if mismatch.a is None or mismatch.b is None or mismatch.a.digest != mismatch.b.digest:
            yield mismatch

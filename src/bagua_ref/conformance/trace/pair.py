"""Two records of `bagua_ref.record`, read and aligned by step."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from bagua_ref.base.untrusted import NATURAL
from bagua_ref.conformance.formats import read_tensors
from bagua_ref.conformance.trace.files import RankTrace, TraceError, read_lines, read_trace

__all__ = ["KINDS", "Digested", "Mismatch", "Pair", "StepDigests", "kind_of"]

KINDS = (
    "rng",
    "mode",
    "buffer",
    "batch",
    "input",
    "module",
    "output",
    "loss",
    "local",
    "grad",
    "option",
    "state",
    "weight",
    "buffer_after",
)
"""The kinds of records, each of which depends on those before it in its step."""

_LINE = {
    "step": NATURAL,
    "entries": list,
    "about": {str: str},
    "start?": list,
    "partial?": bool,
    "file?": str,
}
_OF_ALL_RANKS = ("grad", "option", "state", "weight")
"""What must be equal on any number of ranks, if gradients are averaged over all of them."""


class Digested(NamedTuple):
    """What is recorded of one value: digest, norm (None: not recorded), and its dtype, shape and
    device, or its text.
    """

    digest: int
    norm: float | None
    about: str

    @property
    def dtype(self) -> str:
        """The dtype's name, of a tensor."""
        return self.about.partition(" ")[0]

    @property
    def device(self) -> str:
        """The device's name, of a tensor."""
        return self.about.partition("] ")[2].partition(" ")[0]


@dataclass(frozen=True)
class StepDigests:
    """One rank's digests of a step, by name; at the ``start`` of recording, those of weights and
    optimizer state too.
    """

    entries: dict[str, Digested]
    start: dict[str, Digested]
    file: str | None
    partial: bool


class Mismatch(NamedTuple):
    """A record that differs between runs; None: a run lacks it."""

    rank: int
    name: str
    a: Digested | None
    b: Digested | None

    def distance(self) -> float | None:
        """Return the relative difference of norms, inf if one is not finite; None if they are not
        recorded.
        """
        if self.a is None or self.b is None or self.a.norm is None or self.b.norm is None:
            return None
        a, b = self.a.norm, self.b.norm
        return abs(a - b) / (max(abs(a), abs(b)) or 1.0) if math.isfinite(a + b) else math.inf


class Pair:
    """Two records, aligned by step.

    Args:
        a: folder of the first record.
        b: folder of the second one.

    Attributes:
        runs: the ranks of each.
        ranks: those that are compared.
        steps: likewise.
        kinds: likewise.

    Raises:
        TraceError: a record cannot be read, or they have no step in common.
    """

    def __init__(self, a: Path, b: Path) -> None:
        self.runs: tuple[list[RankTrace], ...] = tuple(
            read_trace(folder, _read_digests) for folder in (a, b)
        )
        same = len(self.runs[0]) == len(self.runs[1])
        self.ranks = list(range(len(self.runs[0]))) if same else [0]
        self.kinds = KINDS if same else _OF_ALL_RANKS
        of_runs = [
            set.intersection(*(set(run[rank].steps) for rank in self.ranks)) for run in self.runs
        ]
        self.steps = sorted(set.intersection(*of_runs))
        self._kept: dict[Path, dict[str, Tensor]] = {}
        if not self.steps:
            ranges = [f"{min(steps)} to {max(steps)}" if steps else "none" for steps in of_runs]
            raise TraceError(
                f"{str(a)!r} and {str(b)!r} have no step in common: {ranges[0]} and {ranges[1]}"
            )

    def at(self, run: int, rank: int, step: int) -> dict[str, Digested]:
        """Return a run's digests of a step, of which there may be none."""
        return (
            self.runs[run][rank].steps[step].entries if step in self.runs[run][rank].steps else {}
        )

    def digest(self, run: int, rank: int, step: int, name: str) -> int | None:
        """Return a run's digest, if it is recorded."""
        entry = self.at(run, rank, step).get(name)
        return None if entry is None else entry.digest

    def mismatches(self, step: int) -> Iterator[tuple[str, list[Mismatch]]]:
        """Yield the kinds with differing records in a step, in the order of their dependence, and
        those records.
        """
        found: dict[str, list[Mismatch]] = {kind: [] for kind in ("start", *self.kinds)}
        for rank in self.ranks:
            lines = [run[rank].steps[step] for run in self.runs]
            starts = [self._start(run, rank, step) for run in range(2)]
            if any(line.start for line in lines) and all(starts):
                found["start"] += _unequal(rank, *starts)
            partial = [line.partial for line in lines]
            for mismatch in _unequal(rank, *(line.entries for line in lines)):
                kind = kind_of(mismatch.name)
                cut_off = (mismatch.a is None and partial[0]) or (mismatch.b is None and partial[1])
                # recorded with values only
                cut_off |= kind == "module" and any(line.file is None for line in lines)
                if (
                    kind in found
                    and not cut_off
                    and not (len(self.runs[0]) != len(self.runs[1]) and _sharded(mismatch))
                ):
                    found[kind].append(mismatch)
        for kind, listed in found.items():
            if listed:
                yield kind, listed

    def _start(self, run: int, rank: int, step: int) -> dict[str, Digested]:
        """Return weights and state as the step began: recorded then, or at the end of the step
        before.
        """
        line = self.runs[run][rank].steps[step]
        if line.start:
            return dict(line.start)
        return {
            name: entry
            for name, entry in self.at(run, rank, step - 1).items()
            if kind_of(name) in ("state", "weight")
        }

    def values(self, step: int, mismatch: Mismatch) -> tuple[Tensor, Tensor] | None:
        """Return both values, flat, if they are kept and of one dtype and shape."""
        found = []
        for run in self.runs:
            file = run[mismatch.rank].steps[step].file
            if file is None:
                return None
            path = run[mismatch.rank].folder / file
            if path not in self._kept:
                if len(self._kept) > 1:  # of another rank or step; files are large
                    self._kept.clear()
                self._kept[path] = read_tensors(path, TraceError)
            found.append(self._kept[path].get(mismatch.name))
        a, b = found
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            return None
        return a.reshape(-1), b.reshape(-1)


def kind_of(name: str) -> str:
    """Return the kind of a record: "grad" of "grad:layer.weight"."""
    return name.partition(":")[0]


def _read_digests(path: Path) -> dict[int, Any]:
    steps: dict[int, Any] = {}
    told: dict[str, str] = {}

    def digested(entries: list[Any]) -> dict[str, Digested]:
        found = {}
        try:  # checked here, as there are many
            for name, number, norm in entries:
                found[sys.intern(name)] = Digested(
                    int(number, 16), None if norm is None else float(norm), told.get(name, "")
                )
        except (TypeError, ValueError):
            raise TraceError(
                f"{str(path)!r}: an entry of step {line['step']} is not a name, a digest and a norm"
            ) from None
        return found

    for line in read_lines(path, _LINE):
        if steps and line["step"] <= next(reversed(steps)):  # a restart repeats the later ones
            steps = {step: kept for step, kept in steps.items() if step < line["step"]}
        told.update(line["about"])
        steps[line["step"]] = StepDigests(
            digested(line["entries"]),
            digested(line.get("start") or []),
            line.get("file"),
            bool(line.get("partial")),
        )
    return steps


def _unequal(rank: int, a: dict[str, Digested], b: dict[str, Digested]) -> list[Mismatch]:
    names = dict.fromkeys([*a, *b])
    found = [Mismatch(rank, name, a.get(name), b.get(name)) for name in names]
    return [m for m in found if m.a is None or m.b is None or m.a.digest != m.b.digest]


def _sharded(mismatch: Mismatch) -> bool:
    return any(side is not None and " shard " in side.about for side in (mismatch.a, mismatch.b))

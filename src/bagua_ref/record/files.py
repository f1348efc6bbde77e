"""Files of a recording: one folder per rank, with a manifest and an index of steps."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bagua_ref.base.untrusted import NATURAL, SCALAR, check_form, load_json

FORMAT = "bagua_ref recording 2"
MANIFEST, INDEX = "manifest.json", "steps.jsonl"

_MANIFEST_FORM = {
    "rank": NATURAL,
    "world_size": NATURAL,
    "command": [str],
    "settings": {str: SCALAR},
    "complete": bool,
    "stopped?": str,
}
_STEP_FORM = {
    "step": NATURAL,
    "entries": list,
    "start": list,
    "metadata": {str: str},
    "partial": bool,
}


class RecordingError(Exception):
    """A recording cannot be read: files of a rank are missing or damaged, or belong to another
    run.
    """


class Entry(NamedTuple):
    """The record of one value: digest, norm (None: not recorded), and metadata: a tensor's dtype,
    shape and device, or the text.
    """

    digest: int
    norm: float | None
    metadata: str

    @property
    def dtype(self) -> torch.dtype | None:
        """A tensor's dtype; None of a text."""
        found = getattr(torch, self.metadata.partition(" ")[0], None)
        return found if isinstance(found, torch.dtype) else None

    @property
    def shape(self) -> list[int]:
        """The shape of a tensor, or of this rank's shard of it."""
        listed = self.metadata.rpartition("[")[2].partition("]")[0]
        return [int(size) for size in listed.split(",") if size.strip().isdigit()]


@dataclass(frozen=True)
class Step:
    """One rank's entries of a step, by name.

    Attributes:
        entries: entries in order of recording; the kind is the part of the name before the colon.
        start: weights and optimizer state before the first step that a process recorded.
        partial: whether the run failed in this step.
    """

    entries: dict[str, Entry]
    start: dict[str, Entry]
    partial: bool


@dataclass(frozen=True)
class RankRecording:
    """One rank's part of a recording: its folder, manifest, and steps by number."""

    folder: Path
    manifest: dict[str, Any]
    steps: dict[int, Step]


def read_recording(folder: Path) -> list[RankRecording]:
    """Return all ranks' recordings in ``folder``, by rank.

    Raises:
        RecordingError: there is none, a rank is missing, or a file is damaged.
    """
    ranks = [_read_rank(path.parent) for path in folder.glob(f"rank*/{MANIFEST}")]
    ranks.sort(key=lambda each: int(each.manifest["rank"]))
    if not ranks:
        raise RecordingError(f"{str(folder)!r} holds no recording: no rank0/{MANIFEST} in it")
    of = [(each.manifest["rank"], each.manifest["world_size"]) for each in ranks]
    if of != [(rank, len(ranks)) for rank in range(len(ranks))]:
        listed = ", ".join(f"rank {rank} of {world_size}" for rank, world_size in of)
        raise RecordingError(
            f"{str(folder)!r} must hold one run's recordings of all ranks; it holds {listed}"
        )
    return ranks


def _read_rank(folder: Path) -> RankRecording:
    path = folder / MANIFEST
    try:
        manifest = load_json(path.read_bytes())
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise RecordingError(
                f"{str(path)!r} is not the manifest of a recording: its format is not {FORMAT!r}"
            )
        check_form(manifest, _MANIFEST_FORM, "it")
        path = folder / INDEX
        return RankRecording(folder, manifest, _read_steps(path))
    except OSError as error:
        raise RecordingError(f"{error.filename!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecordingError(f"{str(path)!r} is damaged: {error}") from None


def _read_steps(path: Path) -> dict[int, Step]:
    steps: dict[int, Step] = {}
    metadata: dict[str, str] = {}

    def parsed(entries: list[Any]) -> dict[str, Entry]:
        return {
            sys.intern(name): Entry(
                int(number, 16), None if norm is None else float(norm), metadata.get(name, "")
            )
            for name, number, norm in entries
        }

    *lines, _ = path.read_bytes().split(b"\n")  # a last line without its end was cut off by a crash
    for number, text in enumerate(lines, start=1):
        try:
            line = load_json(text)
            check_form(line, _STEP_FORM, "it")
            metadata.update(line["metadata"])
            entries, start = (parsed(line[key]) for key in ("entries", "start"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {number}: {error}") from None
        if steps and line["step"] <= next(reversed(steps)):  # a restart repeats the later ones
            steps = {step: kept for step, kept in steps.items() if step < line["step"]}
        steps[line["step"]] = Step(entries, start, line["partial"])
    return steps

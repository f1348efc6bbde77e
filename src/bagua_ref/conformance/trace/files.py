"""Files of a trace: per rank a folder with a manifest, an index of steps and a safetensors file per
sampled step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.base.untrusted import NATURAL, SCALAR, check_form, load_json, read_file
from bagua_ref.conformance.formats import CODES, read_tensors

__all__ = [
    "FORMAT",
    "INDEX",
    "MANIFEST",
    "TRACE_VERSION",
    "RankTrace",
    "Record",
    "TraceError",
    "check_int",
    "json_values",
    "line_of",
    "named_tensors",
    "read_lines",
    "read_trace",
]

FORMAT = "bagua_ref trace"
TRACE_VERSION = "1"
"""Of the format of the files."""

MANIFEST, INDEX = "manifest.json", "steps.jsonl"


class TraceError(Exception):
    """A trace cannot be used: a rank's files are missing or damaged, or the ranks' traces do not
    belong together.
    """


@dataclass
class Record:
    """One execution of a bucket's operation on one rank.

    Attributes:
        bucket: its name.
        execution: number of earlier executions of the bucket's operation since recording began.
        inputs: flat inputs, by name.
        outputs: flat outputs, by name.
        info: further JSON values.
    """

    bucket: str
    execution: int
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


def check_int(name: str, value: Any, least: int | None = None, also: str = "") -> None:
    """Raise TypeError unless ``value`` is an int, and ValueError if it is less than ``least``;
    ``also`` says what else may be.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be an int{also}")
    if least is not None and value < least:
        raise ValueError(f"{name}={value} must be {least} or more{also}")


def json_values(argument: str, values: Any) -> dict[str, Any]:
    """Return a mapping of names to JSON values."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{argument}={values!r} must be a mapping of names to values")
    for name, value in values.items():
        if value is not None and not isinstance(value, str | int | float):
            raise TypeError(
                f"{argument}: {name}={value!r} must be a number, a string, a bool or None, as JSON"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(
                f"{argument}: {name}={value!r} must be finite, as JSON has no infinity or NaN"
            )
    return dict(values)


def named_tensors(argument: str, tensors: Any) -> dict[str, dict[str, Tensor]]:
    """Return the parts of the given values by name, as tensors that share memory with them if
    possible.
    """
    named = dict(tensors) if isinstance(tensors, Mapping) else {"x": tensors}
    if not named:
        raise ValueError(f"{argument}={tensors!r} must hold at least one tensor")
    found: dict[str, dict[str, Tensor]] = {}
    for role, value in named.items():
        if not isinstance(role, str) or not role.isidentifier():
            raise ValueError(f"{argument}: the name {role!r} must be an identifier, such as 'x'")
        parts = (
            {str(place): part for place, part in enumerate(value)}
            if isinstance(value, list | tuple)
            else {"x": value}
        )
        found[role] = {name: _as_tensor(argument, part) for name, part in parts.items()}
        dtypes = {str(part.dtype) for part in found[role].values()}
        if len(dtypes) != 1:
            raise ValueError(
                f"{argument}: {role} must be a list of at least one tensor, all of one dtype, not"
                f" {sorted(dtypes)}"
            )
    return found


def _as_tensor(argument: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        # torch refuses negative strides and warns of read-only arrays.
        value = torch.from_numpy(np.require(value, requirements=["C", "W"]))
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{argument}: {value!r} must be a torch.Tensor or a NumPy array, not"
            f" {type(value).__name__}"
        )
    if value.dtype not in CODES:
        raise TypeError(
            f"{argument}: {value.dtype} is not supported; use one of {', '.join(CODES.values())}"
        )
    return value


def line_of(step: int, records: list[Record]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the index's line and the tensors of a step's records, in the order in which their
    operations ended.

    A step may be written again with more records; the index's last line for a step counts.
    """
    tensors: dict[str, Tensor] = {}
    entries = []
    for record in records:
        for kind, values in (("in", record.inputs), ("out", record.outputs)):
            tensors.update(
                {f"{record.bucket}:{kind}:{role}": tensor for role, tensor in values.items()}
            )
        entries.append(
            {
                "bucket": record.bucket,
                "execution": record.execution,
                "inputs": list(record.inputs),
                "outputs": list(record.outputs),
                "info": record.info,
            }
        )
    return {"step": step, "file": f"{step:08d}.safetensors", "records": entries}, tensors


@dataclass(frozen=True)
class RankTrace:
    """One rank's part of a trace.

    Attributes:
        folder: the rank's folder.
        manifest: its manifest.
        steps: entries of the index, by step.
    """

    folder: Path
    manifest: dict[str, Any]
    steps: dict[int, Any]

    def bytes(self) -> int:
        """Return the size of all steps' files."""
        return sum((self.folder / entry["file"]).stat().st_size for entry in self.steps.values())

    def records(self, step: int) -> dict[str, Record]:
        """Return a step's records by bucket, in order.

        Raises:
            TraceError: the step's file is missing, damaged, or lacks a tensor.
        """
        entry = self.steps[step]
        path = self.folder / entry["file"]
        tensors = read_tensors(path, TraceError)

        def flat(bucket: str, kind: str, roles: list[str]) -> dict[str, Tensor]:
            try:
                return {role: tensors[f"{bucket}:{kind}:{role}"].reshape(-1) for role in roles}
            except KeyError as missing:
                raise TraceError(
                    f"{str(path)!r} has no tensor {missing}, which {INDEX} lists"
                ) from None

        found: dict[str, Record] = {}
        for listed in entry["records"]:
            name = listed["bucket"]
            inputs, outputs = (
                flat(name, "in", listed["inputs"]),
                flat(name, "out", listed["outputs"]),
            )
            found[name] = Record(name, listed["execution"], inputs, outputs, listed["info"])
        return found


def read_trace(
    directory: Path, read_index: Callable[[Path], dict[int, Any]] | None = None
) -> list[RankTrace]:
    """Return all ranks' traces in ``directory``, by rank.

    Args:
        directory: holds the ranks' folders.
        read_index: returns the steps that an index of digests lists, by number; None: the trace is
            a `Recorder`'s.

    Raises:
        TraceError: there is none of this kind, a rank is missing, a manifest or an index is
            damaged, or the ranks' worlds differ.
    """
    if not directory.is_dir():
        raise TraceError(f"{str(directory)!r} is not a folder")
    present = sorted(path.name for path in directory.iterdir() if (path / MANIFEST).exists())
    if not present:
        hint = (
            f"; it is the folder of one rank: pass {str(directory.parent)!r}"
            if (directory / MANIFEST).exists()
            else ""
        )
        raise TraceError(f"{str(directory)!r} holds no trace: no rank0/{MANIFEST} in it{hint}")
    first = _read_rank(directory / present[0], read_index)
    world_size = first.manifest["world_size"]
    ranks = []
    for rank in range(world_size):
        folder = directory / f"rank{rank}"
        if not (folder / MANIFEST).exists():
            raise TraceError(
                f"{str(folder / MANIFEST)!r} is missing; a trace of {world_size} ranks needs rank0"
                f" to rank{world_size - 1} in one folder, and {', '.join(present)}"
                f" {'are' if len(present) > 1 else 'is'} there"
            )
        trace = _read_rank(folder, read_index)
        for key, expected in (
            ("rank", rank),
            ("world_size", world_size),
            ("nodes", first.manifest["nodes"]),
        ):
            if trace.manifest[key] != expected:
                raise TraceError(
                    f"{str(folder / MANIFEST)!r} says {key}={trace.manifest[key]!r}, where"
                    f" {expected!r} was expected"
                )
        ranks.append(trace)
    return ranks


_KINDS = {
    None: "inputs and outputs of operations, for `bagua-ref trace check`",
    "digests": "digests of a training by bagua_ref.record, for `bagua-ref trace diff`",
}
"""What a trace holds, by ``what`` of its manifest, and the command that reads it."""

_MANIFEST = {
    "rank": NATURAL,
    "world_size": NATURAL,
    "nodes": [NATURAL],
    "options": {str: SCALAR},
    "buckets": {
        str: {"dtype": str, "elements": NATURAL, "tensors": [{"name": str, "shape": [NATURAL]}]}
    },
    "algorithm?": str,
    "stopped?": {"reason": str},
    "what?": str,
}

_INFO = {
    str: SCALAR,
    "execution?": NATURAL,
    "ranks?": NATURAL,
    "divided_by?": (int, float),
    "beta1?": (int, float),
    "graph?": str,
}
_INFO |= {
    "t?": NATURAL,
    "fragment?": NATURAL,
    "averages?": str,
    "k?": NATURAL,
    "matrices?": str,
    "elements?": NATURAL,
}
_INFO |= {"applied?": NATURAL, "outer_lr?": (int, float)}

_STEP = {
    "step": NATURAL,
    "file": str,
    "records": [
        {"bucket": str, "execution": NATURAL, "inputs": [str], "outputs": [str], "info?": _INFO}
    ],
}

_MOST_DIMENSIONS = 64  # of a tensor of torch


def _read_rank(folder: Path, read_index: Callable[[Path], dict[int, Any]] | None) -> RankTrace:
    path = folder / MANIFEST
    try:
        manifest = load_json(read_file(path))
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise TraceError(
                f"{str(path)!r} is not the manifest of a trace: its format is not {FORMAT!r}"
            )
        if manifest.get("trace_version") != TRACE_VERSION:
            raise TraceError(
                f"{str(path)!r} has trace_version {manifest.get('trace_version')!r}; this bagua_ref"
                f" reads {TRACE_VERSION!r}"
            )
        manifest = {"nodes": [manifest.get("world_size")], "options": {}, "buckets": {}, **manifest}
        check_form(manifest, _MANIFEST, "it")
        wanted = None if read_index is None else "digests"
        if (what := manifest.get("what")) != wanted:
            raise TraceError(
                f"{str(folder)!r} holds {_KINDS.get(what, repr(what))}; here, {_KINDS[wanted]}, are"
                " needed"
            )
        if any(
            len(tensor["shape"]) > _MOST_DIMENSIONS
            for bucket in manifest["buckets"].values()
            for tensor in bucket["tensors"]
        ):
            raise TraceError(
                f"{str(path)!r} has a tensor of more than {_MOST_DIMENSIONS} dimensions"
            )
        if 0 in manifest["nodes"] or sum(manifest["nodes"]) != manifest["world_size"]:
            raise TraceError(
                f"{str(path)!r} has nodes={manifest['nodes']}, which do not sum to"
                f" world_size={manifest['world_size']}"
            )
        return RankTrace(folder, manifest, (read_index or _read_index)(folder / INDEX))
    except OSError as error:
        raise TraceError(f"{error.filename!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TraceError(f"{str(path)!r} is not valid JSON of a manifest: {error}") from None


def _read_index(path: Path) -> dict[int, dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    for entry in read_lines(path, _STEP):
        for record in entry["records"]:
            record["info"] = record.get("info") or {}
        steps[entry["step"]] = entry
    return steps


def read_lines(path: Path, form: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of an index, which have a ``form`` with ``step`` and ``file``.

    Raises:
        TraceError: a line has not.
    """
    named: dict[str, int] = {}
    lines = read_file(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line or number == len(lines):  # a last line without its end was cut off by a crash
            continue
        try:
            entry = load_json(line)
            check_form(entry, form, "it")
            if (file := entry.get("file")) is not None:
                if not file.isprintable() or file != os.path.basename(file):
                    raise ValueError(f"file={file!r} must be a name in this folder")
                if named.setdefault(file, entry["step"]) != entry["step"]:
                    raise ValueError(f"file={file!r} is already that of step {named[file]}")
        except ValueError as error:
            raise TraceError(
                f"{str(path)!r} line {number} is not a valid entry of a step: {error}"
            ) from None
        yield entry

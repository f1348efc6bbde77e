"""Flight recorder: the last operations of this rank, written to a file when communication fails."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from bagua_ref.base.runtime import current_world
from bagua_ref.errors import CommunicationError

__all__ = ["FOLDER", "dump", "explain", "record"]

FOLDER = "BAGUA_REF_FLIGHT_RECORDER_DIR"
"""The environment variable with the folder of the files; unset or empty: no files are written."""

_RECORDED = ("kind", "bucket", "bytes", "module", "round", "started", "ended")


def record(error: BaseException | None = None) -> dict[str, Any]:
    """Return this rank's last operations and its waits, as JSON values.

    The operations are those on buckets, and the agreements around them, of all modules of this
    process: the last 256, oldest first. Their ``kind``, ``bucket``, ``bytes``, ``module`` and
    ``round`` are followed by ``started`` and ``ended``, in seconds since 1970; an ``ended`` of None
    means that it is under way, or failed. ``waits`` are those of this process's threads.

    Args:
        error: the reason for the record, if there is one.

    >>> sorted(bagua_ref.observe.flight_recorder.record())
    ['error', 'operations', 'rank', 'time', 'waits', 'world_size']
    """
    world = current_world()
    now = time.time()
    offset = now - world.clock()
    waits = [] if world.peers is None else world.peers.under_way()
    found = [
        {name: getattr(operation, name) for name in _RECORDED} for operation in world.operations
    ]
    for entry in found:
        entry["started"] += offset
        entry["ended"] = None if entry["ended"] is None else entry["ended"] + offset
    return {
        "rank": world.identity.rank,
        "world_size": world.identity.world_size,
        "time": now,
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "waits": [{**wait, "since": wait["since"] + offset} for wait in waits],
        "operations": found,
    }


def dump(folder: str | Path, error: BaseException | None = None) -> Path:
    """Write `record` into a new file ``rank<r>.json`` in ``folder``, which is created if missing;
    return its path.

    A file that is there already stays: the next one is ``rank<r>-1.json``.

    Raises:
        OSError: the file cannot be written.
    """
    found = record(error)
    text, rank = (
        ",\n".join(f" {json.dumps(name)}: {_lines(value)}" for name, value in found.items()),
        found["rank"],
    )
    folder, number = Path(folder), 0
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        path = folder / (f"rank{rank}-{number}.json" if number else f"rank{rank}.json")
        try:
            with path.open("x") as file:
                file.write(f"{{\n{text}\n}}\n")
        except FileExistsError:
            number += 1
        else:
            return path


def explain(error: BaseException) -> None:
    """If BAGUA_REF_FLIGHT_RECORDER_DIR is set, write `record` there and add the file's path to a
    CommunicationError's message.
    """
    folder = os.environ.get(FOLDER)
    if not folder or not isinstance(error, CommunicationError):
        return
    try:
        hint = f"this rank's last operations are in {dump(folder, error)}"
    except OSError as why:
        hint = f"this rank's last operations could not be written ({why})"
    error.args = (f"{error}; {hint}", *error.args[1:])


def _lines(value: Any) -> str:
    """Return ``value`` as JSON, with one line per list entry."""
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    entries = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
    return f"[\n{entries}\n ]"

"""Dumps of flight recorders and stacks: what is known of each rank, in compact arrays."""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_ref.simulation.tasks import is_user_code

__all__ = ["LONG", "DumpError", "Operation", "RankDump", "Stack", "Track", "read_dumps"]

LONG = 60.0
"""Seconds of a wait that is no ordinary one; with a shorter timeout, half of that."""

_FILE = re.compile(r"(?:.*[_.-])?rank_?(\d+)(?:-\d+)?(?:\.\w+)?")
"""File names of a rank, such as torch_trace_rank_3, rank3.json and spy_rank_3.txt."""

_LIBRARY = re.compile(r"(site|dist)-packages/|/lib/python3|^torch/|^[\w/]*(threading|runpy)\.py$")
"""Files that are no user's, also in paths of another machine."""

_PUBLIC = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
"""What recorders call public functions."""

_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
}

_PROCESSES_FROM = 64
"""Reading fewer ranks takes less time than starting processes."""


Ranks = range | tuple[int, ...]
"""Ranks of a group: thousands of groups of thousands of ranks are ranges, mostly."""


class DumpError(ValueError):
    """A dump that cannot be read, or does not belong to the others; the message names the file."""


class Operation(NamedTuple):
    """A collective, as many steps and ranks have it.

    Attributes:
        text: the operation with its tensors, such as "all_reduce of float32[5]".
        agrees: what must be equal on all ranks: the operation, its elements and dtypes.
        file: of the user's code; empty if it is unknown.
        line: in that file.
        sent: the elements of each input; in an all-to-all, those for each rank.
        received: the elements of each output.
    """

    text: str
    agrees: str
    file: str
    line: int
    sent: tuple[int, ...]
    received: tuple[int, ...]


class Track(NamedTuple):
    """One rank's collectives in one group: arrays of equal length, in ascending order.

    Attributes:
        numbers: sequence numbers in the group.
        operations: indices of operations.
        created: nanoseconds since 1970.
        timeouts: in milliseconds; 0: unknown.
        pending: whether the rank still waits for it.
    """

    numbers: NDArray[np.int64]
    operations: NDArray[np.int64]
    created: NDArray[np.int64]
    timeouts: NDArray[np.int64]
    pending: NDArray[np.bool_]


class Stack(NamedTuple):
    """What a thread was doing.

    Attributes:
            thread: its name; empty for the main thread.
            file: the innermost line of the user's code; empty if there is none.
            line: in that file.
            text: of that line, and the functions' names, for guesses.
            seconds: for which it has not moved; 0 if that is unknown.
            call: of torch.distributed: ``operation`` and ``group``; of a message its ``peers``; of a
    collective ``members`` and ``root``; and the elements ``sent`` to ranks and ``received``
                from them, all as far as they are known. Empty if it makes none.
    """

    thread: str
    file: str
    line: int
    text: str
    seconds: float
    call: Mapping[str, Any]


@dataclass
class RankDump:
    """All that is known of one rank.

    Attributes:
        rank: the global rank.
        time: of the dump, in seconds since 1970.
        operations: those to which tracks refer.
        tracks: its collectives, by group's name.
        groups: the global ranks of groups, by name, as far as they are known.
        stacks: of its threads, the main thread's first, and pending messages.
        limit: the seconds from which on a thread's wait is no ordinary one.
        reason: for which it was dumped, such as "timeout" or "exit"; empty if it is unknown.
        error: of the rank: ``type``, ``message``, ``file``, ``line`` and whether it is one of
            ``communication``; None: it has none.
        has_ended: whether the process has ended without an exception.
        world_size: 0 if it is unknown.
        version: of the recorder's format; empty without a recorder's dump.
        is_complete: whether the recorder has lost no entries.
        script: the outermost file of the user's code.
    """

    rank: int
    time: float = 0.0
    operations: list[Operation] = field(default_factory=list)
    tracks: dict[str, Track] = field(default_factory=dict)
    groups: dict[str, Ranks] = field(default_factory=dict)
    stacks: list[Stack] = field(default_factory=list)
    limit: float = LONG
    reason: str = ""
    error: Mapping[str, Any] | None = None
    has_ended: bool = False
    world_size: int = 0
    version: str = ""
    is_complete: bool = True
    script: str = ""


class _Unpickler(pickle.Unpickler):
    """An unpickler of numbers, text, lists and dicts, which runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no flight recorder does")


def read_dumps(folder: str | Path) -> dict[int, RankDump]:
    """Return the dumps of a folder, by rank.

    Raises:
        DumpError: there are none, one is damaged, or they do not belong together.
    """
    files: dict[int, list[Path]] = {}
    try:
        for path in sorted(Path(folder).iterdir()):
            if (match := _FILE.fullmatch(path.name)) and path.is_file():
                files.setdefault(int(match[1]), []).append(path)
    except OSError as error:
        raise DumpError(f"cannot read {str(folder)!r}: {error.strerror}") from None
    if not files:
        raise DumpError(
            f"{str(folder)!r} has no dumps, which are files such as torch_trace_rank_0;"
            " bagua_ref.explain_hangs(folder) writes them"
        )
    if len(files) < _PROCESSES_FROM:
        found = list(map(_read_rank, sorted(files.items())))
    else:
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(_read_rank, sorted(files.items()), chunksize=16))
    for name in ("version", "world_size"):
        values = {getattr(dump, name): dump.rank for dump in found if getattr(dump, name)}
        if len(values) > 1:
            texts = [f"rank {rank}'s has {name} {value}" for value, rank in values.items()]
            raise DumpError(
                f"the dumps in {str(folder)!r} are of different runs: {', '.join(texts)}"
            )
        for size in values if name == "world_size" else ():
            if found[-1].rank >= size:
                raise DumpError(
                    f"{str(files[found[-1].rank][0])!r} is of another run: the job has {size} ranks"
                )
    return {dump.rank: dump for dump in found}


def _read_rank(entry: tuple[int, list[Path]]) -> RankDump:
    """Return a rank's dump, from all its files."""
    rank, paths = entry
    dump, found = RankDump(rank), dict[str, tuple[Path, Any]]()
    for path in paths:
        try:
            kind, content = _load(path)
            if content.get("rank", rank) != rank:
                raise ValueError(f"it is of rank {content['rank']}, and not of rank {rank}")
            if kind in found:
                other, before = found[kind]
                if kind == "operations":
                    key: Any = itemgetter("time")  # the last failure of a process counts
                elif kind == "entries" and _has_frames(before) != _has_frames(content):
                    key = _has_frames  # JSON has none, but all else
                else:
                    raise ValueError(f"{other.name} is of the same rank; leave one in the folder")
                content = max(before, content, key=key)
            found[kind] = path, content
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DumpError(f"cannot read {str(path)!r}: {error}") from None
    for kind, read in _READERS.items():
        if kind in found:
            path, content = found[kind]
            try:
                dump.time = dump.time or path.stat().st_mtime
                read(dump, content)
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
                what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                raise DumpError(f"cannot read {str(path)!r}: {what}") from None
    _mark_failed(dump)
    return dump


def _has_frames(content: Mapping[str, Any]) -> bool:
    return "frames" in str(content["entries"][:1])


def _load(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the kind of a file and its parsed content."""
    with path.open("rb") as file:
        start = file.read(4000)
        file.seek(0)
        if start[:1] == b"\x80":
            gc.disable()  # it takes a third of the time
            try:
                content = _Unpickler(file).load()
            except Exception as error:  # pickle raises anything on damaged data
                raise ValueError(f"it is damaged or truncated: {error}") from None
            finally:
                gc.enable()
        elif re.search(rb"(?m)^Thread .*\d", start):
            return "spy", {"text": file.read().decode(errors="replace")}
        else:
            try:
                content = json.load(file)
            except ValueError as error:
                raise ValueError(f"it is damaged, or neither pickle nor JSON: {error}") from None
    for kind in ("entries", "threads", "operations"):
        if isinstance(content, dict) and isinstance(content.get(kind), list):
            return kind, content
    raise ValueError("it has no entries, so no flight recorder wrote it")


@cache
def _is_users(file: str) -> bool:
    return not _LIBRARY.search(file) and is_user_code(file)


def _site(frames: Iterable[Mapping[str, Any]]) -> tuple[str, int]:
    """Return file and line of the innermost frame of the user's code."""
    for frame in frames:
        if _is_users(frame["filename"]):
            return frame["filename"], frame["line"]
    return "", 0


def _operation(entry: Mapping[str, Any], site: tuple[str, int]) -> Operation:
    """Return an entry's operation, with the sizes that must agree between ranks."""
    name, frames = entry["profiling_name"].rpartition(":")[2], entry.get("frames", ())
    public = shown = _PUBLIC.get(name, name)
    if frames and frames[0]["filename"].endswith("distributed_c10d.py") and not entry["is_p2p"]:
        shown = frames[0]["name"]  # gloo records a reduce_scatter as all_reduce
    side = "output" if "all_gather" in name or name == "scatter" else "input"
    dtypes = [_DTYPES.get(dtype, dtype.lower()) for dtype in entry[f"{side}_dtypes"]]
    sizes = [",".join(map(str, size)) for size in entry[f"{side}_sizes"]]
    tensors = [f"{dtype}[{size}]" for dtype, size in zip(dtypes, sizes, strict=False)]
    more = [f"{len(tensors) - 3} more"] * (len(tensors) > 3)
    text = shown + (f" of {', '.join(tensors[:3] + more)}" if tensors else "")
    sent, received = (tuple(map(math.prod, entry[f"{side}_sizes"])) for side in ("input", "output"))
    total = sum(received if side == "output" else sent)
    agrees = f"{public} {'' if 'all_to_all' in name else total} {sorted({*dtypes})}"
    return Operation(text, agrees, *site, sent, received)


def _read_recorder(dump: RankDump, content: Mapping[str, Any]) -> None:
    """Read what torch's flight recorder has dumped."""
    dump.version, entries = str(content["version"]), content["entries"]
    if not dump.version.startswith("2."):
        raise ValueError(f"its format has version {dump.version}; versions 2.x can be read")
    for name, config in content.get("pg_config", {}).items():
        if ranks := json.loads(config["ranks"]):  # gloo's are empty
            dump.groups[name] = _ranks(ranks)
            if dump.rank not in ranks:
                raise ValueError(f"it is not of rank {dump.rank}: group {name!r} has ranks {ranks}")
    ids: dict[Any, int] = {}
    rows: dict[str, dict[int, list[Any]]] = {}
    incarnations: dict[str, int] = {}
    for entry in entries:
        site = _site(entry.get("frames", ()))
        sizes = str((entry["input_sizes"], entry["output_sizes"], entry["input_dtypes"]))
        key = entry["profiling_name"], sizes, site
        if key not in ids:
            ids[key] = len(dump.operations)
            dump.operations.append(_operation(entry, site))
        number, group, created = ids[key], entry["process_group"][0], entry["time_created_ns"]
        is_pending = not entry["retired"] and entry["state"] != "completed"
        if incarnations.setdefault(group, entry["pg_id"]) != entry["pg_id"]:
            rows.pop(group, None)  # the process has made its groups anew
            incarnations[group] = entry["pg_id"]
        if not entry["is_p2p"]:
            row = [number, created, entry.get("timeout_ms") or 0, is_pending]
            before = rows.setdefault(group, {}).setdefault(entry["collective_seq_id"], row)
            before[3] |= is_pending  # operations that were coalesced share a number
        elif is_pending:
            dump.stacks.append(_message(dump, group, created, dump.operations[number]))
    for group, own in rows.items():
        numbers = sorted(own)
        columns = zip(*map(own.__getitem__, numbers), strict=True)
        arrays = [np.array(column) for column in (numbers, *columns)]
        dump.tracks[group] = Track(*arrays)
        last, ranks = dump.operations[arrays[1][-1]], dump.groups.get(group, ())
        if "all_to_all" in last.agrees and len(last.sent) == len(ranks) == len(last.received):
            call: dict[str, Any] = {"operation": last.text, "group": group}
            sent, received = (dict(zip(map(str, ranks), own, strict=True)) for own in last[-2:])
            call |= {"sent": sent, "received": received}
            dump.stacks.append(Stack("", last.file, last.line, "", 0.0, call))
    if entries:
        dump.is_complete = entries[0]["record_id"] == 0
        frames = entries[-1].get("frames", ())
        dump.script = dump.script or _outermost(frame["filename"] for frame in frames)


def _ranks(ranks: list[int]) -> Ranks:
    steps = {after - before for before, after in pairwise(ranks)} or {1}
    if ranks and len(steps) == 1 and min(steps) > 0:
        return range(ranks[0], ranks[-1] + 1, *steps)
    return tuple(ranks)


def _message(dump: RankDump, group: str, created: int, operation: Operation) -> Stack:
    """Return a pending message, such as "recv 1<-0 of float32[4]", as a thread that waits in it."""
    name, pair, *rest = operation.text.split(" ", 2)
    peers = [int(rank) for rank in re.findall(r"\d+", pair)[1:]]  # in the group
    peers = [dict(enumerate(dump.groups.get(group, ()))).get(rank, rank) for rank in peers]
    side = "dst" if name == "send" else "src"
    text = " ".join([f"{name}({side}={peers[0]})", *rest]) if peers else operation.text
    call = {"operation": text, "group": group, "peers": peers}
    return Stack("", operation.file, operation.line, "", dump.time - created / 1e9, call)


def _outermost(files: Iterable[str]) -> str:
    return ([file for file in files if _is_users(file)] or [""])[-1]


def _read_stacks(dump: RankDump, content: Mapping[str, Any]) -> None:
    """Read what `explain_hangs` has written."""
    dump.time, dump.reason = float(content["time"]), content["reason"]
    dump.error, dump.limit = content["error"], min(LONG, content["after"] / 2)
    dump.has_ended = dump.reason == "exit" or bool(content.get("ended"))
    dump.world_size = content["world_size"]
    dump.groups |= {name: _ranks(ranks) for name, ranks in content["groups"].items()}
    for thread in content["threads"]:
        frames = thread["frames"]
        lines = [frame["text"] for frame in frames if _is_users(frame["filename"])]
        text = " ".join([frame["function"] for frame in frames] + lines[:1])
        site = _site(frames)
        dump.stacks.append(Stack(thread["name"], *site, text, thread["seconds"], thread["call"]))
        dump.script = dump.script or _outermost(frame["filename"] for frame in frames)
    if dump.error is not None:  # of the main thread, whose stack is the error's
        dump.error = {**dump.error, "file": dump.stacks[0].file, "line": dump.stacks[0].line}


def _read_spy(dump: RankDump, content: Mapping[str, Any]) -> None:
    """Read what ``py-spy dump`` has printed; it says nothing about arguments and times."""
    for part in re.split(r"(?m)^(?=Thread )", content["text"])[1:]:
        name = re.match(r'.*"(.*)"', part)
        frames = re.findall(r"(?m)^\s+(.+) \((.+):(\d+)\)$", part)
        site = _site({"filename": file, "line": int(line)} for _, file, line in frames)
        thread = "" if name is None or name[1] == "MainThread" else name[1]
        text = " ".join(function for function, _, _ in frames)
        dump.stacks.append(Stack(thread, *site, text, 0.0, {}))


def _read_own(dump: RankDump, content: Mapping[str, Any]) -> None:
    """Read what `bagua_ref.flight_recorder` has dumped: its waits and its error."""
    dump.world_size, dump.time = content["world_size"], float(content["time"])
    for wait in content["waits"]:
        call = {"operation": wait["for"], "group": "", "members": wait["ranks"]}
        dump.stacks.append(Stack("", "", 0, "", dump.time - wait["since"], call))
    if content["error"]:
        kind, _, message = content["error"].partition(": ")
        dump.error = {"type": kind, "message": message, "file": "", "line": 0}
        dump.error["communication"] = True


_READERS = {
    "threads": _read_stacks,  # first: it knows the time
    "operations": _read_own,
    "entries": _read_recorder,
    "spy": _read_spy,
}


def _mark_failed(dump: RankDump) -> None:
    """Mark the newest call as pending if its exception ended the rank: gloo has retired it."""
    error = dump.error
    if error is None or not error["communication"] or not dump.tracks:
        return
    newest = max(dump.tracks.values(), key=lambda track: int(track.created[-1]))
    operation = dump.operations[newest.operations[-1]]
    if (operation.file, operation.line) == (error["file"], error["line"]):
        newest.pending[-1] = True

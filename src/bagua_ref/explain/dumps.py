"""Dumps of flight recorders and stacks, read into one `RankDump` for each rank."""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bagua_ref.errors import RankCall
from bagua_ref.simulation.tasks import is_user_code, place

__all__ = ["CALL", "LONG", "DumpError", "Operation", "RankDump", "Ranks", "Stack", "read_dumps"]

LONG = 60.0
"""Seconds after which a wait is too long; with a shorter timeout, half of the timeout."""

CALL = np.dtype(
    [
        ("rank", "i4"),
        ("operation", "i4"),  # index
        ("number", "i8"),  # sequence number in the group
        ("created", "i8"),  # nanoseconds since 1970
        ("timeout", "i8"),  # milliseconds; 0: unknown
        ("pending", "?"),  # whether the rank still waits for it
    ]
)
"""A collective of one rank, as a row of an array: jobs have millions of them."""

_FILE = re.compile(r"(?:.*[_.-])?rank_?(\d+)(?:-\d+)?(?:\.\w+)?")
"""Pattern of a rank's file names, such as torch_trace_rank_3, rank3.json and spy_rank_3.txt."""

_LIBRARY = re.compile(
    r"(site|dist)-packages/|/lib/python3"
    r"|^(torch|numpy|lightning|pytorch_lightning|transformers|accelerate|deepspeed|bagua_ref)/"
)
"""Pattern of libraries' files, also with paths of another machine and py-spy's short names."""

_PUBLIC = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
"""Name in recorders -> name of the public function."""

_PROCESSES_FROM = 64
"""Number of ranks from which on files are read in processes; for fewer, starting processes takes
longer.
"""

Ranks = tuple[int, ...]


class DumpError(ValueError):
    """A dump that cannot be read, or does not belong to the others; the message names the file."""


class Operation(NamedTuple):
    """A collective operation, shared by many steps and ranks.

    Attributes:
        group: name of the process group.
        text: the operation with its tensors, such as "all_reduce of float32[5]".
        agrees: the fields that must be equal on all ranks: the operation, its elements and dtypes.
        file: file of the user's code; empty if unknown.
        line: line in that file.
    """

    group: str
    text: str
    agrees: str
    file: str
    line: int


class Stack(NamedTuple):
    """A thread's activity: its call of torch.distributed, and the time since it last moved.

    Attributes:
        call: the call of torch.distributed, with the innermost line of the user's code; the
            operation is empty without a call. A message waits for its peers.
        seconds: time since the thread last moved; 0 if unknown.
        text: source line and function names, from which causes are guessed.
        facts: known arguments of the call: ``peers`` of a message; ``members`` and ``root`` of a
            collective; and the elements ``sent`` to ranks and ``received`` from them.
    """

    call: RankCall
    seconds: float
    text: str
    facts: Mapping[str, Any]


@dataclass
class RankDump:
    """The information about one rank.

    Attributes:
        rank: the global rank.
        time: time of the dump, in seconds since 1970.
        operations: the operations, to which calls refer by index.
        calls: the rank's collectives, as rows of `CALL`.
        groups: the global ranks of known groups, by name.
        stacks: stacks of the threads, the main thread's first, and pending messages.
        limit: duration in seconds after which a thread's wait is too long.
        reason: reason for the dump, such as "timeout" or "exit"; empty if unknown.
        error: the rank's error: ``type``, ``message``, and ``communication``, whether communication
            raised it (None of a crash); None: no error.
        has_ended: whether the process has ended without an exception.
        world_size: number of ranks, 0 if unknown.
        version: version of the recorder's format; empty without a recorder's dump.
        is_complete: whether the recorder still has all entries.
        script: the outermost file of the user's code.
    """

    rank: int
    time: float = 0.0
    operations: list[Operation] = field(default_factory=list)
    calls: NDArray[Any] = field(default_factory=lambda: np.empty(0, CALL))
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
    """An unpickler restricted to numbers, text, lists and dicts; it runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no flight recorder does")


def read_dumps(folder: str | Path) -> dict[int, RankDump]:
    """Return the dumps in a folder, by rank.

    Raises:
        DumpError: there are none, one is damaged, or they do not belong together.
    """
    files: dict[int, list[Path]] = {}
    try:
        for path in sorted(Path(folder).iterdir()):
            match = _FILE.fullmatch(path.name)
            # a process that has not crashed leaves its file of crashes empty
            if match and path.is_file() and (path.stat().st_size or path.suffix != ".crash"):
                files.setdefault(int(match[1]), []).append(path)
    except OSError as error:
        raise DumpError(f"cannot read {str(folder)!r}: {error.strerror}") from None
    if not files:
        raise DumpError(
            f"{str(folder)!r} has no dumps, which are files such as torch_trace_rank_0;"
            " bagua_ref.explain_hangs(folder) writes them"
        )
    dumps, operations = dict[int, RankDump](), dict[Operation, Operation]()
    known = dict[Ranks, Ranks]()
    for dump in _read_ranks(sorted(files.items())):
        # Ranks have the same operations and groups: thousands of copies would be a gigabyte.
        dump.operations = [operations.setdefault(one, one) for one in dump.operations]
        dump.groups = {name: known.setdefault(ranks, ranks) for name, ranks in dump.groups.items()}
        dumps[dump.rank] = dump
    for name in ("version", "world_size"):
        values = {getattr(dump, name): rank for rank, dump in dumps.items() if getattr(dump, name)}
        if len(values) > 1:
            texts = [f"rank {rank}'s has {name} {value}" for value, rank in values.items()]
            raise DumpError(
                f"the dumps in {str(folder)!r} are of different runs: {', '.join(texts)}"
            )
    if not any(dump.version or dump.world_size for dump in dumps.values()):
        calls = [dump.stacks[0].call for dump in dumps.values() if dump.stacks]
        at = ", ".join(f"rank {one.rank} is at {place(one.file, one.line)}" for one in calls[:8])
        raise DumpError(
            f"{str(folder)!r} has only stacks, which do not tell in which collectives ranks wait,"
            f" nor since when; add the dumps of a flight recorder: {at}"
        )
    size, last = max(dump.world_size for dump in dumps.values()), max(dumps)
    if 0 < size <= last:
        raise DumpError(f"{str(files[last][0])!r} is of another run: the job has {size} ranks")
    return dumps


def _read_ranks(entries: list[tuple[int, list[Path]]]) -> Iterator[RankDump]:
    if len(entries) < _PROCESSES_FROM:
        yield from map(_read_rank, entries)
    else:
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            yield from pool.map(_read_rank, entries, chunksize=16)


def _read_rank(entry: tuple[int, list[Path]]) -> RankDump:
    """Return a rank's dump, combined from all its files."""
    rank, paths = entry
    gc.disable()  # it takes a third of the time
    dump, chosen = RankDump(rank), dict[str, tuple[Path, Any]]()
    try:
        for path in sorted(paths, key=lambda path: path.stat().st_mtime):
            kind, content = _load(path)
            if isinstance(content, dict) and content.get("rank", rank) != rank:
                raise ValueError(f"it is of rank {content['rank']}, and not of rank {rank}")
            # our own recorder writes a file for each failure; the last one counts
            if kind in chosen and kind != "operations":
                raise ValueError(f"{chosen[kind][0].name} is of the same rank; leave one")
            chosen[kind] = path, content
        if "pickle" in chosen:
            chosen.pop("entries", None)  # as JSON, which has no frames
        for kind, read in _READERS.items():
            if kind in chosen:
                path, content = chosen[kind]
                dump.time = dump.time or path.stat().st_mtime
                read(dump, content)
    except (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DumpError(f"cannot read {str(path)!r}: {what}") from None
    finally:
        gc.enable()
    return dump


def _load(path: Path) -> tuple[str, Any]:
    """Return the kind of a file and its content."""
    with path.open("rb") as file:
        is_pickle = file.peek(1)[:1] == b"\x80"
        if is_pickle:
            try:
                content = _Unpickler(file).load()
            except Exception as error:  # pickle raises anything on damaged data
                raise ValueError(f"it is damaged or truncated: {error}") from None
        elif (data := file.read()).startswith(b"Fatal Python error"):
            return "crash", data.decode(errors="replace")
        elif re.search(rb"(?m)^Thread \w+ \(", data):
            return "spy", data.decode(errors="replace")
        else:
            try:
                content = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"it is damaged, or neither pickle nor JSON: {error}") from None
    for kind in ("entries", "threads", "operations"):
        if isinstance(content, dict) and isinstance(content.get(kind), list):
            return "pickle" if is_pickle else kind, content
    raise ValueError("it has no entries, so no flight recorder wrote it")


@cache
def _is_users(file: str) -> bool:
    return not _LIBRARY.search(file) and is_user_code(file)


def _sites(frames: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    """Yield file and line of each frame of the user's code, innermost first, and ("", 0) at the
    end.
    """
    for frame in frames:
        if _is_users(frame["filename"]):
            yield frame["filename"], frame["line"]
    yield "", 0


def _read_recorder(dump: RankDump, content: Mapping[str, Any]) -> None:
    """Read a dump of torch's flight recorder."""
    dump.version, entries = str(content["version"]), content["entries"]
    if not dump.version.startswith("2."):
        raise ValueError(f"its format has version {dump.version}; versions 2.x can be read")
    for name, config in content.get("pg_config", {}).items():
        if ranks := tuple(json.loads(config["ranks"])):  # gloo's are empty
            dump.groups[name] = ranks
            if dump.rank not in ranks:
                raise ValueError(
                    f"it is not of rank {dump.rank}: group {name!r} has ranks {list(ranks)}"
                )
    operations, incarnations = dict[Any, int](), dict[str, int]()
    latest = dict[str, tuple[int, Any]]()
    rows = dict[tuple[str, int], list[int]]()
    for entry in entries:
        group, site = entry["process_group"][0], next(_sites(entry.get("frames", ())))
        sizes = str((entry["input_sizes"], entry["output_sizes"], entry["input_dtypes"]))
        index = operations.setdefault(
            (group, entry["profiling_name"], sizes, site), len(operations)
        )
        if index == len(dump.operations):
            dump.operations.append(_operation(entry, site))
        created, is_p2p = entry["time_created_ns"], entry["is_p2p"]
        is_pending = not entry["retired"] and entry["state"] != "completed"
        if incarnations.setdefault(group, entry["pg_id"]) != entry["pg_id"]:
            # the process has recreated its groups
            rows = {key: row for key, row in rows.items() if key[0] != group}
            incarnations[group] = entry["pg_id"]
        if not is_p2p:
            number, timeout = entry["collective_seq_id"], entry.get("timeout_ms") or 0
            row = [dump.rank, index, number, created, timeout, False]
            rows.setdefault((group, number), row)[-1] |= is_pending  # coalesced ones share a number
        elif is_pending:
            name, pair = entry["profiling_name"].rpartition(":")[2].split(" ")  # "recv 1<-0"
            peer = int(re.split("<-|->", pair)[1])  # in the group
            peer = dict(enumerate(dump.groups.get(group, ()))).get(peer, peer)
            tensors = dump.operations[index].text.rpartition(" of ")[2]
            text = f"{name}({'src' if name == 'recv' else 'dst'}={peer}) of {tensors}"
            call = RankCall(dump.rank, "", text, group, *site)
            dump.stacks.append(Stack(call, dump.time - created / 1e9, "", {"peers": [peer]}))
        latest[group] = index, entry
    dump.calls = np.array([*map(tuple, rows.values())], CALL)
    for group, (index, entry) in latest.items():
        ranks, operation = dump.groups.get(group, ()), dump.operations[index]
        if "all_to_all" in operation.agrees and len(entry["input_sizes"]) == len(ranks):
            facts = {
                name: dict(
                    zip(map(str, ranks), map(math.prod, entry[f"{side}_sizes"]), strict=True)
                )
                for name, side in (("sent", "input"), ("received", "output"))
            }
            call = RankCall(dump.rank, "", operation.text, group, *operation[3:])
            dump.stacks.append(Stack(call, 0.0, "", facts))
    if entries:
        dump.is_complete = entries[0]["record_id"] == 0
        dump.script = dump.script or [*_sites(entries[-1].get("frames", ()))][-2:][0][0]
    error = dump.error
    if error is not None and error["communication"] and dump.calls.size:
        # The newest call waits still if its exception ended the rank: gloo has retired it.
        newest = dump.calls["created"].argmax()
        site = dump.operations[dump.calls["operation"][newest]][3:]
        dump.calls["pending"][newest] |= site == dump.stacks[0].call[4:6]


def _operation(entry: Mapping[str, Any], site: tuple[str, int]) -> Operation:
    """Return the operation of an entry, including the sizes that must agree between ranks."""
    group, name = entry["process_group"][0], entry["profiling_name"].rpartition(":")[2]
    public = shown = _PUBLIC.get(name, name)
    if (frames := entry.get("frames")) and frames[0]["filename"].endswith("distributed_c10d.py"):
        shown = frames[0]["name"]  # gloo records a reduce_scatter as all_reduce
    side = "output" if "all_gather" in name or name == "scatter" else "input"
    dtypes = [_dtype(name) for name in entry[f"{side}_dtypes"]]
    sizes = entry[f"{side}_sizes"]
    tensors = [
        f"{dtype}[{','.join(map(str, size))}]" for dtype, size in zip(dtypes, sizes, strict=False)
    ]
    more = [f"{len(tensors) - 3} more"] * (len(tensors) > 3)
    text = shown + (f" of {', '.join(tensors[:3] + more)}" if tensors else "")
    total = "" if "all_to_all" in name else sum(map(math.prod, sizes))
    agrees = f"{public} {total} {sorted({*dtypes})}"
    return Operation(group, text, agrees, *site)


def _dtype(name: str) -> str:
    """Return the torch name of a dtype; recorders write "Float", for example."""
    kind = getattr(torch, f"{name}Tensor", None)
    return name.lower() if kind is None else str(kind.dtype).removeprefix("torch.")


def _read_stacks(dump: RankDump, content: Mapping[str, Any]) -> None:
    """Read a file of stacks written by `explain_hangs`."""
    dump.time, dump.reason = float(content["time"]), content["reason"]
    dump.error, dump.limit = content["error"], min(LONG, content["after"] / 2)
    dump.has_ended = dump.reason == "exit" or bool(content.get("ended"))
    dump.world_size = content["world_size"]
    dump.groups |= {name: tuple(ranks) for name, ranks in content["groups"].items()}
    _read_threads(dump, content["threads"])


def _read_threads(dump: RankDump, threads: Iterable[Mapping[str, Any]]) -> None:
    for thread in threads:
        frames, facts = thread["frames"], thread["call"]
        sites = [*_sites(frames)]
        dump.script = dump.script or sites[-2:][0][0]
        lines = [one["text"] for one in frames if (one["filename"], one["line"]) == sites[0]]
        text = " ".join([one["function"] for one in frames] + lines)
        operation, group = facts.get("operation", ""), facts.get("group", "")
        call = RankCall(dump.rank, thread["name"], operation, group, *sites[0])
        dump.stacks.append(Stack(call, thread["seconds"], text, facts))


def _read_spy(dump: RankDump, content: str) -> None:
    """Read the output of ``py-spy dump``; it has no arguments and times."""
    own = re.split(r"(?m)^Process ", content)[:2][-1]  # those of its children follow
    for part in re.split(r"(?m)^(?=Thread )", own)[1:]:
        name = re.match(r'.*"(.*)"', part)
        frames = [
            {"function": function, "filename": file, "line": int(line), "text": ""}
            for function, file, line in re.findall(r"(?m)^ {4}(\S.*) \((.+):(\d+)\)$", part)
            # it shortens the names of modules, and a script may have the name of one
            if function == "<module>" or re.split(r"[/.]", file)[0] not in sys.stdlib_module_names
        ]
        thread = "" if name is None or name[1] == "MainThread" else name[1]
        _read_threads(dump, [{"name": thread, "seconds": 0.0, "call": {}, "frames": frames}])


def _read_own(dump: RankDump, content: Mapping[str, Any]) -> None:
    """Read a dump of `bagua_ref.flight_recorder`: its waits and its error."""
    dump.world_size, dump.time = content["world_size"], float(content["time"])
    for wait in content["waits"]:
        if wait["ranks"]:  # others are waits of one thread for another
            call = RankCall(dump.rank, "", wait["for"].removeprefix("in "), "", "", 0)
            facts = {"members": wait["ranks"]}
            dump.stacks.append(Stack(call, dump.time - wait["since"], "", facts))
    if content["error"]:
        kind, _, message = content["error"].partition(": ")
        dump.error, dump.limit = {"type": kind, "message": message, "communication": True}, 0.0


def _read_crash(dump: RankDump, content: str) -> None:
    """Read faulthandler's report on a process that native code ended; the main thread comes
    last.
    """
    first, *threads = re.split(r"(?m)^(?:Current t|T)hread ", content)
    for part in reversed(threads):
        frames = [
            {"function": function, "filename": file, "line": int(line), "text": ""}
            for file, line, function in re.findall(r'(?m)^  File "(.+)", line (\d+) in (.+)$', part)
        ]
        _read_threads(dump, [{"name": "", "seconds": 0.0, "call": {}, "frames": frames}])
    kind, _, message = first.strip().partition(": ")
    dump.error = {"type": kind, "message": message, "communication": None}


_READERS: dict[str, Callable[[RankDump, Any], None]] = {
    "threads": _read_stacks,  # first: it knows the time
    "operations": _read_own,
    "pickle": _read_recorder,
    "entries": _read_recorder,
    "spy": _read_spy,
    "crash": _read_crash,
}

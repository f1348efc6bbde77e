"""Folders of checkpoints: durable writing, the manifest that completes a checkpoint, verification,
and removal of old ones.

A folder has one folder for each checkpoint, ``step_00000012``, with the parts ``common-<token>.pt``
and ``rank<r>-<token>.pt`` and ``manifest.json``, which is written last and names the others with
size and SHA-256. What it does not name does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bagua_ref.base.untrusted import (
    NATURAL,
    NotRegularError,
    check_form,
    load_json,
    one_line,
    open_file,
    read_file,
)
from bagua_ref.errors import CheckpointError

__all__ = [
    "Manifest",
    "Part",
    "checked_step",
    "commit",
    "discard",
    "found_steps",
    "read_manifest",
    "remove_old",
    "step_folder",
    "verify",
    "write_part",
]

_FORMAT = 1
_MANIFEST = "manifest.json"
_FOLDER_NAME = re.compile(r"step_([0-9]{8,18})")
_FILE_NAME = re.compile(r"(common|rank[0-9]{1,9})-[0-9a-f]{8}\.pt(\.tmp)?|manifest\.json(\.tmp)?")
_PART_FORM = {"name": str, "size": NATURAL, "sha256": str}
_FORM = {"step": NATURAL, "ranks": NATURAL, "algorithm": str, "token": str, "parts": [_PART_FORM]}
_BLOCK = 1024**2
_LARGEST_MANIFEST = 64 * 1024**2  # that of 100,000 ranks has 20 MB


@dataclass(frozen=True)
class Part:
    """A file of a checkpoint, as the manifest describes it."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        step: as it was saved.
        ranks: the number of ranks that saved it.
        algorithm: the name of the algorithm's implementation.
        token: what the names of this attempt's files have in common.
        parts: the other files.
    """

    step: int
    ranks: int
    algorithm: str
    token: str
    parts: list[Part]

    def part(self, owner: str) -> Part | None:
        """Return the file of ``owner``, "common" or "rank0", "rank1", ...; None if it has none."""
        name = part_name(owner, self.token)
        return next((part for part in self.parts if part.name == name), None)


def checked_step(step: Any) -> int:
    """Return ``step``; raise unless it is an int from 0."""
    if not isinstance(step, int) or isinstance(step, bool):
        raise TypeError(f"step={step!r} must be an int")
    if not 0 <= step < 10**18:
        raise ValueError(f"step={step} must be a number of steps, 0 or more")
    return step


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of one checkpoint."""
    return folder / f"step_{step:08d}"


def part_name(owner: str, token: str) -> str:
    """Return the name of a part."""
    return f"{owner}-{token}.pt"


def found_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in ``folder``, complete or not, newest first."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.is_dir())
    return sorted(
        (int(match[1]) for path in found if (match := _FOLDER_NAME.fullmatch(path.name))),
        reverse=True,
    )


def write_part(place: Path, owner: str, token: str, state: Any) -> Part:
    """Write ``state`` into a new file of the checkpoint at ``place``, durably; return what the
    manifest says of it.
    """
    name = part_name(owner, token)
    return _write_durably(place / name, lambda file: torch.save(state, file))


def commit(place: Path, manifest: Manifest) -> None:
    """Complete the checkpoint at ``place``: from now on its newest version is this one, also after
    a crash.

    Raises:
        CheckpointError: a part is not there.
    """
    for part in manifest.parts:
        path = place / part.name
        if not path.is_file() or path.stat().st_size != part.size:
            raise CheckpointError(
                f"{path} was written but is not here; ranks on several nodes need a folder that all"
                " of them share"
            )
    _sync_folder(place.parent)
    content = asdict(manifest) | {"format": _FORMAT}
    text = json.dumps({"manifest": content, "sha256": _checksum(content)}, indent=1)
    _write_durably(place / _MANIFEST, lambda file: file.write(text.encode()))


def read_manifest(place: Path) -> Manifest | None:
    """Return the manifest of the checkpoint at ``place``, None if it has none because saving did
    not finish.

    Raises:
        CheckpointError: it is damaged.
    """
    path = place / _MANIFEST
    try:
        whole = load_json(read_file(path, _LARGEST_MANIFEST))
        check_form(whole, {"manifest": {"format": int}, "sha256": str}, "its content")
        content = whole["manifest"]
        if whole["sha256"] != _checksum(content):
            raise ValueError("it does not match its checksum")
        if content.pop("format") != _FORMAT:
            raise ValueError("it has another format, of another version of bagua_ref")
        check_form(content, _FORM, "its content")
        manifest = Manifest(**content | {"parts": [Part(**part) for part in content["parts"]]})
        for part in manifest.parts:
            if not _FILE_NAME.fullmatch(part.name):
                raise ValueError(f"{part.name!r} is not the name of a part")
        if step_folder(place.parent, manifest.step) != place:
            raise ValueError(f"it is that of step {manifest.step}")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, NotRegularError) as error:
        raise CheckpointError(f"{path} is damaged: {one_line(str(error))}") from error
    return manifest


def verify(place: Path, manifest: Manifest) -> None:
    """Read every rank's part, so that all ranks come to the same conclusion.

    Raises:
        CheckpointError: a part is missing or damaged.
    """
    for part in manifest.parts:
        path = place / part.name
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size != part.size:
                    raise CheckpointError(
                        f"{path} is damaged: it has {size} bytes instead of {part.size}"
                    )
                checksum = hashlib.sha256()
                while size > 0 and (block := file.read(min(size, _BLOCK))):
                    checksum.update(block)
                    size -= len(block)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except NotRegularError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
        if checksum.hexdigest() != part.sha256:
            raise CheckpointError(f"{path} is damaged: it does not match its checksum")


def remove_old(folder: Path, manifest: Manifest, keep: int | None) -> None:
    """Remove files of failed attempts, and of the complete checkpoints up to this step all but the
    newest ``keep``.
    """
    try:
        complete = 0
        for step in found_steps(folder):
            place = step_folder(folder, step)
            if place.is_symlink():
                continue  # what it leads to may be another training's
            if step == manifest.step:
                complete += 1
                _remove_files(place, {_MANIFEST, *(part.name for part in manifest.parts)})
            elif not (place / _MANIFEST).exists():
                _remove_files(place, set())
            elif step < manifest.step:
                complete += 1
                if keep is not None and complete > keep:
                    (place / _MANIFEST).unlink()
                    _sync_folder(place)
                    _remove_files(place, set())
    except OSError as error:
        warnings.warn(f"an old checkpoint could not be removed: {error}", stacklevel=4)


def discard(place: Path, token: str) -> None:
    """Remove the files of a failed attempt, so that it does not fill the disk, unless its manifest
    is there.
    """
    try:
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(place)
            if manifest is not None and manifest.token == token:
                return
        for path in list(place.glob(f"*-{token}.pt")):
            path.unlink(missing_ok=True)  # other ranks remove them, too
        with contextlib.suppress(OSError):  # it has other files
            place.rmdir()
    except OSError as error:
        warnings.warn(
            f"what a failed attempt to save has left could not be removed: {error}", stacklevel=4
        )


def _remove_files(place: Path, kept: set[str]) -> None:
    """Remove our files at ``place`` but those ``kept``, and ``place`` itself if it is then
    empty.
    """
    for path in list(place.iterdir()):
        if path.name not in kept and _FILE_NAME.fullmatch(path.name):
            path.unlink()
    if not any(place.iterdir()):
        place.rmdir()


def _write_durably(path: Path, write: Callable[[Any], object]) -> Part:
    """Write ``path`` so that after a crash it is there as a whole or not at all; if that fails,
    remove what is written.

    Raises:
        OSError: the disk is full, for instance.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # a crash has left it, or somebody has put a link here
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    file = os.fdopen(os.open(temporary, flags, 0o666), "wb")
    hashing = _HashingFile(file)
    try:
        with file:
            write(hashing)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        # torch.save hides the error of a write behind its own, about its position in the file.
        raise hashing.error or error from None
    return Part(path.name, hashing.size, hashing.checksum.hexdigest())


class _HashingFile:
    """A file to write to that computes the checksum of what it is given, and keeps the error of a
    write.
    """

    def __init__(self, file: Any) -> None:
        self._file, self.size, self.checksum = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.checksum.update(data)
        self.size += len(data)
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

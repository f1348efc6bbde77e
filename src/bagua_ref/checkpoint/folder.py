"""Folders of checkpoints: durable writing, the manifest that completes a checkpoint, verification,
the lock against a second job, and removal of old checkpoints.

A folder has one subfolder per checkpoint, such as ``step_00000012``, with the files
``common-<n>.pt``, ``rank<r>-<n>.pt`` and ``manifest.json``. The manifest, which is renamed into
place last, lists the other files with size and SHA-256. Files that it does not list are ignored.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import socket
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bagua_ref.errors import CheckpointError

_MANIFEST = "manifest.json"
_FOLDER_NAME = re.compile(r"step_[0-9]{8,18}")
_FILE_NAME = re.compile(r"(common|rank[0-9]+)-[0-9]+\.pt|manifest\.json(\.tmp)?")
_BLOCK = 1024**2
# What file systems answer that cannot do something, as opposed to failing at it.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


@dataclass(frozen=True)
class Manifest:
    """Metadata of a complete checkpoint.

    Attributes:
        step: the number of steps taken, as passed to `save`.
        number: serial number, larger than that of every checkpoint saved into the folder before. It
            is part of file names, so that saving a step again overwrites nothing.
        ranks: number of ranks that saved the checkpoint.
        algorithm: the name of the algorithm's implementation.
        files: size and SHA-256 of each part, by name.
    """

    step: int
    number: int
    ranks: int
    algorithm: str
    files: dict[str, tuple[int, str]]


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return folder / f"step_{step:08d}"


def step_folders(folder: Path) -> list[Path]:
    """Return the folders of all checkpoints in ``folder``, complete or not, highest step first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = [path for path in paths if _FOLDER_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step, reverse=True)


def _step(place: Path) -> int:
    return int(place.name.removeprefix("step_"))


def is_step_folder(path: Path) -> bool:
    """Return whether ``path`` is the folder of a single checkpoint, whatever its name."""
    return _FOLDER_NAME.fullmatch(path.name) is not None or (path / _MANIFEST).exists()


def write_part(place: Path, name: str, state: Any) -> tuple[int, str]:
    """Write ``state`` durably into a new file in the folder ``place``; return its size and
    SHA-256.
    """
    path = place / name
    with _naming(path), open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # About its position in the file, instead of the disk that is full.
            raise error.__context__ or error from None
    _sync(path, place.parent)
    _sync(place, place.parent)
    return path.stat().st_size, _sha256(path)


def commit(place: Path, manifest: Manifest) -> None:
    """Complete the checkpoint at ``place`` by writing its manifest atomically and durably.

    Raises:
        CheckpointError: a rank's file is missing or has the wrong size.
    """
    for name, (size, _) in manifest.files.items():
        path = place / name
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(
                f"{path} was written but is not here; ranks on several nodes need a folder that all"
                " of them share"
            )
    _sync(place.parent, place.parent)
    content = asdict(manifest)
    temporary = place / f"{_MANIFEST}.tmp"
    with _naming(temporary), open(temporary, "w") as file:
        json.dump({"manifest": content, "sha256": _checksum(content)}, file, indent=1)
    _sync(temporary, place.parent)
    os.replace(temporary, place / _MANIFEST)
    _sync(place, place.parent)


def read_manifests(places: Iterable[Path]) -> tuple[list[tuple[Path, Manifest]], list[str]]:
    """Read the manifests in the folders ``places``; return complete checkpoints, newest first, and
    the errors of damaged manifests.
    """
    found, damages = [], []
    for place in places:
        path = place / _MANIFEST
        try:
            with _naming(path):
                whole = json.loads(path.read_bytes())
            content = whole["manifest"]
            if whole["sha256"] != _checksum(content):
                raise ValueError("it does not match its checksum")
            found.append((place, Manifest(**content)))
        except (FileNotFoundError, NotADirectoryError):
            pass  # saving did not finish
        except (ValueError, TypeError, LookupError, RecursionError, IsADirectoryError) as error:
            damages.append(f"{path} is damaged: {error}")
    return sorted(found, key=lambda entry: -entry[1].number), damages


def verify(place: Path, manifest: Manifest) -> None:
    """Verify the files of all ranks, so that every rank comes to the same result.

    Raises:
        CheckpointError: a rank's file is missing or damaged.
    """
    for name, (_, sha256) in manifest.files.items():
        path = place / name
        try:
            intact = _sha256(path) == sha256
        except (FileNotFoundError, IsADirectoryError) as error:
            raise CheckpointError(f"{path} is missing: {error.strerror}") from None
        if not intact:
            raise CheckpointError(f"{path} is damaged: it does not match its checksum")


def remove_old(folder: Path, manifest: Manifest, keep: int | None) -> None:
    """Remove files of failed attempts, and all complete checkpoints up to this step except the
    newest ``keep``.
    """
    complete = 0
    try:
        for place in step_folders(folder):
            step, names = _step(place), set[str]()
            if place.is_symlink():
                continue  # what it leads to may be another training's
            if (place / _MANIFEST).exists():
                complete += step <= manifest.step
                if step == manifest.step:
                    names = {_MANIFEST, *manifest.files}
                elif step > manifest.step or keep is None or complete <= keep:
                    continue
                else:
                    (place / _MANIFEST).unlink()  # first: without it, the rest does not count
            for path in list(place.iterdir()):
                if path.name not in names and _FILE_NAME.fullmatch(path.name):
                    path.unlink()
            if not any(place.iterdir()):
                place.rmdir()
    except OSError as error:
        warnings.warn(f"an old checkpoint could not be removed: {error}", stacklevel=4)


# By process and inode: closing any file of the same inode would release this process's lock.
_locks: dict[tuple[int, int, int], int] = {}


def lock(folder: Path) -> None:
    """Lock ``folder`` against other processes until this process ends, however it ends; forked
    children do not have the lock.

    Raises:
        CheckpointError: another process saves into this folder; the message names its host and PID.
    """
    path = folder / ".lock"
    path.touch()
    status = path.stat()
    key = os.getpid(), status.st_dev, status.st_ino
    if key not in _locks:
        _locks[key] = os.open(path, os.O_RDWR)
    try:
        with _naming(path):
            fcntl.lockf(_locks[key], fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(_locks[key], 0)
            os.pwrite(_locks[key], f"process {key[0]} on host {socket.gethostname()}".encode(), 0)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            _warn_once(f"{path} cannot be locked, so that a second job is not noticed")
        elif error.errno in (errno.EACCES, errno.EAGAIN):
            raise CheckpointError(
                f"{folder} is in use by {path.read_text() or 'another process'}, which saves"
                " checkpoints there: end that job, or save into another folder"
            ) from None
        else:
            raise


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Context that adds the file name ``path`` to OSErrors without one, such as those of reading
    and writing.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def _sync(path: Path, folder: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk; warn once if the file system of
    ``folder`` does not support this.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _warn_once(
            f"files in {folder} cannot be flushed to the disk (fsync), as its file system does not"
            " support it: if the machine loses power, the newest checkpoint may be lost"
        )
    finally:
        os.close(descriptor)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=6)


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    content = hashlib.sha256()
    with _naming(path), open(path, "rb") as file:
        while block := file.read(_BLOCK):
            content.update(block)
    return content.hexdigest()

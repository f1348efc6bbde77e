"""Folders of checkpoints: durable writing, the manifest that completes a checkpoint, verification,
the lock against a second job, and removal of old checkpoints.

A folder has one folder for each checkpoint, ``step_00000012``, with the parts ``common-<token>.pt``
and ``rank<r>-<token>.pt`` and ``manifest.json``, which is renamed into place last and names the
others with size and SHA-256. What it does not name does not count.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from bagua_ref.errors import CheckpointError

_FORMAT = 2
_MANIFEST = "manifest.json"
_LOCK = ".lock"
_FOLDER_NAME = re.compile(r"step_([0-9]{8,18})")
_FILE_NAME = re.compile(r"(common|rank[0-9]+)-[0-9a-f]{8}\.pt|manifest\.json(\.tmp)?")
_BLOCK = 1024**2
# What file systems answer that cannot do something, as opposed to failing at it.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


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
        number: larger than that of every checkpoint saved into the folder before.
        ranks: the number of ranks that saved it.
        algorithm: the name of the algorithm's implementation.
        token: what the names of this attempt's files have in common.
        parts: the other files.
    """

    step: int
    number: int
    ranks: int
    algorithm: str
    token: str
    parts: list[Part]

    def part(self, owner: str) -> Part | None:
        """Return the file of ``owner``, "common" or "rank0", "rank1", ...; None if it has none."""
        name = part_name(owner, self.token)
        return next((part for part in self.parts if part.name == name), None)


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of one checkpoint."""
    return folder / f"step_{step:08d}"


def part_name(owner: str, token: str) -> str:
    """Return the name of a part."""
    return f"{owner}-{token}.pt"


def is_step_folder(path: Path) -> bool:
    """Return whether ``path`` is the folder of one checkpoint, under whatever name."""
    return (path / _MANIFEST).exists() or (
        path.is_dir() and _FOLDER_NAME.fullmatch(path.name) is not None
    )


def step_folders(folder: Path) -> list[Path]:
    """Return the folders of the checkpoints in ``folder``, complete or not, highest step first."""
    if not folder.is_dir():
        return []
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _FOLDER_NAME.fullmatch(path.name)) and path.is_dir()
    }
    return [found[step] for step in sorted(found, reverse=True)]


def write_part(place: Path, owner: str, token: str, state: Any) -> Part:
    """Write ``state`` into a new file of the checkpoint at ``place``, durably; return what the
    manifest says of it.
    """
    path = place / part_name(owner, token)
    with _naming(path), open(path, "wb") as file:
        hashing = _HashingFile(file, path)
        try:
            torch.save(state, cast("BinaryIO", hashing))
            file.flush()
            _sync(file.fileno(), path)
        except Exception as error:
            # torch.save hides the error of a write behind its own, about its position in the file.
            raise hashing.error or error from None
    _sync_folder(place)
    return Part(path.name, hashing.size, hashing.checksum.hexdigest())


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
    path = place / _MANIFEST
    temporary = path.with_name(f"{_MANIFEST}.tmp")
    with _naming(temporary), open(temporary, "w") as file:
        json.dump({"manifest": content, "sha256": _checksum(content)}, file, indent=1)
        file.flush()
        _sync(file.fileno(), temporary)
    os.replace(temporary, path)
    _sync_folder(place)


def read_manifest(place: Path) -> Manifest | None:
    """Return the manifest of the checkpoint at ``place``, None if it has none because saving did
    not finish.

    Raises:
        CheckpointError: it is damaged.
    """
    path = place / _MANIFEST
    try:
        with _naming(path):
            whole = json.loads(path.read_bytes())
        content = whole["manifest"]
        if whole["sha256"] != _checksum(content):
            raise ValueError("it does not match its checksum")
        if content.pop("format") != _FORMAT:
            raise ValueError("it has another format, of another version of bagua_ref")
        manifest = Manifest(**content | {"parts": [Part(**part) for part in content["parts"]]})
        named = _FOLDER_NAME.fullmatch(place.name)
        if named and int(named[1]) != manifest.step:
            raise ValueError(f"it is that of step {manifest.step}")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, LookupError, RecursionError, IsADirectoryError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return manifest


def verify(place: Path, manifest: Manifest) -> None:
    """Read every rank's part, so that all ranks come to the same conclusion.

    Raises:
        CheckpointError: a part is missing or damaged.
    """
    for part in manifest.parts:
        path, checksum = place / part.name, hashlib.sha256()
        try:
            with _naming(path), open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != part.size:
                    raise CheckpointError(
                        f"{path} is damaged: it has {size} bytes instead of {part.size}"
                    )
                while block := file.read(_BLOCK):
                    checksum.update(block)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except IsADirectoryError:
            raise CheckpointError(f"{path} is damaged: it is a folder") from None
        if checksum.hexdigest() != part.sha256:
            raise CheckpointError(f"{path} is damaged: it does not match its checksum")


def manifests(folder: Path) -> list[Manifest]:
    """Return the manifests in ``folder`` that can be read, in the order in which they were saved."""
    found = []
    for place in step_folders(folder):
        with contextlib.suppress(CheckpointError):
            if manifest := read_manifest(place):
                found.append(manifest)
    return sorted(found, key=lambda manifest: manifest.number)


def remove_old(folder: Path, manifest: Manifest, keep: int | None) -> None:
    """Remove files of failed attempts, and of the complete checkpoints up to this step all but the
    newest ``keep``.
    """
    here, complete = step_folder(folder, manifest.step), 0
    try:
        for place in step_folders(folder):
            if place.is_symlink():
                continue  # what it leads to may be another training's
            if place == here:
                complete += 1
                _remove_files(place, {_MANIFEST, *(part.name for part in manifest.parts)})
            elif not (place / _MANIFEST).exists():
                _remove_files(place, set())
            elif place.name < here.name:
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
        for path in [*place.glob(f"*-{token}.pt"), place / f"{_MANIFEST}.tmp"]:
            path.unlink(missing_ok=True)  # other ranks remove them, too
        with contextlib.suppress(OSError):  # it has other files
            place.rmdir()
    except OSError as error:
        warnings.warn(
            f"what a failed attempt to save has left could not be removed: {error}", stacklevel=4
        )


class _Lock:
    """A lock of this process on a folder. The system releases it when the process ends, however it
    ends, also on another node, and a forked child does not have it.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a+")  # noqa: SIM115
        self._path, self._pid = path, os.getpid()
        weakref.finalize(self, self._file.close)

    def acquire(self) -> None:
        """Take the lock; again: do nothing.

        Raises:
            CheckpointError: another process has it.
        """
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                _warn_once(self._path, "cannot be locked, so that a second job is not noticed")
                return
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            self._file.seek(0)
            raise CheckpointError(
                f"{self._path.parent} is in use by {self._file.read() or 'another process'}, which"
                " saves checkpoints there: end that job, or save into another folder"
            ) from None
        self._file.truncate(0)
        self._file.write(f"process {self._pid} on host {socket.gethostname()}")
        self._file.flush()

    def fits(self, path: Path) -> bool:
        """Return whether this is the lock of the file that is at ``path`` now."""
        return self._pid == os.getpid() and os.path.samestat(
            os.fstat(self._file.fileno()), path.stat()
        )


_locks: weakref.WeakValueDictionary[str, _Lock] = weakref.WeakValueDictionary()
"""By path; closing any file at this path would release this process's lock, so there is one."""

_owners: weakref.WeakKeyDictionary[Any, dict[str, _Lock]] = weakref.WeakKeyDictionary()


def lock(folder: Path, owner: object) -> None:
    """Lock ``folder`` against other processes for as long as ``owner`` lives.

    Raises:
        CheckpointError: another process saves there; the message names its host and number.
    """
    path = folder.resolve() / _LOCK
    with _naming(path):
        known = _locks.get(str(path))
        if known is None or not path.exists() or not known.fits(path):
            known = _locks[str(path)] = _Lock(path)
        known.acquire()
    _owners.setdefault(owner, {})[str(path)] = known


def _remove_files(place: Path, kept: set[str]) -> None:
    """Remove our files at ``place`` but those ``kept``, and ``place`` itself if it is then
    empty.
    """
    for path in list(place.iterdir()):
        if path.name not in kept and _FILE_NAME.fullmatch(path.name):
            path.unlink()
    if not any(place.iterdir()):
        place.rmdir()


class _HashingFile:
    """A file to write to that computes the checksum of what it is given, and keeps the error of a
    write.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self.size, self.checksum = 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.checksum.update(data)
        self.size += len(data)
        self._call(lambda: self._file.write(data))
        return len(data)

    def flush(self) -> None:
        self._call(self._file.flush)

    def _call(self, function: Callable[[], object]) -> None:
        try:
            with _naming(self._path):
                function()
        except OSError as error:
            self.error = error
            raise


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise OSErrors that name no file, as those of reading and writing, with that of ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def _sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _sync(descriptor, folder)
    finally:
        os.close(descriptor)


def _sync(descriptor: int, path: Path) -> None:
    try:
        with _naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _warn_once(
            path,
            "cannot be flushed to the disk (fsync), as its file system does not support it: if the"
            " machine loses power, the newest checkpoint may be lost",
        )


_warned: set[str] = set()


def _warn_once(path: Path, what: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"{path} {what}", stacklevel=6)


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

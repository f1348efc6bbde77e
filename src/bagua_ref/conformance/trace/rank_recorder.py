"""What recorders of operations and of digests share: a rank's folder and manifest, and an end that
never disturbs training.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from bagua_ref import __version__
from bagua_ref.base.runtime import World, current_world
from bagua_ref.base.untrusted import load_json, read_file
from bagua_ref.conformance.clauses import SPEC_VERSION
from bagua_ref.conformance.formats import write_safetensors
from bagua_ref.conformance.trace.files import FORMAT, INDEX, MANIFEST, TRACE_VERSION, check_int

__all__ = ["RankRecorder"]


class RankRecorder:
    """A recorder of one rank: `Recorder` of operations, `Recording` of digests and values.

    A step's file is complete before the index lists it, so that a crash leaves all earlier steps.

    Attributes:
        directory: this rank writes into ``directory/rank<r>``.
        stopped: why recording stopped early, or None.
    """

    directory: Path
    stopped: str | None = None
    _identity: tuple[int | None, int | None, Sequence[int] | None]
    """Rank, world_size and nodes as given."""
    _advice = ""
    """Added to the warning that recording has stopped."""
    _index: TextIO | None = None
    """None before and after recording."""
    _folder: Path
    _manifest: dict[str, Any]

    @property
    def recording(self) -> bool:
        """Whether it has been entered, and has neither stopped nor ended."""
        return self._index is not None and self.stopped is None

    def _open_folder(self, about: dict[str, Any], resume: bool = False) -> None:
        """Begin to write this rank's folder, with ``about`` in its manifest; ``resume`` a record of
        the same kind in it.
        """
        if self._index is not None:
            raise RuntimeError(f"this {type(self).__name__} is already in use; create another one")
        self._manifest = {
            "format": FORMAT,
            "trace_version": TRACE_VERSION,
            "spec_version": SPEC_VERSION,
            "versions": {
                "bagua_ref": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            **_identity(current_world(), *self._identity),
            **about,
            "complete": False,
            "stopped": None,
        }
        self._folder = folder = self.directory / f"rank{self._manifest['rank']}"
        if (folder / MANIFEST).exists():
            there = load_json(read_file(folder / MANIFEST))
            same = [
                isinstance(there, dict) and there.get(key) == self._manifest.get(key)
                for key in ("format", "what", "world_size")
            ]
            if not resume or not all(same):
                raise ValueError(
                    f"directory={str(self.directory)!r} already holds a trace of this"
                    f" rank{' of another kind or number of ranks' if resume else ''}; choose"
                    " another directory or empty it"
                )
        folder.mkdir(parents=True, exist_ok=True)
        self._write_manifest()
        if (folder / INDEX).exists():
            lines = (folder / INDEX).read_bytes()
            os.truncate(folder / INDEX, lines.rfind(b"\n") + 1)  # a line that a crash has cut off
        self._index = (folder / INDEX).open("a", encoding="utf-8")

    def _close_folder(self, complete: bool) -> None:
        assert self._index is not None
        self._manifest["complete"] = complete and self.stopped is None
        self._save_manifest()
        self._index.close()
        self._index = None

    def _append(self, line: dict[str, Any], tensors: dict[str, Tensor]) -> int | None:
        """Write a step's tensors, if any, and its line; return the size of their file, or None if
        recording has stopped.
        """
        if self._index is None or self.stopped is not None:
            return None
        size = 0
        try:
            if tensors:
                partial = self._folder / f"{line['file']}.partial"
                size = len(write_safetensors(partial, tensors))
                os.replace(partial, self._folder / line["file"])
            self._index.write(json.dumps(line) + "\n")
            self._index.flush()
        except OSError as error:
            self._stop(line["step"], f"step {line['step']} cannot be written: {error}")
            return None
        return size

    def _write_manifest(self) -> None:
        """Replace the manifest atomically."""
        partial = self._folder / f"{MANIFEST}.partial"
        partial.write_text(json.dumps(self._manifest, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self._folder / MANIFEST)

    def _save_manifest(self) -> None:
        try:
            self._write_manifest()
        except OSError as error:
            if self.stopped is None:
                self._stop(None, f"the manifest cannot be written: {error}")

    def _stop(self, step: int | None, reason: str) -> None:
        """Stop recording with a warning; ``step`` goes into the manifest."""
        self.stopped = reason
        self._manifest["stopped"] = {"step": step, "reason": reason}
        where = f"recording into {str(self.directory)!r} has stopped"
        warnings.warn(
            f"{where}: {reason}. Training continues{self._advice}", RuntimeWarning, stacklevel=2
        )
        self._save_manifest()


def _identity(
    world: World, rank: int | None, world_size: int | None, nodes: Sequence[int] | None
) -> dict[str, Any]:
    """Return rank, world_size and nodes for the manifest: as given, or as bagua_ref, torch or the
    environment says.
    """
    torchs = world.transport is None and dist.is_available() and dist.is_initialized()
    if rank is None:
        rank = dist.get_rank() if torchs else world.identity.rank
    if world_size is None:
        world_size = dist.get_world_size() if torchs else world.identity.world_size
    check_int("rank", rank)
    check_int("world_size", world_size, 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} must be from 0 to world_size - 1 = {world_size - 1}")
    sizes = list(nodes) if nodes is not None else _known_nodes(world, world_size)
    if (
        any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes)
        or sum(sizes) != world_size
    ):
        raise ValueError(
            f"nodes={sizes} must be numbers of ranks, each at least 1, that sum to"
            f" world_size={world_size}"
        )
    return {"rank": rank, "world_size": world_size, "nodes": sizes}


def _known_nodes(world: World, world_size: int) -> list[int]:
    if world.transport is not None and len(world.transport.node_of) == world_size:
        runs = [
            (node, len(list(ranks))) for node, ranks in itertools.groupby(world.transport.node_of)
        ]
        if len(runs) > len(set(world.transport.node_of)):
            raise ValueError(
                f"nodes: ranks are on nodes {list(world.transport.node_of)}; a replay needs"
                " consecutive ranks on each node"
            )
        return [size for _, size in runs]
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local) and world_size % int(local) == 0:
        return [int(local)] * (world_size // int(local))
    return [world_size]

"""What recorders of operations and of digests share: a rank's folder and manifest, and an end that never disturbs training."""

from __future__ import annotations

import itertools
import os
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua_ref import __version__
from bagua_ref.base.runtime import World, current_world
from bagua_ref.conformance.clauses import SPEC_VERSION
from bagua_ref.conformance.trace.files import FORMAT, TRACE_VERSION, Writer, check_int

__all__ = ["RankRecorder"]


class RankRecorder:
    """A recorder of one rank: `Recorder` of operations, `Recording` of digests and values.

    Attributes:
        stopped: why recording stopped early, or None.
    """

    stopped: str | None = None
    _advice = ""
    """Added to the warning that recording has stopped."""
    _writer: Writer | None = None
    _manifest: dict[str, Any]

    def _open_folder(
        self,
        directory: Path,
        identity: tuple[int | None, int | None, Sequence[int] | None],
        about: dict[str, Any],
        resume: bool = False,
    ) -> None:
        """Begin to write this rank's folder, with rank, world_size and nodes as given, and more for the manifest."""
        if self._writer is not None:
            raise RuntimeError(f"this {type(self).__name__} is already in use; create another one")
        self._directory = directory
        self._manifest = {
            "format": FORMAT,
            "trace_version": TRACE_VERSION,
            "spec_version": SPEC_VERSION,
            "versions": {"bagua_ref": __version__, "torch": torch.__version__, "python": platform.python_version()},
            **_identity(current_world(), *identity),
            **about,
            "complete": False,
            "stopped": None,
        }
        self._writer = Writer(directory / f"rank{self._manifest['rank']}", self._manifest, resume)

    def _close_folder(self, complete: bool) -> None:
        assert self._writer is not None
        self._manifest["complete"] = complete and self.stopped is None
        self._save_manifest()
        self._writer.close()
        self._writer = None

    def _append(self, step: int, line: dict[str, Any], tensors: dict[str, Tensor] | None) -> int | None:
        """Write a step's line, and its tensors; return their size, or None if recording has stopped."""
        if self._writer is None or self.stopped is not None:
            return None
        try:
            return self._writer.write_line(line, tensors)
        except OSError as error:
            self._stop(step, f"step {step} cannot be written: {error}")
            return None

    def _save_manifest(self) -> None:
        assert self._writer is not None
        try:
            self._writer.write_manifest(self._manifest)
        except OSError as error:
            if self.stopped is None:
                self._stop(None, f"the manifest cannot be written: {error}")

    def _stop(self, step: int | None, reason: str) -> None:
        """Stop recording with a warning; ``step`` goes into the manifest."""
        self.stopped = reason
        self._manifest["stopped"] = {"step": step, "reason": reason}
        where = f"recording into {str(self._directory)!r} has stopped"
        warnings.warn(f"{where}: {reason}. Training continues{self._advice}", RuntimeWarning, stacklevel=2)
        self._save_manifest()


def _identity(world: World, rank: int | None, world_size: int | None, nodes: Sequence[int] | None) -> dict[str, Any]:
    """Return rank, world_size and nodes for the manifest: as given, or as bagua_ref, torch or the environment says."""
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
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes) or sum(sizes) != world_size:
        raise ValueError(f"nodes={sizes} must be numbers of ranks, each at least 1, that sum to world_size={world_size}")
    return {"rank": rank, "world_size": world_size, "nodes": sizes}


def _known_nodes(world: World, world_size: int) -> list[int]:
    if world.transport is not None and len(world.transport.node_of) == world_size:
        runs = [(node, len(list(ranks))) for node, ranks in itertools.groupby(world.transport.node_of)]
        if len(runs) > len(set(world.transport.node_of)):
            raise ValueError(
                f"nodes: ranks are on nodes {list(world.transport.node_of)}; a replay needs consecutive ranks on each node"
            )
        return [size for _, size in runs]
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local) and world_size % int(local) == 0:
        return [int(local)] * (world_size // int(local))
    return [world_size]

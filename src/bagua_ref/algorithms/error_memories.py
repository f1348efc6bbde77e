"""Error memories of an algorithm's buckets: found again by tensors and chunks, and their way into checkpoints and back (S11.1)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms.versioned_state import check_saved_here, check_version, saved_by
from bagua_ref.base.memory import Layout
from bagua_ref.base.untrusted import NATURAL, check_form
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.tensor import registration
from bagua_ref.comm_ops import ErrorMemory
from bagua_ref.types import Group

__all__ = ["ErrorMemories", "check_error_feedback", "check_join_with_memory"]

_Key = tuple[tuple[str, ...], int, int]
"""The tensors with their shapes and strides, the elements with padding, and the number of chunks."""


def check_error_feedback(error_feedback: bool) -> None:
    """Raise TypeError unless the argument is a bool."""
    if not isinstance(error_feedback, bool):
        raise TypeError(f"error_feedback={error_feedback!r} must be True or False")


def check_join_with_memory(name: str, divide_by_initial_world_size: bool) -> None:
    """Raise ValueError if an algorithm that keeps what it left out is to divide by the ranks that have batches."""
    if not divide_by_initial_world_size:
        raise ValueError(
            f"divide_by_initial_world_size=False: {name} also applies what ranks have left out in earlier rounds, those "
            "without batches included; use join(divide_by_initial_world_size=True), or train without memory"
        )


class ErrorMemories:
    """The error memories of one module's buckets on this rank.

    A bucket of the same tensors in the same order and the same chunks finds its memory again, also after buckets were rebuilt. A
    memory whose tensors enter another bucket, or get other strides, is dropped.

    Args:
        algorithm: its name, for states.
        group: the algorithm's.
        error_feedback: False: there are no memories, and nothing of them in states.
    """

    def __init__(self, algorithm: str, group: Group, error_feedback: bool) -> None:
        self._algorithm, self._group, self.error_feedback = algorithm, group, error_feedback
        self._memories: dict[_Key, ErrorMemory] = {}

    @property
    def rank_state(self) -> frozenset[str]:
        """The entry of states that belongs to this rank."""
        return frozenset({"memories"} if self.error_feedback else ())

    def of_bucket(self, bucket: BaguaBucket, hierarchical: bool) -> ErrorMemory | None:
        """Return the memory of a bucket that is compressed between all ranks (hierarchical: between leaders), None if disabled."""
        if not self.error_feedback:
            return None
        tensors = bucket.effective_tensors()
        names = [registration(proxy).name for proxy in bucket.tensors]
        filled = sum(tensor.numel() for tensor in tensors)
        numel = filled + (bucket.padding_tensor.numel() if bucket.padding_tensor is not None else 0)
        group = self._group
        comm = group.get_inter_node_communicator() if hierarchical else group.get_global_communicator()
        if hierarchical and group.get_intra_node_communicator().rank() != 0:
            return ErrorMemory(filled, numel, comm.nranks(), bucket.device)  # only leaders use theirs
        return self.claim(names, tensors, numel, comm.nranks())

    def claim(self, names: Sequence[str], tensors: Sequence[Tensor], numel: int, chunks: int) -> ErrorMemory:
        """Return the memory of these tensors, a new one unless there is one of the same tensors and chunks.

        Args:
            names: of the tensors.
            tensors: on one device.
            numel: their elements, with padding.
            chunks: the number of chunks into which the elements are cut.
        """
        key = tuple(_described(name, tensor) for name, tensor in zip(names, tensors, strict=True)), numel, chunks
        device, starts = tensors[0].device, tuple(f"{name} (" for name in names)
        known = self._memories.get(key)
        if known is None:
            for other in [other for other in self._memories if any(tensor.startswith(starts) for tensor in other[0])]:
                del self._memories[other]
            known = self._memories[key] = ErrorMemory(numel, numel, chunks, device)
        known.filled = sum(tensor.numel() for tensor in tensors)
        if known.device != device:
            known.device, kept = device, known.kept()
            known.restore(None if kept is None else (kept[0].to(device), kept[1].to(device)))
        return known

    def state(self) -> dict[str, Any]:
        """Return the entry of `state_dict`: copies, and whose they are; nothing if disabled."""
        if not self.error_feedback:
            return {}
        buckets = []
        for (tensors, numel, chunks), memory in self._memories.items():
            worker, server = memory.kept() or (torch.zeros(numel), torch.zeros(numel // chunks))
            about = {"tensors": list(tensors), "numel": numel, "chunks": chunks}
            buckets.append({**about, "worker": worker.clone(), "server": server.clone()})
        return {"memories": {**saved_by(self._group), "algorithm": self._algorithm, "buckets": buckets}}

    def check(self, state: Mapping[str, Any], drop_local: bool) -> list[dict[str, Any]]:
        """Return the memories of ``state`` for `load`; none where they are to be dropped.

        Raises:
            ValueError: they are those of another algorithm, rank, version or model.
        """
        if drop_local or not self.error_feedback or "memories" not in state:
            return []
        saved = state["memories"]
        _check_entries("memories", saved, {*saved_by(self._group), "algorithm", "buckets"})
        if saved["algorithm"] != self._algorithm:
            raise ValueError(f"state has memories of {saved['algorithm']}, and this training uses {self._algorithm}")
        check_version(saved)
        check_saved_here(saved, self._group)
        buckets: list[dict[str, Any]] = saved["buckets"]
        for bucket in buckets:
            _check_entries("a bucket's memories", bucket, {"tensors", "numel", "chunks", "worker", "server"})
            form = {"tensors": [str], "numel": NATURAL, "chunks": range(1, 2**63), "worker": object, "server": object}
            check_form(bucket, form, "a bucket's memories")
        here = {tensor for tensors, _, _ in self._memories for tensor in tensors}
        there = {tensor for bucket in buckets for tensor in bucket["tensors"]}
        if here and here != there:
            raise ValueError(
                f"state holds memories of another model: it lacks {sorted(here - there) or 'none'}, and "
                f"{sorted(there - here) or 'none'} are new"
            )
        for bucket in buckets:
            wanted = {"worker": bucket["numel"], "server": bucket["numel"] // bucket["chunks"]}
            for name, size in wanted.items():
                if (bucket[name].dtype, tuple(bucket[name].shape)) != (torch.float32, (size,)):
                    raise ValueError(
                        f"state holds a {name} memory of {tuple(bucket[name].shape)} {bucket[name].dtype} for a bucket of "
                        f"{', '.join(bucket['tensors'])}, which needs ({size},) torch.float32"
                    )
        return buckets

    def load(self, buckets: Sequence[Mapping[str, Any]]) -> None:
        """Take over copies of what `check` returned; all other memories become zero."""
        for memory in self._memories.values():
            memory.restore(None)
        lost = []
        for saved in buckets:
            key: _Key = tuple(saved["tensors"]), saved["numel"], saved["chunks"]
            known = self._memories.get(key)
            if known is None and any(set(other[0]) & set(key[0]) for other in self._memories):
                lost.append(saved)
                continue
            if known is None:  # its bucket is not there yet
                known = ErrorMemory(saved["numel"], saved["numel"], saved["chunks"], saved["worker"].device)
                self._memories[key] = known
            known.restore(tuple(saved[name].to(known.device, copy=True) for name in ("worker", "server")))
        if lost:
            warnings.warn(
                f"{len(lost)} of {len(buckets)} error memories were saved for buckets that this training does not have, and are "
                "dropped; use the same bucket size and options to continue exactly",
                stacklevel=4,
            )


def _check_entries(what: str, saved: Any, wanted: set[str]) -> None:
    missing = sorted(wanted - saved.keys()) if isinstance(saved, dict) else sorted(wanted)
    if missing:
        raise ValueError(
            f"state does not hold {what} of error feedback: {', '.join(missing)} are missing; pass drop_local=True to start with "
            "memories of zero"
        )


def _described(name: str, tensor: Tensor) -> str:
    return f"{name} {Layout.of(tensor)}"

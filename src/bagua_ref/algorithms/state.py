"""State of algorithms: tensors that they keep from round to round, and checks of saved states."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua_ref.base.memory import Layout
from bagua_ref.base.runtime import current_world
from bagua_ref.base.untrusted import NATURAL, check_form
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.storage import registration
from bagua_ref.comm_ops import ErrorMemory
from bagua_ref.types import Group

_VERSION = 1
"""Version of the format of all states."""
_COUNT = range(10**18)
"""Range of counters, in which they can be incremented and sent as int64."""
_BUCKET = {
    "tensors": [str],
    "numel": NATURAL,
    "chunks": range(1, 2**63),
    "worker": object,
    "server": object,
}

_Key = tuple[tuple[str, ...], int, int]
"""Tensors with shapes and strides, number of elements with padding, and number of chunks."""


def communicator_of(group: Group, hierarchical: bool) -> Any:
    """Return the communicator of all ranks of ``group`` (hierarchical: of the leaders)."""
    return group.get_inter_node_communicator() if hierarchical else group.get_global_communicator()


def origin(name: str, group: Group) -> dict[str, Any]:
    """Return the header of a state: its version, the algorithm ``name``, this rank in ``group``,
    and the number of ranks.
    """
    return {
        "version": _VERSION,
        "algorithm": name,
        "rank": group.ranks.index(current_world().identity.rank),
        "world_size": len(group.ranks),
    }


def check_origin(state: Mapping[str, Any], here: Mapping[str, Any], local: Collection[str]) -> None:
    """Raise ValueError unless this rank can load ``state``.

    Args:
        state: the state to load.
        here: the `origin` of a state that this rank saves, and its shard, if parameters are
            sharded.
        local: the entries that only the rank that saved them can load.
    """
    if state["version"] != _VERSION:
        raise ValueError(
            f"state has version {state['version']!r}; this version of bagua_ref reads version"
            f" {_VERSION}"
        )
    if state["algorithm"] != here["algorithm"]:
        raise ValueError(
            f"state was saved by {state['algorithm']}, and this training uses {here['algorithm']}"
        )
    if state.get("shard") != here.get("shard"):
        saved, own = (
            f"shard {origin['shard']}" if "shard" in origin else "whole parameters"
            for origin in (state, here)
        )
        raise ValueError(f"state was saved for {saved}, and this rank has {own}")
    kept = sorted(entry for entry in local if state.get(entry))
    if kept and any(state[name] != here[name] for name in ("rank", "world_size")):
        raise ValueError(
            f"state has {' and '.join(kept)} of rank {state['rank']} of {state['world_size']}, and"
            f" this is rank {here['rank']} of {here['world_size']}: each rank must load the state"
            " that it saved itself, or call load_state_dict(state, drop_local=True) to load it"
            " without them"
        )


def check_counters(state: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
    """Raise ValueError unless the counters in ``state`` are numbers, or lists as long as those in
    ``counters`` of this training.
    """
    for name, here in counters.items():
        saved, is_list = state[name], isinstance(here, list)
        check_form(saved, [_COUNT] if is_list else _COUNT, f"state[{name!r}]")
        if is_list and len(saved) != len(here):
            raise ValueError(
                f"state was saved with {len(saved)} optimizers, and this training has {len(here)}"
            )


def check_names(what: str, saved: Sequence[str], here: Sequence[str]) -> None:
    """Raise ValueError unless a state holds ``what`` for the same names in the same order."""
    if saved != here:
        lacking, new = (
            [name for name in here if name not in saved],
            [name for name in saved if name not in here],
        )
        raise ValueError(
            f"state holds {what} of another model: it lacks {lacking or 'none'}, and"
            f" {new or 'none'} are new"
        )


def check_tensors(
    what: str,
    saved: Mapping[str, Any],
    wanted: Mapping[str, Tensor],
    layouts: Mapping[str, Layout] | None = None,
) -> None:
    """Raise ValueError unless a state holds tensors of the expected names, shapes, dtypes and, with
    ``layouts``, strides.

    Args:
        what: a description of the tensors, for messages.
        saved: the tensors in the state, by name.
        wanted: the expected tensors, by name.
        layouts: the expected strides, by name; None: any.
    """
    if not isinstance(saved, Mapping) or not all(
        isinstance(tensor, Tensor) for tensor in saved.values()
    ):
        raise ValueError(f"state holds {what} that are no tensors")
    check_names(what, sorted(saved), sorted(wanted))
    for name, like in wanted.items():
        found = saved[name]
        there, here = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (found, like))
        if there == here and layouts is not None and not layouts[name].describes(found):
            there, here = (
                f"{there} with strides {found.stride()}",
                f"{here} with strides {layouts[name].strides}",
            )
        if there != here:
            raise ValueError(
                f"state holds {what} that are not this model's: {name!r} is {there} there and"
                f" {here} here"
            )


class TensorStore(dict[str, Tensor]):
    """Named tensors that an algorithm keeps from round to round, initially zero.

    Args:
        what: a description of the tensors, for messages.

    >>> memories = TensorStore("memories")
    >>> memories.expect("weight", torch.zeros(2))
    >>> _ = memories["weight"].add_(1)
    >>> memories.state()
    {'weight': tensor([1., 1.])}
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._layouts: dict[str, Layout] = {}
        """Strides of the expected tensors; other tensors were loaded before they were expected."""
        self._flats: dict[tuple[str, ...], Tensor] = {}
        """Flat tensors, by the names of the tensors stored in them."""

    def expect(self, name: str, like: Tensor, layout: Layout | None = None) -> None:
        """Add a tensor of the shape, dtype and device of ``like``, unless the store already has
        this name.

        Args:
            name: name of the tensor.
            like: a tensor of this shape, dtype and device; its values and strides do not matter.
            layout: the strides; None: row-major ones. If others were expected before, the values
                move to these.

        Raises:
            ValueError: a loaded tensor of this name has another shape, dtype or strides.
        """
        layout = layout or Layout(like.shape)
        tensor = layout.zeros(like.dtype, like.device)
        if name in self:
            known = self[name]
            expected = None if name in self._layouts else {name: layout}
            check_tensors(self._what, {name: known}, {name: tensor}, expected)
            if layout.describes(known) and known.device == tensor.device:
                tensor = known
            else:
                tensor.copy_(known)
                self._flats.clear()
        self[name], self._layouts[name] = tensor, layout

    def flat(self, names: Sequence[str]) -> Tensor:
        """Move these tensors into one flat tensor, each in the order of its strides; return it."""
        key = tuple(names)
        if key not in self._flats:
            self._flats = {
                others: flat for others, flat in self._flats.items() if not set(others) & set(key)
            }
            flat = torch.cat([self._layouts[name].flat(self[name]) for name in names])
            for name, part in zip(
                names, flat.split([self[name].numel() for name in names]), strict=True
            ):
                self[name] = self._layouts[name].view(part)
            self._flats[key] = flat
        return self._flats[key]

    def state(self) -> dict[str, Tensor]:
        """Return copies of all tensors, by name."""
        return {name: tensor.clone() for name, tensor in self.items()}

    def check(self, saved: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless `load` can load ``saved``; before any `expect`, check only that
        it holds tensors.
        """
        expected = self if self._layouts else saved
        check_tensors(self._what, saved, expected, self._layouts or None)

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Copy ``saved`` into the store; all other tensors become zero."""
        if not self._layouts:
            self.clear()
            self.update({name: tensor.clone() for name, tensor in saved.items()})
        for name in self._layouts:
            if saved:
                self[name].copy_(saved[name])
            else:
                self[name].zero_()


class ErrorMemories:
    """Error memories of one module's buckets on this rank (S11.1).

    A bucket of the same tensors in the same order and the same chunks finds its memory again, also
    after buckets were rebuilt. A memory whose tensors enter another bucket, or get other strides,
    is dropped.
    """

    def __init__(self) -> None:
        self._memories: dict[_Key, ErrorMemory] = {}

    def of_bucket(self, bucket: BaguaBucket, group: Group, hierarchical: bool) -> ErrorMemory:
        """Return the error memory of a bucket compressed between all ranks of ``group``
        (hierarchical: between leaders).
        """
        chunks = communicator_of(group, hierarchical).nranks()
        if hierarchical and group.get_intra_node_communicator().rank() != 0:
            # only leaders use theirs, so this one takes no memory
            return ErrorMemory(bucket.filled, bucket.numel, chunks, torch.device("meta"))
        names = [registration(proxy).name for proxy in bucket.tensors]
        return self.claim(names, bucket.effective_tensors(), bucket.numel, chunks)

    def claim(
        self, names: Sequence[str], tensors: Sequence[Tensor], numel: int, chunks: int
    ) -> ErrorMemory:
        """Return the error memory of these tensors and chunks; create it if there is none.

        Args:
            names: names of the tensors.
            tensors: the tensors, on one device.
            numel: total number of elements, with padding.
            chunks: the number of chunks into which the elements are cut.
        """
        texts = tuple(f"{name} {Layout.of(t)}" for name, t in zip(names, tensors, strict=True))
        key, starts = (texts, numel, chunks), tuple(f"{name} (" for name in names)
        if key not in self._memories:
            self._memories = {
                other: memory
                for other, memory in self._memories.items()
                if not any(text.startswith(starts) for text in other[0])
            }
            self._memories[key] = ErrorMemory(numel, numel, chunks, tensors[0].device)
        known = self._memories[key]
        known.filled = sum(tensor.numel() for tensor in tensors)
        known.restore((known.worker, known.server), tensors[0].device)
        return known

    def state(self) -> list[dict[str, Any]]:
        """Return copies of all error memories."""
        buckets = []
        for (tensors, numel, chunks), memory in self._memories.items():
            about = {"tensors": list(tensors), "numel": numel, "chunks": chunks}
            kept = {"worker": memory.worker.clone(), "server": memory.server.clone()}
            buckets.append(about | kept)
        return buckets

    def check(self, saved: Any) -> None:
        """Raise ValueError unless `load` can load ``saved``: error memories of this model."""
        check_form(saved, [_BUCKET], "state['memories']")
        if here := sorted({text for texts, _, _ in self._memories for text in texts}):
            there = sorted({text for bucket in saved for text in bucket["tensors"]})
            check_names("memories", there, here)
        for bucket in saved:
            sizes = {"worker": bucket["numel"], "server": bucket["numel"] // bucket["chunks"]}
            check_tensors(
                f"memories of {', '.join(bucket['tensors'])}",
                {name: bucket[name] for name in sizes},
                {
                    name: torch.empty((), dtype=torch.float32).expand(size)
                    for name, size in sizes.items()
                },
            )

    def load(self, saved: Collection[Mapping[str, Any]]) -> None:
        """Load copies of ``saved``, after `check` has passed; all other memories become zero."""
        here, lost = {text for texts, _, _ in self._memories for text in texts}, 0
        for memory in self._memories.values():
            memory.restore(None)
        for bucket in saved:
            numel, chunks = bucket["numel"], bucket["chunks"]
            kept = bucket["worker"].clone(), bucket["server"].clone()
            key: _Key = tuple(bucket["tensors"]), numel, chunks
            if key in self._memories:
                self._memories[key].restore(kept)
            elif here.intersection(key[0]):
                lost += 1
            else:  # its bucket comes later
                known = self._memories[key] = ErrorMemory(numel, numel, chunks, kept[0].device)
                known.restore(kept)
        if lost:
            warnings.warn(
                f"{lost} of {len(saved)} error memories were saved for buckets that this training"
                " does not have, and are dropped; use the same bucket size and options to continue"
                " exactly",
                stacklevel=4,
            )

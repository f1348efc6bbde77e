"""State of algorithms for checkpoints that names who saved it and is checked before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagua_ref.algorithms.base import AlgorithmImpl
from bagua_ref.base.runtime import current_world
from bagua_ref.types import Group

__all__ = ["VersionedStateImpl", "check_saved_here", "check_version", "saved_by"]

_VERSION = 1
"""Of the states that `VersionedStateImpl.state_dict` and `saved_by` return."""


def saved_by(group: Group) -> dict[str, int]:
    """Return the version, and who saves a state in ``group``: the rank in it, and the number of ranks."""
    return {"version": _VERSION, "rank": group.ranks.index(current_world().identity.rank), "world_size": len(group.ranks)}


def check_version(state: Mapping[str, Any]) -> None:
    """Raise ValueError if ``state`` has another version."""
    if state["version"] != _VERSION:
        raise ValueError(f"state has version {state['version']!r}; this version of bagua_ref reads version {_VERSION}")


def check_saved_here(state: Mapping[str, Any], group: Group) -> None:
    """Raise ValueError unless ``state``, which has memories, was saved by this rank of as many ranks."""
    here, saved = saved_by(group), state
    if any(saved[name] != here[name] for name in ("rank", "world_size")):
        raise ValueError(
            f"state has memories of rank {saved['rank']} of {saved['world_size']}, and this is rank {here['rank']} of "
            f"{here['world_size']}: each rank must load the state that it saved itself, or pass drop_local=True to start with "
            "memories of zero"
        )


class VersionedStateImpl(AlgorithmImpl):
    """An implementation whose state names rank, number of ranks and version."""

    name: str
    """The algorithm's, for messages."""

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far, and who saved them: the rank, the number of ranks and the version."""
        return {**super().state_dict(), **saved_by(self.process_group)}

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.process_group.ranks.index(current_world().identity.rank)

    def load_state_dict(self, state: dict[str, Any], drop_local: bool = False) -> None:
        """Continue from ``state``; call it on every rank, after loading that rank's own weights and optimizers.

        It does not communicate; the next round compares what must be equal on all ranks.

        Args:
            state: what `state_dict` returned, on any rank of any number of ranks: nothing in it belongs to a single rank.
            drop_local: accepted as by algorithms that keep state of single ranks; there is none to drop here.

        Raises:
            ValueError: it is a state of another algorithm, version or training; nothing has been loaded.
        """
        super().load_state_dict(state)
        self.context.note_load()

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` can load ``state``."""
        wanted = {"version", *self.counters()}
        if not wanted <= state.keys():
            raise ValueError(f"state is not one of {self.name}: it lacks {', '.join(sorted(wanted - state.keys()))}")
        check_version(state)
        super().check_state(state)

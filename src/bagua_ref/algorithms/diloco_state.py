"""The state of diloco between rounds, for checkpoints: global weights, outer optimizers, and the mean in flight (S9)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms.fragments import Fragment
from bagua_ref.base.memory import Layout
from bagua_ref.buckets.optimizer_state import align_state, check_optimizer_state, take_over
from bagua_ref.comm_ops import ErrorMemory
from bagua_ref.errors import CommunicationError
from bagua_ref.scheduling.engine import Engine

__all__ = ["InFlight", "check_outer_state", "load_outer_state", "outer_state"]


class InFlight:
    """A fragment's differences, sent and not yet applied; once they have arrived, their mean over ranks.

    Args:
        fragment: its place.
        due: t of the step after which it is applied.
        mean: views of what is sent, by name.
        missing: names of the buckets that have not arrived.
        memories: error memories that sending changes.
    """

    def __init__(
        self,
        fragment: int,
        due: int,
        mean: dict[str, Tensor],
        missing: Sequence[str] = (),
        memories: Sequence[ErrorMemory] = (),
    ) -> None:
        self.fragment, self.due, self.mean = fragment, due, mean
        self._missing = set(missing)
        self._before = [(memory, memory.kept()) for memory in memories]

    def note_arrival(self, bucket_name: str) -> None:
        """Note that a bucket has its mean; the last operation of each bucket.

        If the fragment's mean is not finite, so that it will not be applied, its memories are what they were before.
        """
        self._missing.discard(bucket_name)
        if self._missing or not self._before:
            return
        if not all(mean.isfinite().all() for mean in self.mean.values()):
            for memory, kept in self._before:
                memory.restore(kept)
        self._before = []

    def wait(self, engine: Engine) -> None:
        """Wait until the mean is there.

        Raises:
            CommunicationError: it will not come, also if an earlier wait has said so.
        """
        engine.wait_pending_comm_ops()
        if self._missing:
            raise CommunicationError(f"the mean of fragment {self.fragment} has not arrived because an earlier operation failed")


def outer_state(fragments: Sequence[Fragment], taken: bool, flight: InFlight | None) -> dict[str, Any]:
    """Return copies of everything; ``flight`` has arrived."""
    copies = {name: g.detach().clone() for fragment in fragments for name, g in zip(fragment.names, fragment.copies, strict=True)}
    arrived = {name: mean.clone() for name, mean in flight.mean.items()} if flight is not None else {}
    return {
        "fragments": [list(fragment.names) for fragment in fragments],
        "global_weights": copies if taken else None,
        "outer_optimizers": [copy.deepcopy(fragment.optimizer.state_dict()) for fragment in fragments],
        "outer_entries": [len(fragment.optimizer.state) for fragment in fragments],
        "in_flight": None if flight is None else {"fragment": flight.fragment, "due": flight.due, "mean": arrived},
    }


def check_outer_state(state: Mapping[str, Any], fragments: Sequence[Fragment], allowed: Mapping[int, int]) -> None:
    """Raise ValueError unless `load_outer_state` can load ``state``.

    Args:
        state: what `outer_state` returned.
        fragments: of this training.
        allowed: the fragment that each step to come would apply if it is in flight.
    """
    names = [list(fragment.names) for fragment in fragments]
    if state["fragments"] != names:
        raise ValueError(f"state was saved with fragments {state['fragments']}, and this training has {names}")
    shapes = {name: g for fragment in fragments for name, g in zip(fragment.names, fragment.copies, strict=True)}
    if state["global_weights"] is not None:
        _check_tensors("global_weights", state["global_weights"], shapes)
    for place, (saved, fragment) in enumerate(zip(state["outer_optimizers"], fragments, strict=True)):
        sizes = [[len(group["params"]) for group in groups] for groups in (saved["param_groups"], fragment.optimizer.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"state holds an outer optimizer of fragment {place} with groups of {sizes[0]} tensors, and this training's has "
                f"{sizes[1]}"
            )
        check_optimizer_state(fragment.optimizer, saved)
        entries, found = state["outer_entries"][place], len(saved["state"])
        if entries != found:  # torch.distributed.checkpoint loads only what the training that loads has already
            raise ValueError(f"state lacks part of the outer optimizer of fragment {place}: {found} of {entries} entries are there")
    flight = state["in_flight"]
    if flight is not None:
        place, due = flight["fragment"], flight["due"]
        if allowed.get(due) != place:
            raise ValueError(
                f"state has fragment {place} in flight, to be applied after step {due}, which fits no step of this training's "
                "schedule: load it with the period, fragments, delay and warmup_steps with which it was saved"
            )
        _check_tensors("the mean in flight", flight["mean"], {name: shapes[name] for name in fragments[place].names})


def load_outer_state(state: Mapping[str, Any], fragments: Sequence[Fragment]) -> InFlight | None:
    """Load global weights and outer optimizers into ``fragments``; return what is in flight."""
    for saved, fragment in zip(copy.deepcopy(state["outer_optimizers"]), fragments, strict=True):
        take_over(fragment.optimizer, saved, {})
        align_state(fragment.optimizer)
        if state["global_weights"] is not None:
            with torch.no_grad():
                for name, g in zip(fragment.names, fragment.copies, strict=True):
                    g.copy_(state["global_weights"][name])
    flight = state["in_flight"]
    if flight is None:
        return None
    fragment = fragments[flight["fragment"]]
    mean = {
        name: Layout.of(g).copy_of(flight["mean"][name].to(g.device))
        for name, g in zip(fragment.names, fragment.copies, strict=True)
    }
    return InFlight(flight["fragment"], flight["due"], mean)


def _check_tensors(what: str, saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    found, expected = ({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} for tensors in (saved, wanted))
    wrong = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    if wrong:
        raise ValueError(
            f"state holds {what} that are not this model's: {wrong[0]!r} is {found.get(wrong[0], 'missing')} there and "
            f"{expected.get(wrong[0], 'missing')} here"
        )

"""Counters in a saved state of an algorithm, and the check before they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagua_ref.base.untrusted import check_form

__all__ = ["check_saved_counters"]

_COUNT = range(10**18)
"""What a counter may be, so that it can go on and still be sent as an int64."""
_OPTIONAL = {"steps_of_optimizers", "passes"}


def check_saved_counters(state: Mapping[str, Any], counters: Mapping[str, Any], shard: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``state`` has counters like these, and was saved for this shard of parameters.

    Args:
        state: to be loaded.
        counters: of this training: numbers, and lists of numbers.
        shard: of this rank, empty if parameters are whole.
    """
    saved = {"shard": state["shard"]} if "shard" in state else {}
    if saved != shard:
        raise ValueError(f"state was saved for {saved or 'whole parameters'}, and this rank has {shard or 'whole ones'}")
    if missing := sorted(counters.keys() - state.keys() - _OPTIONAL):
        raise ValueError(f"state lacks {', '.join(missing)}")
    for name, here in counters.items():
        if name not in state:
            continue
        check_form(state[name], [_COUNT] if isinstance(here, list) else _COUNT, f"state[{name!r}]")
        if name == "steps_of_optimizers" and len(state[name]) != len(here):
            raise ValueError(f"state was saved with {len(state[name])} optimizers, and this training has {len(here)}")

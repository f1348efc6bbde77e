"""Optimizer state that records whether anyone has looked into it, as then a plan may be out of date (S6)."""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

__all__ = ["ObservedState", "QuietState", "held_elsewhere", "observe"]


class QuietState(defaultdict[Any, Any]):
    """The ``state`` of a fused optimizer while it steps: a defaultdict, of which copies are plain ones."""

    untouched = False
    """Whether nobody has looked into it since this was set to True."""

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (self.default_factory,), None, None, iter(list(dict.items(self)))

    def __copy__(self) -> Any:
        return defaultdict(self.default_factory, self)

    copy = __copy__


class ObservedState(QuietState):
    """The ``state`` of a fused optimizer between steps: it records whether it has been looked into, which takes time."""


def _recorded(name: str) -> Any:
    method = getattr(ObservedState, name)

    def look(self: ObservedState, *args: Any, **kwargs: Any) -> Any:
        self.untouched = False
        return method(self, *args, **kwargs)

    return look


for _name in (
    "__copy__", "__delitem__", "__getitem__", "__ior__", "__iter__", "__or__", "__reversed__", "__ror__", "__setitem__", "clear",
    "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values",
):  # fmt: skip
    setattr(ObservedState, _name, _recorded(_name))


def observe(optimizer: torch.optim.Optimizer) -> ObservedState:
    """Return the optimizer's state, after making it an `ObservedState`."""
    if not isinstance(optimizer.state, ObservedState):
        factory = getattr(optimizer.state, "default_factory", dict)
        optimizer.state = ObservedState(factory, optimizer.state)
    return optimizer.state


def held_elsewhere(
    states: Iterable[Sequence[dict[Any, Any]]],
    holders: int,
    columns: Iterable[tuple[Callable[[Any], Any], Sequence[dict[Any, Any]]]],
) -> bool:
    """Return whether someone else refers to a parameter's state or a tensor in it, and so can change it unobserved.

    Args:
        states: the states of parameters, in parts.
        holders: how many lists and dicts of ours refer to each of them.
        columns: functions that read a tensor from a state, each with the states that have it.
    """
    one: dict[Any, Any] = {}
    ours = [[one] for _ in range(holders)]
    del one
    most = next(map(sys.getrefcount, ours[0]))
    if any(max(map(sys.getrefcount, part), default=0) > most for part in states):
        return True
    most = next(map(sys.getrefcount, map(operator.itemgetter(0), [{0: object()}])))
    return any(max(map(sys.getrefcount, map(read, part)), default=0) > most for read, part in columns)

"""An optimizer's state that tells whether anyone has looked into it since, as then what a plan knows of it may be old (S6)."""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

__all__ = ["State", "held_elsewhere", "take_over"]


class State(defaultdict[Any, Any]):
    """The ``state`` of a fused optimizer: a defaultdict like any other. Copies and pickles are plain ones."""

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (self.default_factory,), None, None, iter(list(dict.items(self)))

    def __copy__(self) -> Any:
        return defaultdict(self.default_factory, self)

    copy = __copy__

    def watch(self) -> None:
        """Notice the next look into it."""
        self.__class__ = _WatchedState

    def unwatch(self) -> None:
        """Be as quick as any defaultdict."""
        self.__class__ = State

    @property
    def is_watched(self) -> bool:
        """Whether nobody has looked into it since `watch`."""
        return False


class _WatchedState(State):
    """State into which nobody has looked. The first look makes it `State` again, so that only that one takes longer."""

    @property
    def is_watched(self) -> bool:
        return True


def _noticed(name: str) -> Any:
    method = getattr(State, name)

    def look(self: State, *args: Any, **kwargs: Any) -> Any:
        self.unwatch()
        return method(self, *args, **kwargs)

    return look


for _name in (
    "__copy__", "__delitem__", "__getitem__", "__ior__", "__iter__", "__or__", "__reversed__", "__ror__", "__setitem__", "clear",
    "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values",
):  # fmt: skip
    setattr(_WatchedState, _name, _noticed(_name))


def take_over(optimizer: torch.optim.Optimizer) -> State:
    """Return the optimizer's state, having made it a `State`."""
    if not isinstance(optimizer.state, State):
        factory = getattr(optimizer.state, "default_factory", dict)
        optimizer.state = State(factory, optimizer.state)
    return optimizer.state


def held_elsewhere(
    states: Iterable[Sequence[dict[Any, Any]]],
    holders: int,
    columns: Iterable[tuple[Callable[[Any], Any], Sequence[dict[Any, Any]]]],
) -> bool:
    """Return whether someone holds a parameter's state or a tensor in it, and so can change it without a look into `State`.

    Args:
        states: of parameters, in parts.
        holders: how many lists and dicts of ours hold each of them.
        columns: what reads a tensor from a state, and the states that have it.
    """
    one: dict[Any, Any] = {}
    ours = [[one] for _ in range(holders)]
    del one
    most = next(map(sys.getrefcount, ours[0]))
    if any(max(map(sys.getrefcount, part), default=0) > most for part in states):
        return True
    most = next(map(sys.getrefcount, map(operator.itemgetter(0), [{0: object()}])))
    return any(max(map(sys.getrefcount, map(read, part)), default=0) > most for read, part in columns)

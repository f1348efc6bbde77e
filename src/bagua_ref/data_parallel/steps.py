"""Optimizer steps since the last round, which ranks with equal weights compare (S2.5)."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer

from bagua_ref.base import runtime
from bagua_ref.scheduling.engine import UNSAID, Fact

__all__ = ["TakenSteps"]

_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Options that choose an implementation of the same step."""


@dataclass(eq=False)
class _Group:
    """The options of a group.

    Attributes:
        raw: what they were made of; without tensors, as long as that is equal, so are they.
        has_tensors: whether some are tensors, which may change in place.
        options: numbers, strings, lists of them, and copies of tensors.
    """

    raw: list[Any]
    has_tensors: bool
    options: dict[str, Any]
    checksum: int = 0


class TakenSteps:
    """The steps of a module's optimizers since the last round, and the options of those steps.

    Options are read when an optimizer steps, as a scheduler may change them at another moment on
    each rank. Compared are numbers and strings among those that the optimizer declares as its
    defaults, to 7 digits: the libraries of two machines differ in the last bit of a cosine.
    """

    def __init__(self) -> None:
        self._groups: weakref.WeakKeyDictionary[Optimizer, list[_Group]] = (
            weakref.WeakKeyDictionary()
        )
        """Those of each optimizer's last step: nearly always, nothing has changed since."""
        self.clear()

    def clear(self) -> None:
        """Begin anew, as after a round."""
        self._last: dict[Optimizer, Sequence[_Group]] = {}
        self._pending: tuple[Optimizer, list[_Group]] | None = None
        """A step and its new groups, whose checksums are missing: copies are on the way."""
        self._copied: list[Any] = []
        """Events after which the copies are there."""
        self._checksum = self._not_passed = 0

    def add(self, optimizer: Optimizer, trained: Container[int], passed: bool) -> None:
        """Record a step.

        Args:
            optimizer: takes the step.
            trained: the ids of the module's trained parameters.
            passed: whether the optimizer was passed when wrapping.
        """
        self._complete()
        self._not_passed += not passed
        names = [
            name
            for name in optimizer.defaults
            # optimizers that share their work between ranks may declare the rank as an option
            if name not in _IMPLEMENTATION and "rank" not in name
        ]
        before, groups, new = self._groups.get(optimizer, []), [], []
        for place, group in enumerate(optimizer.param_groups):
            raw, parameters = [*map(group.get, names)], group["params"]
            raw.append(len(parameters))
            known = before[place] if place < len(before) else None
            if known is None or known.has_tensors or known.raw != raw:
                self._reads_tensors = False
                options = {}
                # other groups, as of experts that only this rank has, need not be equal
                if not parameters or any(id(parameter) in trained for parameter in parameters):
                    options = {name: self._read(group.get(name)) for name in names}
                known = _Group(raw, self._reads_tensors, options)
                new.append(known)
            groups.append(known)
        self._groups[optimizer] = self._last[optimizer] = groups
        self._pending = optimizer, new
        if not self._copied:
            self._complete()

    def facts(self, compared: bool) -> list[Fact]:
        """Return what is compared at the beginning of a round; if not ``compared``, without
        values.
        """
        if compared:
            self._complete()
        last, several = self._last, len(self._last) > 1

        def explain() -> dict[tuple[str, str], str]:
            texts = {}
            for number, (optimizer, groups) in enumerate(last.items()):
                kind = type(optimizer).__name__
                which = f"optimizer {number}, {kind}" if several else kind
                stepped = "{has} stepped {value}", f" as optimizer {number}" if several else ""
                texts[stepped] = f"{kind} with {len(groups)} groups"
                for place, group in enumerate(groups):
                    for name, value in group.options.items():
                        where = f" in group {place} of {which}"
                        texts[f"{{has}} {name} {{value}}", where] = _text(value)
            return texts

        return [
            Fact(
                "{has} taken {value} optimizer steps since the last round",
                self._not_passed if compared else UNSAID,
            ),
            Fact(
                "{has} taken steps with options of checksum {value}",
                self._checksum if compared else UNSAID,
                explain=explain,
            ),
        ]

    def _read(self, value: Any) -> Any:
        """Return ``value`` as it is now, None if it is not compared."""
        if isinstance(value, (float, int, str, Real)):
            return value
        if isinstance(value, (tuple, list)):
            return [*map(self._read, value)]
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            return None
        self._reads_tensors = True
        if value.device.type == "cpu":
            return value.item()
        # the host does not wait for the device here: the copy is needed in the next backward pass
        copy = value.detach().to("cpu", non_blocking=True)
        self._copied.append(runtime.record_event(value.device))
        return copy

    def _complete(self) -> None:
        """Add the pending step to the checksum."""
        if self._pending is None:
            return
        (optimizer, new), self._pending = self._pending, None
        for event in self._copied:
            event.synchronize()
        self._copied.clear()
        for group in new:
            texts = [(name, _text(value)) for name, value in group.options.items()]
            group.checksum = zlib.crc32(repr(texts).encode())
        checksums = [group.checksum for group in self._last[optimizer]]
        step = repr((type(optimizer).__name__, checksums))
        self._checksum = zlib.crc32(step.encode(), self._checksum)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, torch.Tensor):
        value = value.item()
    return f"{value:.7g}" if isinstance(value, (float, int, Real)) else str(value)

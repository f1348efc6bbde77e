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
        names: of the options.
        raw: their values, and the number of parameters; while these are equal, and no tensors, so
            are the texts.
        has_tensors: whether some are tensors, which may change in place.
        texts: of the values, or copies of tensors until `_complete`; empty if not compared.
    """

    names: list[str]
    raw: list[Any]
    has_tensors: bool
    texts: list[Any]
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
                known = self._read_group(names, raw, group, trained, known)
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
                    for name, text in zip(group.names, group.texts, strict=False):
                        where = f" in group {place} of {which}"
                        texts[f"{{has}} {name} {{value}}", where] = _joined(text)
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

    def _read_group(
        self,
        names: list[str],
        raw: list[Any],
        group: dict[str, Any],
        trained: Container[int],
        before: _Group | None,
    ) -> _Group:
        parameters = group["params"]
        self._reads_tensors, texts = False, []
        # other groups, as of experts that only this rank has, need not be equal
        if not parameters or any(id(parameter) in trained for parameter in parameters):
            if before is None or before.has_tensors or not before.texts:
                texts = [self._read(value) for value in raw[:-1]]
            else:  # usually, only the learning rate has changed
                texts = [
                    text if value is old else self._read(value)
                    for value, old, text in zip(raw, before.raw, before.texts, strict=False)
                ]
        return _Group(names, raw, self._reads_tensors, texts)

    def _read(self, value: Any) -> Any:
        """Return ``value`` as it is now: a text, or copies of tensors in lists."""
        if isinstance(value, (float, int, Real)):
            return f"{value:.7g}"
        if isinstance(value, (tuple, list)):
            texts = [*map(self._read, value)]
            return texts if self._reads_tensors else _joined(texts)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            return value if isinstance(value, str) else ""
        self._reads_tensors = True
        if value.device.type == "cpu":
            return self._read(value.item())
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
            if group.has_tensors:
                group.texts = [*map(_joined, group.texts)]
            group.checksum = zlib.crc32(repr(group.texts).encode())
        checksums = [group.checksum for group in self._last[optimizer]]
        step = repr((type(optimizer).__name__, checksums))
        self._checksum = zlib.crc32(step.encode(), self._checksum)


def _joined(text: Any) -> str:
    if isinstance(text, list):
        return f"({', '.join(map(_joined, text))})"
    return f"{text.item():.7g}" if isinstance(text, torch.Tensor) else str(text)

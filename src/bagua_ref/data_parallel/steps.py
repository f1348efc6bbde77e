"""Optimizer steps since the last round, which ranks with equal weights compare (S2.5)."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Container
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer

from bagua_ref.base import runtime
from bagua_ref.scheduling.engine import UNSAID, Fact

_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Options that only select an implementation of the same step."""


@dataclass(eq=False)
class _Group:
    """Options of a parameter group at an optimizer step.

    Attributes:
        names: names of the options.
        raw: values of the options, and the number of parameters; if these are unchanged and hold no
            tensors, so are the texts.
        read: the values with numbers in place of tensors, or copies still in transfer; empty if
            they are not compared.
        has_tensors: whether some values are tensors, which can change in place.
        texts: texts of the values read; None until copies have arrived.
        checksum: checksum of the texts.
    """

    names: list[str]
    raw: list[Any]
    read: list[Any]
    has_tensors: bool
    texts: list[str] | None = None
    checksum: int = 0


class TakenSteps:
    """Record of the steps of a module's optimizers since the last round, with the options of those
    steps.

    Options are read when an optimizer steps, because schedulers may change them at different
    moments on different ranks. Only numbers and strings among the optimizer's declared defaults are
    compared, to 7 digits: math libraries of two machines may differ in the last bit of a cosine.
    """

    def __init__(self) -> None:
        self._groups: weakref.WeakKeyDictionary[Optimizer, list[_Group]] = (
            weakref.WeakKeyDictionary()
        )
        """Options of each optimizer's last step; they rarely change between steps."""
        self.clear()

    def clear(self) -> None:
        """Clear the record, after a round."""
        self._last: dict[Optimizer, list[_Group]] = {}
        """Options of each optimizer's last step since the round."""
        self._pending: Optimizer | None = None
        """Optimizer whose last step is not in the checksum yet, because copies are still in
        transfer.
        """
        self._copied: list[Any] = []
        """CUDA events at the end of these copies."""
        self._checksum = self._not_passed = 0

    def add(self, optimizer: Optimizer, trained: Container[int], passed: bool) -> None:
        """Record an optimizer step.

        Args:
            optimizer: the optimizer that takes the step.
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
        before, groups = self._groups.get(optimizer, []), []
        for place, group in enumerate(optimizer.param_groups):
            values, parameters = [*map(group.get, names)], group["params"]
            raw = [*values, len(parameters)]
            known = before[place] if place < len(before) else None
            if known is None or known.has_tensors or known.raw != raw:
                # other groups, as of experts that only this rank has, need not be equal
                is_compared = not parameters or any(id(p) in trained for p in parameters)
                tensors: list[torch.Tensor] = []
                read = [_read(value, tensors) for value in values] if is_compared else []
                known = _Group(names, raw, read, bool(tensors))
                self._copied += [
                    runtime.record_event(t.device) for t in tensors if t.device.type != "cpu"
                ]
            groups.append(known)
        self._groups[optimizer] = self._last[optimizer] = groups
        self._pending = optimizer
        if not self._copied:
            self._complete()

    def facts(self, compared: bool) -> list[Fact]:
        """Return the agreement fields of the recorded steps; they abstain unless ``compared``."""
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
                    for name, text in zip(group.names, group.texts or (), strict=False):
                        texts[f"{{has}} {name} {{value}}", f" in group {place} of {which}"] = text
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

    def _complete(self) -> None:
        """Add the pending step to the checksum."""
        optimizer, self._pending = self._pending, None
        if optimizer is None:
            return
        for event in self._copied:
            event.synchronize()
        self._copied.clear()
        groups = self._last[optimizer]
        for group in groups:
            if group.texts is None:
                group.texts = [*map(_text, group.read)]
                group.checksum = zlib.crc32(repr(group.texts).encode())
        step = repr((type(optimizer).__name__, [group.checksum for group in groups]))
        self._checksum = zlib.crc32(step.encode(), self._checksum)


def _read(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the current ``value``, with tensors replaced by numbers, or by copies still in
    transfer; append the tensors to ``tensors``.
    """
    if isinstance(value, (tuple, list)):
        return [_read(item, tensors) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        return None
    tensors.append(value)
    # the host does not wait for the device here: the copy is needed in the next backward pass
    return (
        value.item() if value.device.type == "cpu" else value.detach().to("cpu", non_blocking=True)
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, (float, int, Real)):
        return f"{value:.7g}"
    return value if isinstance(value, str) else ""

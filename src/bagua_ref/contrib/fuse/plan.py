"""Which parameters of an optimizer can be updated as one, until something about them changes (S6)."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.contrib.fuse.layout import PLAIN_TYPES, adjacent, chains, find_overlapping, held_by_bucket, is_plain
from bagua_ref.contrib.fuse.run import NUMBERS, Run, registration_of
from bagua_ref.contrib.fuse.state import held_elsewhere, take_over

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["Plan", "can_fuse", "options"]

EXACT = (torch.float32, torch.float64)
SHORT = (torch.float16, torch.bfloat16)

LONG, LONG_ON_CPU = 2**24, 2**19
"""Elements at which a run is long enough.

A step makes temporary tensors as long as a run. On a CPU the allocator gives more than a few MB of them back to the system each
time, and to get them anew takes longer than the step: half as many elements where there are two of them at once.
"""
ONE_TEMPORARY = ("Adagrad", "RMSprop", "SGD")

data_ptr = torch.Tensor.data_ptr
get_grad = operator.attrgetter("grad")


def can_fuse(group: dict[str, Any], dtype: torch.dtype, device: torch.device, allow_inexact: bool) -> bool:
    """Return whether a group's options and a dtype leave results of fused steps as they are (S6)."""
    if group.get("differentiable") or dtype not in EXACT + SHORT:
        return False
    if allow_inexact or (device.type != "cpu" and not group.get("fused")):
        return True
    return not group.get("fused") and dtype in EXACT and not _replaces_average(group)


@dataclass
class PlannedGroup:
    """One parameter group as it was planned, and what is stepped in place of its parameters."""

    parameters: list[Tensor]
    options: tuple[Any, ...]
    runs: list[Run] = field(default_factory=list)
    stepped: list[Tensor] = field(default_factory=list)


class Plan:
    """Runs of parameters, and the cheap answer to whether they still are what they were.

    Args:
        optimizer: whose parameters; state that is part of a run moves beside each other.
        allow_inexact: as `bagua_ref.contrib.fuse.optimizer.fuse_optimizer`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, allow_inexact: bool) -> None:
        self.state = take_over(optimizer)
        self.state.unwatch()
        self.groups: list[PlannedGroup] = []
        self._idle: list[Tensor] = []
        """Parameters without gradient: once they get one, the plan is out of date."""
        overlapping = find_overlapping(p for group in optimizer.param_groups for p in group["params"])
        for group in optimizer.param_groups:
            planned = PlannedGroup(list(group["params"]), options(group))
            joinable = []
            for parameter in planned.parameters:
                if parameter.grad is None:
                    self._idle.append(parameter)
                elif (
                    id(parameter) not in overlapping
                    and can_fuse(group, parameter.dtype, parameter.device, allow_inexact)
                    and is_plain(parameter)
                    and parameter.numel()
                    and _is_dense(parameter.grad, parameter)
                ):
                    joinable.append(parameter)
            planned.runs = list(_find_runs(joinable, self.state, _long(optimizer, group)))
            in_runs = {id(parameter) for run in planned.runs for parameter in run.parameters}
            planned.stepped = [run.weight for run in planned.runs]
            planned.stepped += [parameter for parameter in planned.parameters if id(parameter) not in in_runs]
            self.groups.append(planned)
        self.runs = [run for planned in self.groups for run in planned.runs]
        self.num_fused_groups = sum(bool(planned.runs) for planned in self.groups)
        self.parameters = [parameter for run in self.runs for parameter in run.parameters]
        """All that are in runs, in order."""
        self._pointers = list(map(data_ptr, self.parameters))
        """Of all weights in runs, then of their gradients as they were last seen."""
        self._matrices = [parameter for parameter in self.parameters if parameter.ndim > 1]
        self._expect_state()

    def _expect_state(self) -> None:
        """Take the state for what it should be from now on."""
        self._states = list(self.state.values())
        self._columns = []
        """What reads a tensor from a state; the states of a run; the pointers that it reads there."""
        for run in self.runs:
            for key in run.tensor_keys:
                read = operator.itemgetter(key)
                self._columns.append((read, run.states or [], list(map(data_ptr, map(read, run.states or ())))))
        self._can_watch = False

    def take_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Give each run its flat gradient; return False, having changed nothing, if the plan is out of date.

        This is what a step costs beside the update itself, so nothing here works in Python on single parameters.
        """
        if not (self._groups_are_current(optimizer) and self._state_is_current(optimizer)):
            return False
        try:
            pointers = list(map(data_ptr, itertools.chain(self.parameters, map(get_grad, self.parameters))))
        except (TypeError, RuntimeError):  # a gradient is None, or not dense
            return False
        if pointers != self._pointers:
            count = len(self.parameters)
            if pointers[:count] != self._pointers[:count]:
                return False
            self._pointers, start = pointers, count
            for run in self.runs:
                run.find_gradients(pointers[start : start + len(run.parameters)])
                start += len(run.parameters)
        for run in self.runs:
            run.take_gradient()
        return True

    def _groups_are_current(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether groups, what decides about them, parameters, and which of them have gradients are what they were."""
        if len(optimizer.param_groups) != len(self.groups):
            return False
        for group, planned in zip(optimizer.param_groups, self.groups, strict=True):
            parameters = group["params"]
            if len(parameters) != len(planned.parameters) or options(group) != planned.options:
                return False
            if not all(map(operator.is_, parameters, planned.parameters)):
                return False
        if not all(map(operator.is_, map(get_grad, self._idle), itertools.repeat(None))):
            return False
        if any(registration_of(run.parameters[0]) is not run.registration for run in self.runs):
            return False
        # Vectors of one length at one address are the same memory, matrices may have been transposed.
        return all(map(torch.Tensor.is_contiguous, self._matrices))

    def _state_is_current(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the state is what it was. If nobody has looked into it, it must be."""
        if optimizer.state is not self.state or len(self.state) != len(self._states):
            return False
        if self.state.is_watched:
            return True
        if not all(map(operator.is_, self.state.values(), self._states)):
            return False
        for run in self.runs:
            if sum(map(len, run.states or ())) != run.num_entries:
                return False
        try:
            if any(list(map(data_ptr, map(read, states))) != pointers for read, states, pointers in self._columns):
                return False
            if not all(run.pull() for run in self.runs):
                return False
        except (KeyError, TypeError, RuntimeError):  # a value is gone, or no dense tensor any more
            return False
        # Ours are in self.state, in self._states and in its run's list.
        self._can_watch = not held_elsewhere([run.states or [] for run in self.runs], 3, [column[:2] for column in self._columns])
        return True

    def stepped(self) -> None:
        """Go on after a step that has left all state in place, but may have made some for parameters in no run."""
        if len(self.state) != len(self._states):
            self._expect_state()
        if self._can_watch:
            self.state.watch()


def options(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return what may decide how a group is stepped: switches, which numbers are zero, and `_replaces_average`."""
    values = [value == 0 if value.__class__ in (int, float) else value for value in group.values() if value.__class__ in NUMBERS]
    return *values, _replaces_average(group)


def _replaces_average(group: dict[str, Any]) -> bool:
    """Return whether a running average keeps nothing of what it was.

    Then ``lerp_`` has weight 1, and on a CPU the sign of a zero that it gives depends on the element's place in memory.
    """
    betas = group.get("betas")
    first = betas[0] if isinstance(betas, (tuple, list)) and betas else None
    return (first is not None and bool(first == 0)) or (bool(group.get("centered")) and group.get("alpha") == 0)


def _is_dense(grad: Tensor, parameter: Tensor) -> bool:
    return type(grad) in PLAIN_TYPES and grad.layout is torch.strided and grad.dtype is parameter.dtype and not grad.is_neg()


def _find_runs(parameters: Sequence[Tensor], store: dict[Any, Any], long: int) -> Iterator[Run]:
    """Yield the runs among ``parameters`` of one group, whose state is in ``store``."""
    signatures = _signatures(parameters, store)
    for chain in chains(parameters):
        links = [parameters[place] for place in chain]
        held = [_held(parameter, store) for parameter in links]
        pairs = list(zip(itertools.pairwise(links), itertools.pairwise(held), strict=True))
        # Gradients whose buckets are not flat, or in another order, are copied; but if some lie as the weights do, they are not.
        in_place = any(roles == ("gradient", "gradient") and fit for roles, fit in (_fit(*two) for _, two in pairs))
        cuts = [
            place
            for place, ((before, after), two) in enumerate(pairs, start=1)
            if signatures[id(before)] != signatures[id(after)] or _part(*_fit(*two), in_place)
        ]
        for start, end in itertools.pairwise([0, *cuts, len(links)]):
            if signatures[id(links[start])] is not None:
                for parts in _of_good_length(links[start:end], long):
                    yield _make_run(parts, store, signatures[id(parts[0])])


def _long(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    """Return the number of elements from which on another run is no slower."""
    if group.get("fused") or any(p.device.type != "cpu" for p in group["params"]):
        return LONG
    return LONG_ON_CPU if type(optimizer).__name__ in ONE_TEMPORARY else LONG_ON_CPU // 2


def _of_good_length(parameters: list[Tensor], long: int) -> Iterator[list[Tensor]]:
    """Yield consecutive parts of ``parameters``, each of two or more and of about the same length, ``long`` at most."""
    total = sum(p.numel() for p in parameters)
    length = total / -(-total // long)
    parts: list[list[Tensor]] = [[]]
    size = 0
    for parameter in parameters:
        if len(parts[-1]) > 1 and size >= length * len(parts):
            parts.append([])
        parts[-1].append(parameter)
        size += parameter.numel()
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2] += parts.pop()
    for part in parts:
        # The flat state of a single element would not tell what is per element.
        if len(part) > 1 and any(p.numel() > 1 for p in part):
            yield part


def _make_run(parameters: list[Tensor], store: dict[Any, Any], signature: Any) -> Run:
    if store.get(parameters[0]) is None:
        return Run(parameters, None)
    per_element = [key for key, kind, *_ in signature[-1] if kind == "elements"]
    role, _ = _held(parameters[0], store)
    return Run(parameters, [store[p] for p in parameters], per_element, role if role in per_element else None)


def _signatures(parameters: Sequence[Tensor], store: dict[Any, Any]) -> dict[int, Any]:
    """Return by id what parameters must have in common to be in one run; None for one that cannot be in any."""
    known: dict[Any, set[str | None]] = {}
    for parameter in parameters:
        for key, value in _entries(parameter, store):
            if parameter.numel() > 1:
                known.setdefault(key, set()).add(_kind(value, parameter))
    found: dict[int, Any] = {}
    for parameter in parameters:
        signature: list[Any] = [parameter.dtype, parameter.device, parameter.requires_grad, parameter in store]
        entries: list[Any] = []
        for key, value in _entries(parameter, store):
            kinds = {_kind(value, parameter)} if parameter.numel() > 1 else known.get(key, set())
            kind = next(iter(kinds)) if len(kinds) == 1 else None
            if kind == "number" and type(value) in NUMBERS:
                entries.append((key, kind, type(value), value))
            elif kind == "elements" and isinstance(value, torch.Tensor) and value.shape == parameter.shape and is_plain(value):
                entries.append((key, kind, value.dtype, value.device))
            elif kind == "scalar" and isinstance(value, torch.Tensor) and value.numel() == 1 and is_plain(value):
                entries.append((key, kind, value.dtype, value.device, value.shape, value.item()))
            else:
                break
        else:
            found[id(parameter)] = (*signature, tuple(entries))
            continue
        found[id(parameter)] = None
    return found


def _entries(parameter: Tensor, store: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    state = store.get(parameter)
    if type(state) is dict:
        yield from state.items()
    elif state is not None:
        yield None, state  # of no known kind


def _kind(value: Any, parameter: Tensor) -> str | None:
    """Return what kind of state ``value`` is: a number per element, a tensor of one number, a Python one; None: another."""
    if not isinstance(value, torch.Tensor):
        return "number" if type(value) in NUMBERS else None
    if value.requires_grad:
        return None
    return "elements" if value.shape == parameter.shape else "scalar" if value.numel() == 1 else None


def _fit(before: tuple[Any, Tensor], after: tuple[Any, Tensor]) -> tuple[tuple[Any, Any], bool]:
    """Return the roles of what buckets hold of two neighbours, and whether it is adjacent, too."""
    return (before[0], after[0]), adjacent(before[1], after[1])


def _part(roles: tuple[Any, Any], fit: bool, in_place: bool) -> bool:
    """Return whether neighbours cannot be in one run without moving, or copying for nothing, what buckets hold."""
    if roles == (None, None) or fit:
        return bool(roles[0] != roles[1])
    return in_place or not {*roles} <= {"gradient", None}


def _held(parameter: Tensor, store: dict[Any, Any]) -> tuple[Any, Tensor]:
    """Return what of a parameter a bucket holds: "gradient" or a key of its state, None for nothing or the weight; and that."""
    held = held_by_bucket(parameter)
    if held is None or held is parameter:
        return None, parameter
    if held is parameter.grad:
        return "gradient", held
    return next(((key, value) for key, value in _entries(parameter, store) if value is held), (None, parameter))

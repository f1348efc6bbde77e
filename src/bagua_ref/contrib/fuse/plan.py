"""The plan of an optimizer's runs, which is valid until parameters, options or state change (S6)."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.contrib.fuse.grouping import find_runs, is_cut
from bagua_ref.contrib.fuse.layout import PLAIN_TYPES, find_overlapping, is_plain
from bagua_ref.contrib.fuse.run import NUMBERS, Run, getter_of
from bagua_ref.contrib.fuse.state import held_elsewhere, observe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from bagua_ref.contrib.fuse.sizes import Sizes

__all__ = ["FusePlan", "can_fuse", "options"]

EXACT = (torch.float32, torch.float64)
SHORT = (torch.float16, torch.bfloat16)

data_ptr = torch.Tensor.data_ptr
numel = torch.Tensor.numel
is_contiguous = torch.Tensor.is_contiguous
get_grad = operator.attrgetter("grad")
get_dtype = operator.attrgetter("dtype")
get_shape = operator.attrgetter("shape")


def can_fuse(group: dict[str, Any], dtype: torch.dtype, device: torch.device, allow_inexact: bool) -> bool:
    """Return whether fused steps give the same results for a group's options and a dtype (S6)."""
    if group.get("differentiable") or dtype not in EXACT + SHORT:
        return False
    if allow_inexact or (device.type != "cpu" and not group.get("fused")):
        return True
    return not group.get("fused") and dtype in EXACT and not _replaces_average(group)


@dataclass
class PlannedGroup:
    """One parameter group as it was planned, and the parameters that are stepped in place of its own."""

    parameters: list[Tensor]
    options: tuple[Any, ...]
    runs: list[Run] = field(default_factory=list)
    single: list[Tensor] = field(default_factory=list)
    """Those outside of runs."""
    stepped: list[Tensor] = field(default_factory=list)
    is_fused: bool = False


class FusePlan:
    """Runs of parameters, and a cheap check whether they are still valid.

    Args:
        optimizer: the optimizer; the state of a run's parameters is moved into one storage.
        allow_inexact: see `bagua_ref.contrib.fuse.optimizer.fuse_optimizer`.
        sizes: gives a group's sizes.
        do_flatten: whether small weights are moved together.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, allow_inexact: bool, sizes: Callable[[dict[str, Any]], Sizes], do_flatten: bool
    ) -> None:
        self.state = observe(optimizer)
        self.groups: list[PlannedGroup] = []
        self._idle: list[Tensor] = []
        """Parameters without gradient: if one gets a gradient, the plan is out of date."""
        self._waiting: list[Tensor] = []
        """Large parameters without state: once they have state, they are stepped in blocks."""
        overlapping = find_overlapping(p for group in optimizer.param_groups for p in group["params"])
        for group in optimizer.param_groups:
            planned = PlannedGroup(list(group["params"]), options(group))
            kinds = {(p.dtype, p.device) for p in planned.parameters}
            fitting = {kind for kind in kinds if can_fuse(group, *kind, allow_inexact)}
            has_tensors = _has_tensors(group)
            joinable = []
            for parameter in planned.parameters:
                grad = parameter.grad
                if grad is None:
                    self._idle.append(parameter)
                elif (
                    (parameter.dtype, parameter.device) in fitting
                    and id(parameter) not in overlapping
                    and is_plain(parameter)
                    and parameter.numel()
                    # An operation of two numbers uses the wider dtype, one of a vector and a number does not.
                    and (parameter.ndim > 0 or not has_tensors)
                    and _is_dense(grad, parameter)
                ):
                    joinable.append(parameter)
            chosen = sizes(group)
            planned.runs = list(find_runs(joinable, self.state, chosen))
            self._waiting += [p for p in joinable if is_cut(p, chosen) and not self.state.get(p)]
            # Large parameters count as members of a run, though nothing is gained by moving them together.
            large = do_flatten and any(parameter.numel() > chosen.small for parameter in joinable)
            planned.is_fused = any(len(run.parameters) > 1 for run in planned.runs) or (large and len(joinable) > 1)
            in_runs = {id(parameter) for run in planned.runs for parameter in run.parameters}
            planned.single = [parameter for parameter in planned.parameters if id(parameter) not in in_runs]
            planned.stepped = [*itertools.chain.from_iterable(run.blocks for run in planned.runs), *planned.single]
            self.groups.append(planned)
        self.runs = [run for planned in self.groups for run in planned.runs]
        self.num_fused_groups = sum(planned.is_fused for planned in self.groups)
        self.parameters = [parameter for run in self.runs for parameter in run.parameters]
        """The parameters of all runs, in order."""
        self._pointers = list(map(data_ptr, self.parameters))
        """The addresses of all weights in runs, then those of their gradients at the last step."""
        self._matrices = [parameter for parameter in self.parameters if parameter.ndim > 1]
        self._sizes, self._shapes = list(map(numel, self.parameters)), list(map(get_shape, self.parameters))
        # Only these can change their dtype in place without changing their size: the others are floats that need gradients.
        self._convertible = [p for p in self.parameters if p.dtype in SHORT or not p.requires_grad]
        self._dtypes = list(map(get_dtype, self._convertible))
        single = itertools.chain.from_iterable(planned.single for planned in self.groups)
        self._single = [p for p in single if type(p) in PLAIN_TYPES and p.grad is not None]
        """Parameters outside of runs. If one is moved, it may overlap a run, and then the order of updates matters."""
        self._single_pointers = list(map(data_ptr, self._single))
        self._expect_state()

    def _expect_state(self) -> None:
        """Record the current state as the expected one."""
        self._states = list(self.state.values())
        self._columns = []
        """For each run and key: a function that reads the tensor from a state, the states, and the tensors' pointers and sizes."""
        for run in self.runs:
            for key in run.tensor_keys:
                read = operator.itemgetter(key)
                tensors = list(map(read, run.states or ()))
                self._columns.append((read, run.states or [], list(map(data_ptr, tensors)), list(map(numel, tensors))))
        self._can_watch = False

    def take_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Set the gradients of each run's blocks; return False, with the optimizer unchanged, if the plan is out of date.

        This is the cost of a step beyond the update itself, so nothing here loops in Python over single parameters: such a loop was
        measured, and is slower when other work competes for the cache.
        """
        if not (self._groups_are_current(optimizer) and self._state_is_current(optimizer)):
            return False
        try:
            grads = list(map(get_grad, self.parameters))
            pointers = list(map(data_ptr, itertools.chain(self.parameters, grads)))
        except (TypeError, RuntimeError):  # a gradient is None, or not dense
            return False
        row_major = all(map(is_contiguous, grads))
        if not row_major and (any(map(_is_expanded, grads)) or not all(map(_can_stay, self.runs))):
            return False
        if pointers != self._pointers:
            count = len(self.parameters)
            if pointers[:count] != self._pointers[:count]:
                return False
            self._pointers, start = pointers, count
            for run in self.runs:
                run.find_gradients(pointers[start : start + len(run.parameters)])
                start += len(run.parameters)
        try:
            for run in self.runs:
                run.take_gradient(row_major)
        except RuntimeError:
            if list(map(get_shape, self.parameters)) != self._shapes:  # the same memory, but the gradients have another shape
                return False
            raise
        return True

    def _groups_are_current(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether groups, their options, their parameters, and the set of parameters with gradients are unchanged."""
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
        if any(getter_of(run.parameters[0]) is not run.getter for run in self.runs):
            return False
        return (
            all(map(is_contiguous, self._matrices))
            and list(map(numel, self.parameters)) == self._sizes
            and list(map(get_dtype, self._convertible)) == self._dtypes
            and list(map(data_ptr, self._single)) == self._single_pointers
        )

    def _state_is_current(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the state is unchanged, which is certain if nobody has looked into it."""
        if optimizer.state is not self.state or len(self.state) != len(self._states):
            return False
        if self.state.untouched:
            return True
        if not all(map(operator.is_, self.state.values(), self._states)):
            return False
        for run in self.runs:
            if sum(map(len, run.states or ())) != run.num_entries:
                return False
        try:
            for read, states, pointers, sizes in self._columns:
                # Keep no list of these, as `held_elsewhere` would count it.
                if list(map(data_ptr, map(read, states))) != pointers or not _lie_as_planned(list(map(read, states)), sizes):
                    return False
            if not all(run.pull() for run in self.runs):
                return False
        except (KeyError, TypeError, RuntimeError):  # a value is missing, or not a dense tensor any more
            return False
        # Our own references are in self.state, in self._states and in the run's list.
        self._can_watch = not held_elsewhere([run.states or [] for run in self.runs], 3, [column[:2] for column in self._columns])
        return True

    def stepped(self) -> None:
        """Prepare for the next step, after one that may have created state only for parameters outside of runs."""
        if len(self.state) != len(self._states):
            self._expect_state()
        self.state.untouched = self._can_watch

    def may_be_extended(self) -> bool:
        """Return whether a step has created state of a parameter that can be stepped in blocks from now on."""
        return any(dict.get(self.state, parameter) for parameter in self._waiting)


def options(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return the options that may decide how a group is stepped: flags, zeros among the numbers, types, `_replaces_average`."""
    values = [value == 0 if value.__class__ in (int, float) else value for value in group.values() if value.__class__ in NUMBERS]
    return *values, _replaces_average(group), *map(type, _betas(group))


def _has_tensors(group: dict[str, Any]) -> bool:
    """Return whether an option, such as the learning rate, or one of the betas is a tensor."""
    others = (value for name, value in group.items() if name != "params")
    return any(isinstance(value, torch.Tensor) for value in (*others, *_betas(group)))


def _betas(group: dict[str, Any]) -> Sequence[Any]:
    betas = group.get("betas")
    return betas if isinstance(betas, (tuple, list)) else ()


def _replaces_average(group: dict[str, Any]) -> bool:
    """Return whether a running average forgets its old value.

    Then ``lerp_`` has weight 1, and on a CPU, the sign of a resulting zero depends on the element's place in memory.
    """
    betas = _betas(group)
    first = betas[0] if betas else None
    return (first is not None and bool(first == 0)) or (bool(group.get("centered")) and group.get("alpha") == 0)


def _is_dense(grad: Tensor, parameter: Tensor) -> bool:
    return (
        type(grad) in PLAIN_TYPES
        and grad.layout is torch.strided
        and (grad.dtype, grad.shape) == (parameter.dtype, parameter.shape)
        and not grad.is_neg()
        and not _is_expanded(grad)
    )


def _is_expanded(grad: Tensor) -> bool:
    """Return whether ``grad`` is expanded; then torch's sums have other last bits than with a copy of it."""
    return any(size > 1 and not stride for size, stride in zip(grad.shape, grad.stride(), strict=True))


def _can_stay(run: Run) -> bool:
    """Return whether gradients need not be copied, as those of large parameters, or may be."""
    return len(run.parameters) > 1 or run.parameters[0].grad.is_contiguous()  # type: ignore[union-attr]


def _lie_as_planned(tensors: list[Tensor], sizes: list[int]) -> bool:
    """Return whether tensors with unchanged addresses still cover the same memory: not transposed, expanded or cut in place."""
    return all(map(is_contiguous, tensors)) and list(map(numel, tensors)) == sizes

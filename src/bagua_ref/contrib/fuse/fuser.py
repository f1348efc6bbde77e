"""The object that steps a fused optimizer, with flat parameters in its groups while ``step`` runs (S6)."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from bagua_ref.base.memory import overlapping
from bagua_ref.base.utils import NotCopied
from bagua_ref.contrib.fuse.run import (
    NUMBERS,
    PLAIN_TYPES,
    SHORT,
    Run,
    data_ptr,
    find_runs,
    flatten_weights,
    held_by_bucket,
    is_expanded,
    is_plain,
    neighbours,
)

__all__ = ["Fuser"]

EXACT = torch.float32, torch.float64

_HOOK: Any = "bagua_ref.fuse_step"

SMALL_ON_CPU, SMALL = 2**14, 2**20
"""Up to so many elements, an operation's launch costs more than copying a new gradient beside others, measured with SGD."""


class Fuser(NotCopied):
    """Steps one optimizer with a flat parameter in place of each run.

    It calls the optimizer's own ``step``, so that hooks, schedulers and locks around it work. The groups are exchanged after the
    last pre-step hook, and restored before the first post-step hook.

    Args:
        do_flatten: move small weights beside each other.
        check_flatten: warn when they have left the place to which they were moved.
        allow_inexact: also fuse parameters whose last bits may then differ.
        check: raises if fusing would change an optimizer's steps; called first, and again when groups or options have changed.
        small: fuse parameters of up to so many elements; None: as many as pays on their device.
    """

    def __init__(
        self, do_flatten: bool, check_flatten: bool, allow_inexact: bool, check: Callable[[Any], object], small: int | None = None
    ) -> None:
        self._do_flatten, self._check_flatten, self._allow_inexact = do_flatten, check_flatten, allow_inexact
        self._check, self._small = check, small
        self._checked: list[tuple[Any, ...]] | None = None  # the options of all groups at the last check
        self._plan: _Plan | None = None
        self._exchanged: list[list[Tensor]] | None = None  # while they are exchanged: the parameters of each group
        self._num_states = 0
        self._loss: Any = None
        # The flat tensors, and the weights that were moved there, with their addresses. Weak references would keep
        # ``torch.utils.swap_tensors`` from converting the weights.
        self._flats: list[tuple[Tensor, list[tuple[Tensor, int]]]] = []

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the optimizer, unless its groups' options are those of the last check."""
        if (found := [options(group) for group in optimizer.param_groups]) != self._checked:
            self._check(optimizer)
            self._checked = found

    def flatten(self, groups: list[dict[str, Any]]) -> None:
        """If asked to, move the small weights of each of ``groups`` beside each other; those that a bucket holds stay."""
        # The C library keeps freed memory of up to twice the largest block ever freed, and returns the rest to the system.
        # Allocating a step's temporary tensors from the system would take longer than the step. This block is never written.
        np.empty(2**24, dtype=np.uint8)
        for group in groups if self._do_flatten else ():
            movable = [p for p in group["params"] if is_plain(p) and can_fuse(group, p, self._allow_inexact) and self._is_small(p)]
            if not has_overlap(group["params"]):
                for flat, moved in flatten_weights([p for p in movable if held_by_bucket(p) is not p]):
                    self._flats.append((flat, [(p, p.data_ptr()) for p in moved]))

    def _is_small(self, p: Tensor) -> bool:
        return p.numel() <= (self._small or (SMALL_ON_CPU if p.device.type == "cpu" else SMALL))

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Step ``optimizer`` with flat parameters; return the result of ``closure``."""
        before, after = optimizer._optimizer_step_pre_hooks, cast("OrderedDict[Any, Any]", optimizer._optimizer_step_post_hooks)
        before[_HOOK] = self._exchange
        after[_HOOK] = self._finish
        after.move_to_end(_HOOK, last=False)
        try:
            result = optimizer.step() if closure is None else optimizer.step(closure)
            return result if self._loss is None else self._loss
        finally:
            del before[_HOOK], after[_HOOK]
            self._loss = None
            if self._exchanged is not None:  # the step raised
                self._restore(optimizer)
                self._plan = None

    def _exchange(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Exchange the groups' parameters, as the last pre-step hook; first run the closure, as it computes gradients."""
        if self._exchanged is not None:  # if the step of a class calls that of another, all hooks run twice
            return None
        if len(args) > 1 and args[1] is not None:  # as `step` passes the closure
            with torch.enable_grad():
                self._loss = args[1]()
            args = args[0], None
        plan = self._current_plan(optimizer)
        self._num_states = len(optimizer.state)
        self._exchanged = [group["params"] for group in optimizer.param_groups]
        for group, stepped in zip(optimizer.param_groups, plan.stepped, strict=True):
            group["params"] = stepped
        optimizer.state.update({run.flat: dict(run.state) for run in plan.runs if run.state is not None})
        return args, kwargs

    def _current_plan(self, optimizer: torch.optim.Optimizer) -> _Plan:
        """Return the plan, or a new one if it is out of date, after setting the gradients of its runs."""
        if self._plan is None or not self._plan.take_gradients(optimizer, self._do_flatten):
            self._look_after_weights()
            self.check(optimizer)
            flats = [flat for flat, _ in self._flats] if self._do_flatten else None
            with torch.no_grad():
                self._plan = _Plan(optimizer, self._is_small, self._allow_inexact, flats)
            current = self._plan.take_gradients(optimizer, self._do_flatten)
            assert current, "a new plan is out of date"
        return self._plan

    def _finish(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Restore the groups, as the first post-step hook, and count the step."""
        if self._exchanged is not None:
            optimizer._bagua_fused_count += self._restore(optimizer).num_fused_groups  # type: ignore[attr-defined]

    def _restore(self, optimizer: torch.optim.Optimizer) -> _Plan:
        """Restore the groups, and copy the state of runs to their parameters; return the plan."""
        plan, groups = self._plan, self._exchanged
        assert plan is not None
        assert groups is not None
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        self._exchanged = None
        stepped = list(itertools.islice(optimizer.state, self._num_states, None))
        found = [optimizer.state.pop(run.flat, None) for run in plan.runs]
        for run, state in zip(plan.runs, found, strict=True):
            run.give_gradient_back()
            run.give_state_back(state, optimizer.state)
        if changed := plan.changed():  # tell autograd, as a graph may have saved them: fused=True does not
            torch.autograd.graph.increment_version(changed)
        if len(optimizer.state) > self._num_states:
            self._order(optimizer, stepped, plan)
        plan.states = list(optimizer.state.values())
        return plan

    def _order(self, optimizer: torch.optim.Optimizer, stepped: list[Any], plan: _Plan) -> None:
        """Put new entries of the state in the order of ``step()``, that of parameters in groups, as ``state_dict()`` keeps it."""
        new = {id(key) for key in itertools.islice(optimizer.state, self._num_states, None)}
        members = {id(run.flat): run.parameters for run in plan.runs}
        keys = [key for one in stepped for key in members.get(id(one), [one]) if id(key) in new]
        everyone = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
        places = {id(parameter): place for place, parameter in enumerate(everyone)}
        in_order = iter(sorted((key for key in keys if id(key) in places), key=lambda key: places[id(key)]))
        for key in [next(in_order) if id(key) in places else key for key in keys]:  # others, as strings, keep their places
            optimizer.state[key] = optimizer.state.pop(key)

    def _look_after_weights(self) -> None:
        """Warn once about weights that have left their flat tensor, unless they have neighbours elsewhere; forget these."""
        weights = [entry for _, moved in self._flats for entry in moved]
        here = [(flat, [(p, address) for p, address in moved if p.data_ptr() == address]) for flat, moved in self._flats]
        self._flats = [(flat, moved) for flat, moved in here if moved]
        gone = [p for p, address in weights if p.data_ptr() != address and held_by_bucket(p) is not p]
        apart = sum(len(chain) == 1 for chain in neighbours(gone))
        if apart and self._check_flatten:
            warnings.warn(
                f"{apart} of {len(weights)} parameters have left the storage into which fuse_optimizer() moved them, as .to() or "
                "setting .data makes them do; they are now stepped one by one. Move the model before you fuse its optimizer",
                stacklevel=2,
            )


class _Plan:
    """Runs of parameters, and a cheap check whether they are still valid.

    The check looks at identities, addresses and lengths, not at versions, which torch's fused steps do not increase. It does not
    loop in Python over single parameters, as that would take longer than the step.

    Parameters that ``is_small`` are fused; ``flats`` are flat tensors of weights, None if none move.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, is_small: Callable[[Tensor], bool], allow_inexact: bool, flats: list[Tensor] | None
    ) -> None:
        self.runs: list[Run] = []
        self.stepped: list[list[Tensor]] = []  # for each group, the parameters that are stepped in place of its own
        self.num_fused_groups = 0
        single: list[Tensor] = []
        overlap = has_overlap(p for group in optimizer.param_groups for p in group["params"])
        for group in optimizer.param_groups:
            joinable = [p for p in group["params"] if not overlap and _may_join(p, group, allow_inexact)]
            runs = list(find_runs(list(filter(is_small, joinable)), optimizer.state, flats or ()))
            joined = {id(p) for run in runs for p in run.parameters}
            alone = [p for p in group["params"] if id(p) not in joined]
            # Large parameters count as members of a run, though nothing is gained by moving them together.
            large = flats is not None and len(joinable) > 1 and not all(map(is_small, joinable))
            self.num_fused_groups += bool(runs) or large
            self.stepped.append([*(run.flat for run in runs), *alone])
            self.runs += runs
            single += alone
        self._idle = [p for p in single if p.grad is None]  # if one gets a gradient, it may join a run
        self._single = [p for p in single if p.grad is not None and type(p) in PLAIN_TYPES]  # if one moves, it may overlap a run
        self._members = [p for run in self.runs for p in run.parameters]
        self.states = list(optimizer.state.values())
        """The entries that the optimizer's state had after the last step."""
        self._expected = self._describe(optimizer)

    def take_gradients(self, optimizer: torch.optim.Optimizer, keep: bool) -> bool:
        """Set the gradient of each run; return False, with the optimizer unchanged, if the plan is out of date."""
        states = optimizer.state.values()
        if len(states) != len(self.states) or not all(map(is_, states, self.states)) or any(p.grad is not None for p in self._idle):
            return False
        try:
            return self._describe(optimizer) == self._expected and all(
                run.is_current() and run.take_gradient(keep) for run in self.runs
            )
        except (KeyError, TypeError, RuntimeError):  # a value is missing, is not a dense tensor, or has no truth value, as tensors
            return False

    def changed(self) -> list[Tensor]:
        """Return the parameters that a step changes: not those that have lost their gradients since the plan was made."""
        return [*self._members, *(p for p in self._single if p.grad is not None)]

    def _describe(self, optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[int]]:
        groups = [(list(map(id, group["params"])), options(group)) for group in optimizer.param_groups]
        return groups, list(map(data_ptr, self._single))


def has_overlap(parameters: Iterable[Tensor]) -> bool:
    """Return whether plain parameters share memory: then the order of updates matters."""
    return overlapping([p for p in parameters if type(p) in PLAIN_TYPES and p.layout is torch.strided]) is not None


def can_fuse(group: dict[str, Any], parameter: Tensor, allow_inexact: bool) -> bool:
    """Return whether fused steps give the same results for a group's options and a parameter's dtype (S6)."""
    # An operation of two numbers uses the wider dtype, one of a vector and a number does not. And for a single element, state
    # does not show whether an entry is per element.
    if group.get("differentiable") or parameter.dtype not in EXACT + SHORT or parameter.numel() < 2:
        return False
    if allow_inexact or (parameter.device.type != "cpu" and not group.get("fused")):
        return True
    return not group.get("fused") and parameter.dtype in EXACT and not _replaces_average(group)


def options(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return the options that may decide how a group is stepped: flags, zeros among the numbers, `_replaces_average`."""
    values = [value == 0 if type(value) in (int, float) else value for value in group.values() if type(value) in NUMBERS]
    return *values, _replaces_average(group)


def _replaces_average(group: dict[str, Any]) -> bool:
    """Return whether a running average forgets its old value.

    Then ``lerp_`` has weight 1, and on a CPU, the sign of a resulting zero depends on the element's place in memory.
    """
    betas = group.get("betas")
    zero = isinstance(betas, (tuple, list)) and bool(betas) and bool(betas[0] == 0)
    return zero or (bool(group.get("centered")) and group.get("alpha") == 0)


def _may_join(p: Tensor, group: dict[str, Any], allow_inexact: bool) -> bool:
    """Return whether ``p`` may be a member of a run: if it has a gradient, and both are ordinary."""
    grad = p.grad
    if grad is None or not is_plain(p) or not can_fuse(group, p, allow_inexact):
        return False
    dense = type(grad) in PLAIN_TYPES and grad.layout is torch.strided and (grad.dtype, grad.shape) == (p.dtype, p.shape)
    return dense and not grad.is_neg() and not is_expanded(grad)

"""The object that steps a fused optimizer, with blocks of parameters in its groups while ``step`` runs (S6)."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from bagua_ref.contrib.fuse.layout import chains, flatten_weights, held_by_bucket, is_plain, owns_storage
from bagua_ref.contrib.fuse.plan import FusePlan, can_fuse, options
from bagua_ref.contrib.fuse.sizes import sizes_for
from bagua_ref.contrib.fuse.state import ObservedState, QuietState
from bagua_ref.utils import NotCopied

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable

    from torch import Tensor

    from bagua_ref.contrib.fuse.sizes import Sizes

__all__ = ["Fuser"]

_HOOK: Any = "bagua_ref.fuse_step"


class Fuser(NotCopied):
    """Steps one optimizer with blocks in place of runs of its parameters.

    It calls the optimizer's own ``step``, so that hooks, schedulers and locks around it work. The groups are exchanged after the
    last pre-step hook, and restored before the first post-step hook.

    Args:
        do_flatten: move weights, and gradients that are kept, into one storage.
        check_flatten: warn when weights have left that storage.
        allow_inexact: also fuse parameters whose last bits may then differ.
        check: raises if fusing would change an optimizer's steps; called first, and again when groups or options have changed.
        sizes: gives a group's sizes.
    """

    def __init__(
        self,
        do_flatten: bool,
        check_flatten: bool,
        allow_inexact: bool,
        check: Callable[[torch.optim.Optimizer], object],
        sizes: Callable[[dict[str, Any]], Sizes] = sizes_for,
    ) -> None:
        self._do_flatten, self._check_flatten, self._allow_inexact = do_flatten, check_flatten, allow_inexact
        self._plan: FusePlan | None = None
        self._groups: list[tuple[dict[str, Any], list[Tensor]]] | None = None
        """While they are exchanged: the groups and their parameters."""
        self._loss: Any = None
        self._check, self._sizes = check, sizes
        self._checked: list[tuple[Any, ...]] | None = None
        """The options of all groups at the last check."""
        self._flattened: list[tuple[weakref.ref[Tensor], int]] = []
        """The weights that were moved, and their addresses."""

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the optimizer, unless its groups' options are those of the last check."""
        if (found := [options(group) for group in optimizer.param_groups]) != self._checked:
            self._check(optimizer)
            self._checked = found

    def flatten(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        """If asked to, move the small weights of each of ``groups`` into one storage, with existing gradients and state."""
        # The C library keeps freed memory of up to twice the largest block ever freed, and returns the rest to the system.
        # Allocating a step's temporary tensors from the system would take longer than the step. This block is never written.
        np.empty(2**24, dtype=np.uint8)
        if not self._do_flatten:
            return
        with torch.no_grad():
            for group in groups:
                candidates = [p for p in group["params"] if can_fuse(group, p.dtype, p.device, self._allow_inexact)]
                moved = flatten_weights(candidates, self._sizes(group).small)
                self._flattened += [(weakref.ref(p), p.data_ptr()) for p in moved]
            for run in self._new_plan(optimizer).runs:
                run.move_gradients(_is_movable)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Step ``optimizer`` with blocks; return the result of ``closure``."""
        before, after = optimizer._optimizer_step_pre_hooks, cast("OrderedDict[Any, Any]", optimizer._optimizer_step_post_hooks)
        before[_HOOK] = self._exchange
        after[_HOOK] = self._put_back
        after.move_to_end(_HOOK, last=False)
        try:
            result = optimizer.step() if closure is None else optimizer.step(closure)
            return result if self._loss is None else self._loss
        finally:
            del before[_HOOK], after[_HOOK]
            self._loss = None
            if self._groups is not None:  # the step raised
                self._put_back_partly(optimizer)

    def _exchange(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Exchange the groups' parameters, as the last pre-step hook; first run the closure, as it computes gradients."""
        if self._groups is not None:  # if the step of a class calls that of another, all hooks run twice
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                self._loss = closure()
            args = (*args[:1], *(None for _ in args[1:2]), *args[2:])
            kwargs = {name: value for name, value in kwargs.items() if name != "closure"}
        plan = self._plan_with_gradients(optimizer)
        plan.state.__class__ = QuietState  # type: ignore[assignment]
        self._groups = []
        for group, planned in zip(optimizer.param_groups, plan.groups, strict=True):
            self._groups.append((group, group["params"]))
            group["params"] = planned.stepped
        for run in plan.runs:
            if run.block_states is not None:
                plan.state.update(zip(run.blocks, run.block_states, strict=True))
        return args, kwargs

    def _new_plan(self, optimizer: torch.optim.Optimizer) -> FusePlan:
        return FusePlan(optimizer, self._allow_inexact, self._sizes, self._do_flatten)

    def _plan_with_gradients(self, optimizer: torch.optim.Optimizer) -> FusePlan:
        """Return the plan, or a new one if it is out of date, after setting the gradients of its runs."""
        if self._plan is None or not self._plan.take_gradients(optimizer):
            self._look_after_weights()
            self.check(optimizer)
            with torch.no_grad():
                self._plan = self._new_plan(optimizer)
            current = self._plan.take_gradients(optimizer)
            assert current, "a new plan is out of date"
        if self._do_flatten:
            for run in self._plan.runs:
                run.keep_gradients(_is_movable)
        return self._plan

    def _restore(self, optimizer: torch.optim.Optimizer, plan: FusePlan) -> list[list[dict[Any, Any] | None]]:
        """Restore the groups; return the states of the blocks of each run."""
        for group, parameters in self._groups or ():
            group["params"] = parameters
        self._groups = None
        plan.state.__class__ = ObservedState
        for run in plan.runs:
            run.give_gradient_back()
        return [[optimizer.state.pop(block, None) for block in run.blocks] for run in plan.runs]

    def _put_back(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Restore the groups, as the first post-step hook, and copy the runs' state to the parameters."""
        if self._groups is None:
            return
        assert self._plan is not None
        plan, self._plan = self._plan, None
        states = self._restore(optimizer, plan)
        lasting = [run.push(state, optimizer.state) for run, state in zip(plan.runs, states, strict=True)]
        _mark_changed(plan.parameters)
        optimizer._bagua_fused_count += plan.num_fused_groups  # type: ignore[attr-defined]
        if all(lasting) and not plan.may_be_extended():
            plan.stepped()
            self._plan = plan

    def _put_back_partly(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the groups after a step that raised, and copy the state of the runs that it has stepped."""
        assert self._plan is not None
        plan, self._plan = self._plan, None
        for run, states in zip(plan.runs, self._restore(optimizer, plan), strict=True):
            with contextlib.suppress(RuntimeError):  # it raised between two blocks, so that their counts differ
                run.push(states, optimizer.state)
        _mark_changed(plan.parameters)

    def _look_after_weights(self) -> None:
        """Warn once about weights that have left the common storage, unless they have neighbours elsewhere."""
        here: list[tuple[weakref.ref[Tensor], int]] = []
        moved = []
        for weak, pointer in self._flattened:
            parameter = weak()
            if parameter is not None and parameter.data_ptr() == pointer:
                here.append((weak, pointer))
            elif parameter is not None and held_by_bucket(parameter) is not parameter:
                moved.append(parameter)
        left = sum(len(chain) == 1 for chain in chains(moved))
        total, self._flattened = len(self._flattened), here
        if left and self._check_flatten:
            warnings.warn(
                f"{left} of {total} parameters have left the storage into which fuse_optimizer() moved them, as .to() or setting "
                ".data makes them do; they are now stepped one by one. Create and fuse the optimizer after moving the model",
                stacklevel=2,
            )


def _mark_changed(parameters: list[Tensor]) -> None:
    """Tell autograd that weights have changed, as a graph may have saved them."""
    if parameters:
        torch.autograd.graph.increment_version(parameters)


def _is_movable(parameter: Tensor, grad: Tensor) -> bool:
    """Return whether only the parameter uses the memory of its gradient."""
    return (
        is_plain(grad)
        and owns_storage(grad)
        and held_by_bucket(parameter) is not grad
        and not (grad.device.type == "cpu" and grad.is_shared())
    )

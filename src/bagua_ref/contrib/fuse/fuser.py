"""The object that steps a fused optimizer, with flat parameters in its groups while ``step`` runs (S6)."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from bagua_ref.base.utils import NotCopied, flatten, unflatten
from bagua_ref.buckets.storage import held_by_bucket
from bagua_ref.contrib.fuse.plan import FusionPlan, has_overlap, kind_of, neighbours, options

__all__ = ["Fuser"]

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

    Attributes:
        replaced: the optimizer's own ``step``, if it now calls `step` instead.
    """

    def __init__(
        self, do_flatten: bool, check_flatten: bool, allow_inexact: bool, check: Callable[[Any], object], small: int | None = None
    ) -> None:
        self._do_flatten, self._check_flatten, self._allow_inexact = do_flatten, check_flatten, allow_inexact
        self._check, self._small = check, small
        self.replaced: Callable[..., Any] | None = None
        self._checked: list[tuple[Any, ...]] | None = None  # the options of all groups at the last check
        self._plan: FusionPlan | None = None
        self._exchanged: list[list[Tensor]] | None = None  # while they are exchanged: the parameters of each group
        self._loss: Any = None
        # The weights that were moved, with their addresses, and the flat tensors to which they were moved. Weak references would
        # keep ``torch.utils.swap_tensors`` from converting the weights.
        self._moved: list[tuple[Tensor, int, Tensor]] = []

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the optimizer, unless its groups' options are those of the last check."""
        if (found := [options(group) for group in optimizer.param_groups]) != self._checked:
            self._check(optimizer)
            self._checked = found

    def flatten(self, groups: list[dict[str, Any]]) -> None:
        """If asked to, move the small weights of each of ``groups`` into flat tensors, one for each of their kinds and last first.

        The order is that of buckets (S2.1), so that gradients and weights match. Each weight keeps a storage of its own, a part of
        the flat tensor's memory, as ``torch.save`` writes whole storages. Weights stay where they are if a bucket holds them, or if
        they are shared between processes or beside another one.
        """
        # The C library keeps freed memory of up to twice the largest block ever freed, and returns the rest to the system.
        # Allocating a step's temporary tensors from the system would take longer than the step. This block is never written.
        np.empty(2**24, dtype=np.uint8)
        for group in groups if self._do_flatten else ():
            kinds: dict[Any, list[Tensor]] = {}
            for p in () if has_overlap(group["params"]) else reversed(group["params"]):
                kind = None if held_by_bucket(p) is p else kind_of(p, group, self._allow_inexact)
                if kind is not None and self._is_small(p) and p.is_leaf and not (p.device.type == "cpu" and p.is_shared()):
                    kinds.setdefault(kind, []).append(p)
            for candidates in kinds.values():
                lonely = {chain[0] for chain in neighbours(candidates) if len(chain) == 1}
                moving = [p for p in candidates if p in lonely]
                if len(moving) > 1:
                    flat = flatten(moving).detach()
                    for p, part in zip(moving, unflatten(flat, moving), strict=True):
                        p.data = from_dlpack(part)
                    self._moved += [(p, p.data_ptr(), flat) for p in moving]

    def _is_small(self, p: Tensor) -> bool:
        return p.numel() <= (self._small or (SMALL_ON_CPU if p.device.type == "cpu" else SMALL))

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Step ``optimizer`` with flat parameters; return the result of ``closure``."""
        before, after = optimizer._optimizer_step_pre_hooks, cast("OrderedDict[Any, Any]", optimizer._optimizer_step_post_hooks)
        before[_HOOK] = self._exchange
        after[_HOOK] = self._finish
        after.move_to_end(_HOOK, last=False)
        try:
            step = self.replaced or optimizer.step
            result = step() if closure is None else step(closure)
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
        plan = self._plan
        if plan is None or not plan.is_current(optimizer, self._do_flatten):
            self._look_after_weights()
            self.check(optimizer)
            flats = list(dict.fromkeys(flat for *_, flat in self._moved)) if self._do_flatten else None
            with torch.no_grad():
                plan = self._plan = FusionPlan(optimizer, self._is_small, self._allow_inexact, flats)
            current = plan.is_current(optimizer, self._do_flatten)
            assert current, "a new plan is out of date"
        self._exchanged = [group["params"] for group in optimizer.param_groups]
        for group, stepped in zip(optimizer.param_groups, plan.stepped, strict=True):
            group["params"] = stepped
        optimizer.state.update({run.flat: dict(run.state) for run in plan.runs if run.states})
        return args, kwargs

    def _finish(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Restore the groups, as the first post-step hook, and count the step."""
        if self._exchanged is not None:
            optimizer._bagua_fused_count += self._restore(optimizer).num_fused_groups  # type: ignore[attr-defined]

    def _restore(self, optimizer: torch.optim.Optimizer) -> FusionPlan:
        """Restore the groups, and move the state of runs to their parameters; return the plan."""
        plan, groups, state = self._plan, self._exchanged, optimizer.state
        assert plan is not None
        assert groups is not None
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        self._exchanged = None
        stepped = list(itertools.islice(state, len(plan.states), None))
        for run in plan.runs:
            run.give_gradient_back()
            run.give_state_back(state)
        # Autograd must know of changes, as a graph may have saved weights: fused=True does not tell.
        if changed := [*plan.members, *(p for p in plan.single if p.grad is not None)]:
            torch.autograd.graph.increment_version(changed)
        if len(state) > len(plan.states):
            self._order(optimizer, stepped, plan)
        plan.states = list(state.values())
        return plan

    def _order(self, optimizer: torch.optim.Optimizer, stepped: list[Any], plan: FusionPlan) -> None:
        """Put new entries of the state in the order of ``step()``, that of parameters in groups, as ``state_dict()`` keeps it."""
        state, members = optimizer.state, {run.flat: run.parameters for run in plan.runs}
        new = set(itertools.islice(state, len(plan.states), None))
        keys = [key for one in stepped for key in members.get(one, [one]) if key in new]
        places = {p: place for place, p in enumerate(itertools.chain.from_iterable(plan.parameters))}
        in_order = iter(sorted(places.keys() & new, key=places.__getitem__))
        for key in [next(in_order) if key in places else key for key in keys]:  # others, as strings, keep their places
            state[key] = state.pop(key)

    def _look_after_weights(self) -> None:
        """Warn once about weights that have left their flat tensor, unless they have neighbours elsewhere; forget these."""
        weights = self._moved
        self._moved = [(p, address, flat) for p, address, flat in weights if p.data_ptr() == address]
        gone = [p for p, address, _ in weights if p.data_ptr() != address and held_by_bucket(p) is not p]
        apart = sum(len(chain) == 1 for chain in neighbours(gone))
        if apart and self._check_flatten:
            warnings.warn(
                f"{apart} of {len(weights)} parameters have left the storage into which fuse_optimizer() moved them, as .to() or "
                "setting .data makes them do; they are now stepped one by one. Move the model before you fuse its optimizer",
                stacklevel=2,
            )

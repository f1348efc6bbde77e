"""The object that steps a fused optimizer, with flat parameters in its groups while ``step`` runs
(S6).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from bagua_ref.base.utils import NotCopied, flatten, unflatten
from bagua_ref.buckets.storage import held_by_bucket
from bagua_ref.contrib.fuse.plan import (
    FusionPlan,
    has_overlap,
    is_small,
    kind_of,
    neighbours,
    options,
)

__all__ = ["Fuser"]


class Fuser(NotCopied):
    """Steps one optimizer with a flat parameter in place of each run.

    It calls the optimizer's own ``step``, so that hooks, schedulers and locks around it work. The
    groups are exchanged after the last pre-step hook, and restored before the first post-step hook.

    Args:
        do_flatten: move small weights beside each other.
        check_flatten: warn when they have left the place to which they were moved.
        allow_inexact: also fuse parameters whose last bits may then differ.
        check: raises if fusing would change an optimizer's steps; called first, and again when
            groups or options have changed.

    Attributes:
        replaced: the optimizer's own ``step``, if it now calls `step` instead.
    """

    def __init__(
        self,
        do_flatten: bool,
        check_flatten: bool,
        allow_inexact: bool,
        check: Callable[[Any], object],
    ) -> None:
        self._do_flatten, self._check_flatten, self._allow_inexact, self._check = (
            do_flatten,
            check_flatten,
            allow_inexact,
            check,
        )
        self.replaced: Callable[..., Any] | None = None
        # the options of all groups at the last check
        self._checked: list[tuple[Any, ...]] | None = None
        self._plan: FusionPlan | None = None
        # during a step: the plan, each group's parameters
        self._exchanged: tuple[FusionPlan, list[list[Tensor]]] | None = None
        self._loss: Any = None
        # The weights that were moved, with their addresses, and the flat tensors to which they were
        # moved. Weak references would keep ``torch.utils.swap_tensors`` from converting the
        # weights.
        self._moved: list[tuple[Tensor, int, Tensor]] = []

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the optimizer, unless its groups' options are those of the last check."""
        if (found := [options(group) for group in optimizer.param_groups]) != self._checked:
            self._check(optimizer)
            self._checked = found

    def flatten(self, groups: list[dict[str, Any]]) -> None:
        """If asked to, move the small weights of each of ``groups`` into flat tensors, one for each
        of their kinds and last first.

        The order is that of buckets (S2.1), so that gradients and weights match. Each weight keeps
        a storage of its own, a part of the flat tensor's memory, as ``torch.save`` writes whole
        storages. Weights stay where they are if a bucket holds them, or if they are shared between
        processes or beside another one.
        """
        # The C library keeps freed memory of up to twice the largest block ever freed, and returns
        # the rest to the system. Allocating a step's temporary tensors from the system would take
        # longer than the step. This block is never written.
        np.empty(2**24, dtype=np.uint8)
        for group in groups if self._do_flatten else ():
            kinds: dict[Any, list[Tensor]] = {}
            for p in () if has_overlap(group["params"]) else reversed(group["params"]):
                kind = None if held_by_bucket(p) is p else kind_of(p, group, self._allow_inexact)
                if (
                    kind is not None
                    and is_small(p)
                    and p.is_leaf
                    and not (p.device.type == "cpu" and p.is_shared())
                ):
                    kinds.setdefault(kind, []).append(p)
            for candidates in kinds.values():
                lonely = {chain[0] for chain in neighbours(candidates) if len(chain) == 1}
                moving = [p for p in candidates if p in lonely]
                if len(moving) > 1:
                    flat = flatten(moving).detach()
                    for p, part in zip(moving, unflatten(flat, moving), strict=True):
                        p.data = from_dlpack(part)
                    self._moved += [(p, p.data_ptr(), flat) for p in moving]

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Step ``optimizer`` with flat parameters; return the result of ``closure``."""
        try:
            with (
                optimizer.register_step_pre_hook(self._exchange),
                optimizer.register_step_post_hook(self._finish) as first,
            ):
                optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
                step = self.replaced or optimizer.step
                result = step() if closure is None else step(closure)
            return result if self._loss is None else self._loss
        finally:
            self._loss = None
            if self._restore(optimizer):  # the step raised
                self._plan = None

    def _exchange(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Exchange the groups' parameters, as the last pre-step hook; first run the closure, as it
        computes gradients.
        """
        # if the step of a class calls that of another, all hooks run twice
        if self._exchanged is not None:
            return None
        if len(args) > 1 and args[1] is not None:  # as `step` passes the closure
            with torch.enable_grad():
                self._loss = args[1]()
            args = args[0], None
        plan = self._plan
        if plan is None or not plan.is_current(optimizer):
            self._look_after_weights()
            self.check(optimizer)
            flats = (
                list(dict.fromkeys(flat for *_, flat in self._moved)) if self._do_flatten else None
            )
            plan = self._plan = FusionPlan(optimizer, self._allow_inexact, flats)
        self._exchanged = plan, [group["params"] for group in optimizer.param_groups]
        for group, stepped in zip(optimizer.param_groups, plan.stepped, strict=True):
            group["params"] = stepped
        optimizer.state.update({run.flat: dict(run.state) for run in plan.runs if run.states})
        return args, kwargs

    def _finish(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Restore the groups, as the first post-step hook, and count the step."""
        optimizer._bagua_fused_count += self._restore(optimizer)  # type: ignore[attr-defined]

    def _restore(self, optimizer: torch.optim.Optimizer) -> int:
        """Restore exchanged groups, and move the state of runs to their parameters; return the
        number of groups with runs.
        """
        if self._exchanged is None:
            return 0
        plan, groups = self._exchanged
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        self._exchanged = None
        plan.give_back(optimizer.state)
        return plan.num_fused_groups

    def _look_after_weights(self) -> None:
        """Warn once about weights that have left their flat tensor, unless they have neighbours
        elsewhere; forget these.
        """
        weights = self._moved
        self._moved = [
            (p, address, flat) for p, address, flat in weights if p.data_ptr() == address
        ]
        gone = [
            p for p, address, _ in weights if p.data_ptr() != address and held_by_bucket(p) is not p
        ]
        apart = sum(len(chain) == 1 for chain in neighbours(gone))
        if apart and self._check_flatten:
            warnings.warn(
                f"{apart} of {len(weights)} parameters have left the storage into which"
                " fuse_optimizer() moved them, as .to() or setting .data makes them do; they are"
                " now stepped one by one. Move the model before you fuse its optimizer",
                stacklevel=2,
            )

"""Steps of a fused optimizer, during which flat parameters replace those in its groups (S6)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
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
    kind_of,
    owns_memory,
)


@dataclass(eq=False)
class Fuser(NotCopied):
    """Runs the steps of one optimizer with a flat parameter in place of each run of small ones.

    It calls the optimizer's own ``step``, so that hooks, schedulers and locks around it work. The
    groups are exchanged after the last pre-step hook, and restored before the first post-step hook.

    Attributes:
        do_flatten: whether to move small weights into flat tensors.
        check_flatten: whether to warn about weights that were moved out of their flat tensor.
        allow_inexact: whether to fuse parameters whose last bits may differ when fused.
        replaced: the optimizer's own ``step``, if it now calls `step` instead.
    """

    do_flatten: bool
    check_flatten: bool
    allow_inexact: bool
    replaced: Callable[..., Any] | None = None
    _plan: FusionPlan | None = None
    # during a step: the plan, each group's parameters
    _exchanged: tuple[FusionPlan, list[list[Tensor]]] | None = None
    _loss: Any = None
    # The weights that were moved, with their addresses, and the flat tensors to which they were
    # moved. Weak references would keep ``torch.utils.swap_tensors`` from converting the weights.
    _moved: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)

    def flatten(self, groups: list[dict[str, Any]]) -> None:
        """Move the small weights of each of ``groups`` into flat tensors, one per dtype and device,
        last weight first; only if ``do_flatten``.

        The order is that of buckets (S2.1), so that gradients and weights match. Each weight keeps
        a storage of its own, a part of the flat tensor's memory, as ``torch.save`` writes whole
        storages. Weights stay where they are if a bucket holds them, if they are a part of a larger
        storage, whose owner may read it whole (FSDP, ZeroRedundancyOptimizer), or if they are
        shared between processes or beside another one.
        """
        # The C library keeps freed memory of up to twice the largest block ever freed, and returns
        # the rest to the system. Allocating a step's temporary tensors from the system would take
        # longer than the step. This block is never written.
        np.empty(2**24, dtype=np.uint8)
        for group in groups if self.do_flatten else ():
            kinds: dict[Any, list[Tensor]] = {}
            for p in () if has_overlap(group["params"]) else reversed(group["params"]):
                kind = kind_of(p, group, self.allow_inexact)
                if kind is not None and owns_memory(p, p):
                    kinds.setdefault(kind, []).append(p)
            for moving in kinds.values():
                if len(moving) > 1:
                    flat = flatten(moving).detach()
                    for p, part in zip(moving, unflatten(flat, moving), strict=True):
                        p.data = from_dlpack(part)
                    self._moved += [(p, p.data_ptr(), flat) for p in moving]

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Step ``optimizer`` with flat parameters; return the loss of ``closure``."""
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
        """Replace the groups' parameters with flat ones, as the last pre-step hook; run the closure
        before that, since it computes gradients.
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
            flats = list(dict.fromkeys(flat for *_, flat in self._moved))
            plan = FusionPlan(optimizer, flats, self.do_flatten, self.allow_inexact)
            self._plan = plan
        self._exchanged = plan, [group["params"] for group in optimizer.param_groups]
        for group, stepped in zip(optimizer.param_groups, plan.stepped, strict=True):
            group["params"] = stepped
        optimizer.state.update({run.flat: dict(run.state) for run in plan.runs if run.states})
        return args, kwargs

    def _finish(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Restore the groups' parameters, as the first post-step hook, and count the step."""
        optimizer._bagua_fused_count += self._restore(optimizer)  # type: ignore[attr-defined]

    def _restore(self, optimizer: torch.optim.Optimizer) -> int:
        """Restore replaced parameters and move the state of runs back to them; return the number of
        groups with runs.
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
        """Warn about weights that were moved out of their flat tensor, except into a bucket, and
        stop tracking them.
        """
        weights = self._moved
        self._moved = [entry for entry in weights if entry[0].data_ptr() == entry[1]]
        gone = {p for p, *_ in weights} - {p for p, *_ in self._moved}
        apart = sum(held_by_bucket(p) is not p for p in gone)
        if apart and self.check_flatten:
            warnings.warn(
                f"{apart} of {len(weights)} parameters have left the storage into which"
                " fuse_optimizer() moved them, as .to() or setting .data makes them do; they are"
                " now stepped one by one, unless they are adjacent elsewhere. Move the model before"
                " you fuse its optimizer",
                stacklevel=2,
            )

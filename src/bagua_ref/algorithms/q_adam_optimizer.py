"""QAdamOptimizer, Adam whose second moment freezes after a warm-up, and its momenta as a
bucket (S5.5).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adam import adam

from bagua_ref.algorithms.registry import check_whole
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.optimizer_state import ensure_grad
from bagua_ref.buckets.storage import held_by_bucket
from bagua_ref.comm_ops import ErrorMemory

__all__ = ["BLOCK", "MomentumBucket", "QAdamOptimizer"]

BLOCK = 65536
"""Number of elements processed at a time on a CPU: allocating memory of a bucket's size takes
longer than filling it.
"""


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam in warm-up; then ``p <- p - lr/(1-beta1^s) * m / (sqrt(v)/sqrt(1-beta2^s) + eps)`` with
    v frozen (S5.5).

    s counts the steps of this optimizer from 1. While s < warmup_steps, weights and state are those
    of ``torch.optim.Adam(foreach=False)``, bit for bit. At s = warmup_steps the moments stay as
    they are; from then on, `QAdamAlgorithm` updates m, averaged over ranks, during the backward
    pass. After step warmup_steps, elements whose v is 0 do not move. Parameters without gradient
    are skipped. Options are those of each parameter's group. The step counter is saved with the
    groups, so a checkpoint continues in its phase.

    Args:
        params: parameters or groups of them, as in torch.
        lr: learning rate.
        warmup_steps: the last step with exact gradients, at least 1; with 1, v freezes at 0 and no
            weight moves, with a warning.
        betas: decay of m and v.
        eps: added to the denominator.
        weight_decay: weight_decay times the weight is added to the gradient while s < warmup_steps.

    Raises:
        ValueError: an option is out of range, or a group has a warmup_steps of its own.
        TypeError: warmup_steps is not an int, or a parameter is complex.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=10)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step(); optimizer.step_id
    1

    Source: Tang et al., "1-bit Adam", ICML 2021 (arXiv:2102.02888); QAdam in Gan et al., "BAGUA",
    VLDB 2022 (arXiv:2107.01499).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_whole("warmup_steps", warmup_steps, 1)
        if warmup_steps == 1:
            # Bagua's own tests use it.
            warnings.warn(
                "warmup_steps=1 freezes v at 0, so that no weight moves: v is learned in the steps"
                " before it freezes; use at least 2, and rather 100",
                stacklevel=2,
            )
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "warmup_steps": warmup_steps, "step_id": 0})

    # Both are kept in every group, as the groups are what torch saves, copies and broadcasts.

    @property
    def step_id(self) -> int:
        """Number of steps taken."""
        return cast("int", self.param_groups[0]["step_id"])

    @step_id.setter
    def step_id(self, value: int) -> None:
        for group in self.param_groups:
            group["step_id"] = value

    @property
    def warmup_steps(self) -> int:
        """Number of the last step with exact gradients."""
        return cast("int", self.param_groups[0]["warmup_steps"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch; the warm-up phase is shared by all groups."""
        phase = {
            name: (self.param_groups or [self.defaults])[0][name]
            for name in ("warmup_steps", "step_id")
        }
        if param_group.get("warmup_steps", phase["warmup_steps"]) != phase["warmup_steps"]:
            raise ValueError(
                f"warmup_steps={param_group['warmup_steps']} of a group must be that of all:"
                f" {phase['warmup_steps']}"
            )
        _check_options({**self.defaults, **param_group})
        super().add_param_group({**param_group, **phase})
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex():
                raise TypeError(f"a parameter is {parameter.dtype}; QAdam takes real numbers")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state, also one of torch.optim.Adam, which has no warm-up phase."""
        super().__setstate__(state)
        taken = max(
            (int(entry["step"]) for entry in self.state.values() if "step" in entry), default=0
        )
        for group in self.param_groups:
            group.setdefault("warmup_steps", self.defaults["warmup_steps"])
            group.setdefault("step_id", taken)

    def ensure_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of ``parameter``, initialized with zero moments if there is none:
        ``exp_avg`` is m, ``exp_avg_sq`` is v.

        ``step`` counts this parameter's own steps, as torch.optim.Adam's does: in warm-up that is
        what biases are corrected by.
        """
        state: dict[str, Tensor] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return the result of ``closure``, which recomputes the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.state and self._makes_state_only():
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.ensure_state(parameter)
            return loss
        s = self.step_id + 1
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.ensure_state(p) for p in parameters]
            if s < self.warmup_steps:
                _adam_step(group, parameters, states)
            else:
                _frozen_step(group, parameters, states, s, self.warmup_steps)
                renewed = (
                    held_by_bucket(p) is state["exp_avg"]
                    for p, state in zip(parameters, states, strict=True)
                )
                if s > self.warmup_steps and not all(renewed):
                    warnings.warn(
                        f"step {s} is past warmup_steps={self.warmup_steps}, but no QAdamAlgorithm"
                        " renews the momentum of some parameters, which stays as it is; wrap their"
                        " module with_bagua([optimizer], QAdamAlgorithm(optimizer))",
                        stacklevel=2,
                    )
        self.step_id = s
        return loss

    def _makes_state_only(self) -> bool:
        """Return whether this is the step with lr=0 and zero gradients by which
        torch.distributed.checkpoint initializes optimizer state.
        """
        return all(
            group["lr"] == 0
            and not any(p.grad is not None and p.grad.any() for p in group["params"])
            for group in self.param_groups
        )


class MomentumBucket:
    """A bucket of momenta: their update before the exchange of S3.2, and the handling of overflows
    after it.

    When a GradScaler skips a step because of an overflow, the momenta of that step must be undone,
    too. A bucket keeps a copy of the earlier momenta while its operations run; longer if they
    overflow, or with a GradScaler, because another bucket may have overflowed.

    Args:
        optimizer: the optimizer, which counts its steps.
        scaler: the GradScaler by whose scale gradients are multiplied, or None.
        bucket: its effective tensors are the momenta.
        unused: function that returns the parameters that no rank uses in this round; their momenta
            and compression errors do not change (S2.5).
        memory: the compression errors; None without error feedback.
        place: index of this rank's chunk.
    """

    def __init__(
        self,
        optimizer: QAdamOptimizer,
        scaler: torch.amp.GradScaler | None,
        bucket: BaguaBucket,
        unused: Callable[[], Collection[Tensor]],
        memory: ErrorMemory | None,
        place: int,
    ) -> None:
        self._optimizer, self._scaler, self._bucket = optimizer, scaler, bucket
        self._unused, self._memory, self._place = unused, memory, place
        self._before: Tensor | None = None
        """Copy of the momenta from before the round."""
        self._errors: tuple[Tensor, Tensor] | None = None
        """The compression errors (e and f) from before the round."""
        self._undo_at: int | None = None
        """Step count at which to restore ``_before`` first: if the count is unchanged, the last
        step was skipped.
        """
        self.overflowed = False
        """Whether the last result overflowed."""

    def update(self, bucket_name: str) -> None:
        """Update the momenta with the local gradient: ``m <- beta1*m + (1-beta1)*g`` (S5.5)."""
        bucket, optimizer = self._bucket, self._optimizer
        flat = bucket.load()
        momenta = flat[: bucket.filled]
        if self._before is not None and self._undo_at == optimizer.step_id:
            momenta.copy_(self._before)
        self._before, self._undo_at = momenta.clone(), None
        if self._memory is not None:
            self._errors = self._memory.worker, self._memory.server
        beta1 = {p: group["betas"][0] for group in optimizer.param_groups for p in group["params"]}
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        start, layout_of = 0, dict(zip(bucket.tensors, bucket.layouts, strict=True))
        for run in _runs(bucket.tensors, beta1):
            parts = [layout_of[parameter].flat(_gradient(parameter)) for parameter in run]
            gradients = parts[0] if len(run) == 1 and scale == 1 else torch.cat(parts)
            if gradients.dtype is not momenta.dtype:
                raise ValueError(
                    f"gradients are {gradients.dtype} and momenta {momenta.dtype}, as after"
                    " model.double(). Convert the module before wrapping, or make a new"
                    " QAdamOptimizer and call with_bagua() again on every rank"
                )
            if scale != 1:
                bucket.kernels.divide_(gradients, scale)
            end = start + len(gradients)
            bucket.kernels.update_momentum_(momenta[start:end], gradients, beta1[run[0]])
            start = end
        if not bucket.flatten:
            bucket.copy_from_flat(flat)

    def spread_overflow(self, bucket_name: str) -> None:
        """Propagate an overflow on any rank, a NaN in every rank's momenta (S4.4), to the
        gradients, where GradScaler finds it; restore momenta and errors of parameters that no rank
        uses (S2.5).
        """
        bucket, momenta, unused, end = self._bucket, self._bucket.load(), self._unused(), 0
        # A sum is finite only if all its terms are, and takes a single pass; but it may overflow.
        self.overflowed = not (momenta.sum().isfinite() or momenta.isfinite().all())
        if self.overflowed:
            for parameter in bucket.tensors:
                _gradient(parameter).fill_(torch.nan)
        assert self._before is not None
        if unused:
            for parameter, layout, momentum in zip(
                bucket.tensors, bucket.layouts, bucket.effective_tensors(), strict=True
            ):
                start, end = end, end + parameter.numel()
                if parameter in unused:
                    momentum.copy_(layout.view(self._before[start:end]))
                    if self._memory is not None and self._errors is not None:
                        self._memory.put_back(self._errors, start, end, self._place)
        self._errors = None
        if self._scaler is None and not self.overflowed:
            self._before = None

    def end_round(self, overflowed: bool) -> None:
        """Discard the copy of the momenta from before the round, unless an overflow may make
        GradScaler skip the next step.
        """
        if overflowed:
            self._undo_at = self._optimizer.step_id
        else:
            self._before = None


def _adam_step(
    group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Tensor]]
) -> None:
    """Take the step of the installed torch.optim.Adam(foreach=False)."""
    beta1, beta2 = group["betas"]
    adam(
        parameters,
        [cast("Tensor", p.grad) for p in parameters],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        foreach=False,
        fused=False,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _frozen_step(
    group: dict[str, Any],
    parameters: list[Tensor],
    states: list[dict[str, Tensor]],
    s: int,
    warmup_steps: int,
) -> None:
    """Update weights along m without changing the moments; after step ``warmup_steps``, skip
    elements whose v is 0.
    """
    beta1, beta2 = group["betas"]
    step_size = float(group["lr"]) / (1 - beta1**s)
    correction = (1 - beta2**s) ** 0.5
    for parameter, state in zip(parameters, states, strict=True):
        state["step"] += 1
        for p, m, v in _blocks(parameter, state["exp_avg"], state["exp_avg_sq"]):
            # In float16 eps = 1e-8 would be zero: 0/0 would make a NaN of a weight without
            # gradient.
            root = v.float().sqrt_() if v.dtype is torch.float16 else v.sqrt()
            denominator = root.div_(correction).add_(group["eps"])
            # eps alone must not divide an m of later gradients, or of a codec's errors
            if s > warmup_steps and _may_be_zero(v):
                still = v == 0
                m, denominator = m.masked_fill(still, 0), denominator.masked_fill_(still, 1)
            p.addcdiv_(m, denominator, value=-step_size)


def _may_be_zero(v: Tensor) -> bool:
    """Return whether an element of v may be 0; only CPU tensors are checked, because a check
    elsewhere would wait for the device.
    """
    return v.device.type != "cpu" or (v.numel() > 0 and not v.amin() > 0)


def _blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split tensors of one shape into blocks of `BLOCK` elements, small enough for the processor's
    cache; return small tensors, those on devices, and those with gaps whole.
    """
    if tensors[0].numel() <= BLOCK or tensors[0].device.type != "cpu":
        return [tensors]
    if not all(tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    return zip(*(tensor.view(-1).split(BLOCK) for tensor in tensors), strict=True)


def _check_options(options: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not options[name] >= 0:
            raise ValueError(f"{name}={options[name]!r} must be at least 0")
    betas = options["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas!r} must be two numbers, at least 0 and below 1")


def _runs(parameters: Sequence[Tensor], beta1: Mapping[Tensor, float]) -> Iterator[list[Tensor]]:
    """Split ``parameters`` into runs of equal beta1, each a single parameter or at most a block."""
    run: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if run and (beta1[parameter] != beta1[run[0]] or size + parameter.numel() > BLOCK):
            yield run
            run, size = [], 0
        run.append(parameter)
        size += parameter.numel()
    yield run


def _gradient(parameter: Tensor) -> Tensor:
    """Return the gradient; create one of zeros if this rank did not use the parameter, because all
    ranks must step alike.
    """
    return ensure_grad(parameter).detach()

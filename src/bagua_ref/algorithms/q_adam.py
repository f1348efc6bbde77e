"""Adam whose second moment freezes after a warm-up, so that its first can travel in one byte per element (S5.5)."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim.adam import adam

from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl
from bagua_ref.algorithms.bytegrad import ByteGradAlgorithmImpl
from bagua_ref.algorithms.momentum import MomentumBucket
from bagua_ref.tensor import BaguaTensor, Registration
from bagua_ref.types import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from bagua_ref.algorithms.base import TrainingContext
    from bagua_ref.bucket import BaguaBucket
    from bagua_ref.types import Group

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam in warm-up; then ``p <- p - lr/(1-beta1^s) * m / (sqrt(v)/sqrt(1-beta2^s) + eps)`` with v frozen (S5.5).

    s counts the steps of this optimizer from 1. While s < warmup_steps, weights and state are those of
    ``torch.optim.Adam(foreach=False)``, bit for bit. At s = warmup_steps the moments stay as they are; from then on
    `QAdamAlgorithm` renews m, between the ranks, during backward. Parameters without gradient are skipped. Options are each
    parameter's own group's. The step counter is saved with the groups, so a checkpoint continues in its phase.

    Args:
        params: parameters or groups of them, as in torch.
        lr: learning rate.
        warmup_steps: the last step with exact gradients, at least 1.
        betas: decay of m and v.
        eps: added to the denominator.
        weight_decay: times the weight is added to the gradient while s < warmup_steps.

    Raises:
        ValueError: an option is out of range, or a group has a warmup_steps of its own.
        TypeError: warmup_steps is no int; a parameter is complex.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=10)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step(); optimizer.step_id
    1

    Source: Tang et al., "1-bit Adam", ICML 2021 (arXiv:2102.02888); QAdam in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
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
        if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool):
            raise TypeError(f"warmup_steps={warmup_steps!r} must be an int")
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps={warmup_steps} must be at least 1: v is learned before it freezes")
        if warmup_steps == 1:
            warnings.warn(
                "warmup_steps=1 freezes v = 0, so that every step divides m by eps alone; give Adam some steps to learn v",
                stacklevel=2,
            )
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "warmup_steps": warmup_steps, "step_id": 0})

    # Both are kept in every group, as the groups are what torch saves, copies and broadcasts.

    @property
    def step_id(self) -> int:
        """The number of steps taken."""
        return cast("int", self.param_groups[0]["step_id"])

    @step_id.setter
    def step_id(self, value: int) -> None:
        for group in self.param_groups:
            group["step_id"] = value

    @property
    def warmup_steps(self) -> int:
        """The last step with exact gradients."""
        return cast("int", self.param_groups[0]["warmup_steps"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; the phase is the same for all groups."""
        phase = {name: (self.param_groups or [self.defaults])[0][name] for name in ("warmup_steps", "step_id")}
        if param_group.get("warmup_steps", phase["warmup_steps"]) != phase["warmup_steps"]:
            raise ValueError(f"warmup_steps={param_group['warmup_steps']} of a group must be that of all: {phase['warmup_steps']}")
        _check_options({**self.defaults, **param_group})
        super().add_param_group({**param_group, **phase})
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex():
                raise TypeError(f"a parameter is {parameter.dtype}; QAdam takes real numbers")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore, also what torch.optim.Adam saved: it lacks the phase."""
        super().__setstate__(state)
        taken = max((int(entry["step"]) for entry in self.state.values() if "step" in entry), default=0)
        for group in self.param_groups:
            group.setdefault("warmup_steps", self.defaults["warmup_steps"])
            group.setdefault("step_id", taken)

    def ensure_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of ``parameter``, with zero moments if it has none: ``exp_avg`` is m, ``exp_avg_sq`` is v.

        ``step`` counts this parameter's own steps, as torch.optim.Adam's does: in warm-up that is what biases are corrected by.
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
        """Take one step; return what ``closure``, which computes gradients anew, returns."""
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
                _frozen_step(group, parameters, states, s)
                if s > self.warmup_steps and not all(map(_is_communicated, parameters, states)):
                    warnings.warn(
                        f"step {s} is past warmup_steps={self.warmup_steps}, but no QAdamAlgorithm renews the momentum of some "
                        "parameters, which stays as it is; wrap their module with_bagua([optimizer], QAdamAlgorithm(optimizer))",
                        stacklevel=2,
                    )
        self.step_id = s
        return loss

    def _makes_state_only(self) -> bool:
        """Return whether this is the step with lr=0 and zero gradients by which torch.distributed.checkpoint has state made."""
        return all(
            group["lr"] == 0 and not any(p.grad is not None and p.grad.any() for p in group["params"])
            for group in self.param_groups
        )


def _adam_step(group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Tensor]]) -> None:
    """Step as the installed torch.optim.Adam(foreach=False)."""
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


def _frozen_step(group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Tensor]], s: int) -> None:
    """Step along m, leaving the moments as they are."""
    beta1, beta2 = group["betas"]
    step_size = float(group["lr"]) / (1 - beta1**s)
    correction = (1 - beta2**s) ** 0.5
    for parameter, state in zip(parameters, states, strict=True):
        state["step"] += 1
        v = state["exp_avg_sq"]
        if v.dtype is torch.float16:
            v = v.float()  # where eps = 1e-8 is no zero: 0/0 would make a NaN of a weight without gradient
        parameter.addcdiv_(state["exp_avg"], (v.sqrt() / correction).add_(group["eps"]), value=-step_size)


def _is_communicated(parameter: Tensor, state: dict[str, Tensor]) -> bool:
    """Return whether ``parameter`` is in a bucket of momenta."""
    known: Registration | None = getattr(parameter, "_bagua_registration", None)
    return known is not None and known.sink is not None and known.effective(parameter) is state["exp_avg"]


def _check_options(options: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not options[name] >= 0:
            raise ValueError(f"{name}={options[name]!r} must be at least 0")
    betas = options["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas!r} must be two numbers, at least 0 and below 1")


class QAdamAlgorithmImpl(ByteGradAlgorithmImpl):
    """`QAdamAlgorithm` at work on one module: first with buckets of gradients, after a reset with buckets of momenta."""

    def __init__(
        self,
        process_group: Group,
        q_adam_optimizer: QAdamOptimizer,
        hierarchical: bool = True,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(process_group, hierarchical, average=True)
        self.q_adam_optimizer, self.grad_scaler = q_adam_optimizer, grad_scaler
        self._compressing: bool | None = None
        """Whether the buckets hold momenta; None before there are any."""
        self._momenta: list[MomentumBucket] = []

    @property
    def optimizer_step_id(self) -> int:
        """The number of steps that the optimizer has taken."""
        return self.q_adam_optimizer.step_id

    @property
    def warmup_steps(self) -> int:
        """The last step with exact gradients."""
        return self.q_adam_optimizer.warmup_steps

    @property
    def _past_warmup(self) -> bool:
        """Whether the next step is past the warm-up, so that what counts for it is the momentum."""
        return self.optimizer_step_id >= self.warmup_steps

    @property
    def begins_in_forward(self) -> bool:
        """The change of phase does (S5.5)."""
        return True

    def need_reset(self) -> bool:
        """Return whether the phase is another than that of the buckets: once after the warm-up, or after loading a checkpoint."""
        return self._compressing is not self._past_warmup

    def init_tensors(self, bagua_ddp: TrainingContext) -> list[Tensor]:
        """Return the gradients in warm-up, after it the momenta, last layer first.

        Raises:
            ValueError: the optimizer lacks a parameter; raised on every rank.
            TypeError: a float64 parameter, which cannot be compressed.
        """
        parameters = bagua_ddp.bagua_build_params()
        if self._compressing is None:
            self._check_parameters(parameters)
            self._share_state(bagua_ddp)
        self._compressing, self._momenta = self._past_warmup, []
        for _, parameter in parameters:
            self.q_adam_optimizer.ensure_state(parameter)
        if not self._compressing:
            return super().init_tensors(bagua_ddp)
        return [
            BaguaTensor.ensure_bagua_tensor(
                parameter,  # type: ignore[arg-type]
                name,
                bagua_ddp.bagua_module_name,
                getter_closure=self._get_momentum,
                setter_closure=self._set_momentum,
            )
            for name, parameter in reversed(parameters)
        ]

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append S3.1 in warm-up, after it the update of the momenta and S3.2, or S3.3 with it between leaders."""
        if not self._compressing:
            bucket.append_centralized_synchronous_op(hierarchical=False, average=True, group=self.process_group)
            return
        momentum = MomentumBucket(self.q_adam_optimizer, self.grad_scaler, bucket)
        self._momenta.append(momentum)
        bucket.append_python_op(momentum.update)
        super().init_operations(bagua_ddp, bucket)
        bucket.append_python_op(momentum.spread_overflow)

    def init_post_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[], object]:
        """Return a hook that waits for communication, and sees whether anything overflowed."""
        wait, momenta = super().init_post_backward_hook(bagua_ddp), self._momenta

        def hook() -> None:
            wait()
            overflowed = any(momentum.overflowed for momentum in momenta)
            for momentum in momenta:
                momentum.end_round(overflowed)

        return hook

    def _get_momentum(self, parameter: Tensor) -> Tensor | None:
        # Looked up each time: load_state_dict puts new tensors into the state.
        return cast("Tensor | None", self.q_adam_optimizer.state[parameter].get("exp_avg"))

    def _set_momentum(self, parameter: Tensor, momentum: Tensor) -> None:
        self.q_adam_optimizer.state[parameter]["exp_avg"] = momentum

    def _check_parameters(self, parameters: list[tuple[str, torch.nn.Parameter]]) -> None:
        held = {p for group in self.q_adam_optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in parameters if p not in held]
        comm = self.process_group.get_global_communicator()
        any_missing = torch.tensor([bool(missing)], dtype=torch.int32, device=comm.object_device())
        comm.allreduce_inplace(any_missing, ReduceOp.MAX)
        if any_missing.item():
            raise ValueError(
                f"q_adam_optimizer does not hold {'parameter ' + ', '.join(map(repr, missing)) if missing else 'all of them'} of "
                f"the module{'' if missing else ' on another rank'}; add what is missing to it, freeze it, or list it in "
                "module._bagua_params_and_buffers_to_ignore"
            )
        for name, parameter in parameters:
            if parameter.dtype is torch.float64:
                raise TypeError(
                    f"parameter {name!r} is float64, which cannot be compressed; qadam takes float16, bfloat16 or float32"
                )

    def _share_state(self, bagua_ddp: TrainingContext) -> None:
        """Broadcast the optimizer's state, as wrapping does for those that it was given: all ranks must be in one phase."""
        if any(optimizer is self.q_adam_optimizer for optimizer in bagua_ddp.bagua_optimizers):
            return
        comm = self.process_group.get_global_communicator()
        state = comm.broadcast_object(self.q_adam_optimizer.state_dict() if comm.rank() == 0 else None, 0)
        if comm.rank() != 0:
            self.q_adam_optimizer.load_state_dict(state)


class QAdamAlgorithm(Algorithm):
    """Adam with exact gradients in warm-up, then with momenta averaged as 8-bit levels, v frozen (S5.5, S3.2).

    Args:
        q_adam_optimizer: holds every parameter that the module trains; pass it to ``with_bagua``, too.
        hierarchical: full precision inside nodes, compressed between their leaders (S3.3); not in warm-up.
        grad_scaler: the GradScaler in use, if there is one: after the warm-up gradients enter the momentum during backward,
            before the scaler can divide them by its scale, so the algorithm has to.

    Raises:
        TypeError: q_adam_optimizer is another optimizer, or grad_scaler something else.

    Source: Tang et al., "1-bit Adam", ICML 2021 (arXiv:2102.02888); QAdam in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    def __init__(
        self, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True, *, grad_scaler: torch.amp.GradScaler | None = None
    ) -> None:
        if not isinstance(q_adam_optimizer, QAdamOptimizer):
            raise TypeError(f"q_adam_optimizer must be a QAdamOptimizer, not {type(q_adam_optimizer).__name__}")
        if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
            raise TypeError(f"grad_scaler={grad_scaler!r} must be a torch.amp.GradScaler or None")
        self.q_adam_optimizer, self.hierarchical, self.grad_scaler = q_adam_optimizer, hierarchical, grad_scaler

    def reify(self, process_group: Group) -> AlgorithmImpl:
        """Return the implementation for one module."""
        return QAdamAlgorithmImpl(process_group, self.q_adam_optimizer, self.hierarchical, grad_scaler=self.grad_scaler)

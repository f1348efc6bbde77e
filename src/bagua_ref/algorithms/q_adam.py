"""The algorithm QAdam: exact gradients in the warm-up, then compressed momenta (S5.5)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

import torch
from torch import Tensor

from bagua_ref.algorithms.base import Algorithm, TrainingContext
from bagua_ref.algorithms.bytegrad import ByteGradAlgorithmImpl
from bagua_ref.algorithms.q_adam_optimizer import MomentumBucket, QAdamOptimizer
from bagua_ref.algorithms.registry import implements
from bagua_ref.algorithms.state import communicator_of
from bagua_ref.algorithms.traits import Rounds, Traits, WithoutBatch
from bagua_ref.buckets.bucket import BaguaBucket, check_compression
from bagua_ref.buckets.optimizer_state import align_state
from bagua_ref.buckets.storage import register
from bagua_ref.scheduling.engine import Fact
from bagua_ref.types import Group

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]

_LISTED = 10
"""Maximum number of parameters named in a warning."""


@dataclass(frozen=True, eq=False)
class QAdamAlgorithm(Algorithm):
    """QAdam: Adam with exact gradients in the warm-up; after it, momenta averaged in compressed
    chunks, with v frozen (S5.5, S3.2).

    Args:
        q_adam_optimizer: the optimizer of all parameters that the module trains; must also be
            passed to ``with_bagua``.
        hierarchical: full precision inside nodes, compressed between their leaders (S3.3); not in
            warm-up.
        grad_scaler: the GradScaler in use, if there is one: after the warm-up gradients enter the
            momentum during backward, before the scaler can divide them by its scale, so the
            algorithm has to.
        compression: the name of a codec, one of `bagua_ref.list_codecs` (S4, S12); used after the
            warm-up.
        error_feedback: keep compression errors, in float32, and add them to the next round's
            momenta (S11.1).

    Raises:
        TypeError: q_adam_optimizer is not a QAdamOptimizer, grad_scaler not a GradScaler, or
            error_feedback not a bool.
        ValueError: there is no such codec.

    Source: Tang et al., "1-bit Adam", ICML 2021 (arXiv:2102.02888); QAdam in Gan et al., "BAGUA",
    VLDB 2022 (arXiv:2107.01499).
    """

    q_adam_optimizer: QAdamOptimizer
    hierarchical: bool = True
    _: KW_ONLY
    grad_scaler: torch.amp.GradScaler | None = None
    compression: str = "MinMaxUInt8"
    error_feedback: bool = False

    takes_float64 = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_compression(self.compression)
        if not isinstance(self.q_adam_optimizer, QAdamOptimizer):
            raise TypeError(
                "q_adam_optimizer must be a QAdamOptimizer, not"
                f" {type(self.q_adam_optimizer).__name__}"
            )
        if self.grad_scaler is not None and not isinstance(self.grad_scaler, torch.amp.GradScaler):
            raise TypeError(
                f"grad_scaler={self.grad_scaler!r} must be a torch.amp.GradScaler or None"
            )

    def check(
        self,
        parameters: list[tuple[str, torch.nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Raise an error for parameters that the optimizer lacks, and for float64, which cannot be
        compressed.
        """
        held = {p for group in self.q_adam_optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in parameters if p not in held]
        if missing:
            raise ValueError(
                f"q_adam_optimizer does not hold parameter {', '.join(map(repr, missing))} of the"
                " module; add what is missing to it, freeze it, or list it in"
                " module._bagua_params_and_buffers_to_ignore"
            )
        super().check(parameters, optimizers)


@implements(QAdamAlgorithm)
class QAdamAlgorithmImpl(ByteGradAlgorithmImpl):
    """Implementation of `QAdamAlgorithm` for one module: buckets of gradients in the warm-up,
    buckets of momenta after it.
    """

    name = "qadam"

    def __init__(
        self,
        process_group: Group,
        q_adam_optimizer: QAdamOptimizer,
        hierarchical: bool = True,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        compression: str = "MinMaxUInt8",
        error_feedback: bool = False,
    ) -> None:
        super().__init__(
            process_group, hierarchical, compression=compression, error_feedback=error_feedback
        )
        self.options = options = QAdamAlgorithm(
            q_adam_optimizer,
            hierarchical,
            grad_scaler=grad_scaler,
            compression=compression,
            error_feedback=error_feedback,
        )
        self.q_adam_optimizer, self.grad_scaler = q_adam_optimizer, grad_scaler
        # the phases send different messages, and the second one changes the momenta
        traits = Traits(
            same_replicas=True, own_optimizers=True, without_batch=_without_batch(options)
        )
        self.phases = (traits, traits)
        self._compressing: bool | None = None
        """Whether the current buckets hold momenta; None before there are any."""
        self._momenta: list[MomentumBucket] = []

    @property
    def optimizer_step_id(self) -> int:
        """The number of steps that the optimizer has taken."""
        return self.q_adam_optimizer.step_id

    @property
    def _past_warmup(self) -> bool:
        """Whether the next step is past the warm-up and exchanges momenta."""
        return self.warmup.past_warmup(self.optimizer_step_id)

    @property
    def warmup(self) -> Rounds:
        """The schedule of the warm-up; the optimizer's options have its length."""
        return Rounds(self.q_adam_optimizer.warmup_steps, phase="the compressed phase")

    @property
    def phase(self) -> int:
        """Phase index: 0 in the warm-up, 1 after it."""
        return int(bool(self._compressing))

    def facts(self) -> list[Fact]:
        """Return the phase and the number of steps, which determines it."""
        return [
            self.warmup.fact(bool(self._compressing)),
            Fact(
                "{is} at step {value} of the QAdamOptimizer",
                self.optimizer_step_id,
                adopt=partial(setattr, self.q_adam_optimizer, "step_id"),
            ),
        ]

    def need_reset(self) -> bool:
        """Return whether the buckets belong to another phase: once after the warm-up, or after
        loading a checkpoint.
        """
        return self._compressing is not self._past_warmup

    def init_tensors(self, bagua_ddp: TrainingContext) -> list[Tensor]:
        """Return the gradients in the warm-up and the momenta after it, last layer first."""
        parameters = bagua_ddp.bagua_build_params()
        freezes = not self._compressing and self.optimizer_step_id == self.warmup.warmup
        self._compressing, self._momenta = self._past_warmup, []
        for _, parameter in parameters:
            self.q_adam_optimizer.ensure_state(parameter)
        align_state(self.q_adam_optimizer)
        if not self._compressing:
            return super().init_tensors(bagua_ddp)
        if (
            freezes
            and bagua_ddp.has_batches  # else it has not the moments of the others
            and self.process_group.get_global_communicator().rank() == 0
        ):
            self._warn_of_zeros(parameters)
        optimizer = self.q_adam_optimizer  # whose load_state_dict replaces the state
        return [
            register(
                parameter,
                name,
                bagua_ddp.bagua_module_name,
                lambda parameter: optimizer.state[parameter].get("exp_avg"),
                lambda parameter, momentum: optimizer.state[parameter].update(exp_avg=momentum),
            )
            for name, parameter in reversed(parameters)
        ]

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append gradient averaging (S3.1) in the warm-up; after it, the momentum update and the
        compressed mean: S3.2 (with error memory S11.1), or its hierarchical form S3.3 between
        leaders.
        """
        if not self._compressing:
            self.memory_of(bucket)  # so that states of both phases have the same entries
            bucket.append_centralized_synchronous_op(
                hierarchical=False, average=True, group=self.process_group
            )
            return
        momentum = MomentumBucket(
            self.q_adam_optimizer,
            self.grad_scaler,
            bucket,
            lambda: bagua_ddp.unused,
            self.memory_of(bucket),
            communicator_of(self.process_group, self.options.hierarchical).rank(),
        )
        self._momenta.append(momentum)
        bucket.append_python_op(momentum.update)
        super().init_operations(bagua_ddp, bucket)
        bucket.append_python_op(momentum.spread_overflow)

    def init_post_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[], object]:
        """Return a hook that waits for communication and checks for overflows."""
        wait, momenta = super().init_post_backward_hook(bagua_ddp), self._momenta

        def hook() -> None:
            wait()
            overflowed = any(momentum.overflowed for momentum in momenta)
            for momentum in momenta:
                momentum.end_round(overflowed)

        return hook

    def _warn_of_zeros(self, parameters: list[tuple[str, torch.nn.Parameter]]) -> None:
        """Warn about weight elements that no longer change because their v is frozen at 0
        (S5.5).
        """
        unreached: list[str] = []
        underflowed: list[str] = []
        for name, parameter in parameters:
            state = self.q_adam_optimizer.state[parameter]
            still, moved = state["exp_avg_sq"] == 0, state["exp_avg"] != 0
            for found, listed in ((still & ~moved, unreached), (still & moved, underflowed)):
                if count := int(found.sum()):
                    listed.append(f"{count} of {parameter.numel()} in {name!r}")
        reasons = []
        if unreached:
            reasons.append(
                f"some in {len(unreached)} parameters had no gradient in the warm-up"
                f" ({', '.join(unreached[:_LISTED])}); if they should learn, use a larger"
                " warmup_steps"
            )
        if underflowed:
            reasons.append(
                f"some in {len(underflowed)} parameters had gradients whose squares are 0 in the"
                f" weights' dtype ({', '.join(underflowed[:_LISTED])}); keep these weights in"
                " float32 instead of 16 bits"
            )
        if reasons:
            warnings.warn(
                f"qadam freezes v after warmup_steps={self.warmup.warmup}, and elements whose v is 0"
                f" do not move from now on: {'; '.join(reasons)}",
                stacklevel=2,
            )


def _without_batch(options: QAdamAlgorithm) -> WithoutBatch | str:
    """Return the contribution of a rank without batches, or the reason why `join` is not
    supported.
    """
    if options.error_feedback:
        return (
            "with error_feedback=True, ranks without batches would have to add what they have left"
            " out to a mean that does not count them. Use error_feedback=False"
        )
    if options.grad_scaler is not None:
        return (
            "with grad_scaler=, an overflow is undone in the next round, in which a rank without"
            " batches has no momenta. Train without a GradScaler, in bfloat16 for example"
        )
    return WithoutBatch.ABSENT

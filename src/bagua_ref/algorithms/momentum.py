"""A QAdam bucket of momenta: the gradient enters before the exchange, and overflows are undone (S5.5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from bagua_ref.algorithms.q_adam_optimizer import BLOCK, QAdamOptimizer
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.tensor import BaguaTensor

__all__ = ["MomentumBucket"]


class MomentumBucket:
    """Updates a bucket of momenta before the exchange of S3.2, and handles overflows after it.

    When a GradScaler skips a step because of an overflow, the momenta that were made for it must go, too. A bucket keeps what
    they were while its operations run; longer if they overflow, or, as another bucket's may, if there is a GradScaler.

    Args:
        optimizer: counts the steps that were taken.
        scaler: whose scale the gradients carry, if there is one.
        bucket: its effective tensors are the momenta.
    """

    def __init__(self, optimizer: QAdamOptimizer, scaler: torch.amp.GradScaler | None, bucket: BaguaBucket) -> None:
        self._optimizer, self._scaler = optimizer, scaler
        self._bucket, self._kernels = bucket, bucket.kernels
        self._before: list[Tensor] = []
        self._undo_at: int | None = None
        """Go back to ``_before`` first if the optimizer has still taken so many steps: then the last one was skipped."""
        self.overflowed = False
        """Whether the last result did."""

    def undo_overflow(self) -> Tensor:
        """Go back to the momenta before the last round if the step after it was skipped; return them as one tensor."""
        momenta = self._bucket.load()[: self._bucket.bytes() // self._bucket.dtype.itemsize]
        if self._before and self._undo_at == self._optimizer.step_id:
            torch.cat(self._before, out=momenta)
            self._copy_back(momenta)
        self._undo_at = None
        return momenta

    def update(self, bucket_name: str) -> None:
        """``m <- beta1*m + (1-beta1)*g`` on the local gradient (S5.5)."""
        momenta = self.undo_overflow()
        self._before = [block.clone() for block in momenta.split(BLOCK)]
        beta1 = {p: group["betas"][0] for group in self._optimizer.param_groups for p in group["params"]}
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        start, layout_of = 0, dict(zip(self._bucket.tensors, self._bucket.layouts, strict=True))
        for run in _runs(self._bucket.tensors, beta1):
            parts = [layout_of[parameter].flat(_gradient(parameter)) for parameter in run]
            gradients = parts[0] if len(run) == 1 and scale == 1 else torch.cat(parts)
            if scale != 1:
                self._kernels.divide_(gradients, scale)
            self._kernels.update_momentum_(momenta[start : start + len(gradients)], gradients, beta1[run[0]])
            start += len(gradients)
        assert start == len(momenta), "a gradient has as many elements as its momentum"
        self._copy_back(momenta)

    def _copy_back(self, momenta: Tensor) -> None:
        if not self._bucket.flatten:
            momenta_of = zip(self._bucket.layouts, self._bucket.effective_tensors(), strict=True)
            self._kernels.scatter_flat(momenta, [layout.in_order(momentum) for layout, momentum in momenta_of])

    def spread_overflow(self, bucket_name: str) -> None:
        """Let every rank's GradScaler see an overflow on any rank, which S4.4 has made a NaN in every rank's momenta."""
        momenta = self._bucket.load()
        # A sum is finite only if all its terms are, and takes a single pass; but it may overflow.
        self.overflowed = not (momenta.sum().isfinite() or momenta.isfinite().all())
        if self.overflowed:
            for parameter in self._bucket.tensors:
                _gradient(parameter).fill_(torch.nan)
        elif self._scaler is None:
            self._before = []

    def end_round(self, overflowed: bool) -> None:
        """Forget what the momenta were, unless some overflowed, so that the step to come may be skipped."""
        if overflowed:
            self._undo_at = self._optimizer.step_id
        else:
            self._before = []


def _runs(parameters: Sequence[Tensor], beta1: Mapping[Tensor, float]) -> Iterator[list[Tensor]]:
    """Cut ``parameters`` into runs of equal beta1, each a single parameter or at most a block."""
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
    """Return the gradient, a new zero one if there is none: this rank did not use the parameter, but it steps as the others."""
    return cast("Tensor", BaguaTensor.bagua_ensure_grad(parameter).grad).detach()  # type: ignore[arg-type]

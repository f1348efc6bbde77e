"""Guard against optimizer steps on gradients that bypassed communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["StepGuard"]


class StepGuard:
    """What each optimizer has seen since its last step: gradients, synchronized ones, and ones that bypassed communication.

    Args:
        module_name: for messages.
        optimizers: those that are known to step the module's parameters.
    """

    def __init__(self, module_name: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._module_name = module_name
        self._since = {optimizer: _Since() for optimizer in optimizers}
        self._unstepped: set[torch.optim.Optimizer] = set()
        self._communicates = False
        self.expects_backward = False
        """Whether a training forward has begun that steps of all optimizers, or if none is known a backward, have yet to follow."""
        self._reached: tuple[torch.Tensor, int] | None = None
        """If no optimizer is known: a parameter whose gradient bypassed communication after the last forward, its version then."""

    def forward_begins(self) -> None:
        """Expect a backward: a training forward of the wrapped module has begun."""
        self.expects_backward = True
        self._unstepped = set(self._since)
        self._reached = None

    def gradient_arrives(self) -> None:
        """Note a gradient that is kept local on purpose, as under `no_sync`."""
        for since in self._since.values():
            since.gradients = True

    def synchronized(self) -> None:
        """Note the end of a synchronized backward."""
        for since in self._since.values():
            since.gradients = since.synchronized = True
        self.expects_backward = self.expects_backward and bool(self._since)

    def bypassed(self, reason: str, parameter: torch.Tensor) -> None:
        """Note a gradient of ``parameter`` that was not synchronized, against the user's intention, and why.

        Raises:
            RuntimeError: no optimizer is known, and the weights have changed since the last such gradient.
        """
        for since in self._since.values():
            since.gradients = True
            since.bypassed = reason, parameter, parameter.grad
        if not self._since:  # their steps can only be told from what they change
            if self._reached is None:
                self._reached = parameter, parameter._version
            elif self._reached[0]._version != self._reached[1]:
                raise RuntimeError(self._message("an optimizer", reason))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Allow ``optimizer`` to step.

        Raises:
            RuntimeError: there are gradients since its last step, and all of them bypassed communication.
        """
        since = self._since[optimizer]
        if since.bypassed is not None and not since.synchronized:
            reason, parameter, gradient = since.bypassed
            if parameter.grad is gradient:  # else zero_grad() has dropped it
                raise RuntimeError(self._message(type(optimizer).__name__, reason))
        self._since[optimizer] = _Since()
        # Without gradients and with lr=0: torch.distributed.checkpoint lets an optimizer make its state by such a step.
        self._communicates = since.gradients or any(group.get("lr") != 0 for group in optimizer.param_groups)

    def after_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note the end of a step; return whether it counts as one of the training's."""
        self._unstepped.discard(optimizer)
        self.expects_backward = self.expects_backward and bool(self._unstepped)
        return self._communicates

    def _message(self, who: str, reason: str) -> str:
        return (
            f"{who} was about to step module {self._module_name!r} with gradients of this rank alone: {reason}. Call the wrapped "
            "module itself, model(x), in training mode for each step; model.no_sync() keeps gradients local on purpose"
        )


class _Since:
    """What has happened since an optimizer's last step."""

    gradients = synchronized = False
    bypassed: tuple[str, torch.Tensor, torch.Tensor | None] | None = None
    """Why a gradient bypassed communication, whose it is, and the gradient."""

"""Guard against optimizer steps on gradients that bypassed communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["StepGuard"]


class StepGuard:
    """Record of the gradients since each optimizer's last step: synchronized ones, and ones that bypassed communication.

    Args:
        module_name: for messages.
        optimizers: those that step the module's parameters, as far as known.
    """

    def __init__(self, module_name: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._module_name = module_name
        self._since = {optimizer: _Since() for optimizer in optimizers}
        self._unstepped: set[torch.optim.Optimizer] = set()
        self._communicates = False
        self.followed_backward = False
        """Whether gradients had arrived for the last step, be it from the step's own closure."""
        self.expects_backward = False
        """Whether the steps of all optimizers, or a backward pass if none is known, have yet to follow a training forward pass."""
        self._reached: tuple[torch.Tensor, int] | None = None
        """If no optimizer is known: a parameter whose gradient bypassed communication, and the parameter's version at that time."""

    def forward_begins(self) -> None:
        """Note the start of a training forward pass, which a backward pass should follow."""
        self.expects_backward = True
        self._unstepped = set(self._since)
        self._reached = None

    def gradient_arrives(self) -> None:
        """Note a gradient that stays local on purpose, as under `no_sync`."""
        for since in self._since.values():
            since.gradients = True

    def synchronized(self) -> None:
        """Note the end of a synchronized backward pass."""
        for since in self._since.values():
            since.gradients = since.synchronized = True
        self.expects_backward = self.expects_backward and bool(self._since)

    def bypassed(self, reason: str, parameter: torch.Tensor) -> None:
        """Note a gradient of ``parameter`` that bypassed communication unintentionally, and the reason.

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
        """Check that ``optimizer`` may step.

        Raises:
            RuntimeError: there are gradients since its last step, and all of them bypassed communication.
        """
        since = self._since[optimizer]
        if since.bypassed is not None and not since.synchronized:
            reason, parameter, gradient = since.bypassed
            if parameter.grad is gradient:  # else zero_grad() has dropped it
                raise RuntimeError(self._message(type(optimizer).__name__, reason))
        self._since[optimizer] = _Since()
        self.followed_backward = since.gradients
        # Without gradients and with lr=0: torch.distributed.checkpoint lets an optimizer make its state by such a step.
        self._communicates = since.gradients or any(group.get("lr") != 0 for group in optimizer.param_groups)

    def after_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note the end of a step; return whether it counts as one of the training's."""
        since = self._since[optimizer]
        self.followed_backward, since.gradients = self.followed_backward or since.gradients, False
        self._unstepped.discard(optimizer)
        self.expects_backward = self.expects_backward and bool(self._unstepped)
        return self._communicates or self.followed_backward  # the step's own closure may have made the first gradients

    def _message(self, who: str, reason: str) -> str:
        return (
            f"{who} was about to step module {self._module_name!r} with gradients of this rank alone: {reason}. Call the wrapped "
            "module itself, model(x), in training mode for each step; model.no_sync() keeps gradients local on purpose"
        )


class _Since:
    """Events since an optimizer's last step."""

    gradients = synchronized = False
    bypassed: tuple[str, torch.Tensor, torch.Tensor | None] | None = None
    """The reason why a gradient bypassed communication, its parameter, and the gradient."""

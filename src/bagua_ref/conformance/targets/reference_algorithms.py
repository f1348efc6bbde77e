"""The package's algorithms as a target's ``algorithms``, with any kernels."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

import torch

from bagua_ref.algorithms import Algorithm, AsyncModelAverageAlgorithm, QAdamAlgorithm, QAdamOptimizer
from bagua_ref.data_parallel.wrapping import wrap
from bagua_ref.process_group import init_process_group
from bagua_ref.runtime import current_world

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from bagua_ref.conformance.targets.world import RankWorld

__all__ = ["Action", "Gradients", "ReferenceAlgorithms"]

Gradients = dict[int, "Tensor"]
"""One rank's gradients in one step: the parameter's place -> its gradient, in the order in which they become ready. Parameters
that the rank does not use in this step are missing."""

Action = tuple[Any, ...]
"""``("step", gradients)``, ``("sleep", seconds)``, ``("abort",)`` or ``("resume",)``."""


class ReferenceAlgorithms:
    """The interface of a target's ``algorithms``: each method runs on every rank of a simulated world and trains.

    All take this rank's ``weights`` in the order in which they were registered, and return the weights after each step: a list,
    by step, of lists, by parameter. But for `qadam` the optimizer is plain SGD, ``w <- w - lr*g``, each operation rounded; lr
    is a power of two. ``bucket_bytes`` is the size at which a bucket is closed (S2.1). The other options are those of S5.

    Threads, locks and sleeps are those of `bagua_ref.runtime.current_world()`: ranks share one process.

    Args:
        kernels: a backend or its name.
        device: device of the kernels' tensors.
        flatten: give buckets flat storage.
    """

    def __init__(self, kernels: Any, device: str | torch.device = "cpu", flatten: bool = True) -> None:
        self.kernels, self.device, self.flatten = kernels, torch.device(device), flatten

    def gradient_allreduce(
        self, world: RankWorld, weights: list[Tensor], gradients: list[Gradients], *, lr: float, bucket_bytes: int, **options: Any
    ) -> list[list[Tensor]]:
        """Train as S5.1 says; ``options`` are ``hierarchical`` and ``average``."""
        return self._train("gradient_allreduce", weights, gradients, lr, bucket_bytes, options)

    def bytegrad(
        self, world: RankWorld, weights: list[Tensor], gradients: list[Gradients], *, lr: float, bucket_bytes: int, **options: Any
    ) -> list[list[Tensor]]:
        """Train as S5.2 says; ``options`` are ``hierarchical`` and ``average``."""
        return self._train("bytegrad", weights, gradients, lr, bucket_bytes, options)

    def decentralized(
        self, world: RankWorld, weights: list[Tensor], gradients: list[Gradients], *, lr: float, bucket_bytes: int, **options: Any
    ) -> list[list[Tensor]]:
        """Train as S5.3 says; ``options`` are ``hierarchical``, ``peer_selection_mode`` and ``communication_interval``."""
        return self._train("decentralized", weights, gradients, lr, bucket_bytes, options)

    def low_precision_decentralized(
        self, world: RankWorld, weights: list[Tensor], gradients: list[Gradients], *, lr: float, bucket_bytes: int, **options: Any
    ) -> list[list[Tensor]]:
        """Train as S5.4 says; ``options`` are ``hierarchical`` and ``communication_interval``."""
        return self._train("low_precision_decentralized", weights, gradients, lr, bucket_bytes, options)

    def qadam(
        self,
        world: RankWorld,
        weights: list[Tensor],
        gradients: list[Gradients],
        *,
        groups: list[dict[str, Any]],
        warmup_steps: int,
        hierarchical: bool,
        bucket_bytes: int,
    ) -> list[list[Tensor]]:
        """Train as S5.5 says.

        Args:
            world: world of this rank.
            weights: parameters, each in its own group.
            gradients: gradients by step.
            groups: options of each parameter's group: ``lr``, ``betas``, ``eps`` and ``weight_decay``.
            warmup_steps: the last step with exact gradients.
            hierarchical: compress between node leaders.
            bucket_bytes: bucket size.
        """
        module = self._module(weights)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # warmup_steps=1 is valid and intended
            grouped = [{"params": [w], **group} for w, group in zip(module.weights, groups, strict=True)]
            optimizer = QAdamOptimizer(grouped, warmup_steps=warmup_steps)
        self._wrap(module, optimizer, QAdamAlgorithm(optimizer, hierarchical), bucket_bytes)
        return self._steps(module, optimizer, gradients)

    def async_model_average(
        self,
        world: RankWorld,
        weights: list[Tensor],
        program: list[Action],
        *,
        lr: float,
        bucket_bytes: int,
        sync_interval_ms: float,
        warmup_steps: int,
    ) -> list[list[Tensor]]:
        """Train as S5.6 says; return the weights after each action.

        Args:
            world: world of this rank.
            weights: its parameters.
            program: actions in order: take a step, let virtual time pass, abort, resume. The last one is an abort.
            lr: learning rate of plain SGD.
            bucket_bytes: bucket size of the gradients in the warm-up.
            sync_interval_ms: milliseconds of virtual time from the end of a round to the next.
            warmup_steps: number of steps of gradient all-reduce before the rounds.
        """
        module = self._module(weights)
        optimizer = torch.optim.SGD(module.parameters(), lr=lr)
        algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=sync_interval_ms, warmup_steps=warmup_steps)
        self._wrap(module, optimizer, algorithm, bucket_bytes)
        wrapped = cast("Any", module)
        act: dict[str, Callable[..., Any]] = {
            "step": lambda given: self._step(module, optimizer, given),
            "sleep": current_world().sleep,
            "abort": lambda: wrapped.bagua_algorithm.abort(module),
            "resume": lambda: wrapped.bagua_algorithm.resume(module),
        }
        seen = []
        for name, *arguments in program:
            act[name](*arguments)
            seen.append(_copies(module.weights))
        return seen

    def _train(
        self,
        name: str,
        weights: list[Tensor],
        gradients: list[Gradients],
        lr: float,
        bucket_bytes: int,
        options: dict[str, Any],
    ) -> list[list[Tensor]]:
        module = self._module(weights)
        optimizer = torch.optim.SGD(module.parameters(), lr=lr)
        self._wrap(module, optimizer, Algorithm.init(name, **options), bucket_bytes)
        return self._steps(module, optimizer, gradients)

    def _module(self, weights: list[Tensor]) -> _GivenGradients:
        init_process_group()
        return _GivenGradients([w.to(self.device, copy=True) for w in weights])

    def _wrap(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, algorithm: Algorithm, bucket_bytes: int) -> None:
        wrap(
            module,
            [optimizer],
            algorithm,
            None,
            do_flatten=self.flatten,
            backend=self.kernels,
            find_unused_parameters=True,
            timeout=None,
            bucket_bytes=bucket_bytes,
        )

    def _steps(self, module: _GivenGradients, optimizer: torch.optim.Optimizer, gradients: list[Gradients]) -> list[list[Tensor]]:
        seen = []
        for given in gradients:
            self._step(module, optimizer, given)
            seen.append(_copies(module.weights))
        return seen

    def _step(self, module: _GivenGradients, optimizer: torch.optim.Optimizer, given: Gradients) -> None:
        optimizer.zero_grad()
        module({place: gradient.to(self.device) for place, gradient in given.items()}).backward()
        optimizer.step()


class _GivenGradients(torch.nn.Module):
    """A module whose gradients are its inputs."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, given: Gradients) -> Tensor:
        """Return a sum whose backward accumulates the gradients in the given order: autograd begins with the last term."""
        total = torch.zeros((), dtype=torch.float64)
        for place, gradient in reversed(given.items()):
            total = total.to(gradient.device) + (self.weights[place] * gradient).sum().double()
        return total


def _copies(tensors: Sequence[Tensor] | torch.nn.ParameterList) -> list[Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors]

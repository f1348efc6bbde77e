"""The package's algorithms as a target's ``algorithms``, with any kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from bagua_ref.algorithms import Algorithm, AsyncModelAverageAlgorithm, QAdamAlgorithm, QAdamOptimizer
from bagua_ref.base.runtime import current_world
from bagua_ref.conformance.targets.reference_compressed import CompressedTrainings
from bagua_ref.conformance.targets.world import RankWorld
from bagua_ref.data_parallel.training import Options
from bagua_ref.data_parallel.wrapping import wrap
from bagua_ref.errors import CommunicationError
from bagua_ref.formulas.graphs import in_turn
from bagua_ref.groups.process_group import init_process_group

__all__ = ["Action", "Gradients", "ReferenceAlgorithms"]

Gradients = dict[int, "Tensor"]
"""One rank's gradients in one step: the parameter's place -> its gradient, in the order in which they become ready. Parameters
that the rank does not use in this step are missing."""

Action = tuple[Any, ...]
"""``("step", gradients)``, ``("sleep", seconds)``, ``("abort",)`` or ``("resume",)``; of local updates ``("step", gradients)``,
``("failing step", gradients)``, ``("gradients",)``, ``("global weights",)`` or ``("restart",)``; those of `CompressedTrainings`."""


class ReferenceAlgorithms(CompressedTrainings):
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

    def decentralized_on_graph(
        self,
        world: RankWorld,
        weights: list[Tensor],
        gradients: list[Gradients],
        *,
        lr: float,
        bucket_bytes: int,
        graph: str | list[Any],
        restart: int,
        **options: Any,
    ) -> list[list[Tensor]]:
        """Train as S13 says.

        Args:
            world: world of this rank.
            weights: its parameters.
            gradients: gradients by step.
            lr: learning rate of plain SGD.
            bucket_bytes: bucket size.
            graph: a name, or graphs that follow each other in a cycle: for each receiving rank a list of (source, weight) pairs.
            restart: after so many steps, save weights and state, and continue with a new training that has loaded them; 0: never.
            options: ``hierarchical`` and ``communication_interval``.
        """
        options["peer_selection_mode"] = graph if isinstance(graph, str) else in_turn(graph)
        module, optimizer = self._begin("decentralized", weights, lr, bucket_bytes, options)
        seen = self._steps(module, optimizer, gradients[:restart])
        if restart:
            saved, state = _copies(module.weights), cast("Any", module).bagua_algorithm.state_dict()
            module, optimizer = self._begin("decentralized", weights, lr, bucket_bytes, options)
            with torch.no_grad():
                for weight, value in zip(module.weights, saved, strict=True):
                    weight.copy_(value)
            cast("Any", module).bagua_algorithm.load_state_dict(state)
        return seen + self._steps(module, optimizer, gradients[restart:])

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

    def local_sgd(
        self, world: RankWorld, weights: list[Tensor], program: list[Action], *, lr: float, momentum: float, bucket_bytes: int,
        **options: Any,
    ) -> list[list[Tensor]]:  # fmt: skip
        """Train as S9.1 says; return the weights, or what is asked for, after each action; see `diloco`.

        ``options`` are ``period``, ``warmup_steps``, ``offset`` and ``hierarchical``.
        """
        return self._play("local_sgd", weights, program, lr, momentum, bucket_bytes, options)

    def diloco(
        self,
        world: RankWorld,
        weights: list[Tensor],
        program: list[Action],
        *,
        lr: float,
        momentum: float,
        bucket_bytes: int,
        fragments: int | list[list[int]],
        outer_optimizer: dict[str, Any] | None,
        **options: Any,
    ) -> list[list[Tensor]]:
        """Train as S9.2 to S9.5 say; return tensors like the weights after each action.

        Args:
            world: world of this rank.
            weights: its parameters, named by their places.
            program: actions in order. ``("step", gradients)``: take a step; return the weights. ``("failing step", gradients)``:
                likewise, but the step must raise an error. ``("gradients",)``: return the gradients, zero where there is none.
                ``("global weights",)``: return g as an evaluation sees it. ``("restart",)``: save weights and states, and continue
                with a new training that has loaded them; return the weights.
            lr: of the inner optimizer, ``SGD(lr=lr, momentum=momentum)``.
            momentum: likewise.
            bucket_bytes: bucket size of the gradients in the warm-up.
            fragments: their number, or the places in each.
            outer_optimizer: ``class`` is the name of one of torch's optimizers, the others are its options; None: S9.2's default.
            options: ``period``, ``delay``, ``mix``, ``warmup_steps`` and ``compression``.
        """
        if not isinstance(fragments, int):
            options["fragments"] = [[f"weights.{place}" for place in places] for places in fragments]
        else:
            options["fragments"] = fragments
        if outer_optimizer is not None:
            name, outer = outer_optimizer.pop("class"), outer_optimizer
            options["outer_optimizer"] = lambda tensors: getattr(torch.optim, name)(tensors, **outer)
        return self._play("diloco", weights, program, lr, momentum, bucket_bytes, options)

    def _play(
        self,
        name: str,
        weights: list[Tensor],
        program: list[Action],
        lr: float,
        momentum: float,
        bucket_bytes: int,
        options: dict[str, Any],
    ) -> list[list[Tensor]]:
        """Run the actions of a training with local updates."""
        module, optimizer = self._begin(name, weights, lr, bucket_bytes, options, momentum)
        seen = []
        for action, *arguments in program:
            if action == "step":
                self._step(module, optimizer, *arguments)
            elif action == "failing step":
                try:
                    self._step(module, optimizer, *arguments)
                except CommunicationError:
                    pass
                else:
                    raise AssertionError("the step raised no error")
            elif action == "restart":
                parts = (module, optimizer, cast("Any", module).bagua_algorithm)
                states = copy.deepcopy([part.state_dict() for part in parts])
                module, optimizer = self._begin(name, weights, lr, bucket_bytes, options, momentum)
                for part, state in zip((module, optimizer, cast("Any", module).bagua_algorithm), states, strict=True):
                    part.load_state_dict(state)
            if action == "gradients":
                seen.append(_copies([torch.zeros_like(w) if w.grad is None else w.grad for w in module.weights]))
            elif action == "global weights":
                with cast("Any", module).bagua_algorithm.global_weights():
                    seen.append(_copies(module.weights))
            else:
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
        return self._steps(*self._begin(name, weights, lr, bucket_bytes, options), gradients)

    def _begin(
        self, name: str, weights: list[Tensor], lr: float, bucket_bytes: int, options: dict[str, Any], momentum: float = 0.0
    ) -> tuple[_GivenGradients, torch.optim.Optimizer]:
        module = self._module(weights)
        optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
        self._wrap(module, optimizer, Algorithm.init(name, **options), bucket_bytes)
        return module, optimizer

    def _module(self, weights: list[Tensor]) -> _GivenGradients:
        if current_world().default_group is None:
            init_process_group()
        return _GivenGradients([w.to(self.device, copy=True) for w in weights])

    def _wrap(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, algorithm: Algorithm, bucket_bytes: int) -> None:
        wrap(module, [optimizer], algorithm, None, Options(self.flatten, self.kernels, True, bucket_bytes=bucket_bytes))

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

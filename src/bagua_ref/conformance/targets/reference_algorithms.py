"""The package's algorithms as a target's ``algorithms``, with any kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms import Algorithm, GlobalAlgorithmRegistry, QAdamOptimizer
from bagua_ref.backends import get_backend
from bagua_ref.base.runtime import current_world
from bagua_ref.conformance.targets.world import RankWorld
from bagua_ref.data_parallel.training import Options
from bagua_ref.data_parallel.wrapping import wrap
from bagua_ref.errors import CommunicationError
from bagua_ref.formulas.graphs import in_turn
from bagua_ref.groups.process_group import init_process_group

Gradients = dict[int, "Tensor"]
"""One rank's gradients in one step, by the parameter's index, in the order in which they become
ready. Unused parameters are missing.
"""

Action = tuple[Any, ...]
"""An action of a program with its arguments, such as ``("step", gradients)``; the suite's page
describes them all."""

_Make = Callable[[list[torch.nn.Parameter]], "tuple[torch.optim.Optimizer, Algorithm]"]


class ReferenceAlgorithms:
    """The interface of a target's ``algorithms``: one training method per registered algorithm,
    named after it (``async_model_average`` for "async"), called on every rank of a simulated world;
    see `train`.

    Threads, locks and sleeps are those of `bagua_ref.runtime.current_world()`: ranks share one
    process.

    Args:
        kernels: a backend or its name.
        device: device of the kernels' tensors.
        flatten: give buckets flat storage.
    """

    def __init__(
        self, kernels: Any, device: str | torch.device = "cpu", flatten: bool = True
    ) -> None:
        self.kernels, self.device, self.flatten = kernels, torch.device(device), flatten

    @property
    def codecs(self) -> Mapping[str, Any]:
        """The codecs that ``compression`` may name."""
        return get_backend(self.kernels).codecs

    def train(
        self,
        algorithm: str,
        world: RankWorld,
        weights: list[Tensor],
        program: list[Action],
        *,
        bucket_bytes: int,
        lr: float = 0.0,
        momentum: float = 0.0,
        groups: list[dict[str, Any]] | None = None,
        shows_gradients: bool = False,
        **options: Any,
    ) -> list[list[Any]]:
        """Train by actions in order; return the result of each, by default this rank's weights
        after it.

        Args:
            algorithm: its registered name.
            world: world of this rank.
            weights: the module's parameters, in order of registration.
            program: actions with their arguments.
            bucket_bytes: the size at which a bucket is closed (S2.1).
            lr: learning rate of SGD.
            momentum: momentum of SGD.
            groups: for qadam, options of each parameter's group, instead of SGD's.
            shows_gradients: return the averaged gradients, and no weights.
            options: options of the algorithm; graphs, fragments, and the outer optimizer in the
                form that the suite's page describes.
        """
        if isinstance(mode := options.get("peer_selection_mode"), list):
            options["peer_selection_mode"] = in_turn(mode)
        if isinstance(fragments := options.get("fragments"), list):
            options["fragments"] = [[f"weights.{place}" for place in part] for part in fragments]
        if outer := dict(options.pop("outer_optimizer", None) or {}):
            make_outer = getattr(torch.optim, outer.pop("class"))
            options["outer_optimizer"] = lambda tensors: make_outer(tensors, **outer)

        def make(parameters: list[torch.nn.Parameter]) -> tuple[torch.optim.Optimizer, Algorithm]:
            if groups is None:
                optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum)
                return optimizer, Algorithm.init(algorithm, **options)
            given = [{"params": [w], **group} for w, group in zip(parameters, groups, strict=True)]
            own = dict(options)
            adam = QAdamOptimizer(given, warmup_steps=own.pop("warmup_steps"))
            return adam, Algorithm.init(algorithm, q_adam_optimizer=adam, **own)

        training, seen = _Training(self, weights, bucket_bytes, make), []
        for action, *arguments in program:
            found = getattr(training, f"_{action.replace(' ', '_')}")(*arguments)
            if found is None:
                found = training.gradients() if shows_gradients else training.module.weights
            seen.append([None if x is None else x.detach().cpu().clone() for x in found])
        return seen

    def buckets(
        self, world: RankWorld, weights: list[Tensor], *, bucket_bytes: int
    ) -> list[list[int]]:
        """Return the parameter indices of each bucket (S2.1)."""
        module = _Training(
            self,
            weights,
            bucket_bytes,
            lambda parameters: (
                torch.optim.SGD(parameters, lr=1.0),
                Algorithm.init("gradient_allreduce"),
            ),
        ).module
        places = {id(w): place for place, w in enumerate(module.weights)}
        return [[places[id(w)] for w in bucket.tensors] for bucket in module.bagua_buckets]


for _name in GlobalAlgorithmRegistry.available_algorithms():
    _method = "async_model_average" if _name == "async" else _name
    setattr(ReferenceAlgorithms, _method, partialmethod(ReferenceAlgorithms.train, _name))


class GivenGradients(torch.nn.Module):
    """A module whose gradients are its inputs."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, given: Gradients) -> Tensor:
        """Return a sum whose backward accumulates the gradients in the order of ``given``: autograd
        begins with the last term.
        """
        total = torch.zeros((), dtype=torch.float64)
        for place, gradient in reversed(given.items()):
            total = total.to(gradient.device) + (self.weights[place] * gradient).sum().double()
        return total


class _Training:
    """One rank's training, with a method for each action; the result of one that returns None is
    the weights.

    Args:
        algorithms: the target's algorithms, with kernels, device and storage.
        weights: initial weights.
        bucket_bytes: bucket size.
        make: factory of the optimizer and the algorithm for the parameters.
    """

    def __init__(
        self, algorithms: ReferenceAlgorithms, weights: list[Tensor], bucket_bytes: int, make: _Make
    ) -> None:
        self._of, self._weights, self._bucket_bytes, self._make = (
            algorithms,
            weights,
            bucket_bytes,
            make,
        )
        self._begin()

    def _begin(self) -> None:
        if current_world().default_group is None:
            init_process_group()
        self.module: Any = GivenGradients([w.to(self._of.device, copy=True) for w in self._weights])
        self._optimizer, algorithm = self._make(list(self.module.weights))
        options = Options(self._of.flatten, self._of.kernels, True, bucket_bytes=self._bucket_bytes)
        wrap(self.module, [self._optimizer], algorithm, None, options)

    def _step(self, given: Gradients, seconds: float = 0.0) -> list[Tensor] | None:
        """Take a step; if ``seconds`` is set, sleep after the forward pass and return the weights
        at that time.
        """
        self._optimizer.zero_grad()
        loss = self.module(
            {place: gradient.to(self._of.device) for place, gradient in given.items()}
        )
        seen = None
        if seconds:
            current_world().sleep(seconds)
            seen = [w.detach().clone() for w in self.module.weights]
        loss.backward()
        self._optimizer.step()
        return seen

    # in which the background has time to do too much
    _slow_step = partialmethod(_step, seconds=1.0)

    def _failing_step(self, given: Gradients) -> None:
        try:
            self._step(given)
        except CommunicationError:
            return
        raise AssertionError("the step raised no error")

    def _sleep(self, seconds: float) -> None:
        current_world().sleep(seconds)

    def _abort(self) -> None:
        self.module.bagua_algorithm.abort(self.module)

    def _resume(self) -> None:
        self.module.bagua_algorithm.resume(self.module)

    def _new_buckets(self) -> None:
        self.module._bagua.reset()

    def _restart(self, drop_local: bool = False) -> None:
        states = copy.deepcopy(
            [
                part.state_dict()
                for part in (self.module, self._optimizer, self.module.bagua_algorithm)
            ]
        )
        self._begin()
        weights, optimizer, own = states
        self.module.load_state_dict(weights)
        self._optimizer.load_state_dict(optimizer)
        self.module.bagua_algorithm.load_state_dict(own, drop_local)

    _restart_without_memories = partialmethod(_restart, drop_local=True)

    def gradients(self) -> list[Tensor]:
        """Return the current gradients of the weights, 0 for missing ones."""
        return [torch.zeros_like(w) if w.grad is None else w.grad for w in self.module.weights]

    _gradients = gradients

    def _global_weights(self) -> list[Tensor]:
        with self.module.bagua_algorithm.global_weights():
            return [w.detach().clone() for w in self.module.weights]

    def _memories(self) -> list[Tensor | None]:
        # waits for operations in flight, which change the memories
        state = self.module.bagua_algorithm.state_dict()
        kept = self._by_place(state.get("memories", {}))
        return [
            None if e is None else e.view(w.shape)
            for e, w in zip(kept, self.module.weights, strict=True)
        ]

    def _factors(self) -> list[Tensor | None]:
        return self._by_place(self.module.bagua_algorithm.factors.state())

    def _by_place(self, kept: Mapping[str, Tensor]) -> list[Tensor | None]:
        return [kept.get(f"weights.{place}") for place in range(len(self._weights))]

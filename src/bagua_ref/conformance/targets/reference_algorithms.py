"""The package's algorithms as a target's ``algorithms``, with any kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms import Algorithm, QAdamAlgorithm, QAdamOptimizer
from bagua_ref.backends import get_backend
from bagua_ref.base.runtime import current_world
from bagua_ref.conformance.targets.world import RankWorld
from bagua_ref.data_parallel.training import Options
from bagua_ref.data_parallel.wrapping import wrap
from bagua_ref.errors import CommunicationError
from bagua_ref.formulas.graphs import in_turn
from bagua_ref.groups.process_group import init_process_group

__all__ = ["Action", "GivenGradients", "Gradients", "ReferenceAlgorithms"]

Gradients = dict[int, "Tensor"]
"""One rank's gradients in one step: the parameter's place -> its gradient, in the order in which
they become ready. Parameters that the rank does not use in this step are missing."""

Action = tuple[Any, ...]
"""An action of a program with its arguments: ``("step", gradients)``; of `async_model_average` also
``("sleep", seconds)``, ``("abort",)`` and ``("resume",)``; of `local_sgd` and `diloco` ``("failing
step", gradients)``, ``("gradients",)``, ``("global weights",)`` and ``("restart",)``; of `powersgd`
and `topk` ``("memories",)``, ``("factors",)``, ``("new buckets",)`` and ``("restart",)``."""

History = list[list[Any]]
"""Tensors by action, or step, and parameter."""

_Make = Callable[[list[torch.nn.Parameter]], "tuple[torch.optim.Optimizer, Algorithm]"]


class ReferenceAlgorithms:
    """The interface of a target's ``algorithms``: each method runs on every rank of a simulated
    world and trains.

    All take this rank's ``weights`` in the order in which they were registered, and return the
    weights after each step, or what
    each action of a ``program`` is to return: a list of lists, by parameter. But for `qadam` the
    optimizer is SGD, ``w <- w - lr*g``, each operation rounded; lr is a power of two.
    ``bucket_bytes`` is the size at which a bucket is closed (S2.1). ``restart``: after so many
    steps, save weights and states, and continue with a new training that has loaded them; 0: never.
    The other options are those of S5, S9 to S11 and S13; the suite's page describes all arguments.

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

    def _on_gradients(
        self,
        algorithm: str,
        world: RankWorld,
        weights: list[Tensor],
        gradients: list[Gradients],
        *,
        lr: float,
        bucket_bytes: int,
        restart: int = 0,
        **options: Any,
    ) -> History:
        """Train with SGD on gradients by step."""
        return self._with_sgd(algorithm, weights, bucket_bytes, options, lr).steps(
            gradients, restart
        )

    gradient_allreduce = partialmethod(_on_gradients, "gradient_allreduce")
    """S5.1; ``options`` are ``hierarchical`` and ``average``."""
    bytegrad = partialmethod(_on_gradients, "bytegrad")
    """S5.2; ``options`` are ``hierarchical`` and ``average``."""
    decentralized = partialmethod(_on_gradients, "decentralized")
    """S5.3; ``options`` are ``hierarchical``, ``peer_selection_mode`` and
    ``communication_interval``.
    """

    def decentralized_in_forward(
        self,
        world: RankWorld,
        weights: list[Tensor],
        gradients: list[Gradients],
        *,
        lr: float,
        bucket_bytes: int,
        **options: Any,
    ) -> History:
        """Train as `decentralized`; return the weights after each forward and a sleep, before its
        backward.
        """
        training = self._with_sgd("decentralized", weights, bucket_bytes, options, lr)
        return training.play([("slow step", given) for given in gradients])

    def buckets(
        self, world: RankWorld, weights: list[Tensor], *, bucket_bytes: int
    ) -> list[list[int]]:
        """Return the places of the weights in each bucket (S2.1)."""
        return self._with_sgd("gradient_allreduce", weights, bucket_bytes, {}, 1.0).buckets()

    low_precision_decentralized = partialmethod(_on_gradients, "low_precision_decentralized")
    """S5.4; ``options`` are ``hierarchical`` and ``communication_interval``."""

    def decentralized_on_graph(
        self,
        world: RankWorld,
        weights: list[Tensor],
        gradients: list[Gradients],
        *,
        graph: str | list[Any],
        **options: Any,
    ) -> History:
        """Train as S13 says.

        Args:
            world: world of this rank.
            weights: its parameters.
            gradients: gradients by step.
            graph: a name, or graphs that follow each other in a cycle: for each receiving rank a
                list of (source, weight) pairs.
            options: ``lr``, ``bucket_bytes``, ``restart``, ``hierarchical`` and
                ``communication_interval``.
        """
        mode = graph if isinstance(graph, str) else in_turn(graph)
        return self._on_gradients(
            "decentralized", world, weights, gradients, peer_selection_mode=mode, **options
        )

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
        restart: int = 0,
        **options: Any,
    ) -> History:
        """Train as S5.5 says.

        Args:
            world: world of this rank.
            weights: parameters, each in its own group.
            gradients: gradients by step.
            groups: options of each parameter's group: ``lr``, ``betas``, ``eps`` and
                ``weight_decay``.
            warmup_steps: the last step with exact gradients.
            hierarchical: compress between node leaders.
            bucket_bytes: bucket size.
            restart: see above.
            options: further ones of the algorithm.
        """

        def make(parameters: list[torch.nn.Parameter]) -> tuple[torch.optim.Optimizer, Algorithm]:
            grouped = [
                {"params": [w], **group} for w, group in zip(parameters, groups, strict=True)
            ]
            optimizer = QAdamOptimizer(grouped, warmup_steps=warmup_steps)
            return optimizer, QAdamAlgorithm(optimizer, hierarchical, **options)

        return _ReferenceTraining(self, weights, bucket_bytes, make).steps(gradients, restart)

    qadam_with_memory = partialmethod(qadam, error_feedback=True)
    """S5.5 with S11.1 after the warm-up; ``options`` are ``compression``."""

    def _on_program(
        self,
        algorithm: str,
        world: RankWorld,
        weights: list[Tensor],
        program: list[Action],
        *,
        lr: float,
        bucket_bytes: int,
        momentum: float = 0.0,
        shows_gradients: bool = False,
        **options: Any,
    ) -> History:
        """Train with SGD by actions in order; return this rank's weights after each, or its
        averaged gradients.

        With ``shows_gradients``, return the averaged gradients after steps, and no weights.
        """
        return self._with_sgd(algorithm, weights, bucket_bytes, options, lr, momentum).play(
            program, shows_gradients
        )

    async_model_average = partialmethod(_on_program, "async")
    """S5.6; ``options`` are ``sync_interval_ms``, in virtual time, and ``warmup_steps``. The last
    action is an abort.
    """
    local_sgd = partialmethod(_on_program, "local_sgd")
    """S9.1; ``options`` are ``period``, ``warmup_steps``, ``offset`` and ``hierarchical``."""

    def diloco(
        self,
        world: RankWorld,
        weights: list[Tensor],
        program: list[Action],
        *,
        fragments: int | list[list[int]],
        outer_optimizer: dict[str, Any] | None,
        **options: Any,
    ) -> History:
        """Train as S9.2 to S9.5 say; return tensors like the weights after each action.

        Args:
            world: world of this rank.
            weights: its parameters, named by their places.
            program: actions in order.
            fragments: their number, or the places in each.
            outer_optimizer: ``class`` is the name of one of torch's optimizers, the others are its
                options; None: S9.2's default.
            options: ``lr``, ``momentum``, ``bucket_bytes``, ``period``, ``delay``, ``mix``,
                ``warmup_steps`` and ``compression``.
        """
        if not isinstance(fragments, int):
            options["fragments"] = [
                [f"weights.{place}" for place in places] for places in fragments
            ]
        else:
            options["fragments"] = fragments
        if outer_optimizer is not None:
            outer = {name: value for name, value in outer_optimizer.items() if name != "class"}
            options["outer_optimizer"] = lambda tensors: getattr(
                torch.optim, outer_optimizer["class"]
            )(tensors, **outer)
        return self._on_program("diloco", world, weights, program, **options)

    sparse_diloco = diloco
    """S15.5; further ``options`` are ``top_k``, ``chunk``, ``error_decay`` and ``mean``."""

    powersgd = partialmethod(_on_program, "powersgd", shows_gradients=True)
    """S10; ``options`` are ``matrix_approximation_rank``, ``warmup_steps``,
    ``min_compression_rate``, ``memory``, ``warm_start`` and ``seed``."""
    bytegrad_with_memory = partialmethod(
        _on_program, "bytegrad", shows_gradients=True, error_feedback=True
    )
    """S5.2 with S11.1, without factors and memories; ``options`` are ``hierarchical``, ``average``
    and ``compression``.
    """
    topk = partialmethod(_on_program, "topk", shows_gradients=True)
    """S11.2, without factors; ``options`` are ``ratio``, ``error_feedback`` and
    ``warmup_steps``.
    """

    demo = partialmethod(_on_program, "demo", shows_gradients=True)
    """S15.6, without factors; ``options`` are ``top_k``, ``chunk``, ``decay``, ``transform``,
    ``sign``, ``mean``, ``compression`` and ``warmup_steps``.
    """

    def _with_sgd(
        self,
        algorithm: str,
        weights: list[Tensor],
        bucket_bytes: int,
        options: dict[str, Any],
        lr: float,
        momentum: float = 0.0,
    ) -> _ReferenceTraining:
        def make(parameters: list[torch.nn.Parameter]) -> tuple[torch.optim.Optimizer, Algorithm]:
            return torch.optim.SGD(parameters, lr=lr, momentum=momentum), Algorithm.init(
                algorithm, **options
            )

        return _ReferenceTraining(self, weights, bucket_bytes, make)


class GivenGradients(torch.nn.Module):
    """A module whose gradients are its inputs."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, given: Gradients) -> Tensor:
        """Return a sum whose backward accumulates the gradients in the given order: autograd begins
        with the last term.
        """
        total = torch.zeros((), dtype=torch.float64)
        for place, gradient in reversed(given.items()):
            total = total.to(gradient.device) + (self.weights[place] * gradient).sum().double()
        return total


class _ReferenceTraining:
    """One rank's training; what an action's method returns is what the program returns for it,
    None: what a step leaves.

    Args:
        algorithms: gives kernels, device and storage.
        weights: at the beginning.
        bucket_bytes: bucket size.
        make: returns the optimizer and the algorithm for the parameters.
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
        self._module: Any = GivenGradients(
            [w.to(self._of.device, copy=True) for w in self._weights]
        )
        self._optimizer, algorithm = self._make(list(self._module.weights))
        options = Options(self._of.flatten, self._of.kernels, True, bucket_bytes=self._bucket_bytes)
        wrap(self._module, [self._optimizer], algorithm, None, options)

    def buckets(self) -> list[list[int]]:
        """Return the places of the weights in each bucket."""
        places = {id(w): place for place, w in enumerate(self._module.weights)}
        return [[places[id(w)] for w in bucket.tensors] for bucket in self._module.bagua_buckets]

    def steps(self, gradients: list[Gradients], restart: int = 0) -> History:
        """Take a step with the gradients of each; return the weights after each."""
        program: list[Action] = [("step", given) for given in gradients]
        seen = self.play(program[:restart])
        if restart:
            self._restart()
        return seen + self.play(program[restart:])

    def play(self, program: list[Action], shows_gradients: bool = False) -> History:
        """Run the actions; return what each returns, else the weights, or after steps the gradients
        and nothing after others.
        """
        seen = []
        for action, *arguments in program:
            found = getattr(self, f"_{action.replace(' ', '_')}")(*arguments)
            if found is None and not shows_gradients:
                found = self._module.weights
            elif found is None:
                found = self._gradients() if action == "step" else []
            seen.append([None if x is None else x.detach().cpu().clone() for x in found])
        return seen

    def _step(self, given: Gradients, seconds: float = 0.0) -> list[Tensor] | None:
        """Take a step; return the weights after its forward and a sleep, if there is one."""
        self._optimizer.zero_grad()
        loss = self._module(
            {place: gradient.to(self._of.device) for place, gradient in given.items()}
        )
        seen = None
        if seconds:
            current_world().sleep(seconds)
            seen = [w.detach().clone() for w in self._module.weights]
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
        self._module.bagua_algorithm.abort(self._module)

    def _resume(self) -> None:
        self._module.bagua_algorithm.resume(self._module)

    def _new_buckets(self) -> None:
        self._module._bagua.reset()

    def _restart(self) -> None:
        states = copy.deepcopy(
            [
                part.state_dict()
                for part in (self._module, self._optimizer, self._module.bagua_algorithm)
            ]
        )
        self._begin()
        for part, state in zip(
            (self._module, self._optimizer, self._module.bagua_algorithm), states, strict=True
        ):
            part.load_state_dict(state)

    def _gradients(self) -> list[Tensor]:
        return [torch.zeros_like(w) if w.grad is None else w.grad for w in self._module.weights]

    def _global_weights(self) -> list[Tensor]:
        with self._module.bagua_algorithm.global_weights():
            return [w.detach().clone() for w in self._module.weights]

    def _memories(self) -> list[Tensor | None]:
        # waits for what is in flight, which changes them
        state = self._module.bagua_algorithm.state_dict()
        kept = self._by_place(state.get("memories", {}))
        return [
            None if e is None else e.view(w.shape)
            for e, w in zip(kept, self._module.weights, strict=True)
        ]

    def _factors(self) -> list[Tensor | None]:
        return self._by_place(self._module.bagua_algorithm.factors.state())

    def _by_place(self, kept: Mapping[str, Tensor]) -> list[Tensor | None]:
        return [kept.get(f"weights.{place}") for place in range(len(self._weights))]

"""The state of one rank's training: collected for saving, restored after loading."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from bagua_ref.base.runtime import current_world
from bagua_ref.base.utils import uncompiled
from bagua_ref.buckets.optimizer_state import check_optimizer_state, take_over
from bagua_ref.data_parallel.training import ModuleTraining
from bagua_ref.data_parallel.wrapping import context_of

State = dict[str, dict[str, Any]]
"""Plain trees by component, such as "model", and entry, such as the name of a weight."""

_SAVED_BY = {"version", "rank", "world_size", "shard"}
"""Entries of an algorithm's state that say who saved it."""


class TrainingState:
    """State of a training on this rank, which a checkpoint saves and restores.

    Args:
        model: wrapped by ``with_bagua``, or a wrapper; to restore, it may also be a plain module.
        optimizers: one or several.
        sampler: has ``state_dict()`` and ``load_state_dict()``; to save, it may also be the state.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sampler: Any,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model={model!r} must be a torch.nn.Module")
        module = uncompiled(model)
        inside = getattr(module, "module", None)
        if (
            context_of(module) is None
            and isinstance(inside, torch.nn.Module)
            and context_of(inside) is not None
        ):
            module = uncompiled(inside)  # of a DistributedDataParallel
        self.module: torch.nn.Module = module
        self.context: ModuleTraining | None = context_of(module)
        self.optimizers = (
            [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        )
        if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in self.optimizers):
            raise TypeError(
                f"optimizers={optimizers!r} must be a torch.optim.Optimizer or a list of them"
            )
        if (
            sampler is not None
            and not isinstance(sampler, Mapping)
            and not hasattr(sampler, "load_state_dict")
        ):
            raise TypeError(f"sampler={sampler!r} must have state_dict() and load_state_dict()")
        self.sampler = sampler

    @property
    def algorithm(self) -> Any:
        """The implementation of the algorithm in use."""
        assert self.context is not None
        return self.context.bagua_algorithm

    def place(self) -> tuple[int, int]:
        """Return this rank and the number of ranks that train together."""
        identity = current_world().identity
        if self.context is None:
            return identity.rank, identity.world_size
        ranks = self.context.given_group.ranks
        return ranks.index(identity.rank), len(ranks)

    def collect(self, algorithm: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Return the components of the state, in which that of the algorithm is given."""
        model = self.module.state_dict()
        state: State = {
            "model": dict(model),
            "versions": {
                "modules": dict(getattr(model, "_metadata", {})),
                "parameters": [self._names(optimizer) for optimizer in self.optimizers],
            },
            "optimizers": {
                str(place): optimizer.state_dict()
                for place, optimizer in enumerate(self.optimizers)
            },
            "algorithm": algorithm,
            "rng": random_states(),
        }
        if self.sampler is not None:
            state["sampler"] = dict(
                self.sampler if isinstance(self.sampler, Mapping) else self.sampler.state_dict()
            )
        return list(state.items())

    def _names(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names in the model of the parameters in each of the optimizer's groups; the
        others are numbered.
        """
        names: dict[int, str] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            # Of a tied weight, the same name in whatever order its modules are.
            names[id(parameter)] = min(name, names.get(id(parameter), name))
        others = count()
        return [
            [names.get(id(parameter)) or f"#{next(others)}" for parameter in group["params"]]
            for group in optimizer.param_groups
        ]

    def replicated(self, state: State) -> set[tuple[str, str]]:
        """Return component and name of those entries of ``state`` of which the algorithm says that
        all ranks have the same.
        """
        assert self.context is not None
        algorithm, kept = self.algorithm, state["algorithm"]
        own = {*algorithm.rank_state, *algorithm.counters(), *_SAVED_BY}
        found = {("algorithm", name) for name in kept if name not in own}
        if algorithm.replicas_are_equal:
            ids = {id(parameter) for _, parameter in self.context.bagua_build_params()}
            named = self.module.named_parameters(remove_duplicate=False)
            found |= {("model", name) for name, parameter in named if id(parameter) in ids}
            found |= {
                ("optimizers", str(place))
                for place, optimizer in enumerate(self.optimizers)
                if all(
                    id(p) in ids
                    for group in optimizer.param_groups
                    for p in group["params"]
                    if p.requires_grad
                )
            }
        return found & {
            (component, name) for component, entries in state.items() for name in entries
        }

    def restore(self, state: State) -> None:
        """Continue from ``state``, which may lack the algorithm's, the sampler's and generators of
        random numbers.

        Raises:
            ValueError: it cannot be loaded; the message names the component. Model, optimizers,
                random generators and algorithm are as they were; a sampler of another kind than
                those of bagua_ref must see to this itself.
        """
        if self.context is not None:
            self.algorithm.check_idle()
        model = OrderedDict(state["model"])
        model._metadata = OrderedDict(state["versions"]["modules"])  # type: ignore[attr-defined]
        component = "optimizers"
        try:
            optimizers = [
                _in_order(optimizer, saved, names, self._names(optimizer))
                for optimizer, saved, names in zip(
                    self.optimizers,
                    state["optimizers"].values(),
                    state["versions"]["parameters"],
                    strict=False,
                )
            ]
            for optimizer, saved in zip(self.optimizers, optimizers, strict=True):
                check_optimizer_state(optimizer, saved)
            component = "algorithm"
            if self.context is not None and component in state:
                self.algorithm.check_state(state[component])
            component = "model"
            before = {
                name: copy.deepcopy(value)
                if not isinstance(value, torch.Tensor) or is_lazy(value)
                else value.detach().clone()
                for name, value in self.module.state_dict().items()
            }
            options = [copy.deepcopy(each.state_dict()["param_groups"]) for each in self.optimizers]
            states = [dict(each.state_dict()["state"]) for each in self.optimizers]
            random_before = random_states()
            try:
                self.module.load_state_dict(model)
                component = "optimizers"
                for optimizer, saved in zip(self.optimizers, optimizers, strict=True):
                    take_over(optimizer, saved, {})
                component = "rng"
                _restore_random_states(state.get(component, {}))
                component = "sampler"
                if self.sampler is not None and component in state:
                    self.sampler.load_state_dict(state[component])
                component = "algorithm"
                if self.context is not None and component in state:
                    self.algorithm.load_state_dict(state[component])
            except Exception:
                self.module.load_state_dict(before)
                for optimizer, kept, groups in zip(self.optimizers, states, options, strict=True):
                    take_over(optimizer, {"state": kept, "param_groups": groups}, {})
                _restore_random_states(random_before)
                raise
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"its {component} cannot be loaded: {kind}{error}") from error


def listed(state: State) -> str:
    """Return the components and entries of ``state``, in words."""
    return ", ".join(
        f"{component}"
        f" ({', '.join(map(str, list(entries)[:3]))}{f' and {len(entries) - 3} more' if len(entries) > 3 else ''})"
        for component, entries in state.items()
        if entries
    )


def _in_order(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    saved: list[list[str]],
    here: list[list[str]],
) -> dict[str, Any]:
    """Return ``state``, of groups of parameters named ``saved``, in the order ``here``.

    Raises:
        ValueError: the groups hold other parameters.
    """
    if saved == here or list(map(len, saved)) != list(map(len, here)):
        return state  # or refused by `check_optimizer_state`, which says more
    groups = {frozenset(names): place for place, names in enumerate(saved)}
    for place, names in enumerate(here):
        if frozenset(names) not in groups:
            raise ValueError(
                f"group {place} of the {type(optimizer).__name__} has the parameters"
                f" {', '.join(names)}, and was saved with {', '.join(saved[place])}"
            )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"the state of {type(optimizer).__name__} depends on the order of parameters, which was"
            f" {', '.join(saved[0])}, and now is {', '.join(here[0])}"
        )
    ordered = []
    for names in here:
        place = groups[frozenset(names)]
        group = state["param_groups"][place]
        order = [saved[place].index(name) for name in names]
        moved = {
            key: [group[key][index] for index in order]
            for key in ("params", "param_names")
            if key in group
        }
        ordered.append({**group, **moved})
    return {**state, "param_groups": ordered}


def random_states() -> dict[str, Any]:
    """Return the states of the generators of Python, torch, NumPy and the current CUDA device."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    name, *numpy = np.random.get_state(legacy=True)  # noqa: NPY002  (a bit generator other than the default has no such tuple)
    if name == "MT19937":
        keys, *rest = numpy
        states["numpy"] = [name, torch.as_tensor(np.asarray(keys, dtype=np.int64)), *rest]
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    if "python" in states:
        random.setstate(states["python"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])

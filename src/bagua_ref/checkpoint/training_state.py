"""State of one rank's training: collected for saving, restored after loading."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bagua_ref.base.utils import uncompiled
from bagua_ref.buckets.optimizer_state import check_optimizer_state, take_over
from bagua_ref.checkpoint.contents import detached, map_leaves
from bagua_ref.data_parallel.wrapping import context_of

# By component and entry, such as "model/0.weight".
State = dict[str, Any]


class TrainingState:
    """State of a training run on this rank, as saved in and restored from a checkpoint.

    Args:
        model: a module wrapped by ``with_bagua``, or its wrapper; for `restore`, also a plain
            module.
        optimizers: one optimizer or several.
        sampler: an object with ``state_dict()`` and ``load_state_dict()``; for saving, also a
            state.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sampler: Any,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model={model!r} must be a torch.nn.Module")
        inside: Any = getattr(uncompiled(model), "module", None)  # of a DistributedDataParallel
        wrapped = isinstance(inside, torch.nn.Module) and context_of(inside) is not None
        self.module: torch.nn.Module = uncompiled(inside if wrapped else model)
        self.context = context_of(self.module)
        self.optimizers = (
            [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        )
        if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in self.optimizers):
            raise TypeError(
                f"optimizers={optimizers!r} must be a torch.optim.Optimizer or a list of them"
            )
        self.sampler = sampler

    @property
    def algorithm(self) -> Any:
        """The current algorithm's implementation."""
        assert self.context is not None
        return self.context.bagua_algorithm

    def collect(self, algorithm: dict[str, Any], extra: Any) -> State:
        """Collect this rank's state, including ``algorithm``, the algorithm's state, and
        ``extra``.
        """
        model = self.module.state_dict()
        state: State = {
            "extra": extra,
            "modules": dict(getattr(model, "_metadata", {})),
            "names": [self._names(optimizer) for optimizer in self.optimizers],
        }
        optimizers = {str(n): each.state_dict() for n, each in enumerate(self.optimizers)}
        for component, entries in (
            ("model", model),
            ("optimizers", optimizers),
            ("algorithm", algorithm),
            ("rng", _random_states()),
        ):
            state |= {f"{component}/{name}": value for name, value in entries.items()}
        if self.sampler is not None:
            given = isinstance(self.sampler, Mapping)
            state["sampler"] = dict(self.sampler if given else self.sampler.state_dict())
        return state

    def _names(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the model's names of the parameters in each group of the optimizer, numbers for
        other parameters.
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

    def restore(self, place: Path, state: State) -> None:
        """Restore ``state``; the states of the algorithm, the sampler and random generators may be
        missing from it.

        Raises:
            ValueError: ``state`` cannot be loaded; the message names ``place`` and the component.
                Model, optimizers, random generators and algorithm are as they were; a sampler that
                is not of bagua_ref must ensure this itself.
        """
        if self.context is not None:
            self.algorithm.check_idle()
        model = OrderedDict(entries_of(state, "model"))
        model._metadata = OrderedDict(state["modules"])  # type: ignore[attr-defined]
        algorithm = entries_of(state, "algorithm")
        component = "optimizers"
        try:
            optimizers = []
            for number, optimizer in enumerate(self.optimizers):
                saved, names = state[f"optimizers/{number}"], state["names"][number]
                saved = _in_order(optimizer, saved, names, self._names(optimizer))
                check_optimizer_state(optimizer, saved)
                optimizers.append(saved)
            component = "algorithm"
            if self.context is not None:
                self.algorithm.check_state(algorithm)
            component = "model"
            # Only modules know what they take, and say so when they have loaded the rest.
            before = detached(self.module.state_dict())
            try:
                self.module.load_state_dict(model)
                component = "sampler"
                if self.sampler is not None and component in state:
                    self.sampler.load_state_dict(state[component])
            except Exception:
                self.module.load_state_dict(before)
                raise
            component = "optimizers"
            for optimizer, saved in zip(self.optimizers, optimizers, strict=True):
                take_over(optimizer, saved, {})
            component = "algorithm"
            if self.context is not None:
                self.algorithm.load_state_dict(algorithm)
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"{place}: its {component} cannot be loaded: {kind}{error}") from error
        for name, generator in entries_of(state, "rng").items():
            if name != "cuda" or torch.cuda.is_available():
                _SET_RANDOM_STATE[name](generator)


def entries_of(state: State, component: str) -> dict[str, Any]:
    """Return the entries of a component of ``state``, by name."""
    start = f"{component}/"
    return {key[len(start) :]: value for key, value in state.items() if key.startswith(start)}


def _in_order(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    saved: list[list[str]],
    here: list[list[str]],
) -> dict[str, Any]:
    """Reorder the optimizer state ``state``, with parameters named ``saved``, to the order of the
    names ``here``.

    Raises:
        ValueError: the groups hold other parameters.
    """
    if saved == here:
        return state
    groups = {
        frozenset(names): (group, dict(zip(names, group["params"], strict=True)))
        for names, group in zip(saved, state["param_groups"], strict=True)
    }
    ordered = []
    for place, names in enumerate(here):
        # The state of LBFGS is one vector of all parameters, in their order.
        if frozenset(names) not in groups or isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"group {place} of the {type(optimizer).__name__} has the parameters"
                f" {', '.join(names)}, and was saved with {' and '.join(map(', '.join, saved))}"
            )
        group, numbers = groups[frozenset(names)]
        ordered.append({**group, "params": [numbers[name] for name in names]})
        ordered[-1].pop("param_names", None)  # the optimizer keeps its own
    return {**state, "param_groups": ordered}


def _random_states() -> dict[str, Any]:
    """Return the states of the random generators of Python, torch, NumPy and the current CUDA
    device.
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    states["numpy"] = map_leaves(
        lambda leaf, _: leaf.tolist() if isinstance(leaf, np.ndarray) else leaf,
        np.random.get_state(legacy=False),  # noqa: NPY002
        "numpy",
    )
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


_SET_RANDOM_STATE: dict[str, Callable[[Any], None]] = {
    "python": random.setstate,
    "torch": torch.set_rng_state,
    "numpy": np.random.set_state,
    "cuda": torch.cuda.set_rng_state,
}

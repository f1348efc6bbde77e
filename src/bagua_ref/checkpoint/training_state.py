"""The state of one rank's training: collected for saving, restored after loading."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bagua_ref.checkpoint.plain import plain
from bagua_ref.data_parallel.wrapping import context_of
from bagua_ref.optimizer_state import take_over
from bagua_ref.runtime import current_world
from bagua_ref.utils import uncompiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bagua_ref.data_parallel.wrapped_module import WrappedModule

__all__ = ["State", "Training"]

State = dict[str, dict[str, Any]]
"""Plain trees by component, such as "model", and entry, such as the name of a weight."""


class Training:
    """What a checkpoint saves and restores on this rank.

    Args:
        model: wrapped by ``with_bagua``, or a wrapper; to restore, it may also be a plain module.
        optimizers: one or several.
        sampler: has ``state_dict()`` and ``load_state_dict()``; to save, it may also be the state.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], sampler: Any
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model={model!r} must be a torch.nn.Module")
        module = uncompiled(model)
        inside = getattr(module, "module", None)
        if context_of(module) is None and isinstance(inside, torch.nn.Module) and context_of(inside) is not None:
            module = uncompiled(inside)  # of a DistributedDataParallel
        self.module: torch.nn.Module = module
        self.context: WrappedModule | None = context_of(module)
        self.optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in self.optimizers):
            raise TypeError(f"optimizers={optimizers!r} must be a torch.optim.Optimizer or a list of them")
        if sampler is not None and not isinstance(sampler, Mapping) and not hasattr(sampler, "load_state_dict"):
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

    def collect(self, algorithm: dict[str, Any]) -> State:
        """Return the state, in which that of the algorithm is given; tensors in the host's memory are not copied."""
        model = self.module.state_dict()
        state: State = {
            "model": dict(model),
            "versions": {"modules": dict(getattr(model, "_metadata", {}))},
            "optimizers": {str(place): optimizer.state_dict() for place, optimizer in enumerate(self.optimizers)},
            "algorithm": algorithm,
            "rng": _random_states(),
        }
        if self.sampler is not None:
            state["sampler"] = dict(self.sampler if isinstance(self.sampler, Mapping) else self.sampler.state_dict())
        return {component: plain(entries, component) for component, entries in state.items()}

    def restore(self, state: State) -> None:
        """Continue from ``state``, which may lack the algorithm's, the sampler's and generators of random numbers."""
        if self.sampler is not None and "sampler" in state:
            self.sampler.load_state_dict(state["sampler"])
        model = OrderedDict(state["model"])
        model._metadata = OrderedDict(state["versions"]["modules"])  # type: ignore[attr-defined]
        self.module.load_state_dict(model)
        for place, optimizer in enumerate(self.optimizers):
            take_over(optimizer, state["optimizers"][str(place)], {})
        if self.context is not None and "algorithm" in state:
            self.algorithm.load_state_dict(state["algorithm"])
        _restore_random_states(state.get("rng", {}))


def _random_states() -> dict[str, Any]:
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

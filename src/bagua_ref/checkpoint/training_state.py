"""The state of one rank's training: collected for saving, restored after loading."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from bagua_ref.base.runtime import current_world
from bagua_ref.base.untrusted import check_form
from bagua_ref.base.utils import uncompiled
from bagua_ref.buckets.optimizer_state import check_optimizer_state, take_over
from bagua_ref.checkpoint.plain import plain
from bagua_ref.data_parallel.training import ModuleTraining
from bagua_ref.data_parallel.wrapping import context_of

__all__ = ["RestoreError", "State", "TrainingState", "listed", "random_states"]

State = dict[str, dict[str, Any]]
"""Plain trees by component, such as "model", and entry, such as the name of a weight."""

_NUMPY_KEYS = 624
_LONGEST = 1000  # characters of an error, which may show what a file holds
_SAVED_BY = {"version", "rank", "world_size", "shard"}
"""Entries of an algorithm's state that say who saved it."""


class RestoreError(ValueError):
    """A component of a state cannot be loaded; nothing has been.

    Attributes:
        component: its name.
    """

    def __init__(self, component: str, reason: str) -> None:
        super().__init__(reason)
        self.component = component


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

    def collect(self, algorithm: dict[str, Any]) -> State:
        """Return the state, in which that of the algorithm is given; tensors in the host's memory
        are not copied.
        """
        model = self.module.state_dict()
        state: State = {
            "model": dict(model),
            "versions": {"modules": dict(getattr(model, "_metadata", {}))},
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
        return {component: plain(entries, component) for component, entries in state.items()}

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

        Everything is checked first. What only its owner can check, such as a model's own kind of
        state, is put back as it was if loading it fails, or what is loaded after it.

        Raises:
            RestoreError: a component cannot be loaded. Model, optimizers and random generators are
                as they were, and the algorithm; a sampler of another kind than those of bagua_ref
                must see to this itself.
        """
        if self.context is not None:
            self.algorithm.check_idle()
        for component, check in self._checks(state):
            _name_failures(component, check)
        undo: list[Callable[[], object]] = [partial(_restore_random_states, random_states())]
        try:
            for component, before, load in self._loads(state):
                undo.append(_name_failures(component, before))
                _name_failures(component, load)
        except RestoreError:
            for put_back in reversed(undo):
                put_back()
            raise

    def _checks(self, state: State) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield for each component what raises if it cannot be loaded, and changes nothing."""
        yield "model", partial(check_form, state["model"], {str: object}, "state")
        yield (
            "versions",
            partial(check_form, state["versions"], {"modules": {str: {str: object}}}, "state"),
        )
        for place, optimizer in enumerate(self.optimizers):
            yield (
                "optimizers",
                partial(_check_optimizer, str(place), optimizer, state["optimizers"]),
            )
        if self.context is not None and "algorithm" in state:
            yield "algorithm", partial(self.algorithm.check_state, state["algorithm"])
        yield "rng", partial(_check_random_states, state.get("rng", {}))

    def _loads(
        self, state: State
    ) -> Iterator[tuple[str, Callable[[], Callable[[], object]], Callable[[], object]]]:
        """Yield for each component what returns a function to put it back as it was, and what loads
        it.
        """
        model = OrderedDict(state["model"])
        model._metadata = OrderedDict(state["versions"]["modules"])  # type: ignore[attr-defined]
        yield "model", self._model_before, partial(self.module.load_state_dict, model)
        for place, optimizer in enumerate(self.optimizers):
            saved = state["optimizers"][str(place)]
            yield (
                "optimizers",
                partial(_optimizer_before, optimizer),
                partial(_load_optimizer, optimizer, saved),
            )
        if self.sampler is not None and "sampler" in state:
            yield (
                "sampler",
                lambda: lambda: None,
                partial(self.sampler.load_state_dict, state["sampler"]),
            )
        if self.context is not None and "algorithm" in state:
            yield (
                "algorithm",
                lambda: lambda: None,
                partial(self.algorithm.load_state_dict, state["algorithm"]),
            )
        yield "rng", lambda: lambda: None, partial(_restore_random_states, state.get("rng", {}))

    def _model_before(self) -> Callable[[], object]:
        state = self.module.state_dict()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value if is_lazy(value) else value.detach().clone()
            else:
                state[name] = copy.deepcopy(value)
        return partial(self.module.load_state_dict, state)


def listed(state: State) -> str:
    """Return the components and entries of ``state``, in words."""
    return ", ".join(
        f"{component}"
        f" ({', '.join(map(str, list(entries)[:3]))}{f' and {len(entries) - 3} more' if len(entries) > 3 else ''})"
        for component, entries in state.items()
        if entries
    )


def _name_failures(component: str, function: Callable[[], Any]) -> Any:
    """Return ``function()``; raise RestoreError if it raises: whoever wrote the state chose what
    goes wrong.
    """
    try:
        return function()
    except Exception as error:
        what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = " ".join(str(error).split())
        raise RestoreError(
            component, f"{what}{reason[:_LONGEST]}{'...' * (len(reason) > _LONGEST)}"
        ) from error


def _check_optimizer(place: str, optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> None:
    if place not in states:
        raise ValueError(f"there is no optimizer {place}, only {sorted(map(str, states))}")
    check_optimizer_state(optimizer, states[place])


def _optimizer_before(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    state = optimizer.state_dict()
    return partial(
        take_over, optimizer, {**state, "param_groups": copy.deepcopy(state["param_groups"])}, {}
    )


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    options = [optimizer.defaults.keys() & group.keys() for group in optimizer.param_groups]
    take_over(optimizer, state, {})
    for place, (before, group) in enumerate(zip(options, optimizer.param_groups, strict=True)):
        if missing := sorted(before - group.keys()):
            raise ValueError(
                f"group {place} of the {type(optimizer).__name__} lacks the options"
                f" {', '.join(missing)}"
            )


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


def _check_random_states(states: dict[str, Any]) -> None:
    """Raise unless the generators can take these states."""
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.Random().setstate((version, numbers, gauss))  # noqa: S311 # no secret depends on it
        if not isinstance(gauss, float | None):
            raise ValueError(
                "the state of Python's generator is not one that random.getstate() returns"
            )
    if "torch" in states:
        torch.Generator().set_state(states["torch"])
    if "numpy" in states:
        name, keys, place, has_gauss, gauss = states["numpy"]
        if (
            name != "MT19937"
            or not isinstance(keys, torch.Tensor)
            or keys.dtype != torch.int64
            or keys.shape != (_NUMPY_KEYS,)
        ):
            raise ValueError(
                "the state of NumPy's generator is not one of MT19937, with 624 keys of int64"
            )
        # NumPy checks none of this, and reads beyond the end of its keys.
        if not ((keys >= 0) & (keys < 2**32)).all():
            raise ValueError("the keys of NumPy's generator must be from 0 to 2**32 - 1")
        check_form(
            [place, has_gauss, gauss],
            [range(_NUMPY_KEYS + 1), range(2), float],
            "the position of NumPy's generator",
        )
    if "cuda" in states and torch.cuda.is_available():
        torch.Generator("cuda").set_state(states["cuda"])


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

"""The interface of algorithms (S5)."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from bagua_ref.algorithms.async_rounds import AveragingThread
from bagua_ref.algorithms.registry import (
    GlobalAlgorithmRegistry,
    _AlgorithmRegistry,  # noqa: F401  # the original has it here
    check_bool,
    check_options,
)
from bagua_ref.algorithms.state import (
    ErrorMemories,
    TensorStore,
    check_counters,
    check_origin,
    origin,
)
from bagua_ref.algorithms.traits import Traits
from bagua_ref.backends.base import KernelBackend
from bagua_ref.base.runtime import World
from bagua_ref.base.utils import NotCopied
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.optimizer_state import with_aligned_grad
from bagua_ref.buckets.storage import register
from bagua_ref.scheduling.engine import Engine, Fact
from bagua_ref.types import Group

__all__ = ["Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry", "TrainingContext"]


class TrainingContext(NotCopied):
    """The view of a training that algorithms may use.

    Attributes:
        process_group: the training's own group, which only its background worker uses.
        bagua_module_name: the module's name, unique in this process.
        bagua_buckets: the buckets in the order in which they are scheduled.
        bagua_optimizers: the optimizers passed when wrapping.
        bagua_train_step_counter: training forward passes begun so far; the current step is one
            less.
        algorithm: the algorithm passed when wrapping.
        bagua_algorithm: the implementation in use.
        steps_of_optimizers: the number of steps of each optimizer.
        world: this rank's world, which starts threads.
        kernel_backend: the ``backend`` argument of wrapping.
        shards: this rank's shards of parameters that fully_shard (FSDP2) has sharded, by name.
        rounds: the rounds of communication.
        loads: number of times that the state of the module, or of a part of it, was loaded.
        unused: the parameters that no rank has used in the current round (S2.5).
        has_batches: False while this rank has run out of batches in `bagua_ref.join`.
        engine: ``mark_ready(tensor)`` and ``gradient_ready(name, parameter)`` schedule,
            ``wait_pending_comm_ops()`` waits.
    """

    process_group: Group
    bagua_module_name: str
    bagua_buckets: list[BaguaBucket]
    bagua_optimizers: list[torch.optim.Optimizer]
    bagua_train_step_counter: int
    algorithm: Algorithm
    bagua_algorithm: AlgorithmImpl
    steps_of_optimizers: list[int]
    world: World
    kernel_backend: str | KernelBackend | None
    shards: dict[str, Any]
    engine: Engine
    rounds: Any
    loads = 0
    unused: Collection[torch.nn.Parameter] = ()
    has_batches = True
    _module: weakref.ref[torch.nn.Module]
    _called: weakref.ref[torch.nn.Module]
    _named: list[tuple[str, torch.nn.Parameter]]
    _post_backward_hook: Callable[[], object]

    @property
    def _bagua_backend(self) -> Engine:
        """Alias of `engine` under the original's name."""
        return self.engine

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        module = self._module()
        assert module is not None, "the module's hooks and properties are the only way here"
        return module

    @property
    def called_module(self) -> torch.nn.Module:
        """The module that training calls: the torch.compile wrapper if one was passed, else the
        wrapped module itself.
        """
        module = self._called()
        return self.module if module is None else module

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the names and tensors of the parameters to train: those with ``requires_grad``
        that are not ignored (S2.1).
        """
        return self._named

    def note_load(self) -> None:
        """Request a comparison, in the next round, of all state that must be equal on all ranks."""
        self.rounds.note_load()

    def reset(self) -> None:
        """Rebuild tensors, buckets, operations and hooks from the algorithm (S5); the state is not
        broadcast again.
        """
        raise NotImplementedError(f"the buckets of {self.bagua_module_name!r} cannot be made again")

    def take_strides(self) -> None:
        """Rebuild the buckets if parameters have new strides, as after
        ``model.to(memory_format=...)``; collective if they have (S2.3).
        """

    def reshard(self) -> None:
        """Discard gathered weights of a sharded module, because the weights have changed; the next
        forward pass gathers them again.
        """

    def end_join(self) -> None:
        """Declare inside `bagua_ref.join` that this rank has no more batches, and wait until all
        ranks have declared it; elsewhere, do nothing.
        """
        if self.rounds.joining is not None:
            self.rounds.joining.follow()


class AlgorithmImpl(NotCopied):
    """Implementation of an algorithm for one module; the base class fills buckets with gradients
    but communicates nothing.

    Subclasses override what differs. Each training step calls, in this order: ``need_reset``, the
    forward-pre hook, the backward hook for each parameter, the post-backward hook and the
    post-optimizer-step hook, as the ``init_*_hook`` methods returned them (S5).

    Args:
        process_group: the group to communicate in.
        options: the algorithm object, which holds the options.
    """

    def __init__(self, process_group: Group, options: Any = None) -> None:
        self.process_group, self.options = process_group, options

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.options!r}>"

    _context: weakref.ref[TrainingContext] | None = None
    """The training that this implementation takes part in; set when a module is wrapped."""

    @property
    def context(self) -> TrainingContext:
        """The context of the training that uses this implementation."""
        context = self._context() if self._context is not None else None
        if context is None:
            raise RuntimeError(
                f"{type(self).__name__} takes part in no training; wrap a module with it first"
            )
        return context

    algorithm: ClassVar[Any] = None
    """The class of the algorithm's options; set by `implements`."""

    name = "this algorithm"
    """The algorithm's name in messages and states."""

    entries: frozenset[str] = frozenset()
    """Entries of `state_dict` required in every state, in addition to those that all algorithms
    save.
    """

    stores: Mapping[str, TensorStore | ErrorMemories] = MappingProxyType({})
    """Stores of tensors kept from round to round, by their entry in `state_dict`."""

    counted: tuple[str, ...] = ()
    """Names of attributes of this object that are among its `counters`."""

    rank_state: frozenset[str] = frozenset()
    """Entries of `state_dict` that can only be loaded by the same rank of the same number of ranks;
    `load_state_dict` accepts states without them.
    """

    phases: tuple[Traits, ...] = (Traits(),)
    """The traits of each phase."""

    background: AveragingThread | None = None
    """The background averaging of weights, which training must stop before it changes them; None:
    rounds belong to steps.
    """

    passes = 0
    """Number of backward passes begun outside `no_sync`; where rounds follow steps, since the last
    round.
    """

    handles: Sequence[Any] = ()
    """Hooks that `close` removes by ``handle.remove()``."""

    @property
    def phase(self) -> int:
        """The current phase, an index into `phases`."""
        return 0

    @property
    def traits(self) -> Traits:
        """The traits of the current phase; read again in each round."""
        return self.phases[self.phase]

    @property
    def in_forward(self) -> bool:
        """Whether the algorithm acts at the start of a training forward pass, so that a backward
        pass alone is not enough.
        """
        kind = type(self)
        return (kind.need_reset, kind.init_forward_pre_hook) != (
            AlgorithmImpl.need_reset,
            AlgorithmImpl.init_forward_pre_hook,
        )

    @property
    def delivers_errors(self) -> bool:
        """Whether rounds also deliver error feedback: residuals of earlier rounds."""
        return not self.rank_state.isdisjoint(self.stores)

    def replicas(self) -> list[tuple[Tensor, list[torch.optim.Optimizer]]]:
        """Return the tensors that must be equal on all ranks, each with its optimizers; they are
        compared after a state was loaded.
        """
        context = self.context
        return (
            [(p, context.bagua_optimizers) for _, p in context.bagua_build_params()]
            if self.traits.same_replicas
            else []
        )

    def facts(self) -> list[Fact]:
        """Return the algorithm's own agreement fields, a fixed number of values that must be equal
        on all ranks when a round begins.
        """
        return []

    def suspend(self) -> Callable[[], None]:
        """Stop background averaging on all ranks; return a function that resumes it."""
        return nothing if self.background is None else self.background.suspend()

    def close(self) -> None:
        """Remove the algorithm's hooks and end its background thread, when another algorithm
        replaces it.
        """
        for handle in self.handles:
            handle.remove()
        if self.background is not None:
            self.background.forget()

    def metrics(self) -> dict[str, float | int]:
        """Return this algorithm's part of `bagua_ref.distributed.BaguaModule.bagua_metrics`; it
        does not communicate.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs, besides that of model and optimizers, to
        continue exactly where it was saved.

        Each rank saves its own state. Subclasses add entries.
        """
        kept = {entry: store.state() for entry, store in self.stores.items()}
        return {**self._origin(), **self.counters(), **kept}

    def load_state_dict(self, state: dict[str, Any], drop_local: bool = False) -> None:
        """Restore ``state``; call this on every rank, after wrapping and after loading the state of
        model and optimizers.

        It does not communicate.

        Args:
            state: a result of `state_dict`; if it has entries of `rank_state`, it must come from
                the same rank of the same number of ranks.
            drop_local: ignore these entries, so that the state can come from any rank of any number
                of ranks; residuals start at zero.

        Raises:
            ValueError: it is a state of another algorithm, version or model, of another rank, or of
                other shards of parameters (FSDP2); nothing has been loaded.
            RuntimeError: background averaging is running; the message says how to stop it.
        """
        self.check_idle()
        state = {
            name: value
            for name, value in state.items()
            if not drop_local or name not in self.rank_state
        }
        self.check_state(state)
        self.load_checked(state)
        self.load_counters(state)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` can load ``state``; change nothing. Subclasses
        check their own entries, too.
        """
        here, counters = self._origin(), self.counters()
        needed = {*here, *counters, *self.entries} - {"shard"}
        if missing := sorted(needed - state.keys()):
            raise ValueError(f"state is not one of {self.name}: it lacks {', '.join(missing)}")
        check_origin(state, here, self.rank_state)
        check_counters(state, counters)
        for entry, store in self.stores.items():
            if entry in state:
                store.check(state[entry])

    def load_checked(self, state: dict[str, Any]) -> None:
        """Load all entries of ``state`` except `counters`, after `check_state` has passed, and
        request a comparison of the replicas in the next round.
        """
        for entry, store in self.stores.items():
            store.load(state.get(entry, {}))
        self.context.note_load()

    def check_idle(self) -> None:
        """Raise RuntimeError if background averaging must be stopped before a state is loaded."""
        if self.background is not None:
            self.background.check_idle()

    def _origin(self) -> dict[str, Any]:
        """Return the `origin` of this rank's states, with the index and number of shards if
        parameters are sharded.
        """
        meshes = [shard.sharded.device_mesh for shard in self.context.shards.values()]
        shard = {"shard": [meshes[0].get_local_rank(), meshes[0].size()]} if meshes else {}
        return origin(self.name, self.process_group) | shard

    def counters(self) -> dict[str, Any]:
        """Return the counters of training progress, which are part of `state_dict`."""
        context = self.context
        return {
            "train_step_counter": context.bagua_train_step_counter,
            "steps_of_optimizers": list(context.steps_of_optimizers),
            **{name: getattr(self, name) for name in self.counted},
        }

    def load_counters(self, state: dict[str, Any]) -> None:
        """Restore the counters that `counters` returned."""
        context = self.context
        context.bagua_train_step_counter = state["train_step_counter"]
        context.steps_of_optimizers[:] = state["steps_of_optimizers"]
        self.passes = 0
        for name in self.counted:
            setattr(self, name, state[name])

    def end_unsynchronized_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the end of an optimizer step that must not communicate, as after a forward pass
        under `no_sync`.

        After all other steps, the post-optimizer-step hook is called instead.
        """

    def need_reset(self) -> bool:
        """Return whether tensors, buckets and operations must be rebuilt; called before each
        training forward pass, also under `no_sync`.
        """
        return False

    def init_tensors(self, bagua_ddp: TrainingContext) -> list[Tensor]:
        """Return the tensors to communicate, in the order in which they become ready: by default
        gradients, last layer first (S2.1).
        """
        return [
            register(
                with_aligned_grad(parameter),
                name,
                bagua_ddp.bagua_module_name,
                attrgetter("grad"),
                _set_grad,
            )
            for name, parameter in reversed(bagua_ddp.bagua_build_params())
        ]

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        """Return one bucket for each list of tensors, named "0", "1", ... (S2.1)."""
        return [
            BaguaBucket(bucket, str(place), flatten=do_flatten)
            for place, bucket in enumerate(tensors)
        ]

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append the operations to a new bucket."""

    def init_forward_pre_hook(self, bagua_ddp: TrainingContext) -> Callable[[Any], object]:
        """Return ``hook(input)``, called before each training forward pass."""
        return nothing

    def init_backward_hook(
        self, bagua_ddp: TrainingContext
    ) -> Callable[[str, torch.nn.Parameter], object]:
        """Return ``hook(name, parameter)``, called when a parameter's gradient is accumulated; by
        default it marks the gradient ready.
        """
        return bagua_ddp.engine.gradient_ready

    def init_post_backward_hook(self, bagua_ddp: TrainingContext) -> Callable[[], object]:
        """Return ``hook()``, called once at the end of the outermost backward pass; by default it
        waits for communication.
        """
        return bagua_ddp.engine.wait_pending_comm_ops

    def init_post_optimizer_step_hook(
        self, bagua_ddp: TrainingContext
    ) -> Callable[[torch.optim.Optimizer], object]:
        """Return ``hook(optimizer)``, called after each optimizer's step."""
        return nothing


class Algorithm:
    """An algorithm and its options; `reify` creates the implementation for one wrapped module.

    >>> Algorithm.init("gradient_allreduce")
    GradientAllReduceAlgorithm(hierarchical=False, average=True)
    """

    takes_shards = False
    """Whether it supports parameters sharded by fully_shard (FSDP2), by training this rank's
    shards.
    """

    takes_float64 = True
    """Whether it supports float64, which no codec compresses."""

    counts_steps = False
    """Whether it counts the steps of the last optimizer, so that at least one optimizer is
    required.
    """

    def __post_init__(self) -> None:
        """Raise TypeError if a bool option has another type, since the text "False" would count as
        true.
        """
        for option in fields(self):  # type: ignore[arg-type]
            if option.type in (bool, "bool"):
                check_bool(option.name, getattr(self, option.name))

    def check(
        self,
        parameters: list[tuple[str, torch.nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Raise an error for parameters or optimizers that this algorithm cannot train; called
        before wrapping sends or changes anything.

        Args:
            parameters: the parameters to train, with names, in the order of ``named_parameters()``.
            optimizers: the optimizers passed when wrapping.

        Raises:
            ValueError: optimizers are missing.
            TypeError: a parameter is float64, which these options do not support.
        """
        own_name = GlobalAlgorithmRegistry.name_of(self)
        for name, parameter in parameters:
            if parameter.dtype is torch.float64 and not self.takes_float64:
                raise TypeError(
                    f"parameter {name!r} is float64; {own_name} takes float16, bfloat16 or float32"
                    " where it compresses"
                )
        if self.counts_steps and not optimizers:
            raise ValueError(
                f"optimizers=[]: {own_name} counts the steps of the last optimizer; pass the module's"
                " optimizers to with_bagua"
            )

    implementation: ClassVar[Any] = None
    """The implementation's class, instantiated by `reify`."""

    def reify(self, process_group: Group) -> AlgorithmImpl:
        """Return an implementation that communicates in ``process_group``."""
        if self.implementation is None:
            raise NotImplementedError(f"{type(self).__name__} must define reify(process_group)")
        made: AlgorithmImpl = self.implementation(process_group, **vars(self))
        return made

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers among the algorithm's options."""
        return [value for value in vars(self).values() if isinstance(value, torch.optim.Optimizer)]

    def settings(self) -> dict[str, Any]:
        """Return the options that are numbers, strings or lists; they must be equal on all
        ranks.
        """
        options = {
            name: getattr(self, name, None) for name in inspect.signature(type(self)).parameters
        }
        return {
            name: value
            for name, value in options.items()
            if isinstance(value, (int, float, str, list))
        }

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """Return a new instance of the algorithm registered as ``name``, created with ``kwargs``
        (S5.7).

        Raises:
            ValueError: no algorithm has this name; the message lists the registered ones.
            TypeError: it has no such option; the message lists its options.
        """
        make = GlobalAlgorithmRegistry.get(name)
        check_options(name, make, kwargs)
        algorithm: Algorithm = make(**kwargs)
        return algorithm


def nothing(*_: object) -> None:
    """Do nothing."""


def _set_grad(parameter: Tensor, grad: Tensor) -> None:
    parameter.grad = grad

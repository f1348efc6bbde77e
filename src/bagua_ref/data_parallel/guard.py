"""Guards of a training: against reduction by two wrappers, new parameters, and optimizer steps on
gradients that were not communicated.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from bagua_ref.algorithms.base import AlgorithmImpl, TrainingContext
from bagua_ref.base.runtime import World, current_world
from bagua_ref.base.utils import inside_backward
from bagua_ref.buckets.optimizer_state import align
from bagua_ref.data_parallel.hooks import GradientHook, are_for_a_call
from bagua_ref.data_parallel.sharding import LocalShard, ignored_names, reshard, stand_in, whole
from bagua_ref.types import Group

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


class StepGuard:
    """Guard of the steps of all optimizers that hold a module's parameters, including optimizers
    not passed when wrapping; active from `watch` to `unwatch`.

    Args:
        training: the `bagua_ref.data_parallel.training.ModuleTraining` of the module; held weakly.
        trained: the module's parameters.
    """

    def __init__(self, training: Any, trained: TrainedParameters) -> None:
        self._training, self._trained = weakref.ref(training), trained
        self.parameters = frozenset(map(id, trained.whole))
        """The ids of the module's parameters."""
        self._module_name = training.bagua_module_name
        self._checked: dict[Any, tuple[list[int], list[torch.Tensor]]] = {}
        """For each optimizer, the ids of its parameters at the last check, and those of them that
        were frozen and belonged to no wrapped module.
        """
        self._inner: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that are parts of other optimizers."""
        weakref.finalize(self, _update_hook).atexit = False

    def watch(self) -> None:
        """Start checking the steps of all optimizers."""
        with _lock:
            _guards[self] = current_world()
        _update_hook()

    def unwatch(self) -> None:
        """Stop checking optimizer steps."""
        with _lock:
            _guards.pop(self, None)
        _update_hook()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the step of an ``optimizer`` that was passed when wrapping, before it begins.

        Raises:
            RuntimeError: the optimizer trains parameters that belong to no wrapped module; or a
                parameter was swapped; or for the reasons of
                `bagua_ref.data_parallel.backward.Backward.step_begins`.
        """
        training: Any = self._training()
        with training.rounds.aborting(RuntimeError):
            self._check_outsiders(optimizer)
            self._check_gradients(optimizer, known=True, inside=False)

    def before_unexpected_step(self, optimizer: torch.optim.Optimizer, inside: bool) -> None:
        """Check a step before it begins, if the optimizer was not passed when wrapping, or if the
        step is inside a backward pass.

        Raises:
            RuntimeError: the step is inside a backward pass, or the algorithm requires that the
                optimizer is passed when wrapping, or for the reasons of `before_step`.
        """
        training = self._training()
        if training is None or not self._holds_parameters(optimizer):
            return
        known = training.bagua_optimizers
        # A step with lr=0 changes no weights: torch.distributed.checkpoint lets an optimizer make
        # its state by one. The step of a known optimizer may consist of another one's.
        if not inside and (
            optimizer in known
            or training.machine.stepping
            or all(group.get("lr") == 0 for group in optimizer.param_groups)
        ):
            return
        with training.rounds.aborting(RuntimeError):
            if not inside:
                if known and not any(map(self._holds_parameters, known)):
                    self._refuse_outsiders(known[0], [])
                algorithm = training.bagua_algorithm
                if (
                    algorithm.traits.own_optimizers
                    and optimizer not in training.algorithm.optimizers()
                ):
                    raise RuntimeError(
                        f"{type(optimizer).__name__} was about to step module"
                        f" {self._module_name!r}, but was not among the optimizers when it was"
                        f" wrapped, and {algorithm.name} acts on the steps of those alone. Call"
                        " with_bagua() again on every rank, with this optimizer in its list"
                        " (train(): leave the context, and enter another one)"
                    )
            self._check_gradients(optimizer, known=False, inside=inside)
        # as ZeRO's step consists of that of an optimizer with the rank's share of parameters
        self._inner.update(
            o for o in vars(optimizer).values() if isinstance(o, torch.optim.Optimizer)
        )
        if optimizer not in self._inner:
            training.rounds.add_step(optimizer, self.parameters, passed=False)

    def _holds_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether ``optimizer`` holds parameters of the module."""
        return any(
            not self.parameters.isdisjoint(map(id, group["params"]))
            for group in optimizer.param_groups
        )

    def _check_gradients(self, optimizer: torch.optim.Optimizer, known: bool, inside: bool) -> None:
        """Raise RuntimeError if the optimizer's gradients must not be used by a step."""
        self._trained.refuse_swapped(in_backward=False)
        training: Any = self._training()

        def gradients() -> dict[str, Any]:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            named = zip(self._trained.named, self._trained.whole, strict=True)
            return {name: p.grad for (name, _), p in named if id(p) in held}

        training.machine.step_begins(
            optimizer if known else None, gradients, inside, type(optimizer).__name__
        )

    def _check_outsiders(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise an error if the optimizer trains parameters that belong to no wrapped module;
        checked when its parameters have changed.
        """
        held = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        ids = list(map(id, held))
        checked, frozen = self._checked.get(optimizer, ([], []))
        if ids == checked and not any(parameter.requires_grad for parameter in frozen):
            return
        # at a step, since modules that share an optimizer are wrapped one after the other
        owned = set().union(*(guard._trained.owned() for guard in _guards_here()))
        outsiders = [parameter for parameter in held if id(parameter) not in owned]
        trained = [parameter for parameter in outsiders if parameter.requires_grad]
        if trained:
            self._refuse_outsiders(optimizer, trained if owned.intersection(ids) else [])
        self._checked[optimizer] = ids, outsiders

    def _refuse_outsiders(
        self, optimizer: torch.optim.Optimizer, some: Sequence[torch.Tensor]
    ) -> NoReturn:
        who = type(optimizer).__name__
        if not some:
            raise RuntimeError(
                f"none of the parameters of {who}, which was passed when module"
                f" {self._module_name!r} was wrapped, belongs to a wrapped module, as if they were"
                " of another model, or replaced since the optimizer was made. Pass an optimizer of"
                " the module's parameters to with_bagua(), or pass parameters that each rank is to"
                " train alone in ignored=[...]"
            )
        places = [
            f"parameter {place} of group {number}, of shape {tuple(parameter.shape)}"
            for number, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
            if any(parameter is outsider for outsider in some)
        ]
        more = f", and {len(places) - 1} more" if len(places) > 1 else ""
        raise RuntimeError(
            f"{who} was about to step module {self._module_name!r}, but also trains parameters that"
            f" belong to no wrapped module, so that ranks would part in them: {places[0]}{more}."
            " Make them part of the module before with_bagua(), wrap their module too, freeze them,"
            " or pass them to with_bagua() in ignored=[...] if they are to stay local"
        )


class TrainedParameters:
    """The parameters of a module at the time of wrapping, by name; `check` detects later changes.

    Args:
        module: the module; held weakly.
        ignored: parameters that do not take part, or their names, and parameters of other modules.

    Attributes:
        ignored: names of parameters that do not take part.

    Raises:
        NotImplementedError: a parameter gets sparse gradients.
        TypeError: a parameter is complex.
    """

    def __init__(
        self, module: torch.nn.Module, ignored: Collection[str | torch.Tensor] = ()
    ) -> None:
        self._module, self.ignored = weakref.ref(module), ignored_names(module, ignored)
        self._local = [item for item in ignored if not isinstance(item, str)]
        reshard(module)
        self._take_stock(module)
        self.named = self._find(module)
        """Parameters to train, by their names in ``named_parameters()``: those that need a gradient
        and are not ignored; `LocalShard` in place of sharded ones.
        """
        self.shards = {name: shard for name, shard in self.named if isinstance(shard, LocalShard)}
        self.whole = [whole(parameter) for _, parameter in self.named]
        """The same parameters; sharded ones as they are."""
        self._hooks: list[GradientHook] = []
        self._with_strides = [parameter for _, parameter in self.named if parameter.dim() > 1]
        self.note_strides()

    def hook(self, training: TrainingContext) -> list[RemovableHandle]:
        """Register gradient hooks for ``training``; return their handles."""
        self._hooks = [GradientHook(training, name) for name, _ in self.named]
        # not in the hooks, which the garbage collector cannot see
        self._registrations = {
            hook: getattr(parameter, "_bagua_registration", None)
            for hook, parameter in zip(self._hooks, self.whole, strict=True)
        }
        return [
            hook.add_last(parameter)
            for hook, parameter in zip(self._hooks, self.whole, strict=True)
        ]

    def hook_again(self) -> bool:
        """Register the hooks of swapped parameters again; return whether there were any.

        Raises:
            RuntimeError: a parameter has another type, dtype, device or shape than before; the
                message names it.
        """
        lost = self._swapped()
        for parameter, hook in lost:
            hook.add_again(parameter)
            parameter._bagua_registration = self._registrations[hook]  # type: ignore[attr-defined]
        return bool(lost)

    def refuse_swapped(self, in_backward: bool) -> None:
        """Raise RuntimeError, with its name, for a parameter swapped since the last training
        forward pass that has a gradient, or is about to get one in the current backward pass.
        """
        for parameter, hook in self._swapped():
            if in_backward or parameter.grad is not None:
                raise RuntimeError(
                    f"parameter {hook.name!r} was swapped for another tensor, as by"
                    " torch.utils.swap_tensors, and has a gradient of this rank alone. Swap before"
                    " calling the wrapped module, model(x), in training mode (train(): leave the"
                    " context, and enter another one)"
                )

    def _swapped(self) -> list[tuple[Parameter, GradientHook]]:
        """Return the parameters that were swapped since their hooks were registered, with these
        hooks.
        """
        found = zip(self.whole, self._hooks, strict=True)
        return [(p, hook) for p, hook in found if getattr(p, "_bagua_hook", None) is not hook]

    def owned(self) -> set[int]:
        """Return the ids of all parameters of the module, and of parameters that are local on
        purpose.
        """
        module = self._module()
        others = () if module is None else module.parameters()
        return {*map(id, chain(self.whole, self._local, others))}

    def check(self) -> bool:
        """Return whether the module currently holds its trained parameters.

        It does not in a forward pass with other tensors in their place, as in
        `torch.func.functional_call`.

        Raises:
            RuntimeError: parameters were permanently added, replaced or unfrozen; the message names
                them.
        """
        if self.shards:  # FSDP2 itself replaces parameters, and refuses later ones
            return True
        same = list(map(id, chain.from_iterable(self._members))) == self._ids
        return (same and not any(p.requires_grad for p in self._frozen)) or self._check_changes()

    def _check_changes(self) -> bool:
        module = self._module()
        assert module is not None, "its forward is under way"
        known = dict(self.named)
        held = [
            tensor
            for inside in module.modules()
            for tensor in inside._parameters.values()
            if tensor is not None
        ]
        if are_for_a_call(held):
            return {*map(id, held)}.issuperset(map(id, known.values()))
        # by identity: pruning and parametrizations keep a parameter under a new name
        trained = {*map(id, known.values())}
        new = [name for name, parameter in self._find(module) if id(parameter) not in trained]
        if new:
            raise RuntimeError(
                f"{type(module).__name__} was wrapped before"
                f" {'parameters' if len(new) > 1 else 'parameter'} {', '.join(map(repr, new))}"
                " could be trained (added, replaced or unfrozen since), so they would not be"
                " synchronized. Call with_bagua() again on every rank, with these names in ignored=[...]"
                " if they are to stay local"
            )
        self._take_stock(module)  # what changed is ignored, or frozen
        return True

    def note_strides(self) -> None:
        """Record the current strides of the parameters, for which the buckets were made."""
        self._strides = list(map(torch.Tensor.stride, self._with_strides))

    def align_gradients(self) -> None:
        """Convert gradients to the strides of their parameters, if those changed between forward
        and backward pass.
        """
        if self.have_new_strides():
            for parameter in self._with_strides:
                if parameter.grad is not None:
                    align(parameter.grad, parameter)

    def have_new_strides(self) -> bool:
        """Return whether strides have changed since `note_strides`, for example by
        ``model.to(memory_format=...)``.
        """
        return list(map(torch.Tensor.stride, self._with_strides)) != self._strides

    def check_new_strides(self, algorithm: AlgorithmImpl) -> None:
        """Raise RuntimeError, naming a parameter with new strides, if ``algorithm`` cannot rebuild
        its buckets.
        """
        named = [(name, parameter) for name, parameter in self.named if parameter.dim() > 1]
        for (name, parameter), before in zip(named, self._strides, strict=True):
            if algorithm.background is not None and parameter.stride() != before:
                raise RuntimeError(
                    f"parameter {name!r} had strides {before} when the module was wrapped and has"
                    f" {parameter.stride()} now, and {type(algorithm).__name__} cannot make new"
                    " buckets during training. Call with_bagua() again on every rank"
                )

    def _find(self, module: torch.nn.Module) -> list[tuple[str, Parameter]]:
        sparse = {
            id(m._parameters.get("weight")): m
            for m in module.modules()
            if isinstance(m, _EMBEDDINGS) and m.sparse
        }
        found = [
            (name, stand_in(p))
            for name, p in module.named_parameters()
            if p.requires_grad and name not in self.ignored
        ]
        for name, parameter in found:
            if id(parameter) in sparse:
                raise NotImplementedError(
                    f"parameter {name!r} of {sparse[id(parameter)]!r} gets sparse gradients, which"
                    " cannot be communicated; use sparse=False or pass its name in ignored=[...]"
                )
            if parameter.dtype.is_complex:
                raise TypeError(
                    f"parameter {name!r} is {parameter.dtype}, which cannot be trained; make its"
                    " real view the parameter, nn.Parameter(torch.view_as_real(weight)), and use"
                    " torch.view_as_complex(parameter) in forward()"
                )
        return found

    def _take_stock(self, module: torch.nn.Module) -> None:
        """Record all parameters and submodules by identity, which takes microseconds to compare,
        unlike names.
        """
        self._members: list[Collection[Any]] = [
            members.values()
            for inside in module.modules()
            for members in (inside._parameters, inside._modules)
        ]
        # an id is only another object's once this one is gone
        self._kept = list(chain.from_iterable(self._members))
        self._ids = list(map(id, self._kept))
        self._frozen = [
            p
            for name, p in module.named_parameters()
            if not p.requires_grad and name not in self.ignored
        ]


def refuse_both(group: Group) -> None:
    """Raise RuntimeError if the current forward pass is inside torch's DistributedDataParallel over
    a group that shares more than one rank with ``group``.

    Raises:
        RuntimeError: they share more than this rank; the message says how to drop one of the two.
    """
    around = DistributedDataParallel._get_active_ddp_module()
    if around is not None:
        _refuse(around, group, "around")


def refuse_inside(module: torch.nn.Module, group: Group) -> None:
    """Raise RuntimeError if ``module`` is, or contains, torch's DistributedDataParallel; conditions
    as for `refuse_both`.
    """
    for inside in module.modules():
        if isinstance(inside, DistributedDataParallel):
            _refuse(inside, group, "inside")


def _refuse(ddp: DistributedDataParallel, group: Group, where: str) -> None:
    shared = sorted({*group.ranks} & {*dist.get_process_group_ranks(ddp.process_group)})
    if len(shared) > 1:
        raise RuntimeError(
            f"torch's DistributedDataParallel {where} this module and bagua_ref both reduce over"
            f" ranks {shared}, so that all gradients would travel twice: drop"
            " DistributedDataParallel and train the plain module, or drop with_bagua() or train()"
            " to have DistributedDataParallel reduce alone. Both work only over groups that share"
            " no more than one rank"
        )


def trainings_of(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Return each `bagua_ref.data_parallel.training.ModuleTraining` that trains some of
    ``parameters``.
    """
    ids = {*map(id, parameters)}
    found = [guard._training() for guard in _guards_here() if not guard.parameters.isdisjoint(ids)]
    return [training for training in found if training is not None]


_guards: weakref.WeakKeyDictionary[StepGuard, World] = weakref.WeakKeyDictionary()
"""Guards of all currently wrapped modules, and their worlds."""
_lock = threading.RLock()  # the garbage collector may call `_update_hook` anywhere
_hook: RemovableHandle | None = None
"""Handle of the global pre-step hook of torch's optimizers; None without guards."""


def _update_hook() -> None:
    global _hook
    with _lock:
        if _guards and _hook is None:
            _hook = register_optimizer_step_pre_hook(_check_step)
        elif not _guards and _hook is not None:
            _hook.remove()
            _hook = None


def _guards_here() -> list[StepGuard]:
    world = current_world()
    with _lock:
        return [guard for guard, its_world in _guards.items() if its_world is world]


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # a compiled step of another module's optimizer must not break its graph
    if not is_dynamo_compiling():
        for guard in _guards_here():
            guard.before_unexpected_step(optimizer, inside_backward())

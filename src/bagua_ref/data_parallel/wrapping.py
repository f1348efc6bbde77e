"""Validation and wrapping of a module, shared by ``with_bagua``, `train`, `DistributedDataParallel`
and trainers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from bagua_ref.algorithms import (
    AsyncModelAverageAlgorithm,
    GlobalAlgorithmRegistry,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from bagua_ref.algorithms.base import Algorithm
from bagua_ref.algorithms.decentralized import WEIGHTS_AVERAGED, DecentralizedAlgorithmImpl
from bagua_ref.backends import get_backend
from bagua_ref.backends.base import KernelBackend
from bagua_ref.base.runtime import current_world
from bagua_ref.base.utils import let_compiler_see_hooks, uncompiled
from bagua_ref.data_parallel.guard import trainings_of
from bagua_ref.data_parallel.parameters import refuse_what_cannot_be_flat
from bagua_ref.data_parallel.sharding import check_sharded, group_of
from bagua_ref.data_parallel.training import ModuleTraining, Options
from bagua_ref.env import checked_timeout
from bagua_ref.errors import CommunicationError, NotInitializedError
from bagua_ref.observe.flight_recorder import explain
from bagua_ref.types import Group

__all__ = [
    "Recipe",
    "call_if_there",
    "context_of",
    "named",
    "resynchronize",
    "train",
    "wrap",
]


def wrap(
    module: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    process_group: Group | DeviceMesh | ProcessGroup | None,
    options: Options,
    caller: str = "with_bagua",
) -> None:
    """Wrap ``module`` for training together with the other ranks; wrapping again replaces the
    algorithm (S5).

    Arguments and errors are those of `bagua_ref.distributed.BaguaModule.with_bagua`; ``caller`` is
    the name of the function that the user called, for messages.
    """
    called, module = module, uncompiled(module)
    optimizers, algorithm = _resolved(optimizers, algorithm)
    if options.timeout is not None:
        checked_timeout(options.timeout)
    world = current_world()
    default = world.default_group
    if default is None:
        raise NotInitializedError(f"call bagua_ref.init_process_group() before {caller}()")
    group = default if process_group is None else group_of(process_group)
    if world.identity.rank not in group.ranks:
        raise ValueError(
            f"process_group={group!r} does not hold this rank, {world.identity.rank}; only its"
            " ranks may wrap a module"
        )
    group.refuse_in_child()
    let_compiler_see_hooks()
    before = context_of(module)
    if before is not None and (options.without_forward or before.options.without_forward):
        active = "train()" if before.options.without_forward else "with_bagua()"
        raise ValueError(
            f"this {type(module).__name__} is in training by {active} already; {caller}() cannot"
            " train it as well"
        )
    if before is not None:
        try:
            before.engine.wait_pending_comm_ops()
            take_up_again = before.bagua_algorithm.suspend()
        except CommunicationError as error:
            before.rounds.fail(error)  # a new training begins from the first rank's state
    try:
        training = ModuleTraining(
            called,
            optimizers,
            algorithm,
            group,
            world,
            options,
            lambda: _check(module, algorithm, group, options),
        )
    except Exception as error:
        explain(error)
        if before is not None and not before.rounds.broken:
            before.reset()  # the tensors may already be registered for the new algorithm
            take_up_again()
        raise
    training.publish()
    if before is not None:
        before.close()
    if world.identity.rank == group.ranks[0]:
        _warn_of_leaders(algorithm, group)


def _warn_of_leaders(algorithm: Any, group: Group) -> None:
    """Warn if ``hierarchical=True`` saves nothing because all ranks are on one node."""
    known = type(algorithm).__module__.startswith("bagua_ref.")
    if not known or not getattr(algorithm, "hierarchical", False) or len(group.nodes) > 1:
        return
    exact = getattr(algorithm, "compression", None) is None and not hasattr(algorithm, "period")
    if len(group.ranks) > 2 or (len(group.ranks) == 2 and not exact):  # two send as much either way
        warnings.warn(
            f"with hierarchical=True, {type(algorithm).__name__} saves no bytes on one node: ranks"
            " send whole tensors to the first one and get them back. Pass hierarchical=False to it",
            stacklevel=4,
        )


@contextmanager
def train(
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    process_group: Group | DeviceMesh | ProcessGroup | None = None,
    do_flatten: bool = True,
    *,
    backend: str | KernelBackend | None = None,
    find_unused_parameters: bool = False,
    timeout: float | None = None,
    ignored: Iterable[str | torch.Tensor] = (),
) -> Iterator[torch.nn.Module]:
    """Context that trains ``model`` together with the other ranks, whichever of its methods
    computes the loss (S5).

    The first gradient of each backward pass counts as the start of the training forward pass.
    Entering is collective.

    Args:
        model: the module, from which all hooks are removed at the end.
        optimizers: the optimizers of its parameters, at least one.
        algorithm: an algorithm or its name, except asynchronous averaging, which would change
            weights during forward passes that it cannot detect.
        process_group: as for `bagua_ref.distributed.BaguaModule.with_bagua`, like all further
            arguments.
        do_flatten: keep the tensors of each bucket in one storage.
        backend: the kernels.
        find_unused_parameters: treat parameters that a backward pass does not reach as having zero
            gradients; those that no rank's backward pass reaches keep theirs.
        timeout: seconds without progress after which waiting raises.
        ignored: what stays local to each rank.

    Returns:
        A context manager whose value is ``model``.

    Raises:
        ValueError: ``model`` is already wrapped, or ``optimizers`` is empty; otherwise as for
            ``with_bagua``.
        NotImplementedError: ``algorithm`` averages asynchronously.

    >>> import torch, bagua_ref
    >>> bagua_ref.init_process_group()
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with bagua_ref.train(model, [optimizer], bagua_ref.algorithms.GradientAllReduceAlgorithm()):
    ...     model.forward(torch.ones(1, 4)).sum().backward()
    ...     optimizer.step()
    >>> bagua_ref.destroy_process_group()
    """
    optimizers, algorithm = _resolved(optimizers, algorithm)
    if isinstance(algorithm, AsyncModelAverageAlgorithm):
        raise NotImplementedError(
            "algorithm=AsyncModelAverageAlgorithm changes weights at any time but during forward"
            " and backward passes, and train() does not see where forward passes begin; call the"
            " module itself and use with_bagua()"
        )
    if not optimizers:
        raise ValueError(
            f"optimizers={optimizers!r} must hold the optimizers of the module, at least one"
        )
    options = Options(
        do_flatten,
        backend,
        find_unused_parameters,
        timeout,
        without_forward=True,
        ignored=tuple(ignored),
    )
    wrap(model, optimizers, algorithm, process_group, options, "train")
    try:
        yield model
        if (context := context_of(model)) is not None:
            context.engine.wait_pending_comm_ops()
    except RuntimeError as error:
        context = context_of(model)
        if (
            context is not None
            and isinstance(context.bagua_algorithm, DecentralizedAlgorithmImpl)
            and "modified by an inplace operation" in str(error)
        ):
            raise RuntimeError(WEIGHTS_AVERAGED) from error
        raise
    finally:
        if (context := context_of(model)) is not None:
            context.withdraw()
            context.close()


def resynchronize(module: torch.nn.Module) -> None:
    """Rebuild the training of ``module`` with new connections, from the state and counters of the
    group's first rank.

    Collective. Operations in progress are dropped.

    Raises:
        ValueError: the module is not wrapped, or modules differ between ranks.
        CommunicationTimeoutError: a rank did not call this in time.
    """
    before = context_of(module)
    if before is None:
        raise ValueError(
            f"this {type(module).__name__} is not wrapped, so there is nothing to resynchronize;"
            " call with_bagua() first"
        )
    before.rounds.abort("it resynchronizes")
    before.bagua_algorithm.close()
    group = (
        before.given_group.sibling()
        if before.process_group is before.given_group
        else before.given_group
    )
    counters = before.bagua_algorithm.counters()
    anew = ModuleTraining(
        before.called_module,
        before.bagua_optimizers,
        before.algorithm,
        group,
        before.world,
        before.options,
    )
    comm = anew.process_group.get_global_communicator()
    anew.bagua_algorithm.load_counters(
        comm.broadcast_object(counters, 0) if comm.nranks() > 1 else counters
    )
    anew.publish()
    before.close()


def context_of(module: torch.nn.Module) -> ModuleTraining | None:
    """Return the training context of ``module``, or None if it is not wrapped."""
    return cast("ModuleTraining | None", getattr(uncompiled(module), "_bagua", None))


def named(name: str, optimizers: Sequence[torch.optim.Optimizer], **options: Any) -> Algorithm:
    """Return a new instance of the algorithm registered as ``name``; "qadam" uses the only
    optimizer.

    Raises:
        ValueError: no algorithm has this name, or the optimizers for "qadam" are not exactly one
            QAdamOptimizer.
        TypeError: the algorithm has no such option.
    """
    if GlobalAlgorithmRegistry.get(name) is QAdamAlgorithm and "q_adam_optimizer" not in options:
        if len(optimizers) != 1 or not isinstance(optimizers[0], QAdamOptimizer):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
            raise ValueError(
                f"algorithm={name!r} needs exactly one optimizer, a QAdamOptimizer; there are:"
                f" {kinds}"
            )
        options["q_adam_optimizer"] = optimizers[0]
    return Algorithm.init(name, **options)


def _resolved(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], algorithm: Algorithm | str
) -> tuple[list[torch.optim.Optimizer], Algorithm]:
    found = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    if not isinstance(found, (list, tuple)) or not all(
        isinstance(o, torch.optim.Optimizer) for o in found
    ):
        raise TypeError(
            f"optimizers={optimizers!r} must be a torch.optim.Optimizer, or a list of them"
        )
    if isinstance(algorithm, str):
        return list(found), named(algorithm, found)
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"algorithm={algorithm!r} must be an Algorithm or a registered name, such as"
            " 'gradient_allreduce'"
        )
    return list(found), algorithm


def _check(module: torch.nn.Module, algorithm: Algorithm, group: Group, options: Options) -> None:
    if options.backend is not None:
        get_backend(options.backend)
    if isinstance(module, torch.jit.ScriptModule):
        raise NotImplementedError(
            f"{type(module).__name__} takes no hooks; wrap the module that torch.jit.script was"
            " given instead"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            "this module has no parameter that needs a gradient, so there is nothing to train"
        )
    for name, inside in module.named_modules():
        if name and context_of(inside) is not None:
            raise ValueError(
                f"module.{name} is wrapped already; wrap the whole module once, or only its parts"
            )
    refuse_what_cannot_be_flat(module)
    check_sharded(module, algorithm, group, options.ignored)
    for name, parameter in module.named_parameters():
        for other in trainings_of([parameter]):
            if other.module is not module:
                raise ValueError(
                    f"parameter {name!r} takes part in the training of"
                    f" {type(other.module).__name__} ({other.bagua_module_name!r}) already; wrap"
                    " the whole module once, or only its parts"
                )


class Recipe:
    """An algorithm's name and options, for creating it once the module and its optimizers exist.

    Args:
        algorithm: a registered name.
        options: options of the algorithm.
        caller: name of the function that the user called, for messages.
        do_flatten: as for `bagua_ref.distributed.BaguaModule.with_bagua`; so is
            find_unused_parameters.

    Raises:
        ValueError: there is no such algorithm, or an option is out of range; raised here rather
            than in processes that start later.
        TypeError: the algorithm has no such option.
    """

    def __init__(
        self,
        algorithm: str,
        options: dict[str, Any],
        caller: str,
        *,
        do_flatten: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        GlobalAlgorithmRegistry.get(algorithm)
        if algorithm != "qadam":  # which needs its optimizer
            Algorithm.init(algorithm, **options)
        self.algorithm, self.options, self._caller = algorithm, options, caller
        self.do_flatten, self.find_unused_parameters = do_flatten, find_unused_parameters

    def wrap(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Wrap ``module`` with a new instance of the algorithm; "qadam" uses the only optimizer.

        Raises:
            ValueError: the optimizers for "qadam" are not exactly one QAdamOptimizer.
        """
        algorithm = named(self.algorithm, optimizers, **self.options)
        of_training = Options(self.do_flatten, find_unused_parameters=self.find_unused_parameters)
        wrap(module, list(optimizers), algorithm, None, of_training, self._caller)


def call_if_there(name: str, module: torch.nn.Module) -> None:
    """Call ``abort`` or ``resume`` of the module's algorithm, if the module is wrapped and the
    algorithm has this method.
    """
    context = context_of(module)
    method = None if context is None else getattr(context.bagua_algorithm, name, None)
    if method is not None:
        method(context)

"""Validation and wrapping of a module, shared by ``with_bagua`` and `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from bagua_ref.algorithms.base import Algorithm
from bagua_ref.backends import get_backend
from bagua_ref.backends.base import KernelBackend
from bagua_ref.base.runtime import current_world
from bagua_ref.base.utils import let_compiler_see_hooks, uncompiled
from bagua_ref.data_parallel.gradient_hook import trainings_of
from bagua_ref.data_parallel.metrics import count_from_now
from bagua_ref.data_parallel.sharding import check_sharded, group_of
from bagua_ref.data_parallel.trained_parameters import refuse_what_cannot_be_flat
from bagua_ref.data_parallel.wrapped_module import WrappedModule
from bagua_ref.env import checked_timeout
from bagua_ref.errors import NotInitializedError
from bagua_ref.types import Group

__all__ = ["context_of", "wrap"]


def wrap(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm,
    process_group: Group | DeviceMesh | None,
    do_flatten: bool,
    *,
    backend: str | KernelBackend | None,
    find_unused_parameters: bool,
    timeout: float | None,
    bucket_bytes: int | None = None,
    broadcast_buffers: bool = False,
    without_forward: bool = False,
    caller: str = "with_bagua",
) -> None:
    """Train ``module`` together with the other ranks from now on; wrapping again replaces the algorithm (S5).

    Arguments and errors as `bagua_ref.distributed.BaguaModule.with_bagua`; ``bucket_bytes``, ``broadcast_buffers``
    and ``without_forward`` as `WrappedModule`; ``caller`` is what the user called, for messages.
    """
    called, module = module, uncompiled(module)
    optimizers = _check(module, optimizers, algorithm, timeout)
    if backend is not None:
        get_backend(backend)  # raises, before anything is sent, if it cannot run
    world = current_world()
    group = group_of(process_group) if process_group is not None else world.default_group
    if group is None:
        raise NotInitializedError(f"call bagua_ref.init_process_group() before {caller}()")
    if not hasattr(group, "for_background"):
        raise TypeError(
            f"process_group={process_group!r} must be a BaguaProcessGroup or None; see bagua_ref.communication.new_group"
        )
    if world.identity.rank not in group.ranks:
        raise ValueError(
            f"process_group={group!r} does not hold this rank, {world.identity.rank}; only its ranks may wrap a module"
        )
    group.refuse_in_child()
    check_sharded(module, algorithm, group)
    let_compiler_see_hooks()
    before = context_of(module)
    if before is not None and (without_forward or before.without_forward):
        active = "train()" if before.without_forward else "with_bagua()"
        raise ValueError(f"this {type(module).__name__} is in training by {active} already; {caller}() cannot train it as well")
    if before is not None:
        before._bagua_backend.wait_pending_comm_ops()
        take_up_again = before.bagua_algorithm.suspend()
    try:
        wrapped = WrappedModule(
            called,
            optimizers,
            algorithm,
            group,
            world,
            do_flatten=do_flatten,
            backend=backend,
            find_unused_parameters=find_unused_parameters,
            timeout=group.timeout if timeout is None else timeout,
            bucket_bytes=bucket_bytes,
            broadcast_buffers=broadcast_buffers,
            without_forward=without_forward,
        )
    except Exception:
        if before is not None:
            before.reset()  # the tensors may already be registered for the new algorithm
            take_up_again()
        raise
    wrapped.publish()
    count_from_now(wrapped)
    if before is not None:
        before.close()


def resynchronize(module: torch.nn.Module) -> None:
    """Make the training of ``module`` anew, with new connections, from the state and counters of the group's first rank.

    Collective. Whatever was under way is forgotten.

    Raises:
        ValueError: the module is not wrapped, or modules differ between ranks.
        CommunicationTimeoutError: a rank has not come.
    """
    before = context_of(module)
    if before is None:
        raise ValueError(
            f"this {type(module).__name__} is not wrapped, so there is nothing to resynchronize; call with_bagua() first"
        )
    before.rounds.give_up("it resynchronizes")
    before.bagua_algorithm.close()
    group = before.given_group.sibling() if before.process_group is before.given_group else before.given_group
    counters = before.bagua_algorithm.counters()
    anew = WrappedModule(before.called_module, before.bagua_optimizers, before.algorithm, group, before.world, **before.options)
    comm = anew.process_group.get_global_communicator()
    anew.bagua_algorithm.load_counters(comm.broadcast_object(counters, 0) if comm.nranks() > 1 else counters)
    anew.publish()
    count_from_now(anew)
    before.close()


def context_of(module: torch.nn.Module) -> WrappedModule | None:
    """Return the training context of ``module``, None if it is not wrapped."""
    return cast("WrappedModule | None", uncompiled(module).__dict__.get("_bagua"))


def _check(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], algorithm: Algorithm, timeout: float | None
) -> list[torch.optim.Optimizer]:
    if isinstance(module, torch.jit.ScriptModule):
        raise NotImplementedError(
            f"{type(module).__name__} takes no hooks; wrap the module that torch.jit.script was given instead"
        )
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"algorithm={algorithm!r} must be an Algorithm, e.g. Algorithm.init('gradient_allreduce')")
    if not isinstance(optimizers, (list, tuple)) or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
        raise TypeError(f"optimizers={optimizers!r} must be a list of torch.optim.Optimizer")
    if timeout is not None:
        checked_timeout(timeout)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("this module has no parameter that needs a gradient, so there is nothing to train")
    for name, inside in module.named_modules():
        if name and context_of(inside) is not None:
            raise ValueError(f"module.{name} is wrapped already; wrap the whole module once, or only its parts")
    refuse_what_cannot_be_flat(module)
    for name, parameter in module.named_parameters():
        for other in trainings_of(parameter):
            if other.module is not module:
                raise ValueError(
                    f"parameter {name!r} takes part in the training of {type(other.module).__name__} "
                    f"({other.bagua_module_name!r}) already; wrap the whole module once, or only its parts"
                )
    return list(optimizers)

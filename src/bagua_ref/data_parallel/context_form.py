"""Training as a context, for loops that cannot wrap the module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from bagua_ref.algorithms import AsyncModelAverageAlgorithm
from bagua_ref.algorithms.base import Algorithm
from bagua_ref.backends.base import KernelBackend
from bagua_ref.base.utils import NotCopied
from bagua_ref.data_parallel.wrapped_module import WrappedModule
from bagua_ref.data_parallel.wrapping import context_of, wrap
from bagua_ref.types import Group

__all__ = ["train"]


@contextmanager
def train(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm,
    process_group: Group | DeviceMesh | None = None,
    do_flatten: bool = True,
    *,
    backend: str | KernelBackend | None = None,
    find_unused_parameters: bool = False,
    timeout: float | None = None,
) -> Iterator[torch.nn.Module]:
    """Train ``model`` together with the other ranks in this context, whichever of its methods computes the loss (S5).

    The first gradient of each backward pass stands in for the beginning of the training forward pass. Entering is collective.

    Args:
        model: the module; afterwards it has no hooks of the training any more.
        optimizers: at least one, those of its parameters.
        algorithm: any but asynchronous averaging, which would change weights during a forward pass that it does not see.
        process_group: as `bagua_ref.distributed.BaguaModule.with_bagua`, and so are all that follow.
        do_flatten: keep the tensors of each bucket in one storage.
        backend: the kernels.
        find_unused_parameters: treat parameters that a backward pass does not reach as having zero gradients; those that no rank's
            backward pass reaches keep theirs.
        timeout: seconds without progress after which waiting raises.

    Returns:
        A context that gives ``model``.

    Raises:
        ValueError: ``model`` is in training already, or ``optimizers`` is empty; otherwise as ``with_bagua``.
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
    if isinstance(algorithm, AsyncModelAverageAlgorithm):
        raise NotImplementedError(
            "algorithm=AsyncModelAverageAlgorithm changes weights at any time but during forward and backward passes, and train() "
            "does not see where forward passes begin; call the module itself and use with_bagua()"
        )
    if not optimizers:
        raise ValueError(f"optimizers={optimizers!r} must hold the optimizers of the module, at least one")
    wrap(
        model,
        optimizers,
        algorithm,
        process_group,
        do_flatten,
        backend=backend,
        find_unused_parameters=find_unused_parameters,
        timeout=timeout,
        without_forward=True,
        caller="train",
    )
    try:
        yield model
        context = context_of(model)
        if context is not None:
            context._bagua_backend.wait_pending_comm_ops()
    except RuntimeError as error:
        context = context_of(model)
        if context is not None and context.bagua_algorithm.why_one_backward and "modified by an inplace operation" in str(error):
            raise RuntimeError(context.bagua_algorithm.why_one_backward) from error
        raise
    finally:
        context = context_of(model)
        if context is not None:
            _withdraw(context)
            context.close()


def _withdraw(context: WrappedModule) -> None:
    """Take back what `WrappedModule.publish` did, but leave a name that the user gave."""
    attributes = context.module.__dict__
    for name in ("_bagua", "bagua_algorithm", "bagua_optimizers", "bagua_buckets", "bagua_train_step_counter"):
        attributes.pop(name, None)
    if isinstance(attributes.get("bagua_module_name"), NotCopied):
        del attributes["bagua_module_name"]
    context.world.engines.pop(context.bagua_module_name, None)

"""``with_bagua`` and its companions, the methods that bagua_ref puts on ``torch.nn.Module``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from bagua_ref.algorithms.base import Algorithm
from bagua_ref.backends import get_backend
from bagua_ref.data_parallel.wrapped_module import WrappedModule
from bagua_ref.errors import NotInitializedError
from bagua_ref.runtime import current_world

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from bagua_ref.algorithms.base import AlgorithmImpl
    from bagua_ref.backends.base import KernelBackend
    from bagua_ref.bucket import BaguaBucket
    from bagua_ref.types import Group

__all__ = ["BaguaModule"]


class BaguaModule:
    """The methods that bagua_ref puts on ``torch.nn.Module``.

    Source: ``bagua/torch_api/distributed.py`` of Bagua 0.9.
    """

    def with_bagua(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        process_group: Group | None = None,
        do_flatten: bool = True,
        *,
        backend: str | KernelBackend | None = None,
        find_unused_parameters: bool = False,
        timeout: float = 300.0,
    ) -> Any:
        """Train this module together with the other ranks from now on; return it (S5).

        Collective: every rank of the group wraps its copy. The first rank's parameters, buffers and optimizer state are
        broadcast. From then on each training forward, backward and optimizer step takes part in the algorithm. Wrapping again
        replaces the algorithm.

        Args:
            optimizers: those that step this module's parameters.
            algorithm: e.g. ``GradientAllReduceAlgorithm()``.
            process_group: the ranks that train together; None is the default group.
            do_flatten: keep each bucket's tensors in one storage.
            backend: the kernels; None chooses as `bagua_ref.backends.get_backend`.
            find_unused_parameters: parameters that a backward does not reach count as having zero gradient.
            timeout: seconds without progress after which waiting raises.

        Raises:
            NotInitializedError: ``init_process_group()`` was not called (a RuntimeError).
            TypeError: ``algorithm``, ``optimizers`` or ``process_group`` is something else.
            ValueError: modules differ between ranks; nothing to train; this rank is not in the group.
            NotImplementedError: a parameter gets sparse gradients.

        >>> from bagua_ref import init_process_group
        >>> from bagua_ref.algorithms import GradientAllReduceAlgorithm
        >>> init_process_group()  # doctest: +SKIP
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model = model.with_bagua([optimizer], GradientAllReduceAlgorithm())  # doctest: +SKIP
        """
        module = _module(self)
        optimizers = _check(module, optimizers, algorithm, timeout)
        if backend is not None:
            get_backend(backend)  # refuse what cannot run before anything is sent
        world = current_world()
        group = process_group if process_group is not None else world.default_group
        if group is None:
            raise NotInitializedError("call bagua_ref.init_process_group() before with_bagua()")
        if not hasattr(group, "for_background"):
            raise TypeError(
                f"process_group={process_group!r} must be a BaguaProcessGroup or None; see bagua_ref.communication.new_group"
            )
        if world.identity.rank not in group.ranks:
            raise ValueError(
                f"process_group={group!r} does not hold this rank, {world.identity.rank}; only its ranks may wrap a module"
            )
        before = _wrapped_or_none(module)
        if before is not None:
            before._bagua_backend.wait_pending_comm_ops()
            take_up_again = before.bagua_algorithm.suspend()
        try:
            module._bagua = WrappedModule(  # type: ignore[assignment]
                module,
                optimizers,
                algorithm,
                group,
                world,
                do_flatten=do_flatten,
                backend=backend,
                find_unused_parameters=find_unused_parameters,
                timeout=timeout,
            )
        except Exception:
            if before is not None:
                before.reset()  # the tensors may have been registered for the new algorithm already
                take_up_again()
            raise
        if before is not None:
            before.close()
        return module

    def no_sync(self) -> AbstractContextManager[None]:
        """Skip communication for training forwards entered in this context (S5); does nothing if the module is not wrapped."""
        wrapped = _wrapped_or_none(_module(self))
        return nullcontext() if wrapped is None else wrapped.no_sync()

    @property
    def bagua_module_name(self) -> str:
        """The name of this module in messages; unique in the process."""
        wrapped = _wrapped_or_none(_module(self))
        return wrapped.bagua_module_name if wrapped is not None else getattr(self, "_bagua_module_name", "")

    @bagua_module_name.setter
    def bagua_module_name(self, name: str) -> None:
        """Name the module; before it is wrapped."""
        if _wrapped_or_none(_module(self)) is not None:
            raise ValueError(f"name={name!r}: a module is named before it is wrapped; this one is {self.bagua_module_name!r}")
        self._bagua_module_name = name

    @property
    def bagua_algorithm(self) -> AlgorithmImpl:
        """The implementation of the algorithm at work."""
        return _wrapped(self).bagua_algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers passed when wrapping."""
        return _wrapped(self).bagua_optimizers

    @property
    def bagua_buckets(self) -> list[BaguaBucket]:
        """The buckets in the order in which they are scheduled."""
        return _wrapped(self).bagua_buckets

    @property
    def bagua_train_step_counter(self) -> int:
        """Training forwards begun since wrapping."""
        return _wrapped(self).bagua_train_step_counter


def _check(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], algorithm: Algorithm, timeout: float
) -> list[torch.optim.Optimizer]:
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"algorithm={algorithm!r} must be an Algorithm, e.g. Algorithm.init('gradient_allreduce')")
    if not isinstance(optimizers, (list, tuple)) or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
        raise TypeError(f"optimizers={optimizers!r} must be a list of torch.optim.Optimizer")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r} must be a positive number of seconds")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("this module has no parameter that needs a gradient, so there is nothing to train")
    return list(optimizers)


def _module(mixin: object) -> torch.nn.Module:
    """Return ``self`` of a method that runs on torch.nn.Module, typed as what it is."""
    return cast("torch.nn.Module", mixin)


def _wrapped_or_none(module: torch.nn.Module) -> WrappedModule | None:
    return cast("WrappedModule | None", module.__dict__.get("_bagua"))


def _wrapped(mixin: object) -> WrappedModule:
    wrapped = _wrapped_or_none(_module(mixin))
    if wrapped is None:
        raise AttributeError("this module is not wrapped; call with_bagua() first")
    return wrapped

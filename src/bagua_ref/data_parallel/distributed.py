"""DistributedDataParallel with torch's interface, on top of `with_bagua` (S5)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partialmethod
from typing import Any, NoReturn

import torch
from torch._utils import _get_device_index
from torch.distributed.utils import _to_kwargs

from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl
from bagua_ref.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua_ref.backends.base import KernelBackend
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.data_parallel.joining import join
from bagua_ref.data_parallel.sharding import group_of
from bagua_ref.data_parallel.training import ModuleTraining, Options
from bagua_ref.data_parallel.wrapping import context_of, wrap
from bagua_ref.errors import NotProvidedError
from bagua_ref.groups.process_group import BaguaProcessGroup, _get_default_group

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallel_V1_9_0",
    "DistributedDataParallel_V1_9_0_Interface",
    "to_bagua_process_group",
]

_ONE_DEVICE = "a wrapper has one device; start one process for each device"
_NOT_PROVIDED = {
    "scatter": _ONE_DEVICE,
    "gather": _ONE_DEVICE,
    "to_kwargs": "forward() moves inputs to the device of device_ids",
    "register_comm_hook": (
        "pass algorithm=, such as ByteGradAlgorithm() for compressed gradients, or write one"
    ),
}


def _refuse(self: object, method: str, *_: object, **__: object) -> NoReturn:
    raise NotProvidedError(
        f"{method}() of DistributedDataParallel is not provided; {_NOT_PROVIDED[method]}"
    )


class DistributedDataParallel(torch.nn.Module):
    """Wrapper that trains ``module`` together with the other ranks, with the interface of torch's
    class of the same name (S5).

    It wraps the module as ``module.with_bagua(optimizers, algorithm)`` does: the hooks are on
    ``module``, so that calling the wrapper and calling ``module`` itself have the same effect.
    Creating one is collective. A copy or pickle trains alone.

    Args:
        module: the module to train, already on its device.
        device_ids: None, or the single CUDA device of ``module``, to which inputs are moved.
        output_device: None, or that device.
        dim: 0.
        broadcast_buffers: broadcast the first rank's buffers before each training forward pass
            outside `no_sync`, not only now; None is True. Algorithms whose ranks do not step
            together (async after its warm-up) leave each rank its own buffers.
        process_group: the ranks that train together, Bagua's group or torch's; None is Bagua's
            default group.
        bucket_cap_mb: the size at which a bucket is closed, in MiB; None is 25.
        find_unused_parameters: treat parameters that a backward pass does not reach as having zero
            gradients; those that no rank's backward pass reaches keep theirs.
        check_reduction: False.
        gradient_as_bucket_view: keep the tensors of each bucket in one storage, as ``do_flatten``
            of ``with_bagua`` does.
        optimizers: the optimizers of ``module``'s parameters; None means [], for algorithms that
            need none.
        algorithm: None is ``GradientAllReduceAlgorithm()``.
        backend: the kernels; None chooses as `bagua_ref.backends.get_backend`.
        timeout: seconds without progress after which waiting raises; None: that of
            ``process_group``.
        ignored: as `bagua_ref.distributed.BaguaModule.with_bagua`.
        **torch_arguments: further arguments of torch's class, which must have torch's default
            values.

    Attributes:
        module: the module inside.
        broadcast_buffers: as given, like the other arguments.
        bagua_algorithm: the implementation of the algorithm in use; like the next ones, of the
            training context.
        bagua_buckets: the buckets in the order in which they are scheduled.
        bagua_module_name: the name of the module in messages.
        bagua_optimizers: the optimizers passed when wrapping.
        bagua_train_step_counter: training forward passes begun since wrapping.
        parameters_to_ignore: names, within ``module``, of parameters and buffers that are neither
            communicated nor broadcast.

    Raises:
        NotImplementedError: an argument's value is not supported; the message names it.
        NotProvidedError: by ``scatter``, ``gather``, ``to_kwargs`` and ``register_comm_hook``.
        NotInitializedError: ``init_process_group()`` was not called (a RuntimeError).
        TypeError: ``module``, ``algorithm``, ``optimizers`` or ``process_group`` has the wrong
            type.
        ValueError: modules differ between ranks, there is nothing to train, this rank is not in the
            group, or devices do not match.

    >>> from bagua_ref import init_process_group
    >>> from bagua_ref.data_parallel import DistributedDataParallel
    >>> init_process_group()  # doctest: +SKIP
    >>> model = DistributedDataParallel(torch.nn.Linear(4, 2))  # doctest: +SKIP

    Source: ``bagua/torch_api/data_parallel/distributed.py`` of Bagua 0.9, and
    ``torch.nn.parallel.DistributedDataParallel``.
    """

    bagua_algorithm: AlgorithmImpl
    bagua_buckets: list[BaguaBucket]
    bagua_module_name: str
    bagua_optimizers: list[torch.optim.Optimizer]
    bagua_train_step_counter: int
    parameters_to_ignore: set[str]

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        algorithm: Algorithm | str | None = None,
        *,
        backend: str | KernelBackend | None = None,
        timeout: float | None = None,
        ignored: Iterable[str | torch.Tensor] = (),
        **torch_arguments: Any,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module={module!r} must be a torch.nn.Module")
        _refuse_unsupported({"dim": dim, "check_reduction": check_reduction, **torch_arguments})
        # Newer versions of torch default to None, with these meanings.
        broadcast_buffers = True if broadcast_buffers is None else broadcast_buffers
        bucket_cap_mb = 25 if bucket_cap_mb is None else bucket_cap_mb
        number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
        if not number or not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r} must be a positive number of MiB")
        super().__init__()
        self.device_ids = _device_ids(module, device_ids, output_device)
        self.output_device = self.device_ids[0] if self.device_ids else None
        self.dim = dim
        self.bucket_cap_mb = bucket_cap_mb
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.module = module
        self.with_bagua(
            [] if optimizers is None else optimizers,
            GradientAllReduceAlgorithm() if algorithm is None else algorithm,
            process_group,
            gradient_as_bucket_view,
            backend=backend,
            find_unused_parameters=find_unused_parameters,
            timeout=timeout,
            ignored=ignored,
        )

    def with_bagua(
        self,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        algorithm: Algorithm | str,
        process_group: Any = None,
        do_flatten: bool = True,
        *,
        ignored: Iterable[str | torch.Tensor] = (),
        **options: Any,
    ) -> DistributedDataParallel:
        """Wrap the inner module again, with the bucket size and buffers of this wrapper; return the
        wrapper.

        The arguments are those of `bagua_ref.distributed.BaguaModule.with_bagua`.
        """
        wrap(
            self.module,
            optimizers,
            algorithm,
            process_group,
            Options(
                do_flatten,
                bucket_bytes=max(1, int(self.bucket_cap_mb * 1024**2)),
                broadcast_buffers=self.broadcast_buffers,
                ignored=tuple(ignored),
                **options,
            ),
            "DistributedDataParallel",
        )
        return self

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``module(*inputs, **kwargs)``; inputs are moved to the device in ``device_ids``,
        if there is one.
        """
        if self.device_ids:
            device = torch.device("cuda", self.device_ids[0])
            (inputs,), (kwargs,) = _to_kwargs(inputs, kwargs, device, False)
        return self.module(*inputs, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load parameters and buffers; the prefix ``module.`` of names, as in `state_dict`, is
        optional.
        """
        # A submodule may itself be called "module".
        if not self.module.state_dict(keep_vars=True).keys().isdisjoint(state_dict):
            return self.module.load_state_dict(state_dict, strict, assign)
        return super().load_state_dict(state_dict, strict, assign)

    @property
    def _bagua(self) -> ModuleTraining | None:
        """The training context, for the methods of `bagua_ref.distributed.BaguaModule`."""
        return context_of(self.module)

    @property
    def inner(self) -> ModuleTraining:
        """The training context, with buckets, hooks and everything else that algorithms use.

        Raises:
            AttributeError: this wrapper is a copy, which trains alone.
        """
        if self._bagua is None:
            raise AttributeError(
                "this wrapper is a copy, which trains alone; make another one around its module"
            )
        return self._bagua

    @property
    def process_group(self) -> BaguaProcessGroup:
        """The group passed by the user; the background worker has its own connections."""
        return self.inner.given_group  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether training forward passes communicate from now on; settable, as `no_sync` does
        temporarily.
        """
        return not self.inner.machine.skipping

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.inner.machine.skipping = not value

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next training forward pass begins with a broadcast of buffers."""
        return self.inner.will_broadcast_buffers() and self.require_backward_grad_sync

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Context in which ranks may have different numbers of batches; calls `bagua_ref.join` for
        this module.
        """
        return join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    scatter = partialmethod(_refuse, "scatter")
    gather = partialmethod(_refuse, "gather")
    to_kwargs = partialmethod(_refuse, "to_kwargs")
    register_comm_hook = partialmethod(_refuse, "register_comm_hook")

    def __getattr__(self, name: str) -> Any:
        if name in DistributedDataParallel.__annotations__:
            return getattr(self.inner, name)
        return super().__getattr__(name)


DistributedDataParallel_V1_9_0 = DistributedDataParallel
DistributedDataParallel_V1_9_0_Interface = DistributedDataParallel


def to_bagua_process_group(process_group: Any = None) -> BaguaProcessGroup:
    """Convert ``process_group``, torch's or Bagua's, to a Bagua group of the same ranks; None means
    the default group.

    Raises:
        NotInitializedError: ``init_process_group()`` was not called.
        TypeError: ``process_group`` has another type.
    """
    default = _get_default_group()
    found: BaguaProcessGroup = default if process_group is None else group_of(process_group)
    return found


def _refuse_unsupported(arguments: dict[str, Any]) -> None:
    """Raise an error for the first argument of torch's class that has an unsupported value."""
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    for name, value in arguments.items():
        if name not in known:
            raise TypeError(
                f"DistributedDataParallel() got an unexpected keyword argument {name!r}"
            )
        default = known[name].default
        if value != default:
            raise NotImplementedError(
                f"{name}={value!r} is not supported; only {name}={default!r} is"
            )


def _device_ids(
    module: torch.nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> list[int] | None:
    """Return the index of the single CUDA device, as a list, or None if there is none."""
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    indices = [_get_device_index(d, optional=True, allow_cpu=True) for d in device_ids or ()]
    if len(indices) > 1:
        raise ValueError(
            f"device_ids={device_ids!r} must be None or hold one device; start one process for each"
            " device"
        )
    if indices and devices != [f"cuda:{indices[0]}"]:
        raise ValueError(
            f"device_ids={device_ids!r} must be the CUDA device that all parameters are on, or"
            f" None; they are on {', '.join(devices)}"
        )
    if output_device is not None and [_get_device_index(output_device, optional=True)] != indices:
        raise NotImplementedError(
            f"output_device={output_device!r} is not supported with device_ids={device_ids!r};"
            " leave it out"
        )
    return indices or None

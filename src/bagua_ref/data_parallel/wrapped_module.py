"""A module in distributed training: its buckets, and the hooks that drive them (S2.1, S5)."""

from __future__ import annotations

import inspect
import itertools
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.communication import broadcast_coalesced
from bagua_ref.data_parallel.bucketing import split_into_buckets
from bagua_ref.data_parallel.state_broadcast import broadcast_state
from bagua_ref.env import get_default_bucket_size
from bagua_ref.runtime import use_world
from bagua_ref.scheduling.engine import Engine
from bagua_ref.utils import NotCopied, OwnHook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bagua_ref.algorithms.base import Algorithm
    from bagua_ref.backends.base import KernelBackend
    from bagua_ref.bucket import BaguaBucket
    from bagua_ref.runtime import World
    from bagua_ref.types import Group

__all__ = ["WrappedModule"]

_counter = itertools.count()


class WrappedModule(NotCopied):
    """The training context of one module: what `bagua_ref.algorithms.base.TrainingContext` promises, and the hooks.

    Making one is collective over ``group``: it takes a group of its own from it and broadcasts the first rank's state.
    A deep copy or pickle of the module is an ordinary module, without hooks.

    Args:
        module: to train; hooks are put on it and its parameters.
        optimizers: whose state is broadcast, and whose steps the algorithm sees.
        algorithm: makes the implementation.
        group: the ranks that train together.
        world: of this rank.
        do_flatten: keep each bucket's tensors in one storage.
        backend: the kernels; None chooses as `bagua_ref.backends.get_backend`.
        find_unused_parameters: parameters that a backward does not reach count as having zero gradient.
        timeout: seconds without progress after which waiting raises.
        bucket_bytes: the size at which a bucket is closed; None: `bagua_ref.env.get_default_bucket_size`.
        broadcast_buffers: give every rank the first one's buffers before each training forward, not only now.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        group: Group,
        world: World,
        *,
        do_flatten: bool = True,
        backend: str | KernelBackend | None = None,
        find_unused_parameters: bool = False,
        timeout: float = 300.0,
        bucket_bytes: int | None = None,
        broadcast_buffers: bool = False,
    ) -> None:
        self._module = weakref.ref(module)
        self.bagua_module_name = getattr(module, "_bagua_module_name", None) or f"bagua_module_{next(_counter)}"
        self.bagua_optimizers = list(optimizers)
        self.bagua_buckets: list[BaguaBucket] = []
        self.bagua_train_step_counter = 0
        self.world, self._do_flatten, self.kernel_backend = world, do_flatten, backend
        self._find_unused_parameters, self._bucket_bytes = find_unused_parameters, bucket_bytes
        self._broadcast_buffers = broadcast_buffers
        self.parameters_to_ignore = {
            *getattr(module, "_bagua_params_and_buffers_to_ignore", ()),
            *getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
        }
        """Names of parameters and buffers that are neither communicated nor broadcast."""
        self._synchronizing = False
        """Whether the last training forward was entered outside `no_sync`."""
        self.skipping = False
        """Whether training forwards entered now skip communication, as in `no_sync`."""
        self._in_backward = False
        self._bagua_backend = Engine(world, self.bagua_module_name, timeout)
        split_into_buckets([p for _, p in self.bagua_build_params()], 1)  # refuse what cannot be trained before anything is sent
        self.given_group, self.process_group = group, group.for_background()
        self._owns_group = self.process_group is not group
        settings = [f"algorithm {type(algorithm).__name__}{_plain_options(algorithm)}", f"buckets of {self.bucket_bytes} bytes"]
        settings += [f"broadcast_buffers={broadcast_buffers}"]
        comm = self.process_group.get_global_communicator()
        broadcast_state(module, optimizers, comm, self.parameters_to_ignore, settings)
        # The worker's connections are not for the training thread.
        self._buffer_group = group.sibling() if broadcast_buffers and self._buffers() and comm.nranks() > 1 else None
        if self._buffer_group is not None:
            self._buffer_group.get_global_communicator()
        self.bagua_algorithm = algorithm.reify(self.process_group)
        self.bagua_algorithm._context = weakref.ref(self)
        self._handles: list[Any] = []
        self.reset()
        self._handles.append(module.register_forward_pre_hook(OwnHook(self._forwarding())))
        for name, parameter in self.bagua_build_params():
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated(name)))
        for optimizer in self.bagua_optimizers:
            self._handles.append(optimizer.register_step_post_hook(self._stepped()))

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        module = self._module()
        assert module is not None, "the module's hooks and properties are the only way here"
        return module

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters that need a gradient and are not ignored, as ``named_parameters()`` names them (S2.1).

        Raises:
            NotImplementedError: a parameter gets sparse gradients.
        """
        sparse = {id(p): m for m in self.module.modules() if getattr(m, "sparse", False) for p in m.parameters(recurse=False)}
        parameters = [
            (name, p) for name, p in self.module.named_parameters() if p.requires_grad and name not in self.parameters_to_ignore
        ]
        for name, parameter in parameters:
            if id(parameter) in sparse:
                raise NotImplementedError(
                    f"parameter {name!r} of {sparse[id(parameter)]!r} gets sparse gradients, which cannot be communicated; use "
                    f"sparse=False or list it in module._bagua_params_and_buffers_to_ignore"
                )
        return parameters

    @property
    def bucket_bytes(self) -> int:
        """The size at which a bucket is closed."""
        return get_default_bucket_size() if self._bucket_bytes is None else self._bucket_bytes

    def reset(self) -> None:
        """Ask the algorithm for tensors, buckets, operations and hooks (S5); the state is not broadcast again."""
        algorithm = self.bagua_algorithm
        self._bagua_backend.wait_pending_comm_ops()
        with use_world(self.world):
            tensors = algorithm.init_tensors(self)
            self.bagua_buckets = algorithm.tensors_to_buckets(split_into_buckets(tensors, self.bucket_bytes), self._do_flatten)
            for bucket in self.bagua_buckets:
                bucket.backend = bucket.backend or self.kernel_backend
                algorithm.init_operations(self, bucket)
        self._bagua_backend.register_ordered_buckets(self.bagua_buckets)
        self._forward_pre_hook = algorithm.init_forward_pre_hook(self)
        self._backward_hook = algorithm.init_backward_hook(self)
        self._post_backward_hook = algorithm.init_post_backward_hook(self)
        self._post_step_hook = algorithm.init_post_optimizer_step_hook(self)

    def _begin_forward(self, input: Any) -> None:
        if not self.module.training or _inside_backward():  # checkpointing computes forwards anew
            return
        self._synchronizing = not self.skipping
        if self._in_backward:  # the last backward failed half-way
            self._in_backward = False
            self._bagua_backend.abandon_round()
        self.bagua_train_step_counter += 1
        if self.bagua_algorithm.need_reset():
            self.reset()
        if self._synchronizing:
            if self._buffer_group is not None and self.bagua_algorithm.ranks_in_step:
                # A graph that has saved a buffer must not take this for a change of the user's: data has no version.
                buffers = [buffer.data for buffer in self._buffers()]
                broadcast_coalesced(buffers, 0, self._buffer_group.get_global_communicator())
            self._forward_pre_hook(input)

    def will_broadcast_buffers(self) -> bool:
        """Return whether training forwards outside `no_sync` begin with a broadcast of buffers."""
        return self._broadcast_buffers and bool(self._buffers()) and self.bagua_algorithm.ranks_in_step

    def _buffers(self) -> list[torch.Tensor]:
        """Return the buffers that are broadcast, as they are now: modules may put others in place."""
        return [buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore]

    # Hooks on parameters and optimizers hold this object weakly: the collector cannot see through a parameter's C++ part.

    def _forwarding(self) -> Callable[[torch.nn.Module, Any], None]:
        this = weakref.ref(self)

        def hook(module: torch.nn.Module, input: Any) -> None:
            wrapped = this()
            if wrapped is not None:
                wrapped._begin_forward(input)

        return hook

    def _accumulated(self, name: str) -> Callable[[torch.Tensor], None]:
        this = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            wrapped = this()
            if wrapped is not None:
                wrapped._grad_accumulated(name, parameter)

        return hook

    def _stepped(self) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
        this = weakref.ref(self)

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            wrapped = this()
            if wrapped is not None and wrapped.module.training and wrapped._synchronizing:
                wrapped._post_step_hook(optimizer)

        return hook

    def _grad_accumulated(self, name: str, parameter: Any) -> None:
        if not self._synchronizing or not self.module.training:
            return
        if not self._in_backward:
            self._in_backward = True
            self._bagua_backend.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._graph_task_ended)
        self._backward_hook(name, parameter)

    def _graph_task_ended(self) -> None:
        """Go on to post-backward, at the end of the outermost backward.

        A reentrant checkpoint runs a backward inside one: then a node of the outer one is still being evaluated, and what
        follows waits until that node is done.
        """
        node = torch._C._current_autograd_node()
        if node is None:
            self._post_backward()
        else:
            queue = torch.autograd.Variable._execution_engine.queue_callback
            node.register_hook(lambda *_: queue(self._graph_task_ended))

    def _post_backward(self) -> None:
        self._in_backward = False
        self._bagua_backend.end_backward(self._find_unused_parameters)
        self._post_backward_hook()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip all communication of training forwards entered in this context, and of their backwards (S5)."""
        before, self.skipping = self.skipping, True
        try:
            yield
        finally:
            self.skipping = before

    def close(self) -> None:
        """Take the hooks off, end the background thread and give its connections up."""
        for handle in self._handles:
            handle.remove()
        self.bagua_algorithm.close()
        self._bagua_backend.close()
        if self._owns_group:
            self.process_group.close()
        if self._buffer_group is not None:
            self._buffer_group.close()


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _plain_options(algorithm: Algorithm) -> dict[str, Any]:
    """Return the numbers and strings that ``algorithm`` was made with; all ranks must have made theirs with the same."""
    options = {name: getattr(algorithm, name, None) for name in inspect.signature(type(algorithm)).parameters}
    return {name: value for name, value in options.items() if isinstance(value, (int, float, str))}

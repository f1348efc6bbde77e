"""Distributed training of one module: its buckets and the hooks that drive them (S2.1, S5)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from bagua_ref.algorithms.base import Algorithm, GlobalAlgorithmRegistry, TrainingContext
from bagua_ref.backends.base import KernelBackend
from bagua_ref.base.runtime import World, use_world
from bagua_ref.base.utils import OwnHook, OwnList, OwnName, inside_backward, uncompiled
from bagua_ref.buckets.optimizer_state import align_state
from bagua_ref.communicators.processes import refuse_in_child
from bagua_ref.data_parallel.guard import StepGuard, TrainedParameters, refuse_both, refuse_inside
from bagua_ref.data_parallel.hooks import (
    ForwardPasses,
    Reached,
    call_after_backward,
    trains,
)
from bagua_ref.data_parallel.parameters import Buffers, split_into_buckets
from bagua_ref.data_parallel.rounds import BUFFERS, PLAN, ModuleRounds
from bagua_ref.data_parallel.sharding import reshard
from bagua_ref.data_parallel.state_broadcast import (
    broadcast_state,
    refusing_together,
    warn_of_drift,
)
from bagua_ref.env import get_default_bucket_size
from bagua_ref.scheduling.engine import Engine
from bagua_ref.types import Group

__all__ = ["ModuleTraining", "Options"]

_PUBLISHED = ("bagua_algorithm", "bagua_optimizers", "bagua_buckets", "bagua_train_step_counter")
"""Attributes of a wrapped module, beside its name."""
_FAILED = "one of its backward passes failed after communication had begun"


@dataclass(frozen=True)
class Options:
    """Options of a training.

    Attributes:
        do_flatten: keep each bucket's tensors in one storage.
        backend: the kernels; None chooses as `bagua_ref.backends.get_backend`.
        find_unused_parameters: treat parameters that a backward pass does not reach as having zero
            gradients (S2.5).
        timeout: seconds without progress after which waiting raises; None: that of the group.
        bucket_bytes: the size at which a bucket is closed; None:
            `bagua_ref.env.get_default_bucket_size`.
        broadcast_buffers: broadcast the first rank's buffers before each training forward pass, not
            only when wrapping.
        without_forward: a backward pass's first gradient stands in for the beginning of a training
            forward pass.
        ignored: names of the module's parameters and buffers, and parameters of this or another
            module, that stay local to each rank.
    """

    do_flatten: bool = True
    backend: str | KernelBackend | None = None
    find_unused_parameters: bool = False
    timeout: float | None = None
    bucket_bytes: int | None = None
    broadcast_buffers: bool = False
    without_forward: bool = False
    ignored: tuple[str | torch.Tensor, ...] = ()


class ModuleTraining(TrainingContext):
    """The training of one module, which owns the hooks.

    Creating one is collective over ``group``: it makes a group of its own with the same ranks and
    broadcasts the first rank's state. A deep copy or pickle of the module is an ordinary module,
    without hooks.

    Args:
        module: the module to train, possibly compiled; gets hooks, as do its parameters.
        optimizers: their state is broadcast, and the algorithm is told of their steps.
        algorithm: makes the implementation.
        group: the ranks that train together.
        world: this rank's.
        options: of the training.
        check: raises if this rank cannot train the module; then all ranks raise.

    Attributes:
        buffers: the module's buffers.
        given_group: ``group``.
        parameters_to_ignore: names of parameters and buffers that are neither communicated nor
            broadcast.
        rounds: the rounds of communication, and what the ranks agree on before each.
        skipping: whether training forward passes that begin now skip communication, as in
            `no_sync`.
    """

    rounds: ModuleRounds

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        group: Group,
        world: World,
        options: Options,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.algorithm, self.options, self.given_group, self.world = (
            algorithm,
            options,
            group,
            world,
        )
        # hooks on the module inside a compiled one would be compiled
        self._called = weakref.ref(module)
        module = uncompiled(module)
        self._module = weakref.ref(module)
        kind = type(module).__name__
        self.bagua_module_name = module.__dict__.get("bagua_module_name", "")
        if not self.bagua_module_name:
            world.names[kind] += 1
            number = f"-{world.names[kind]}" if world.names[kind] > 1 else ""
            self.bagua_module_name = OwnName(f"{kind}{number}")
        self.bagua_optimizers = OwnList(optimizers)
        self.bagua_buckets = OwnList()
        self.steps_of_optimizers = [0] * len(optimizers)
        self._train_steps, self._pid = 0, os.getpid()
        self.kernel_backend = options.backend
        self.skipping = self._in_backward = False
        self._backward_begun = -1
        """The last backward pass that stood in for a forward pass."""
        self._passes = ForwardPasses(self._synchronize, synchronizing=not self.bagua_optimizers)
        timeout = group.timeout if options.timeout is None else options.timeout
        self.engine = Engine(
            world, self.bagua_module_name, timeout, GlobalAlgorithmRegistry.name_of(algorithm)
        )
        self.process_group = group.for_background()
        comm = self.process_group.get_global_communicator()
        with refusing_together(comm, group.ranks):
            refuse_inside(module, group)
            check()
            self._parameters = TrainedParameters(module, options.ignored)
            self._guard = StepGuard(self, self._parameters)
            self.parameters_to_ignore = self._parameters.ignored
            self._named, self.shards = self._parameters.named, self._parameters.shards
            split_into_buckets([p for _, p in self._named], 1)
            algorithm.check(self._named, self.bagua_optimizers)
        settings = {
            "algorithm": f"{type(algorithm).__name__}{algorithm.settings()}",
            "buckets": f"{self.bucket_bytes} bytes",
            "broadcast_buffers": str(options.broadcast_buffers),
            "find_unused_parameters": str(options.find_unused_parameters),
        }
        own = [given for given in algorithm.optimizers() if given not in optimizers]
        broadcast_state(
            module,
            [*optimizers, *own],
            comm,
            self.parameters_to_ignore,
            settings,
            group.ranks,
        )
        self.buffers = Buffers(module, self.parameters_to_ignore, group, options.broadcast_buffers)
        self.bagua_algorithm = algorithm.reify(self.process_group)
        self.bagua_algorithm._context = weakref.ref(self)
        self.rounds = ModuleRounds(
            self, group.sibling() if options.find_unused_parameters else None
        )
        if self.bagua_algorithm.traits.same_replicas:
            warn_of_drift(
                [parameter for _, parameter in self._named],
                self.bagua_optimizers,
                comm,
                group.ranks,
            )
        self.reset()
        self._handles: list[Any] = [
            *(
                # a part of the module may be loaded alone
                part.register_load_state_dict_post_hook(OwnHook(self._module_loaded))
                for part in module.modules()
            ),
            self.called_module.register_forward_pre_hook(OwnHook(self._forward_called)),
            self.called_module.register_forward_hook(OwnHook(self._forward_returned)),
            *self._parameters.hook(self),
        ]
        for optimizer in self.bagua_optimizers:
            self._handles.append(optimizer.register_step_pre_hook(OwnHook(self._begin_step)))
            self._handles.append(optimizer.register_step_post_hook(OwnHook(self._end_step)))
            self._handles.append(
                optimizer.register_load_state_dict_post_hook(OwnHook(self._optimizer_loaded))
            )

    def publish(self) -> None:
        """Set the attributes of `bagua_ref.distributed.BaguaModule` on the module, and begin to
        count.

        Unwrapped modules have none of these attributes. What was sent when wrapping is no traffic
        of training.
        """
        self.module.__dict__.update(
            _bagua=self,
            **{name: getattr(self, name) for name in ("bagua_module_name", *_PUBLISHED)},
        )
        self.world.engines[self.bagua_module_name] = self.engine
        self.world.meter = self.engine.meter
        self._guard.watch()
        self.engine.meter.bytes_before = self._bytes_sent()

    def withdraw(self) -> None:
        """Remove the attributes that `publish` set, but leave a name that the user gave."""
        attributes = self.module.__dict__
        for name in ("_bagua", *_PUBLISHED):
            attributes.pop(name, None)
        if isinstance(self.bagua_module_name, OwnName):
            attributes.pop("bagua_module_name", None)
        self.world.engines.pop(self.bagua_module_name, None)

    @property
    def bagua_train_step_counter(self) -> int:
        """Training forward passes begun since wrapping; a checkpoint restores the number."""
        return self._train_steps

    @bagua_train_step_counter.setter
    def bagua_train_step_counter(self, value: int) -> None:
        self._train_steps = self.module.__dict__["bagua_train_step_counter"] = value

    def reset(self) -> None:
        """Get tensors, buckets, operations and hooks from the algorithm (S5); the state is not
        broadcast again.
        """
        algorithm, options = self.bagua_algorithm, self.options
        without_gradient = [parameter for _, parameter in self._named if parameter.grad is None]
        self.engine.wait_pending_comm_ops()
        for optimizer in self.bagua_optimizers:
            align_state(optimizer)
        with use_world(self.world):
            tensors = split_into_buckets(algorithm.init_tensors(self), self.bucket_bytes)
            self.bagua_buckets[:] = algorithm.tensors_to_buckets(tensors, options.do_flatten)
            for bucket in self.bagua_buckets:
                bucket.backend = bucket.backend or self.kernel_backend
                algorithm.init_operations(self, bucket)
        self.engine.register_ordered_buckets(self.bagua_buckets)
        self._parameters.note_strides()
        self.rounds.plan()
        # else torch would not create the optimizer's state when it loads a checkpoint
        for parameter in without_gradient:
            parameter.grad = None
        self._forward_pre_hook = algorithm.init_forward_pre_hook(self)
        self._backward_hook = algorithm.init_backward_hook(self)
        if self.rounds.unused is not None:
            self._backward_hook = self.rounds.unused.noting(self._backward_hook)
        self._post_backward_hook = algorithm.init_post_backward_hook(self)
        self._post_step_hook = algorithm.init_post_optimizer_step_hook(self)

    def take_strides(self) -> None:
        """Make new buckets if the strides of parameters have changed, as by
        ``model.to(memory_format=...)``; collective where they have (S2.3).

        Raises:
            CommunicationError: they have not on all ranks.
            RuntimeError: the algorithm changes weights in the background, where they are.
        """
        if self._parameters.have_new_strides():
            self._parameters.check_new_strides(self.bagua_algorithm)
            self.rounds.announce(PLAN)
            self.reset()

    @property
    def bucket_bytes(self) -> int:
        """The size at which a bucket is closed."""
        return (
            get_default_bucket_size()
            if self.options.bucket_bytes is None
            else self.options.bucket_bytes
        )

    def _module_loaded(self, *_: object) -> None:
        self.loads += 1
        self.rounds.note_load()

    def _optimizer_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        align_state(optimizer)  # it may have been saved with other strides
        self.rounds.note_load()

    def _forward_called(self, module: torch.nn.Module, input: Any) -> None:
        if not trains(module):
            return
        refuse_both(self.given_group)
        if self.options.without_forward:
            return
        with self.rounds.aborting(RuntimeError):
            if self._parameters.hook_again():
                self.rounds.note_load()  # a rank alone may have other values now
        # Tensors made in a transform end with it.
        with (
            temporarily_clear_interpreter_stack()
            if peek_interpreter_stack() is not None
            else nullcontext()
        ):
            if torch.is_grad_enabled():
                self._begin_forward(input, not self.skipping)
            else:
                if self._in_backward:
                    self._abandon_failed_backward()
                self._passes.begin_without_gradients(not self.skipping)

    def _forward_returned(self, module: torch.nn.Module, input: Any, output: Any) -> None:
        if not self.options.without_forward and trains(module) and torch.is_grad_enabled():
            self._passes.end(output, not self.skipping)

    def _abandon_failed_backward(self) -> None:
        self._in_backward = False
        self.engine.abandon_round()
        if self.engine.half_done:
            self.rounds.abort(_FAILED)

    def _begin_forward(self, input: Any, synchronized: bool, in_backward: bool = False) -> None:
        refuse_in_child(self._pid)
        with self.rounds.aborting(RuntimeError):
            if in_backward:
                self._parameters.refuse_swapped(in_backward)
            self._passes.is_functional = not self._parameters.check()
        if self._passes.is_functional:
            if not self._guard.unstepped:
                self._passes.begin_functional(synchronized)
            return
        if self._in_backward:
            self._abandon_failed_backward()
        self.rounds.check_usable()
        self._passes.begin(synchronized, in_backward)
        self.bagua_train_step_counter = self._train_steps + 1
        self.engine.meter.step = self.engine.meter.steps + 1
        if synchronized:
            self.take_strides()
        if self.bagua_algorithm.need_reset():
            self.reset()
        self._guard.forward_begins()
        if synchronized:
            if self.buffers.group is not None and not in_backward:
                self._broadcast_buffers()
            self._forward_pre_hook(input)

    def _broadcast_buffers(self) -> None:
        if self.bagua_algorithm.traits.same_forwards:
            source = 0 if self.rounds.joining is None else self.rounds.announce(BUFFERS).active[0]
            self.buffers.broadcast(source, self.engine.meter)

    def will_broadcast_buffers(self) -> bool:
        """Return whether training forward passes outside `no_sync` begin with a broadcast of
        buffers.
        """
        return self.buffers.are_broadcast() and self.bagua_algorithm.traits.same_forwards

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        refuse_in_child(self._pid)
        if self.options.without_forward and self._in_backward and not inside_backward():
            raise RuntimeError(
                "a backward pass failed inside train(), so gradients are of this rank alone; leave"
                " the context"
            )
        self.rounds.check_usable()
        self._passes.forget_functional()
        self._guard.before_step(optimizer)

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        counts = self._guard.after_step(optimizer)
        before = self._guard.before
        follows = self.bagua_algorithm.traits.steps_follow_backward
        if not (before.gradients if follows else counts):
            return
        self.steps_of_optimizers[self.bagua_optimizers.index(optimizer)] += 1
        self.rounds.add_step(optimizer, self._guard.parameters, passed=True)
        self.engine.meter.count_step(optimizer is self.bagua_optimizers[-1])
        synchronizing = before.synchronized
        if not before.gradients:  # as where they did not come through backward()
            synchronizing = self.module.training and self._passes.synchronizing
        with self.rounds.aborting():
            (
                self._post_step_hook
                if synchronizing
                else self.bagua_algorithm.end_unsynchronized_step
            )(optimizer)
        if synchronizing:
            self.rounds.end_round()

    def _begin_backward(self, name: str, parameter: Any) -> bool:
        """Return whether the backward pass that delivers a gradient now is synchronized; if it is,
        begin its round.
        """
        refuse_in_child(self._pid)
        if self.rounds.unused is not None:
            self.rounds.unused.reached.add(name)
        reached, first_run = self._passes.reached, self._passes.gradient_arrives()
        if first_run is not None or self.options.without_forward or not self._guard.unstepped:
            self._stand_in_for_forward(first_run)
        if self._synchronizes_any_other() if reached is None else reached.synchronized:
            self._begin_round()
            return True
        self._keep_local(name, parameter, reached)
        return False

    def _keep_local(self, name: str, parameter: Any, reached: Reached | None) -> None:
        """Note a gradient that is not synchronized, or not yet."""
        bypassed = self._why_bypassed() if reached is None else None
        if reached is not None:
            reached.waiting.append((name, parameter))
        if bypassed is None or self.skipping:
            self._guard.gradient_arrives(parameter)
        else:
            self._guard.bypassed(
                f"the backward that reached parameter {name!r} {bypassed}", parameter
            )

    def _synchronizes_any_other(self) -> bool:
        """Return whether a backward pass that has come to no output of a forward pass is
        synchronized.
        """
        # Whether it runs under no_sync counts only if there was no forward pass.
        return (
            self._why_bypassed() is None
            and self._passes.synchronizing
            and (bool(self._guard.unstepped) or not self.skipping)
        )

    def _stand_in_for_forward(self, first_run: bool | None) -> None:
        """Begin a training forward pass that only a backward pass shows; ``first_run`` as from
        `ForwardPasses.gradient_arrives`.
        """
        if first_run is not None:
            self._begin_forward((), first_run, in_backward=True)
        elif self.options.without_forward and self.module.training:
            backward = torch._C._current_graph_task_id()
            if backward != self._backward_begun:
                self._backward_begun = backward
                self._begin_forward((), not self.skipping, in_backward=True)
        if (
            self.module.training
            and not self._guard.unstepped
            and (synchronized := self._passes.forget_functional()) is not None
        ):
            self._begin_forward((), synchronized, in_backward=True)

    def _begin_round(self) -> None:
        self._in_backward = True
        self.bagua_algorithm.passes += 1
        self.engine.meter.count_step(not self.bagua_optimizers)
        self.engine.begin_backward()
        call_after_backward(_BackwardEnd(self))

    def _synchronize(self, gradients: list[tuple[str, Any]]) -> None:
        """Synchronize a backward pass of which ``gradients`` have arrived."""
        self._begin_round()
        for name, parameter in gradients:
            self._backward_hook(name, self.shards.get(name, parameter))

    def _why_bypassed(self) -> str | None:
        """Return the reason that a backward pass that begins now cannot be synchronized; None if it
        can, or is not meant to be.
        """
        if not self.module.training:
            return "began while the module was in eval mode"
        if self._guard.unstepped or (
            not self.bagua_optimizers and not self.bagua_algorithm.in_forward
        ):
            return None
        return (
            "followed no training forward of the module, as when one of its children or methods is"
            " called instead of it"
        )

    def _post_backward(self) -> None:
        self._in_backward = False
        with self.rounds.aborting():
            if self.rounds.unused is not None and self.engine.round_begun:
                self.rounds.unused.agree()
            self.engine.end_backward(self.options.find_unused_parameters)
            self._post_backward_hook()
        self._parameters.align_gradients()
        self._guard.synchronized()
        self._passes.awaited = False
        self.rounds.end_round()

    def reshard(self) -> None:
        """If the module is sharded, let its next forward pass gather the weights anew, as they have
        changed.
        """
        if self.shards:
            reshard(self.module)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip all communication of training forward passes that begin in this context, and of
        their backward passes (S5).
        """
        before, self.skipping = self.skipping, True
        try:
            yield
        finally:
            self.skipping = before

    def metrics(self) -> dict[str, float | int]:
        """Return the metrics of `bagua_ref.distributed.BaguaModule.bagua_metrics`."""
        on_cpu = all(parameter.device.type == "cpu" for _, parameter in self._named)
        return (
            self.engine.meter.metrics(self._bytes_sent(), self.rounds.alone, on_cpu)
            | self.bagua_algorithm.metrics()
        )

    def _bytes_sent(self) -> float:
        return sum(
            group.unrounded_bytes
            for group in (self.process_group, self.buffers.group)
            if group is not None
        )

    def close(self) -> None:
        """Remove the hooks, end the background thread and close its connections."""
        for handle in self._handles:
            handle.remove()
        self._guard.unwatch()
        self.bagua_algorithm.close()
        self.engine.close()
        if self.process_group is not self.given_group:
            self.process_group.close()
        self.buffers.close()
        self.rounds.close()


class _BackwardEnd:
    """The end of a backward pass, which the autograd engine calls, or drops if the pass fails: then
    the other ranks need not wait until this one goes on, which it may never do.
    """

    def __init__(self, training: ModuleTraining) -> None:
        self._training, self._called = weakref.ref(training), False

    def __call__(self) -> None:
        self._called = True
        if (training := self._training()) is not None:
            training._post_backward()

    def __del__(self) -> None:
        training = None if self._called else self._training()
        if training is not None and (training.engine.half_done or training.engine.half_scheduled):
            training.rounds.abort(_FAILED)

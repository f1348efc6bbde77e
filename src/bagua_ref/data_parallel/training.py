"""Distributed training of one module: its buckets, and the hooks that run them (S2.1, S5)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.weak import TensorWeakRef

from bagua_ref.algorithms.base import Algorithm, GlobalAlgorithmRegistry, TrainingContext
from bagua_ref.backends.base import KernelBackend
from bagua_ref.base.runtime import World, use_world
from bagua_ref.base.utils import OwnHook, OwnList, OwnName, uncompiled
from bagua_ref.buckets.optimizer_state import align_state
from bagua_ref.communicators.processes import refuse_in_child
from bagua_ref.data_parallel.backward import (
    AbandonRound,
    Action,
    Backward,
    BeginForward,
    BeginRound,
    Deliver,
    State,
)
from bagua_ref.data_parallel.guard import StepGuard, TrainedParameters, refuse_both, refuse_inside
from bagua_ref.data_parallel.hooks import call_after_backward, queue_callback, trains
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

_PUBLISHED = ("bagua_algorithm", "bagua_optimizers", "bagua_buckets", "bagua_train_step_counter")
"""Attributes of a wrapped module, in addition to its name."""
_FAILED = "one of its backward passes failed after communication had begun"


@dataclass(frozen=True)
class Options:
    """Options of distributed training.

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
        without_forward: the first gradient of a backward pass counts as the start of a training
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
    """Distributed training of one module; owns the hooks.

    Creating one is collective over ``group``: it creates its own group of the same ranks and
    broadcasts the first rank's state. A deep copy or pickle of the module is an ordinary module,
    without hooks.

    Args:
        module: the module to train, possibly compiled; gets hooks, as do its parameters.
        optimizers: the optimizers, whose state is broadcast and whose steps are reported to the
            algorithm.
        algorithm: the algorithm, which creates the implementation.
        group: the ranks that train together.
        world: this rank's world.
        options: options of the training.
        check: function that raises if this rank cannot train the module; then all ranks raise.

    Attributes:
        buffers: the module's buffers.
        given_group: ``group``.
        parameters_to_ignore: names of parameters and buffers that are neither communicated nor
            broadcast.
        rounds: the rounds of communication, and the agreement of ranks before each.
        machine: state machine of backward passes and steps.
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
        self._marks = False
        """Whether the output of the last forward pass belongs to a training step."""
        self._reach = OwnHook(self._output_reached)
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
        self.machine = Backward(
            self.bagua_module_name,
            self.bagua_optimizers,
            stands_alone=not self.bagua_algorithm.in_forward,
            without_forward=options.without_forward,
        )
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
        """Set the attributes of `bagua_ref.distributed.BaguaModule` on the module, and start the
        counters.

        Unwrapped modules have none of these attributes. Bytes sent during wrapping are not counted.
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
        """Remove the attributes set by `publish`, except a name given by the user."""
        attributes = self.module.__dict__
        for name in ("_bagua", *_PUBLISHED):
            attributes.pop(name, None)
        if isinstance(self.bagua_module_name, OwnName):
            attributes.pop("bagua_module_name", None)
        self.world.engines.pop(self.bagua_module_name, None)

    @property
    def bagua_train_step_counter(self) -> int:
        """Number of training forward passes begun since wrapping; restored by checkpoints."""
        return self._train_steps

    @bagua_train_step_counter.setter
    def bagua_train_step_counter(self, value: int) -> None:
        self._train_steps = self.module.__dict__["bagua_train_step_counter"] = value

    def reset(self) -> None:
        """Rebuild tensors, buckets, operations and hooks from the algorithm (S5); the state is not
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
        """Rebuild the buckets if parameters have new strides, as after
        ``model.to(memory_format=...)``; collective if they have (S2.3).

        Raises:
            CommunicationError: strides have not changed on all ranks.
            RuntimeError: the algorithm averages weights in the background, so that buckets cannot
                be rebuilt.
        """
        if self._parameters.have_new_strides():
            self._parameters.check_new_strides(self.bagua_algorithm)
            self.rounds.announce(PLAN)
            self.reset()

    @property
    def bucket_bytes(self) -> int:
        """Size in bytes at which a bucket is closed."""
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
        # Tensors made in a transform end with it.
        with (
            temporarily_clear_interpreter_stack()
            if peek_interpreter_stack() is not None
            else nullcontext()
        ):
            with self.rounds.aborting(RuntimeError):
                if self._parameters.hook_again():
                    self.rounds.note_load()  # a rank alone may have other values now
                own = not torch.is_grad_enabled() or self._parameters.check()
            self._marks = own and torch.is_grad_enabled()
            if not own:
                self.machine.functional_forward_begins()
            elif not torch.is_grad_enabled():
                self._perform(self.machine.forward_without_gradients_begins())
            else:
                self._perform(self.machine.forward_begins(not self.machine.skipping), input)

    def _forward_returned(self, module: torch.nn.Module, input: Any, output: Any) -> None:
        if (
            not self.options.without_forward
            and trains(module)
            and self._marks
            and peek_interpreter_stack() is None
        ):
            mark = partial(self._reach, not self.machine.skipping)
            for tensor in _find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(mark)

    def _output_reached(self, synchronized: bool, gradients: Any) -> None:
        """Report to the state machine that a backward pass has reached the output of a forward
        pass; a hook of the output's autograd nodes.
        """
        self._perform(self.machine.output_reached(synchronized, queue_callback))

    def first_gradient(self, name: str, parameter: Any) -> bool:
        """Handle the first gradient of a backward pass; return whether the pass is synchronized.
        Not called once a synchronized pass is known.
        """
        refuse_in_child(self._pid)
        if self.rounds.unused is not None:
            self.rounds.unused.reached.add(name)
        actions = self.machine.gradient(
            name,
            parameter,
            lambda: TensorWeakRef(parameter.grad),
            training=self.module.training,
            task=torch._C._current_graph_task_id(),
            alike=self.bagua_algorithm.traits.same_replicas,
        )
        self._perform(actions)
        return self.machine.state is State.BACKWARD

    def _perform(self, actions: Sequence[Action], input: Any = ()) -> None:
        for action in actions:
            match action:
                case BeginForward(synchronized, in_backward):
                    self._begin_forward(input, synchronized, in_backward)
                case AbandonRound():
                    self.engine.abandon_round()
                    if self.engine.half_done:
                        self.rounds.abort(_FAILED)
                case BeginRound():
                    self.bagua_algorithm.passes += 1
                    self.engine.meter.count_step(not self.bagua_optimizers)
                    self.engine.begin_backward()
                    call_after_backward(_BackwardEnd(self))
                case Deliver(gradients):
                    for name, parameter in gradients:
                        self._backward_hook(name, self.shards.get(name, parameter))

    def _begin_forward(self, input: Any, synchronized: bool, in_backward: bool) -> None:
        refuse_in_child(self._pid)
        if in_backward:
            with self.rounds.aborting(RuntimeError):
                self._parameters.refuse_swapped(in_backward)
                self._parameters.check()
        self.rounds.check_usable()
        self.bagua_train_step_counter = self._train_steps + 1
        self.engine.meter.step = self.engine.meter.steps + 1
        if synchronized:
            self.take_strides()
        if self.bagua_algorithm.need_reset():
            self.reset()
        if synchronized:
            if (
                self.buffers.group is not None
                and not in_backward
                and self.bagua_algorithm.traits.same_forwards
            ):
                joins = self.rounds.joining is not None
                source = self.rounds.announce(BUFFERS).active[0] if joins else 0
                self.buffers.broadcast(source, self.engine.meter)
            self._forward_pre_hook(input)

    def will_broadcast_buffers(self) -> bool:
        """Return whether training forward passes outside `no_sync` begin with a broadcast of
        buffers.
        """
        return self.buffers.are_broadcast() and self.bagua_algorithm.traits.same_forwards

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        refuse_in_child(self._pid)
        self.rounds.check_usable()
        self._guard.before_step(optimizer)

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # With lr=0: torch.distributed.checkpoint lets an optimizer make its state by such a step.
        changes = any(group.get("lr") != 0 for group in optimizer.param_groups)
        stepped = self.machine.step_ends(optimizer, changes, self.module.training)
        follows = self.bagua_algorithm.traits.steps_follow_backward
        if not (stepped.followed if follows else stepped.counts):
            return
        self.steps_of_optimizers[self.bagua_optimizers.index(optimizer)] += 1
        self.rounds.add_step(optimizer, self._guard.parameters, passed=True)
        self.engine.meter.count_step(optimizer is self.bagua_optimizers[-1])
        with self.rounds.aborting():
            if stepped.synchronized:
                self._post_step_hook(optimizer)
            else:
                self.bagua_algorithm.end_unsynchronized_step(optimizer)
        if stepped.synchronized:
            self.rounds.end_round()

    def _post_backward(self) -> None:
        self.machine.backward_ends()
        with self.rounds.aborting():
            if self.rounds.unused is not None and self.engine.round_begun:
                self.rounds.unused.agree()
            self.engine.end_backward(self.options.find_unused_parameters)
            self._post_backward_hook()
        self._parameters.align_gradients()
        self.machine.round_ends()
        self.rounds.end_round()

    def reshard(self) -> None:
        """Discard gathered weights of a sharded module, because the weights have changed; the next
        forward pass gathers them again.
        """
        if self.shards:
            reshard(self.module)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context without communication for the training forward passes that begin in it, and for
        their backward passes (S5).
        """
        machine = self.machine
        before, machine.skipping = machine.skipping, True
        try:
            yield
        finally:
            machine.skipping = before

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
        """Remove the hooks, stop the background thread and close its connections."""
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
    """Callback for the end of a backward pass. The autograd engine drops it if the pass fails; then
    the rounds are aborted, so that other ranks do not wait for this one, which may never continue.
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

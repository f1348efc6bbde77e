"""Communication hooks for ``torch.nn.parallel.DistributedDataParallel`` that run the algorithms'
own bucket operations.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from bagua_ref.algorithms.base import Algorithm, GlobalAlgorithmRegistry, TrainingContext
from bagua_ref.algorithms.compressed_gradients import CompressedGradientsImpl
from bagua_ref.algorithms.power_sgd import PowerSGDAlgorithmImpl
from bagua_ref.backends.base import KernelBackend
from bagua_ref.base import runtime
from bagua_ref.base.memory import Layout, bytes_of
from bagua_ref.base.runtime import current_world, use_world
from bagua_ref.buckets.storage import register
from bagua_ref.data_parallel.rounds import AgreedRound, AgreedRounds
from bagua_ref.errors import CommunicationError, NotInitializedError
from bagua_ref.groups.communication import from_torch_group, init_process_group, is_initialized
from bagua_ref.scheduling.engine import Engine, Fact
from bagua_ref.scheduling.worker import BucketRun
from bagua_ref.types import Group

__all__ = ["DDPHookState", "ddp_comm_hook"]

_NAMES = ("gradient_allreduce", "bytegrad", "powersgd", "topk")
"""Algorithms that only average gradients, exactly or nearly."""


def ddp_comm_hook(
    name: str,
    *,
    process_group: Any = None,
    backend: str | KernelBackend | None = None,
    **options: Any,
) -> tuple[DDPHookState, Callable[[Any, Any], Any]]:
    """Return state and hook for ``DistributedDataParallel.register_comm_hook(state, hook)``, which
    replace DDP's averaging by the algorithm.

    Collective: every rank of the group calls it, after ``torch.distributed.init_process_group()``.
    The operations and their results are those of `bagua_ref.distributed.BaguaModule.with_bagua` for
    the same buckets. A hook sees no optimizer: t counts reductions, that is backward passes outside
    ``no_sync``.

    Args:
        name: "gradient_allreduce", "bytegrad", "powersgd" or "topk".
        process_group: DDP's group: a ``torch.distributed.ProcessGroup``, a
            `bagua_ref.communication.BaguaProcessGroup`, or None for all ranks.
        backend: the kernels; None chooses as `bagua_ref.backends.get_backend`.
        options: options of the algorithm.

    Raises:
        ValueError: there is no hook of this name, or an option is out of range.
        NotInitializedError: torch.distributed is not initialized.
        CommunicationError: ranks have different options.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    >>> state, hook = ddp_comm_hook("powersgd", matrix_approximation_rank=2, warmup_steps=10)
    >>> model.register_comm_hook(state, hook)
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> state.reductions
    1
    >>> bagua_ref.destroy_process_group(); dist.destroy_process_group()

    Source: communication hooks of ``torch.nn.parallel.DistributedDataParallel``.
    """
    if name not in _NAMES:
        raise ValueError(
            f"name={name!r} is no communication hook; there are {', '.join(map(repr, _NAMES))}"
        )
    algorithm = GlobalAlgorithmRegistry.get(name)(**options)
    if not is_initialized():
        if not dist.is_initialized():
            raise NotInitializedError(
                "call torch.distributed.init_process_group() before ddp_comm_hook()"
            )
        init_process_group()
    group = current_world().default_group if process_group is None else process_group
    if not hasattr(group, "for_background"):
        group = from_torch_group(group)
    assert group is not None, "it is initialized"
    return DDPHookState(name, algorithm, group.for_background(), backend), _hook


def _hook(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with types of its own
    """Average the gradients in a bucket of DDP."""
    return state.reduce(bucket)


class DDPHookState(TrainingContext):
    """The state of a communication hook; made by `ddp_comm_hook`.

    Attributes:
        algorithm: the algorithm with its options.
        bagua_algorithm: the implementation; has ``memories`` and ``factors`` under "powersgd" and
            "topk".
    """

    def __init__(
        self, name: str, algorithm: Algorithm, group: Group, backend: str | KernelBackend | None
    ) -> None:
        self.algorithm, self.process_group, self.kernel_backend = algorithm, group, backend
        self.bagua_module_name = f"DDP with {name}"
        self.bagua_optimizers, self.bagua_train_step_counter, self.shards = [], 0, {}
        self.steps_of_optimizers = [0]
        """Number of finished reductions, which algorithms count as steps."""
        self.world = current_world()
        self.bagua_algorithm = algorithm.reify(group)
        self.bagua_algorithm._context = weakref.ref(self)
        self.engine = cast("Engine", self)  # algorithms use only its `wait_pending_comm_ops`
        self._count_round = self.bagua_algorithm.init_post_backward_hook(self)
        self._engine = Engine(self.world, self.bagua_module_name, group.timeout, name)
        self.meter = self._engine.meter
        self._buckets: dict[int, _DDPBucket] = {}
        self._places: dict[torch.nn.Parameter, int] = {}
        self.rounds = _HookRounds(self, self._engine)
        options = Fact("{has} options of checksum {value}", zlib.crc32(repr(algorithm).encode()))
        if not self.rounds.alone:
            self.rounds.compare([options]).check()

    def __repr__(self) -> str:
        return f"DDPHookState({self.algorithm!r}, {self.reductions} reductions)"

    @property
    def buckets(self) -> list[list[str]]:
        """The parameter indices of each bucket in the last round; algorithm states use them as
        names.

        They are counted from 0 in the order in which DDP's first buckets have them: that of
        ``parameters()``, last one first.
        """
        return [known.names for _, known in sorted(self._buckets.items())]

    @property
    def reductions(self) -> int:
        """The number of backward passes with reduced gradients."""
        return self.steps_of_optimizers[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of reductions and the algorithm's state; error memories belong to this
        rank, so each rank saves its own.
        """
        return self.bagua_algorithm.state_dict()

    def load_state_dict(self, state: dict[str, Any], **options: Any) -> None:
        """Restore ``state``; call it on every rank, before or after ``register_comm_hook``. It does
        not communicate.

        Args:
            state: result of `state_dict` on the same rank, with the same number of ranks and the
                same model.
            options: ``drop_local=True`` loads the state of any rank without its memories.

        Raises:
            ValueError: the state is of another algorithm, version, model or rank.
        """
        self.bagua_algorithm.load_state_dict(state, **options)

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start averaging DDP's ``bucket`` in the background; return a future of its buffer."""
        self.rounds.check_usable()
        with use_world(self.world), torch.no_grad():
            if bucket.index() == 0:
                # returns at once: DDP has waited for the last round
                self._engine.wait_pending_comm_ops()
                self._engine.begin_round()
            try:
                ours = self._bucket_of(bucket)
                ours.receive(bucket)
                reduction: _Reduction = self._engine.schedule(
                    ours.bucket, partial(_Reduction, self, ours, bucket)
                )
            except Exception as error:
                self.rounds.fail(error)
                raise
            if bucket.is_last():
                self._buckets = {
                    index: known
                    for index, known in self._buckets.items()
                    if index <= bucket.index()
                }
        return reduction.future

    def end_round(self) -> None:
        """Count a finished round; the job of the last bucket calls this."""
        self._count_round()
        self.steps_of_optimizers[0] += 1
        self.meter.count_step(True)

    def _bucket_of(self, bucket: Any) -> _DDPBucket:
        """Return the counterpart of DDP's bucket, a new one if DDP has rebuilt its buckets."""
        parameters = bucket.parameters()
        # DDP's first buckets come in reverse order, with parameters in forward order, so this is
        # the order of S2.1.
        for parameter in reversed(parameters):
            self._places.setdefault(parameter, len(self._places))
        names = [str(self._places[parameter]) for parameter in parameters]
        known = self._buckets.get(bucket.index())
        if known is None or known.names != names or known.address != bucket.buffer().data_ptr():
            algorithm = self.bagua_algorithm
            if isinstance(algorithm, PowerSGDAlgorithmImpl):
                algorithm.enter([str(place) for place in range(len(self._places))])
            known = self._buckets[bucket.index()] = _DDPBucket(self, names, bucket)
        return known

    def wait_pending_comm_ops(self) -> None:
        """Do nothing: DDP itself waits for the futures."""


class _HookRounds(AgreedRounds):
    """The agreed rounds of a communication hook."""

    def __init__(self, state: DDPHookState, engine: Engine) -> None:
        super().__init__(
            state.process_group,
            state.bagua_module_name,
            engine.meter,
            remedy="Start again from a checkpoint",
        )
        self._state: DDPHookState = weakref.proxy(state)
        if not self.alone:
            engine.new_round = self.new_round

    def new_round(self) -> AgreedRound:
        """Return a new round, in which ranks agree on the number of reductions and the algorithm's
        facts.
        """
        facts = [
            Fact("{has} finished {value} reductions", self._state.reductions),
            *self._state.bagua_algorithm.facts(),
        ]
        return AgreedRound(self, facts)

    def digest(self) -> Fact | None:
        """Return a checksum of the factors, which must be equal on all ranks; DDP synchronizes the
        weights.
        """
        algorithm, checksum = self._state.bagua_algorithm, 0
        if not isinstance(algorithm, CompressedGradientsImpl):
            return None
        for _, factor in sorted(algorithm.factors.items()):
            checksum = zlib.crc32(bytes_of(factor.cpu().contiguous()).numpy().data, checksum)
        return Fact("{has} factors of checksum {value} after a state was loaded", checksum)


class _DDPBucket:
    """A bucket over the memory of DDP's bucket; a padded one has memory of its own.

    Args:
        state: state of the hook, whose algorithm appends the operations.
        names: names of the parameters.
        bucket: DDP's bucket.

    Attributes:
        address: address of DDP's buffer.
    """

    def __init__(self, state: DDPHookState, names: list[str], bucket: Any) -> None:
        self.names, self.address = names, bucket.buffer().data_ptr()
        self._gradients: dict[str, Tensor] = dict(zip(names, _gradients(bucket), strict=True))
        proxies = [self._proxy(name, state.bagua_module_name) for name in names]
        (self.bucket,) = state.bagua_algorithm.tensors_to_buckets([proxies], True)
        self.bucket.name, self.bucket.backend = str(bucket.index()), state.kernel_backend
        state.bagua_algorithm.init_operations(state, self.bucket)

    def _proxy(self, name: str, module_name: str) -> Tensor:
        def replace(proxy: Tensor, gradient: Tensor) -> None:
            self._gradients[name] = gradient

        return register(
            self._gradients[name].detach(),
            name,
            module_name,
            lambda proxy: self._gradients[name],
            replace,
        )

    def receive(self, bucket: Any) -> None:
        """Load the gradients of DDP's ``bucket``."""
        self._gradients = dict(zip(self.names, _gradients(bucket), strict=True))

    def store(self, flat: Tensor, gradients: list[Tensor]) -> None:
        """Copy the result to DDP's ``gradients``, unless the memory is shared."""
        if flat.data_ptr() != gradients[0].data_ptr():
            torch._foreach_copy_(gradients, [self._gradients[name] for name in self.names])


def _gradients(bucket: Any) -> list[Tensor]:
    """Return the gradients in DDP's ``bucket`` with their parameters' strides; DDP's own method
    assumes row-major order.
    """
    parameters, buffer = bucket.parameters(), bucket.buffer()
    parts = buffer.split([parameter.numel() for parameter in parameters])
    return [
        Layout.of(parameter).view(part) for parameter, part in zip(parameters, parts, strict=True)
    ]


class _Reduction(BucketRun):
    """The job that averages one of DDP's buckets.

    Args:
        state: the state of the hook.
        ours: counterpart of DDP's bucket.
        bucket: DDP's bucket.
        run: arguments of `bagua_ref.scheduling.worker.BucketRun`.

    Attributes:
        future: future of DDP's buffer, or of the error.
    """

    def __init__(self, state: DDPHookState, ours: _DDPBucket, bucket: Any, *run: Any) -> None:
        super().__init__(*run)
        self._state, self._ours = state, ours
        self._buffer, self._gradients, self._is_last = (
            bucket.buffer(),
            _gradients(bucket),
            bucket.is_last(),
        )
        device = self._buffer.device
        self._result: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )
        self.future = self._result.then(self._value)

    def __call__(self) -> None:
        super().__call__()
        if (error := self.error or self.errors.fatal) is not None:
            self._state.rounds.fail(error)
        with runtime.use_stream(self.bucket.stream, self._buffer.device):
            self._result.set_result(self._buffer)

    def run(self) -> None:
        """Run the operations, and store their result in DDP's bucket."""
        super().run()
        assert self.flat is not None, (
            "DDP has waited for the last round, so the bucket was free to be loaded"
        )
        with runtime.use_stream(self.bucket.stream, self._buffer.device):
            runtime.hold([self._buffer], self._buffer.device)
            self._ours.store(self.flat, self._gradients)
        if self._is_last:
            self._state.end_round()

    def _value(self, result: torch.futures.Future[Tensor]) -> Tensor:
        # an error that is raised here becomes the future's
        if (error := self.error or self.errors.fatal) is not None:
            raise CommunicationError(f"{self._state.bagua_module_name}: {error}") from error
        return result.value()

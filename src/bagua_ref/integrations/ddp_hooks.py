"""Communication hooks for ``torch.nn.parallel.DistributedDataParallel`` that run the algorithms' own bucket operations."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from bagua_ref.agreement import Agreement, Fact
from bagua_ref.algorithms.base import Algorithm, GlobalAlgorithmRegistry
from bagua_ref.algorithms.compressed_gradients import CompressedGradientsImpl
from bagua_ref.algorithms.power_sgd import PowerSGDAlgorithmImpl
from bagua_ref.backends.base import KernelBackend
from bagua_ref.base import streams
from bagua_ref.base.memory import Layout
from bagua_ref.base.runtime import current_world, use_world
from bagua_ref.base.utils import NotCopied
from bagua_ref.buckets.tensor import BaguaTensor
from bagua_ref.errors import CommunicationError, NotInitializedError
from bagua_ref.groups.communication import from_torch_group, init_process_group, is_initialized
from bagua_ref.observe.flight_recorder import explain
from bagua_ref.scheduling.worker import Worker
from bagua_ref.types import Group

__all__ = ["DDPHookState", "ddp_comm_hook"]

_NAMES = ("gradient_allreduce", "bytegrad", "powersgd", "topk")
"""Algorithms that replace gradients by something like their mean, and do nothing else."""


def ddp_comm_hook(
    name: str, *, process_group: Any = None, backend: str | KernelBackend | None = None, **options: Any
) -> tuple[DDPHookState, Callable[[Any, Any], Any]]:
    """Return state and hook for ``DistributedDataParallel.register_comm_hook(state, hook)``, so that DDP averages as the algorithm.

    Collective: every rank of the group calls it, after ``torch.distributed.init_process_group()``. The operations and their results
    are those of `bagua_ref.distributed.BaguaModule.with_bagua` for the same buckets. A hook sees no optimizer: t counts reductions,
    that is backward passes outside ``no_sync``.

    Args:
        name: "gradient_allreduce", "bytegrad", "powersgd" or "topk".
        process_group: DDP's: a ``torch.distributed.ProcessGroup``, a `bagua_ref.communication.BaguaProcessGroup`, or None for all
            ranks.
        backend: the kernels; None chooses as `bagua_ref.backends.get_backend`.
        options: the algorithm's.

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
        raise ValueError(f"name={name!r} is no communication hook; there are {', '.join(map(repr, _NAMES))}")
    algorithm = GlobalAlgorithmRegistry.get(name)(**options)
    if not is_initialized():
        if not dist.is_initialized():
            raise NotInitializedError("call torch.distributed.init_process_group() before ddp_comm_hook()")
        init_process_group()
    group = current_world().default_group if process_group is None else process_group
    if not hasattr(group, "for_background"):
        group = from_torch_group(group)
    assert group is not None, "it is initialized"
    return DDPHookState(name, algorithm, group.for_background(), backend), _hook


def _hook(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with types of its own
    """Average DDP's bucket."""
    return state.reduce(bucket)


class DDPHookState(NotCopied):
    """The state of a communication hook; made by `ddp_comm_hook`.

    Attributes:
        algorithm: the algorithm with its options.
        bagua_algorithm: the implementation; has ``memories`` and ``factors`` under "powersgd" and "topk".
    """

    def __init__(self, name: str, algorithm: Algorithm, group: Group, backend: str | KernelBackend | None) -> None:
        self.algorithm, self.process_group, self.kernel_backend = algorithm, group, backend
        self.bagua_module_name = f"DDP with {name}"
        self.bagua_optimizers: list[torch.optim.Optimizer] = []
        self.bagua_train_step_counter = 0
        self.shards: dict[str, Any] = {}
        self.steps_of_optimizers = [0]
        """The finished reductions, in the place of the steps that algorithms count."""
        self.world = current_world()
        self.bagua_algorithm = algorithm.reify(group)
        self.bagua_algorithm._context = weakref.ref(cast("Any", self))  # it offers what algorithms need of a training here
        self._count_round = self.bagua_algorithm.init_post_backward_hook(cast("Any", self))
        self._worker: Worker[_Begin | _Reduction] = Worker(self.world, "bagua_ref communication hook", group.timeout)
        self._buckets: dict[int, _DDPBucket] = {}
        self._places: dict[torch.nn.Parameter, int] = {}
        self._loaded = False
        self._broken = ""
        comm = group.get_global_communicator()
        self._agreement = Agreement(comm, group.ranks, self.bagua_module_name) if comm.nranks() > 1 else None
        if self._agreement is not None:
            options = Fact("{has} options of checksum {value}", zlib.crc32(repr(algorithm).encode()))
            self._agreement.begin([options], flag=False).check_facts()

    def __repr__(self) -> str:
        return f"DDPHookState({self.algorithm!r}, {self.reductions} reductions)"

    @property
    def buckets(self) -> list[list[str]]:
        """The places of the parameters in each bucket of the last round, which also name what the algorithm keeps.

        They are counted from 0 in the order in which DDP's first buckets have them: that of ``parameters()``, last one first.
        """
        return [known.names for _, known in sorted(self._buckets.items())]

    @property
    def reductions(self) -> int:
        """The backward passes whose gradients have been reduced."""
        return self.steps_of_optimizers[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the reductions so far, and what the algorithm keeps; memories belong to this rank, so each rank saves its own."""
        return self.bagua_algorithm.state_dict()

    def load_state_dict(self, state: dict[str, Any], **options: Any) -> None:
        """Continue from ``state``; call it on every rank, before or after ``register_comm_hook``. It does not communicate.

        Args:
            state: what `state_dict` returned on the same rank of as many ranks, for the same model.
            options: ``drop_local=True`` loads the state of any rank without its memories.

        Raises:
            ValueError: it is a state of another algorithm, version, model or rank.
        """
        self.bagua_algorithm.load_state_dict(state, **options)

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Begin to average DDP's ``bucket`` in the background; return a future of its buffer."""
        self.check_usable()
        with use_world(self.world), torch.no_grad():
            if bucket.index() == 0:
                self._worker.wait()  # for nothing: DDP has waited for the last round
                self._worker.submit(_Begin(self, self._compare()))
            try:
                reduction = _Reduction(self, self._bucket_of(bucket), bucket)
            except Exception as error:
                self._give_up(error)
                raise
            self._worker.submit(reduction)
            if bucket.is_last():
                self._buckets = {index: known for index, known in self._buckets.items() if index <= bucket.index()}
        return reduction.future

    def check_usable(self) -> None:
        """Raise CommunicationError if a round has failed."""
        if self._broken:
            raise CommunicationError(f"{self.bagua_module_name}: {self._broken}; start again from a checkpoint")

    def failing_for_good(self, function: Callable[[], None]) -> None:
        """Call ``function``, unless a round has failed; if this fails, let no reduction begin any more, on any rank."""
        if not self._broken:
            try:
                function()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        explain(error)
        self._broken = f"{type(error).__name__}: {error}"
        self.process_group.abort(why)

    def end_round(self) -> None:
        """Count a round; the last bucket's job calls this."""
        self._count_round()
        self.steps_of_optimizers[0] += 1

    def _compare(self) -> Callable[[], None]:
        """Return what compares the ranks before a round."""
        loaded, self._loaded = self._loaded, False
        facts = [Fact("{has} finished {value} reductions", self.reductions), *self.bagua_algorithm.facts()]
        agreement = self._agreement

        def compare() -> None:
            if agreement is not None:
                agreement.begin(facts, loaded).check(self._digest)

        return compare

    def _digest(self) -> Fact | None:
        """Return a checksum of what is equal on all ranks; weights are DDP's business."""
        checksum = 0
        if not isinstance(self.bagua_algorithm, CompressedGradientsImpl):
            return None
        for factor in self.bagua_algorithm.factors.written():
            checksum = zlib.crc32(factor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data, checksum)
        return Fact("{has} factors of checksum {value} after a state was loaded", checksum)

    def _bucket_of(self, bucket: Any) -> _DDPBucket:
        """Return our bucket for DDP's; a new one where DDP has made new buckets."""
        parameters = bucket.parameters()
        # DDP's first buckets come in reverse order, with parameters in forward order, so this is the order of S2.1.
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

    # The part of a training that algorithms use.

    @property
    def _bagua_backend(self) -> DDPHookState:
        return self

    def wait_pending_comm_ops(self) -> None:
        """Do nothing: DDP waits for the futures."""

    def note_load(self) -> None:
        """Have what is equal on all ranks compared in the next round."""
        self._loaded = True


class _DDPBucket:
    """DDP's bucket as a bucket of ours, in DDP's memory unless it needs padding.

    Args:
        state: whose algorithm appends the operations.
        names: of the parameters.
        bucket: DDP's.

    Attributes:
        address: where DDP's buffer is.
    """

    def __init__(self, state: DDPHookState, names: list[str], bucket: Any) -> None:
        self.names, self.address = names, bucket.buffer().data_ptr()
        self._gradients: dict[str, Tensor] = dict(zip(names, _gradients(bucket), strict=True))
        proxies = [self._proxy(name, state.bagua_module_name) for name in names]
        (self.bucket,) = state.bagua_algorithm.tensors_to_buckets([proxies], True)
        self.bucket.name, self.bucket.backend = str(bucket.index()), state.kernel_backend
        state.bagua_algorithm.init_operations(cast("Any", state), self.bucket)

    def _proxy(self, name: str, module_name: str) -> Tensor:
        def replace(proxy: Tensor, gradient: Tensor) -> None:
            self._gradients[name] = gradient

        proxy = cast("BaguaTensor", self._gradients[name].detach())
        return BaguaTensor.ensure_bagua_tensor(proxy, name, module_name, lambda proxy: self._gradients[name], replace)

    def load(self, bucket: Any) -> Tensor:
        """Return our flat tensor with the values of DDP's ``bucket``."""
        self._gradients = dict(zip(self.names, _gradients(bucket), strict=True))
        return self.bucket.load()

    def store(self, flat: Tensor, gradients: list[Tensor]) -> None:
        """Copy the result to DDP's ``gradients``, unless it is there."""
        if flat.data_ptr() != gradients[0].data_ptr():
            torch._foreach_copy_(gradients, [self._gradients[name] for name in self.names])


def _gradients(bucket: Any) -> list[Tensor]:
    """Return the gradients in DDP's ``bucket``, in their parameters' strides; its own method takes all of them to be row-major."""
    parameters, buffer = bucket.parameters(), bucket.buffer()
    parts = buffer.split([parameter.numel() for parameter in parameters])
    return [Layout.of(parameter).view(part) for parameter, part in zip(parameters, parts, strict=True)]


class _Begin:
    """The first job of a round: the comparison of the ranks."""

    def __init__(self, state: DDPHookState, compare: Callable[[], None]) -> None:
        self._state, self._compare = state, compare

    def __call__(self) -> None:
        self._state.failing_for_good(self._compare)

    def describe(self) -> str:
        return "agreement with the other ranks at the beginning of a round"


class _Reduction:
    """The job that averages one of DDP's buckets.

    Args:
        state: whose.
        ours: our bucket.
        bucket: DDP's.

    Attributes:
        future: gets DDP's buffer, or the error.
    """

    def __init__(self, state: DDPHookState, ours: _DDPBucket, bucket: Any) -> None:
        self._state, self._ours = state, ours
        self._buffer, self._gradients, self._is_last = bucket.buffer(), _gradients(bucket), bucket.is_last()
        device = self._buffer.device
        self._flat, self._ready = ours.load(bucket), streams.record(streams.current_stream(device))
        self._done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        self.future = self._done.then(self._result)

    def __call__(self) -> None:
        device = self._buffer.device
        self._state.failing_for_good(self._run)
        with streams.use_stream(self._ours.bucket.stream, device):
            self._done.set_result(self._buffer)

    def _run(self) -> None:
        bucket = self._ours.bucket
        bucket.execute(self._flat, self._ready)
        with streams.use_stream(bucket.stream, self._buffer.device):
            streams.hold([self._buffer], self._buffer.device)
            self._ours.store(self._flat, self._gradients)
        if self._is_last:
            self._state.end_round()

    def _result(self, done: torch.futures.Future[Tensor]) -> Tensor:
        self._state.check_usable()  # an error that is raised here becomes the future's
        return done.value()

    def describe(self) -> str:
        return f"bucket {self._ours.bucket.name!r}, operation {self._ours.bucket.running!r}"

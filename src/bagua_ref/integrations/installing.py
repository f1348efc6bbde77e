"""Averaging of gradients in models that torch has made parallel: DistributedDataParallel, FSDP2, and
HSDP of replicas that are each sharded by FSDP2 (S16).
"""

from __future__ import annotations

import io
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from bagua_ref.algorithms.base import Algorithm, GlobalAlgorithmRegistry
from bagua_ref.algorithms.state import check_names, check_tensors
from bagua_ref.backends import get_backend, get_codec
from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.codec import COMPRESSIBLE, Codec
from bagua_ref.base.memory import bytes_of
from bagua_ref.base.runtime import current_world, use_world
from bagua_ref.comm_ops import (
    CentralizedErrorFeedback,
    CentralizedLowPrecision,
    CentralizedScatterGather,
    ErrorMemory,
)
from bagua_ref.communicators.pipelining import Overlap
from bagua_ref.data_parallel.rounds import AgreedRounds, describe_texts
from bagua_ref.data_parallel.sharding import group_of, local
from bagua_ref.errors import CommunicationError, NotInitializedError
from bagua_ref.groups.process_group import init_process_group, is_initialized
from bagua_ref.integrations.ddp_hooks import ddp_comm_hook
from bagua_ref.observe.meter import Meter, Operation, use_meter
from bagua_ref.scheduling.engine import Fact
from bagua_ref.types import Group

__all__ = ["Installation", "install"]

_NAMES = ("gradient_allreduce", "bytegrad")
"""Algorithms for FSDP2 and HSDP."""
_VERSION = 1
"""Version of saved states."""
_REMEDY = "Start again from a checkpoint"
_OTHER = "{!r} has a communication hook of its own, which install() would replace; leave it out"
_AGAIN = "install() was called for this model before; call remove() of what it returned first"
_HSDP = (
    "for HSDP, call fully_shard(module, mesh=mesh['shard']) and install(...,"
    " process_group=mesh['replicate'])"
)


def install(
    model: nn.Module,
    name: str,
    process_group: Any = None,
    *,
    backend: str | KernelBackend | None = None,
    **options: Any,
) -> Installation:
    """Install an algorithm as the gradient averaging of a model that torch has made parallel (S16).

    Collective: every rank calls it, once per model, after the model was made parallel. Nothing is
    wrapped, and the training loop stays as it is.

    - ``DistributedDataParallel`` averages as by `bagua_ref.ddp_comm_hook` (S16.1).
    - FSDP2: each module that ``fully_shard`` was called for, a unit, reduce-scatters in compressed
      chunks (S16.2, S16.3).
    - HSDP: call ``fully_shard`` with the mesh of the shards alone, and pass the replicas as
      ``process_group``. They average their shards in compressed chunks (S16.4).

    Args:
        model: contains one DistributedDataParallel, or modules that ``fully_shard`` was called for.
        name: "gradient_allreduce" or "bytegrad"; for DDP also "powersgd" or "topk".
        process_group: HSDP's replicas, as a torch ProcessGroup, a DeviceMesh of one dimension, or a
            `bagua_ref.communication.BaguaProcessGroup`; None for FSDP2 and DDP.
        backend: the kernels; None chooses as `bagua_ref.get_backend`.
        options: options of the algorithm; with FSDP2 without ``hierarchical`` and
            ``average=False``.

    Raises:
        ValueError: a model, name, group or option that is not supported. Like the errors below, it
            comes before anything has been changed.
        TypeError: the model is not parallel, or it is sharded by FSDP1; or a codec is to compress
            float64.
        RuntimeError: it was called for this model before, the model has a hook of its own, or this
            torch lacks a method of FSDP2.
        NotInitializedError: torch.distributed is not initialized.
        CommunicationError: ranks differ; the message, on every rank, says in what.

    >>> import torch.distributed as dist
    >>> from torch.distributed.fsdp import fully_shard
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = fully_shard(torch.nn.Linear(8, 8))
    >>> installation = bagua_ref.install(model, "bytegrad", compression="MXFP8")
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> installation.remove()
    >>> bagua_ref.destroy_process_group(); dist.destroy_process_group()

    Source: ``register_comm_hook`` of torch's DistributedDataParallel, ``set_custom_reduce_scatter``
    and ``set_all_reduce_hook`` of its FSDPModule.
    """
    units = _find_units(model)
    if not is_initialized():
        if not dist.is_initialized():
            raise NotInitializedError("call torch.distributed.init_process_group() first")
        init_process_group()
    label = f"{type(model).__name__} with {name}"
    meter, rounds = Meter(current_world(), label), dict[tuple[int, ...], AgreedRounds]()

    def connect(process_group: Any) -> tuple[int, ...]:
        group = group_of(process_group)
        if group.ranks not in rounds:
            rounds[group.ranks] = AgreedRounds(group.sibling(), label, meter, remedy=_REMEDY)
        return tuple(group.ranks)

    for unit in units:
        unit.ranks = connect(unit.torch_group)
    settings = {"name": repr(name), **{key: repr(value) for key, value in sorted(options.items())}}
    settings["process_group"] = "None" if process_group is None else "ranks"
    replicas: tuple[int, ...] | None = None
    error: Exception | None = None
    try:
        if process_group is not None:
            replicas = connect(process_group)
        for unit in units:
            settings[unit.name] = unit.check(name, options, replicas)
        if isinstance(units[0], _Shards):
            options = {**options, "hierarchical": False}
        algorithm: Any = GlobalAlgorithmRegistry.get(name)(**options)
        kernels, codec = get_backend(backend, units[0].device), None
        if compression := getattr(algorithm, "compression", None):
            codec = get_codec(compression, kernels)
            if codec.biased and not algorithm.error_feedback:
                warnings.warn(
                    f"{algorithm!r} loses what its codec rounds, and training may not converge;"
                    " pass error_feedback=True",
                    stacklevel=2,
                )
            if wide := set.union(*(unit.dtypes for unit in units)) - {*COMPRESSIBLE}:
                raise TypeError(
                    f"compression={compression!r} takes float16, bfloat16 or float32, and there are"
                    f" gradients of {', '.join(map(str, wide))}"
                )
    except Exception as refusal:
        error = refusal
    for agreed in rounds.values():
        error = _compared(agreed, settings, error)
    if error is not None:
        raise error
    if isinstance(units[0], _Replicated):
        meter = units[0].set(name, rounds[units[0].ranks].group, backend, options)
    else:
        feedback = getattr(algorithm, "error_feedback", False)
        names = tuple(unit.name for unit in units)
        for place, unit in enumerate(units):
            fact = Fact("{is} about to reduce {value}", place, names)
            agreed = rounds[replicas or unit.ranks]
            unit.set(agreed, fact, kernels, codec, feedback, replicas is not None)
    return Installation(algorithm, meter, [agreed.group for agreed in rounds.values()], units)


class Installation:
    """Handle of an algorithm installed in a model that torch has made parallel; `bagua_ref.install`
    returns it.

    ``torch.distributed.checkpoint`` saves and loads it beside the model, as in
    ``save({"model": model, "bagua": installation})``; training then goes on exactly where it was.

    Attributes:
        algorithm: the algorithm with its options.
        removed: whether `remove` was called.
    """

    def __init__(
        self, algorithm: Algorithm, meter: Meter, groups: list[Group], units: list[Any]
    ) -> None:
        self.algorithm, self.removed = algorithm, False
        self._meter, self._groups, self._units = meter, groups, units
        meter.bytes_before = self._bytes()  # bytes of the comparison of settings do not count

    def __repr__(self) -> str:
        text = f"Installation({self.algorithm!r}{', removed' if self.removed else ''})"
        for unit in self._units if not self.removed else ():
            sent, plain = unit.costs()
            text += f"\n  {unit.name}: {sent:,.0f} bytes a backward pass{unit.so_far}"
            text += f", {sent / plain:.0%} of torch's {plain:,.0f}" if plain else ""
        return text

    @property
    def reductions(self) -> int:
        """Number of backward passes with reduced gradients since installation."""
        return self._meter.steps

    def metrics(self) -> dict[str, float | int]:
        """Return the counts of this rank, named as in
        `bagua_ref.distributed.BaguaModule.bagua_metrics`; a step is a synchronized backward pass.

        "bytes_sent_by_torch" is what torch would have sent instead.
        """
        alone = all(len(group.ranks) == 1 for group in self._groups)
        found = self._meter.metrics(self._bytes(), alone, self._units[0].device.type == "cpu")
        plain = sum(unit.costs()[1] * unit.reductions for unit in self._units)
        return {**found, "bytes_sent_by_torch": round(plain)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in addition to model and optimizers. State of this
        rank alone, such as error memories, is stored under the rank's number; later passes do not
        modify it.
        """
        return {self._own: {unit.name: unit.state() for unit in self._units}}

    def load_state_dict(self, state: Mapping[str, Any], drop_local: bool = False) -> None:
        """Restore ``state``; call it on every rank. It does not communicate.

        Args:
            state: result of `state_dict`; with error memories, on the same rank of the same number
                of ranks.
            drop_local: start with error memories of zero, and load the state of any rank of any
                number of ranks.

        Raises:
            ValueError: the state is of another algorithm, version, model or rank; nothing has been
                loaded.
        """
        if self._own not in state and not drop_local:
            raise ValueError(
                f"state is that of {', '.join(state)}, and this is {self._own}: load what this rank"
                " saved itself, or call load_state_dict(state, drop_local=True) to begin with error"
                " memories of zero"
            )
        saved = next(iter(state.values())) if drop_local else state[self._own]
        check_names("units", [*saved], [unit.name for unit in self._units])
        for load in [unit.loading(saved[unit.name], drop_local) for unit in self._units]:
            load()

    def _bytes(self) -> float:
        return sum(group.unrounded_bytes for group in self._groups)

    @property
    def _own(self) -> str:
        """The key of this rank's state in a checkpoint; all ranks share one if their states are
        equal.
        """
        world, name = current_world().identity, GlobalAlgorithmRegistry.name_of(self.algorithm)
        is_local = any(unit.is_local for unit in self._units)
        whose = f"rank {world.rank} of {world.world_size}" if is_local else "every rank"
        return f"{name}, version {_VERSION}, {whose}"

    def remove(self) -> None:
        """Restore torch's own averaging; every rank calls this, outside of backward passes.

        `bagua_ref.install` can then be called for the model again.
        """
        for unit in self._units if not self.removed else ():
            unit.unset()
        self.removed = True


def _hook(slot, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with types of its own
    """Average the gradients in a bucket of DDP."""
    if slot.state is None:  # removed, but torch cannot unregister a hook
        return allreduce_hook(slot.torch_group, bucket)
    return slot.state.reduce(bucket)


class _Replicated:
    """Installation in a DistributedDataParallel, as one unit."""

    is_local, reductions, ranks, so_far = False, 0, (0,), " so far"

    def __init__(self, name: str, ddp: DistributedDataParallel) -> None:
        self.name, self._ddp, self.torch_group = name, ddp, ddp.process_group
        self._parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        self.dtypes, self.device = {p.dtype for p in self._parameters}, self._parameters[0].device
        hooks: list[tuple[Any, Any]] = ddp._comm_hooks
        if any(hook is not _hook for hook, _ in hooks):
            raise RuntimeError(_OTHER.format(name))
        self._slot = hooks[0][1] if hooks else SimpleNamespace(state=None, torch_group=None)
        if self._slot.state is not None:
            raise RuntimeError(_AGAIN)

    def check(
        self, name: str, options: dict[str, Any], process_group: tuple[int, ...] | None
    ) -> str:
        """Raise ValueError for a group other than DDP's; return an empty string, as there are no
        settings to compare between ranks.
        """
        if process_group is not None and {*process_group} != {*self.ranks}:
            raise ValueError(
                f"process_group has ranks {[*process_group]}, and DistributedDataParallel"
                f" {[*self.ranks]}; leave it out"
            )
        return ""

    def set(
        self, name: str, group: Group, backend: str | KernelBackend | None, options: dict[str, Any]
    ) -> Meter:
        """Register the hook, or reuse that of a removed installation; return its meter."""
        self._state, _ = ddp_comm_hook(name, process_group=group, backend=backend, **options)
        self.is_local = bool(self._state.bagua_algorithm.rank_state)
        self._slot.state, self._slot.torch_group = self._state, self.torch_group
        if not self._ddp._comm_hooks:
            self._ddp.register_comm_hook(self._slot, _hook)
        return self._state.meter

    def unset(self) -> None:
        """Make the hook compute the plain mean."""
        self._slot.state = None

    def costs(self) -> tuple[float, float]:
        """Return the bytes that this rank has sent per backward pass, and those of torch's own
        averaging.
        """
        meter, n = self._state.meter, len(self.ranks)
        self.reductions = meter.steps
        sent = self._state.process_group.unrounded_bytes - meter.bytes_before
        return sent / max(meter.steps, 1), 2 * (n - 1) / n * sum(p.nbytes for p in self._parameters)

    def state(self) -> bytes:
        """Return the hook's state as one blob: DDP makes its buckets in the first passes, so a
        loading program has none yet.
        """
        torch.save(self._state.state_dict(), saved := io.BytesIO())
        return saved.getvalue()

    def loading(self, state: bytes, drop_local: bool) -> Callable[[], None]:
        """Validate ``state``; return a callback that restores it."""
        values = torch.load(io.BytesIO(state), weights_only=True)
        return partial(self._state.load_state_dict, values, drop_local=drop_local)


class _Shards:
    """Installation in a unit of FSDP2: the parameters of one call of ``fully_shard``, reduced
    together (S16.2).

    Args:
        name: the module's name.
        module: the module, or the first of several.
        groups: FSDP2's groups of its parameters: one, unless they are on several meshes.

    Attributes:
        ranks: the ranks over which the parameters are sharded.
        reductions: number of reductions.
    """

    is_local, reductions, ranks, so_far = False, 0, (0,), ""
    _memory: ErrorMemory | None = None

    def __init__(self, name: str, module: Any, groups: Sequence[Any]) -> None:
        self.name, self._module, self._groups, self._params = name, module, groups, groups[0]
        self.device, self._mesh = self._params.device, self._params.mesh_info
        self._shard_group = getattr(self._mesh, "shard_process_group", None)
        self.torch_group = self._shard_group or self._mesh.replicate_process_group
        for params in groups:
            hook, comm = (
                getattr(params, name, None) for name in ("_all_reduce_hook", "_reduce_scatter_comm")
            )
            if isinstance(comm, _Shards) or isinstance(getattr(hook, "__self__", None), _Shards):
                raise RuntimeError(_AGAIN)
            if hook is not None or type(comm).__name__ not in ("NoneType", "DefaultReduceScatter"):
                raise RuntimeError(_OTHER.format(name))

    @property
    def _trained(self) -> list[Any]:
        """FSDP2's objects for the parameters that require a gradient."""
        return [p for p in self._params.fsdp_params if p.sharded_param.requires_grad]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of reduced gradients."""
        policy = self._params.mp_policy
        reduced = policy.reduce_dtype or policy.param_dtype
        return {reduced or p.sharded_param.dtype for p in self._trained}

    def check(
        self, name: str, options: dict[str, Any], process_group: tuple[int, ...] | None
    ) -> str:
        """Validate the settings; return those that must be equal on all ranks.

        Raises:
            ValueError: a setting that S16.5 excludes.
            RuntimeError: this torch lacks a method.
        """
        methods = ["set_custom_reduce_scatter" if process_group is None else "set_all_reduce_hook"]
        methods += ["set_reduce_scatter_unused_params"] if options.get("error_feedback") else []
        for method in methods:
            if not hasattr(FSDPModule, method):
                raise RuntimeError(
                    f"install() calls FSDPModule.{method}, which torch {torch.__version__} lacks;"
                    " use a newer one"
                )
        what, mesh = f"{self.name!r} is sharded", self._mesh.mesh
        dtypes = sorted({str(p.sharded_param.dtype) for p in self._trained})
        shared = [rank for rank in self.ranks if rank in (process_group or ())]
        refusals = {
            f"name={name!r} cannot reduce shards; for FSDP2 and HSDP, there are"
            f" {', '.join(map(repr, _NAMES))}": name not in _NAMES,
            "hierarchical=True is for DistributedDataParallel; leave it out": options.get(
                "hierarchical"
            ),
            "average=False is for DistributedDataParallel; leave it out, as FSDP2 takes the"
            " mean": not options.get("average", True),
            f"{what} over several meshes; shard it over one": len(self._groups) > 1,
            f"{what} over a mesh of {mesh.ndim} dimensions; {_HSDP}": mesh.ndim > 1,
            f"{self.name!r} is replicated; use DistributedDataParallel": self._shard_group is None,
            f"{what} by fully_shard after its parameters had become DTensors, as tensor parallelism"
            " makes them; leave its communication to torch": any(
                p.is_dtensor for p in self._params.fsdp_params
            ),
            f"{what} with parameters of {' and '.join(dtypes)}; call fully_shard for modules of one"
            " dtype": len(dtypes) > 1,
            f"{what} over ranks {shared}, which process_group has, too, though their shards differ;"
            f" {_HSDP}": len(shared) > 1,
        }
        for refusal, applies in refusals.items():
            if applies:
                raise ValueError(refusal)
        shapes = [[*p.padded_sharded_param_size] for p in self._trained]
        return f"{shapes} {' '.join(map(str, self.dtypes))}"

    def set(
        self,
        rounds: AgreedRounds,
        fact: Fact,
        kernels: KernelBackend,
        codec: Codec | None,
        feedback: bool,
        replicas: bool,
    ) -> None:
        """Register this unit as FSDP2's reduce-scatter or, with ``replicas``, `average` as its
        all-reduce hook.

        Args:
            rounds: agreed rounds of the communicating ranks.
            fact: fact that names this unit.
            kernels: the kernel backend.
            codec: codec of chunks; None: no compression.
            feedback: whether there is an error memory.
            replicas: whether all ranks have the same shard.
        """
        self._rounds, self._fact, self._replicas = rounds, fact, replicas
        self._kernels, self._codec, self.is_local = kernels, codec, feedback
        self._comm, self._world = rounds.group.get_global_communicator(), current_world()
        self._n = self._comm.nranks()
        if self._replicas:
            self._module.set_all_reduce_hook(self.average)
        else:
            self._default = self._params._reduce_scatter_comm
            self._module.set_custom_reduce_scatter(self)
        if self.is_local:  # the memory's layout must not depend on which parameters are used
            self._unused = self._params.reduce_scatter_unused_params
            self._module.set_reduce_scatter_unused_params(True, recurse=False)

    def unset(self) -> None:
        """Restore FSDP2's own reduction."""
        if self._replicas:
            self._module.set_all_reduce_hook(None)
        else:
            self._module.set_custom_reduce_scatter(self._default)
        if self.is_local:
            self._module.set_reduce_scatter_unused_params(self._unused, recurse=False)

    def allocate(self, size: Sequence[int], **kind: Any) -> Tensor:
        """Allocate a tensor for FSDP2's input or output."""
        return torch.empty(*size, **kind)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *, op: Any, **_: Any) -> None:
        """Reduce-scatter FSDP2's input, which has one row per rank (S16.2, S16.3)."""
        n, rank, size = self._n, self._comm.rank(), output_tensor.numel()
        average = op == dist.ReduceOp.AVG
        with self._agreed(input_tensor):
            if not average and op != dist.ReduceOp.SUM:
                raise ValueError(
                    f"{self.name!r} is to be reduced by {op}, and only by the mean or the sum can it"
                    " be; leave out set_gradient_divide_factor(), and scale the loss instead"
                )
            # nothing is sent to oneself, so nothing is compressed
            rows = input_tensor if n == 1 else self._exchanged(input_tensor)
            self._kernels.reduce_chunks_(rows, n, target_chunk=rank, average=average)
            output_tensor.copy_(rows[rank * size : (rank + 1) * size])

    def _exchanged(self, x: Tensor) -> Tensor:
        """Exchange rows by all-to-all; return this rank's row of every rank's ``x``, as decoded."""
        n, codec = self._n, self._codec
        if codec is None:
            self._comm.alltoall(x, rows := torch.empty_like(x))
            return rows
        memory, values = self._memory_for(x.numel()), x.float()
        if memory is not None:
            values = values + memory.worker
        size = n * codec.payload_bytes(x.numel() // n, torch.float32)
        sent, payload = (torch.empty(size, dtype=torch.uint8, device=x.device) for _ in range(2))
        compress = codec.compress_in_steps(values, n, out=sent)
        decompress = codec.decompress_in_steps(payload, n, out=(rows := torch.empty_like(values)))
        self._comm.alltoall(sent, payload, Overlap(compress, decompress))
        if memory is not None:
            codec.decompress(sent, n, out=(own := torch.empty_like(values)))
            left = values - own
            memory.restore((torch.where(left.isnan(), memory.worker, left), memory.server))
        return rows

    def average(self, shard: Tensor) -> None:
        """Average FSDP2's flat ``shard`` over the replicas, in place (S16.4)."""
        args = self._comm, self._kernels
        with self._agreed(shard):
            x = nn.functional.pad(shard, (0, -shard.numel() % self._n))
            memory = self._memory_for(shard.numel())
            if self._codec is None:
                CentralizedScatterGather(*args, average=True)(x)
            elif memory is None:
                CentralizedLowPrecision(*args, self._codec, average=True)(x)
            else:
                CentralizedErrorFeedback(*args, self._codec, True, memory)(x)
            shard.copy_(x[: shard.numel()])

    @contextmanager
    def _agreed(self, x: Tensor) -> Iterator[None]:
        """Context of one reduction of ``x``, on which all ranks agree first."""
        rounds, meter = self._rounds, self._rounds.meter
        rounds.check_usable()
        meter.rounds = max(meter.rounds, self.reductions + 1)
        with (
            use_world(self._world),
            use_meter(meter),
            torch.no_grad(),
            rounds.aborting(),
            meter.timing("wait_seconds", f"bagua_ref::{rounds.name}/{self.name}"),
        ):
            if not rounds.alone:
                rounds.compare(self._facts(x)).check()
                meter.steps_in_agreement = meter.steps
            with Operation("average" if self._replicas else "reduce-scatter", self.name, x.nbytes):
                yield
        self.reductions += 1
        if self.reductions > meter.steps:
            meter.count_step(True)

    def _facts(self, x: Tensor) -> list[Fact]:
        facts = [
            self._fact,
            Fact("{has} reduced it {value} times", self.reductions),
            Fact("{has} {value} bytes of gradients for it", x.nbytes),
        ]
        if self._replicas and not self.reductions:  # nothing would ever make them equal
            checksum = 0
            for p in self._params.fsdp_params:
                shard = bytes_of(local(p.sharded_param).detach().cpu().contiguous())
                checksum = zlib.crc32(shard.numpy().data, checksum)
            facts.append(Fact("{has} weights of checksum {value} in it", checksum))
        return facts

    @property
    def _elements(self) -> int:
        """The elements of this rank's flat shard, with FSDP2's padding."""
        return sum(p.padded_sharded_param_size.numel() for p in self._trained)

    def costs(self) -> tuple[float, float]:
        """Return the bytes that this rank sends per backward pass, and those of torch's own
        reduction.
        """
        n, elements = self._n, self._elements
        chunk = -(-elements // n) if self._replicas else elements
        (dtype,) = self.dtypes or {torch.float32}
        sent = plain = chunk * dtype.itemsize
        if self._codec is not None:
            is_wide = self.is_local or not self._replicas
            sent = self._codec.payload_bytes(chunk, torch.float32 if is_wide else dtype)
        messages = (n - 1) * (1 + self._replicas)
        return messages * sent, messages * plain

    def _memory_for(self, numel: int | None = None) -> ErrorMemory | None:
        """Return the error memory for ``numel`` elements (None: not checked); it is reset when the
        set of trained parameters changes.
        """
        if not self.is_local:
            return None
        n, filled = self._n, self._elements * (1 if self._replicas else self._n)
        if numel not in (None, filled):
            raise ValueError(
                f"{self.name!r} has {numel} elements of gradients, and its error memory {filled};"
                " leave set_reduce_scatter_unused_params(True) as it is"
            )
        if self._memory is None or self._memory.filled != filled:
            self._memory = ErrorMemory(filled, -(-filled // n) * n, n, self.device)
        return self._memory

    def state(self) -> dict[str, Tensor]:
        """Return the error memories; they are zeros before the first pass."""
        memory = self._memory_for()
        return {} if memory is None else {"worker": memory.worker, "server": memory.server}

    def loading(self, state: Any, drop_local: bool) -> Callable[[], None]:
        """Validate ``state``; return a callback that restores it. Raise ValueError for another
        unit's state.
        """
        memory, kept = self._memory_for(), None
        if not drop_local:
            check_tensors(f"error memories of {self.name!r}", state, self.state())
            if memory is not None:
                kept = state["worker"].clone(), state["server"].clone()

        def load() -> None:
            if memory is not None:
                memory.restore(kept)

        return load


def _find_units(model: nn.Module) -> list[Any]:
    """Return the distinct units of a model.

    Raises:
        TypeError: there is none, or one of FSDP1.
        ValueError: they are of different kinds.
        RuntimeError: an installation or another hook is there.
    """
    found: dict[int, Any] = {}
    for path, module in model.named_modules():
        # as without torch.compile, so that states can be loaded with or without it
        name = ".".join(part for part in path.split(".") if part != "_orig_mod") or "(root)"
        if isinstance(module, FullyShardedDataParallel):
            raise TypeError(
                f"{name!r} is sharded by FullyShardedDataParallel (FSDP1), which has no place for"
                " other communication; use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        if isinstance(module, DistributedDataParallel):
            found[id(module)] = _Replicated(name, module)
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # older versions have one group
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            if groups[0] is not None:
                found.setdefault(id(groups[0]), _Shards(name, module, groups))
    kinds = [type(unit) for unit in found.values()]
    if not kinds:
        raise TypeError(
            f"model, a {type(model).__name__}, must contain a DistributedDataParallel, or modules"
            " with parameters that fully_shard (FSDP2) was called for; a plain module has"
            " with_bagua()"
        )
    if len(kinds) > 1 and _Replicated in kinds:
        raise ValueError(
            "model must contain one DistributedDataParallel, or only modules that fully_shard was"
            " called for; call install() for each of its parts"
        )
    return [*found.values()]


def _compared(
    rounds: AgreedRounds, settings: Mapping[str, str], error: Exception | None
) -> Exception | None:
    """Return ``error``, or a message if ranks differ in their errors or ``settings``.
    Collective.
    """
    mine = {"error": "none" if error is None else f"{type(error).__name__}: {error}", **settings}
    comm, ranks = rounds.group.get_global_communicator(), rounds.group.ranks
    texts = {(f"{{has}} {key}: {{value}}", ""): text for key, text in mine.items()}
    differences = describe_texts(texts, comm, ranks, "not given")
    if error is None and differences:
        return CommunicationError(
            f"the ranks that call install() for {rounds.name} disagree:"
            f" {differences}. Nothing has been changed; call it alike on all ranks"
        )
    return error

"""Bucket: tensors that are communicated together, their flat storage, and the operations on it
(S2.2, S2.3).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends import get_backend, get_codec, is_codec, list_codecs
from bagua_ref.backends.base import FLOATS, KernelBackend
from bagua_ref.backends.chunks import Stat2
from bagua_ref.backends.codec import COMPRESSIBLE, Codec
from bagua_ref.base import runtime
from bagua_ref.base.runtime import current_world
from bagua_ref.buckets.storage import FlatStorage, check_apart, effective_tensor
from bagua_ref.comm_ops import (
    AsynchronousModelAverage,
    CentralizedErrorFeedback,
    CentralizedFullPrecision,
    CentralizedLowPrecision,
    CentralizedScatterGather,
    ChunkedSparse,
    CommOp,
    Decentralized,
    ErrorMemory,
    Hierarchical,
    LowPrecisionDecentralized,
    PythonOp,
)
from bagua_ref.communicators.base import Communicator
from bagua_ref.errors import NotInitializedError
from bagua_ref.formulas.graphs import PeerSelection
from bagua_ref.observe.meter import Operation, profiled
from bagua_ref.types import Group

__all__ = ["BaguaBucket", "check_compression"]


class BaguaBucket(FlatStorage):
    """A group of tensors that are communicated together, and the operations to run when all of them
    are ready.

    Args:
        tensors: bagua tensors whose effective tensors share a dtype and a device and do not
            overlap.
        name: name of the bucket, unique within a module.
        flatten: move the effective tensors into one contiguous storage, unless they are in one
            already (S2.3); otherwise each operation gathers them into a buffer and copies the
            result back. In both, dense tensors keep their strides, and their elements come in the
            order of their memory.
        alignment: if greater than 1, a padding tensor makes the number of elements divisible by it
            (S2.2).
        backend: the kernels, by name or instance; None chooses as `bagua_ref.backends.get_backend`.

    Attributes:
        padding_tensor: the padding, or None.

    Raises:
        ValueError: the list is empty, a name appears twice, tensors overlap or are on different
            devices, an effective tensor is missing, or alignment is below 1.
        TypeError: mixed dtypes, or a name that is not a string.
        BackendUnavailableError: the backend cannot run here.

    >>> bucket = BaguaBucket([torch.ones(3).ensure_bagua_tensor("a")], "0", flatten=True, alignment=4)
    >>> bucket.flattened_tensor(), bucket.bytes()
    (tensor([1., 1., 1., 0.]), 12)

    Source: ``bagua/torch_api/bucket.py`` of Bagua 0.9.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        name: str,
        flatten: bool,
        alignment: int = 1,
        *,
        backend: str | KernelBackend | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name={name!r} of a bucket must be a string")
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1:
            raise ValueError(
                f"alignment={alignment!r} of bucket {name!r} must be an int, 1 or more"
            )
        if backend is not None:
            get_backend(backend)  # raises now, not at the first operation, if it cannot run
        super().__init__(tensors, name, flatten, alignment)
        self.backend = backend
        self.running: object = None
        """The current or last operation."""
        self.stream: Any = None
        """The first group's CUDA stream, on which operations run; None: the current stream of the
        thread that executes them.
        """
        self._ops: list[Callable[[Tensor], Any]] = []
        self._background_groups: dict[Group, Group] = {}

    def __repr__(self) -> str:
        return (
            f"BaguaBucket({self.name!r}, {len(self.tensors)} tensors, {self.numel} x {self.dtype}"
            f" on {self.device}, {'flat' if self.flatten else 'not flat'}, operations {self._ops})"
        )

    @property
    def kernels(self) -> KernelBackend:  # type: ignore[override]
        """The kernel backend in use by this bucket; see ``backend``."""
        return get_backend(self.backend, self.device)

    def bytes(self) -> int:
        """Return the size of the effective tensors in bytes, without padding (S2.2)."""
        return self.filled * self.dtype.itemsize

    def flattened_tensor(self) -> Tensor:
        """Return a new flat tensor of all effective tensors and the padding, in order; missing
        gradients are zeros.
        """
        parts = [
            (
                torch.zeros(proxy.numel(), dtype=self.dtype, device=self.device)
                if tensor is None
                else layout.flat(tensor.detach())
            )
            for layout, proxy, tensor in zip(
                self.layouts, self.tensors, map(effective_tensor, self.tensors), strict=True
            )
        ]
        return torch.cat(parts + ([self.padding_tensor] if self.padding_tensor is not None else []))

    def execute(
        self, flat: Tensor | None = None, after: Any = None, label: str | None = None
    ) -> Any:
        """Run the operations in order; the background worker calls this when all tensors are ready
        (S2.4).

        Args:
            flat: the result of `load`; None calls it here.
            after: a CUDA event to wait for first.
            label: prefix of the operations' names in a profile.

        Returns:
            A CUDA event that marks the end of the operations; None on a CPU, where they have ended.
        """
        with runtime.use_stream(self.stream, self.device):
            runtime.order_after(after, self.device)
            flat = self.load() if flat is None else flat
            runtime.hold([flat], self.device)
            for place, op in enumerate(self._ops):
                flat = self.load() if place else flat
                self._run(op, flat, label or f"bagua_ref::bucket{self.name}")
                # A Python function writes to the tensors itself. A decentralized operation changes
                # nothing before copy-back: the forward and backward pass use the tensors meanwhile,
                # and to autograd even a write of equal values is a change.
                if not self.flatten and not isinstance(op, (PythonOp, Decentralized)):
                    self.copy_from_flat(flat)
            if self.flatten and any(isinstance(op, PythonOp) for op in self._ops):
                self.load()  # a Python function may have replaced tensors
            return runtime.record_event(self.device)

    def _run(self, op: Callable[[Tensor], Any], flat: Tensor, label: str) -> None:
        self.running = op
        kind = type(op).__name__
        with profiled(f"{label}/{kind}"), Operation(kind, self.name, flat.nbytes):
            op(flat)

    def shadow(self) -> None:
        """Run the operations on zeros instead of the tensors, which are unchanged; Python functions
        do not run.
        """
        with runtime.use_stream(self.stream, self.device):
            flat = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
            for op in [op for op in self._ops if not isinstance(op, PythonOp)]:
                self._run(op, flat, f"bagua_ref::bucket{self.name}")

    def clear_ops(self) -> BaguaBucket:
        """Remove all operations; return the bucket."""
        self._ops.clear()
        return self

    def append_python_op(
        self, python_function: Callable[[str], object], group: Group | None = None
    ) -> BaguaBucket:
        """Append ``python_function(bucket_name)``, which runs on the background worker (S3.8);
        return the bucket.

        Args:
            python_function: may read and write the bucket's tensors.
            group: ignored; accepted for compatibility.
        """
        if not callable(python_function):
            raise TypeError(
                f"python_function={python_function!r} must be callable with the bucket's name"
            )
        self._ops.append(PythonOp(python_function, self.name))
        return self

    def append_op(self, op: CommOp, group: Group) -> BaguaBucket:
        """Append ``op``, whose communicators must belong to the background group ``group``; return
        the bucket.
        """
        self._background_group(group)
        self._ops.append(op)
        return self

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: Group | None = None,
        *,
        error_memory: ErrorMemory | None = None,
    ) -> BaguaBucket:
        """Append a sum or mean over all ranks (S3.1 to S3.3); return the bucket. Collective over
        the group.

        Args:
            hierarchical: reduce within nodes, operate between node leaders, and broadcast within
                nodes.
            average: compute the mean instead of the sum.
            scattergather: use all-to-all and all-gather instead of all-reduce; the number of
                elements, including padding, must be divisible by the number of ranks (hierarchical:
                of leaders). See ``alignment``.
            compression: None or the name of a codec (S4, S12), which needs scattergather.
            group: the ranks; None is the default group.
            error_memory: None, or the memory of this bucket's compression errors on this rank,
                which are added to its next contribution (S11.1).

        Raises:
            ValueError: compression without scattergather, unknown compression, a size that is not
                divisible, or an error memory without compression or of another size.
            BackendUnavailableError: the backend does not have the codec.
            TypeError: a dtype that cannot be averaged or compressed.
            NotInitializedError: no group is given and there is no default group.
        """
        kernels, codec = self.kernels, None
        if error_memory is not None and compression is None:
            raise ValueError("error_memory needs compression, which is None")
        if compression is not None:
            codec = self._codec_named(compression, has_memory=error_memory is not None)
            if not scattergather:
                raise ValueError(
                    f"compression={compression!r} needs scattergather=True, not {scattergather!r}"
                )
        if average or scattergather:
            self._check_float()
        num_ranks, comm, intra = self._connect(group, hierarchical)
        leaders = comm.nranks()
        if scattergather and self.numel % leaders:
            raise ValueError(
                f"bucket {self.name!r} has {self.numel} elements, which cannot be split into the"
                f" {leaders} equal chunks that scattergather=True needs; create the bucket with"
                f" alignment={leaders}"
            )
        if error_memory is not None and (error_memory.numel, error_memory.chunks) != (
            self.numel,
            leaders,
        ):
            raise ValueError(
                f"error_memory is for {error_memory.numel} elements in {error_memory.chunks}"
                f" chunks; bucket {self.name!r} has {self.numel} in {leaders}"
            )
        op: CommOp
        if codec is not None and error_memory is not None:
            op = CentralizedErrorFeedback(comm, kernels, codec, average, error_memory)
        elif codec is not None:
            op = CentralizedLowPrecision(comm, kernels, codec, average)
        elif scattergather:
            op = CentralizedScatterGather(comm, kernels, average)
        else:
            op = CentralizedFullPrecision(comm, kernels, average)
        if intra is not None:
            op = Hierarchical(
                intra,
                kernels,
                op if intra.rank() == 0 else None,
                divisor=num_ranks / leaders if average else None,
                in_rank_order=codec is not None,
            )
        self._ops.append(op)
        return self

    def append_chunked_sparse_op(
        self, compression: str | None, group: Group | None = None, **options: Any
    ) -> BaguaBucket:
        """Append the chunked sparse mean: over all ranks, of the largest elements of each chunk
        (S15); return the bucket. Collective over the group.

        Args:
            compression: None, the name of a codec, or "Stat2".
            group: the ranks; None is the default group.
            options: options of `bagua_ref.comm_ops.ChunkedSparse`.

        Raises:
            ValueError: unknown compression.
            TypeError: the bucket is not float16, bfloat16 or float32.
        """
        codec: Codec | None = None
        if compression is not None:
            codec = self._codec_named(compression, has_memory=True, also={"Stat2": Stat2})
        _, comm, _ = self._connect(group, hierarchical=False)
        self._ops.append(ChunkedSparse(comm, self.kernels, self.layouts, codec=codec, **options))
        return self

    def append_decentralized_synchronous_op(
        self,
        peer_weight: Tensor,
        hierarchical: bool = True,
        peer_selection_mode: PeerSelection = "all",
        group: Group | None = None,
    ) -> Decentralized:
        """Append decentralized averaging (S3.4, S13); return the operation. Collective over the
        group.

        The result stays in ``peer_weight`` until ``op.copy_back_peer_weight(bucket)`` copies it
        into the tensors.

        Args:
            peer_weight: a bagua tensor of the bucket's size:
                ``bucket.flattened_tensor().ensure_bagua_tensor()``.
            hierarchical: communicate between node leaders only.
            peer_selection_mode: the ranks (hierarchical: leaders) that average with each other, see
                `Decentralized`: "all", "shift_one", "one_peer_exponential", "hypercube", "ring",
                    "exponential", or a function ``(t, n) -> graph``.
            group: the ranks; None is the default group.

        Raises:
            ValueError: the mode is unknown or does not support this number of ranks, the graph of a
                function is not doubly stochastic or differs between ranks, or ``peer_weight`` has
                the wrong size.
            TypeError: a dtype that is not floating-point, or not the bucket's.
        """
        self._check_float()
        (peer,) = check_apart(self.load(), self.name, peer_weight=peer_weight)
        num_ranks, comm, intra = self._connect(group, hierarchical)
        everyone = (
            self._connect(group, hierarchical=False)[1] if callable(peer_selection_mode) else comm
        )
        self._decentralized_op = Decentralized(
            comm, self.kernels, peer, peer_selection_mode, intra, num_ranks, everyone
        )
        self._peer_weight = peer_weight
        self._ops.append(self._decentralized_op)
        return self._decentralized_op

    def append_low_precision_decentralized_synchronous_op(
        self,
        weight: Tensor,
        left_peer_weight: Tensor,
        right_peer_weight: Tensor,
        hierarchical: bool = True,
        compression: str | None = "MinMaxUInt8",
        group: Group | None = None,
    ) -> BaguaBucket:
        """Append averaging with ring neighbours, which sends compressed changes (S3.5); return the
        bucket. Collective over the group.

        Args:
            weight: a bagua tensor with the bucket's values:
                ``bucket.flattened_tensor().ensure_bagua_tensor()``.
            left_peer_weight: likewise, with the values of the left neighbour's ``weight``.
            right_peer_weight: likewise, with the right neighbour's.
            hierarchical: average node means, between node leaders.
            compression: the name of a codec (S4, S12).
            group: the ranks; None is the default group.

        Raises:
            ValueError: another compression, or replicas that do not fit.
            TypeError: a dtype that cannot be compressed, or is not the bucket's.
        """
        codec = self._codec_named(compression)
        replicas = check_apart(
            self.load(),
            self.name,
            weight=weight,
            left_peer_weight=left_peer_weight,
            right_peer_weight=right_peer_weight,
        )
        _, comm, intra = self._connect(group, hierarchical)
        op: CommOp = LowPrecisionDecentralized(comm, self.kernels, codec, *replicas)
        if intra is not None:
            ring = op if intra.rank() == 0 else None
            op = Hierarchical(intra, self.kernels, ring, divisor=intra.nranks(), in_rank_order=True)
        self._weight, self._left_peer_weight, self._right_peer_weight = (
            weight,
            left_peer_weight,
            right_peer_weight,
        )
        self._ops.append(op)
        return self

    def append_asynchronous_model_average_op(
        self, peer_selection_mode: str, group: Group | None = None
    ) -> AsynchronousModelAverage:
        """Append a round of asynchronous averaging (S3.6); return the operation. Collective over
        the group.

        Args:
            peer_selection_mode: "all": average over all ranks.
            group: the ranks; None is the default group.

        Raises:
            ValueError: another peer_selection_mode, or the bucket is not flat.
            TypeError: a dtype that is not floating-point.
        """
        if peer_selection_mode != "all":
            raise ValueError(f"peer_selection_mode={peer_selection_mode!r} must be 'all'")
        if not self.flatten:
            raise ValueError(
                f"bucket {self.name!r} is not flat; an asynchronous average changes tensors in"
                " place and needs flatten=True"
            )
        self._check_float()
        _, comm, _ = self._connect(group, hierarchical=False)
        self._async_op = AsynchronousModelAverage(comm, self.kernels, current_world(), self.device)
        self._ops.append(self._async_op)
        return self._async_op

    def _codec_named(
        self,
        compression: str | None,
        has_memory: bool = False,
        also: Mapping[str, type[Codec]] = MappingProxyType({}),
    ) -> Codec:
        """Return the codec of an operation, from ``also`` or the backend; warn if a biased codec
        has no error memory.
        """
        check_compression(compression, also=tuple(also))
        assert compression is not None
        if self.dtype not in COMPRESSIBLE:
            raise TypeError(
                f"compression={compression!r} takes float16, bfloat16 or float32, not bucket"
                f" {self.name!r}'s {self.dtype}"
            )
        own = also.get(compression)
        codec = own(self.kernels) if own else get_codec(compression, self.kernels)
        if codec.biased and not has_memory:
            warnings.warn(
                f"compression={compression!r} without error memory loses what it rounds, and"
                " training may not converge",
                stacklevel=3,
            )
        return codec

    def _check_float(self) -> None:
        if self.dtype not in FLOATS:
            raise TypeError(
                f"bucket {self.name!r} is {self.dtype}; a mean or scattergather=True needs one of"
                f" {', '.join(map(str, FLOATS))}"
            )

    def _connect(
        self, group: Group | None, hierarchical: bool
    ) -> tuple[int, Communicator, Communicator | None]:
        """Return the number of ranks, the communicator of all ranks (hierarchical: of node leaders)
        and, if hierarchical, that of the node.
        """
        group = self._background_group(group)
        if not hierarchical:
            return len(group.ranks), group.get_global_communicator(), None
        intra = group.get_intra_node_communicator()
        return len(group.ranks), group.get_inter_node_communicator(), intra

    def _background_group(self, group: Group | None) -> Group:
        """Return a group of the same ranks whose communicators only the background worker uses.

        Two threads that use one gloo group can silently receive each other's data, so operations
        never use the caller's group.
        """
        group = current_world().default_group if group is None else group
        if group is None:
            raise NotInitializedError(
                "there is no process group yet; call bagua_ref.init_process_group() first"
            )
        if not hasattr(group, "for_background"):
            raise TypeError(
                f"group={group!r} must be a BaguaProcessGroup; see communication.new_group and"
                " from_torch_group"
            )
        if group not in self._background_groups:
            self._background_groups[group] = group.for_background()
            self.stream = self.stream or self._background_groups[group].side_stream(self.device)
        return self._background_groups[group]


def check_compression(
    compression: str | None, *, optional: bool = False, also: tuple[str, ...] = ()
) -> None:
    """Raise ValueError, with the list of names, unless ``compression`` is a codec, one of ``also``,
    or None where that is allowed.
    """
    if (optional and compression is None) or compression in also:
        return
    if not is_codec(compression):
        names = [*(["None"] if optional else []), *map(repr, (*list_codecs(), *also))]
        raise ValueError(
            f"compression={compression!r} is not a known codec; it must be one of"
            f" {', '.join(names)}"
        )

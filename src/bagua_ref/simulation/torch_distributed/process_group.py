"""A `torch.distributed.ProcessGroup` over a simulated group: each of its methods as one call of
`SimulatedGroup`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from bagua_ref.communicators import collectives
from bagua_ref.simulation.group import Call, SimulatedGroup
from bagua_ref.simulation.torch_distributed.work import SimulatedWork, seconds_of
from bagua_ref.types import ReduceOp

_OPERATIONS = {
    int(getattr(dist.ReduceOp, name)): ReduceOp[name]
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}

Lists = Sequence[Sequence[Tensor]]
"""Lists of tensors, one list per rank, in rank order."""

_ProcessGroup: Any = dist.ProcessGroup  # whose stubs differ by version


class SimulatedProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of `torch.distributed` whose ranks are simulated.

    A call that blocks waits in its method and writes its results directly. One that does not
    returns a `SimulatedWork`, which writes them when it is waited for. Reductions run in rank order
    [defined].

    Args:
        group: state shared by the group's ranks.
        rank: this rank in the group.
        store: store of the group.
    """

    def __init__(self, group: SimulatedGroup, rank: int, store: Store) -> None:
        super().__init__(rank, len(group.ranks))
        self.group, self._store = group, store
        self._coalescing: list[SimulatedWork] | None = None
        self.is_nccl = False
        """Whether the program has asked for NCCL."""

    # Facts about the group. torch asks for some of them by their C++ names.

    def __repr__(self) -> str:
        return f"SimulatedProcessGroup({self.group.name!r}, rank {self.rank()} of {self.size()})"

    def name(self) -> str:
        """Return the name of gloo, as some callers depend on it."""
        return "gloo"

    def getBackendName(self) -> str:  # noqa: N802
        """Return a name other than gloo's to C++ code, which would expect an object of gloo's
        class.
        """
        return "simulated"

    @property
    def group_name(self) -> str:
        """The group's name in torch's registry."""
        return self.group.name

    def getGroupName(self) -> str:  # noqa: N802, D102
        return self.group.name

    def _set_group_name(self, name: str) -> None:
        """Ignore the name: the group keeps the one under which the ranks connected."""

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> SimulatedProcessGroup:
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def get_group_store(self) -> Store:
        """Return the group's store."""
        return self._store

    def shutdown(self) -> None:
        """Do nothing: there are no connections."""

    def abort(self) -> None:
        """Abort the group: operations of all ranks raise, including those in progress."""
        self.group.give_up(
            f"rank {self.group.ranks[self.rank()]} aborted group {self.group.name!r}"
        )

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of waits for other ranks, in virtual seconds."""
        self.group.timeout = timeout.total_seconds()

    # Collectives: what each rank receives, as a function of what all ranks send.

    def allreduce(self, tensors: Any, opts: Any = None) -> SimulatedWork:  # noqa: D102
        tensors, op, n = _listed(tensors), _reduction(opts), self.size()
        return self._start(
            f"all_reduce({op.name})",
            tensors,
            tensors,
            lambda sends: [_combined(sends, op)] * n,
            opts,
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> SimulatedWork:  # noqa: D102
        op, dst, n = _reduction(opts), opts.rootRank, self.size()
        outputs = tensors if self.rank() == dst else []
        operation = f"reduce({op.name}, dst={dst})"
        return self._start(
            operation, tensors, outputs, lambda sends: [_combined(sends, op)] * n, opts
        )

    def broadcast(self, tensors: Any, opts: Any = None, root: int = 0) -> SimulatedWork:  # noqa: D102
        tensors, src, n = _listed(tensors), getattr(opts, "rootRank", root), self.size()
        sends, outputs = (tensors, []) if self.rank() == src else ([], tensors)
        return self._start(
            f"broadcast(src={src})",
            sends,
            outputs,
            lambda sends: [sends[src]] * n,
            opts,
            tensors,
            tensors,
        )

    def allgather(self, output_lists: Any, tensors: Any, opts: Any = None) -> SimulatedWork:  # noqa: D102
        tensors, n = _listed(tensors), self.size()
        outputs = [tensor for output_list in output_lists for tensor in _listed(output_list)]
        # those of ranks may differ over NCCL
        likes = [None if self.is_nccl else tensor for tensor in tensors for _ in range(n)]
        _check("all_gather", outputs, likes)
        return self._start(
            "all_gather()",
            tensors,
            outputs,
            lambda sends: [_columns(sends)] * n,
            opts,
            [] if self.is_nccl else tensors,
        )

    def allgather_coalesced(  # noqa: D102
        self, output_lists: Any, tensors: Any, opts: Any = None
    ) -> SimulatedWork:
        # One list per rank, of one tensor per input.
        return self.allgather(list(zip(*output_lists, strict=True)), tensors, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SimulatedWork:  # noqa: D102
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(  # noqa: D102
        self, outputs: Any, tensors: Any, opts: Any = None
    ) -> SimulatedWork:
        n = self.size()
        for output, tensor in zip(outputs, tensors, strict=True):
            _check_sizes("all_gather_into_tensor", output, tensor, n)

        def gathered(sends: Lists) -> Lists:
            return [
                [
                    torch.cat([tensor.reshape(-1) for tensor in column])
                    for column in zip(*sends, strict=True)
                ]
            ] * n

        return self._start("all_gather_into_tensor()", tensors, outputs, gathered, opts)

    def gather(self, output_lists: Any, tensors: Any, opts: Any) -> SimulatedWork:  # noqa: D102
        dst, n = opts.rootRank, self.size()
        outputs = self._of_root("gather", output_lists, tensors[0], dst)
        return self._start(
            f"gather(dst={dst})",
            tensors,
            outputs,
            lambda sends: [_columns(sends)] * n,
            opts,
        )

    def scatter(self, tensors: Any, input_lists: Any, opts: Any) -> SimulatedWork:  # noqa: D102
        src = opts.rootRank
        inputs = self._of_root("scatter", input_lists, tensors[0], src)
        return self._start(
            f"scatter(src={src})",
            inputs,
            tensors,
            lambda sends: [[part] for part in sends[src]],
            opts,
            tensors,
        )

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> SimulatedWork:  # noqa: D102
        op, n = _reduction(opts), self.size()
        inputs = [tensor for input_list in input_lists for tensor in input_list]
        own = self.rank()
        likes = [output if rank == own else None for output in outputs for rank in range(n)]
        _check("reduce_scatter", inputs, likes)

        def scattered(sends: Lists) -> Lists:
            return [_combined([send[rank::n] for send in sends], op) for rank in range(n)]

        return self._start(f"reduce_scatter({op.name})", inputs, outputs, scattered, opts)

    def reduce_scatter_single(  # noqa: D102
        self, output: Tensor, tensor: Tensor, opts: Any = None
    ) -> SimulatedWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(  # noqa: D102
        self, outputs: Any, tensors: Any, opts: Any = None
    ) -> SimulatedWork:
        op, n = _reduction(opts), self.size()
        for output, tensor in zip(outputs, tensors, strict=True):
            _check_sizes("reduce_scatter_tensor", tensor, output, n)

        def scattered(sends: Lists) -> Lists:
            return list(
                zip(*(total.reshape(-1).chunk(n) for total in _combined(sends, op)), strict=True)
            )

        return self._start(f"reduce_scatter_tensor({op.name})", tensors, outputs, scattered, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:  # noqa: D102
        for tensors in (outputs, inputs):
            _check("all_to_all", tensors, [None] * self.size())
        return self._alltoall("all_to_all", list(outputs), list(inputs), opts, result=list(outputs))

    def all_to_all_single(  # noqa: D102
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Any,
        input_splits: Any,
        opts: Any = None,
    ) -> SimulatedWork:
        outputs = _split("output", output, output_splits, self.size())
        inputs = _split("input", tensor, input_splits, self.size())
        return self._alltoall("all_to_all_single", outputs, inputs, opts, result=[output])

    def _alltoall(
        self,
        name: str,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any,
        result: list[Tensor],
    ) -> SimulatedWork:
        exchanged = lambda sends: list(zip(*sends, strict=True))  # noqa: E731
        return self._start(
            f"{name}({inputs[0].dtype})", inputs, outputs, exchanged, opts, [], result
        )

    def barrier(self, opts: Any = None) -> SimulatedWork:  # noqa: D102
        return self._start("barrier()", [], [], lambda sends: sends, opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; after ``timeout`` virtual seconds, raise RuntimeError with the
        missing ranks.
        """
        self.group.scheduler.yield_()
        call = Call(self.group, self.rank(), "monitored_barrier()", None, None)
        self.group.post(call, lambda sends, recvs: None, strict=True)
        call.wait(seconds_of(timeout), passes=True)

    # Messages.

    def send(self, tensors: Any, dst: int, tag: int = 0) -> SimulatedWork:  # noqa: D102
        self._check_devices("send", tensors)
        self.group.scheduler.yield_()
        operation = f"send(dst={self.group.ranks[dst]}, tag={tag})"
        call = Call(self.group, self.rank(), operation, None, None, tensors[0])
        work = SimulatedWork(call, [])
        [call.send], _ = work.delay([tensors[0].data], [])
        self.group.post_message(call, dst, tag)
        return self._track(work)

    def recv(self, tensors: Any, src: int | None, tag: int = 0) -> SimulatedWork:  # noqa: D102
        self._check_devices("recv", tensors)
        self.group.scheduler.yield_()
        operation = f"recv(src={'any' if src is None else self.group.ranks[src]}, tag={tag})"
        call = Call(self.group, self.rank(), operation, None, None, tensors[0])
        work = SimulatedWork(call, list(tensors))
        _, [call.recv] = work.delay([], [tensors[0].data])
        self.group.post_message(call, src, tag)
        return self._track(work)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SimulatedWork:  # noqa: D102
        return self.recv(tensors, None, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> SimulatedWork | None:
        works, self._coalescing = self._coalescing or [], None
        if not works:
            return None
        return SimulatedWork(works[-1].call, [t for work in works for t in work.result()], works)

    # One way for all collectives.

    def _start(
        self,
        operation: str,
        sends: Sequence[Tensor],
        outputs: Sequence[Tensor],
        received: Callable[[Lists], Lists],
        opts: Any,
        described: Sequence[Tensor] | None = None,
        result: list[Tensor] | None = None,
    ) -> SimulatedWork:
        """Start a collective; wait for it if ``opts`` says so.

        Args:
            operation: the operation and the arguments on which all ranks must agree.
            sends: input tensors, read when the last rank arrives, or immediately if they share
                memory with an output.
            outputs: output tensors.
            received: function from the tensors sent by each rank to those received by each rank, in
                the order of the outputs.
            opts: torch's options of the call.
            described: tensors whose shapes and dtypes must agree between ranks; None: ``sends``.
            result: the value of the work's future; None: ``outputs``.
        """
        self._check_devices(operation, [*sends, *outputs])
        self.group.scheduler.yield_()
        described = sends if described is None else described
        text = f"{operation} of {', '.join(map(_describe, described))}" if described else operation
        blocking = (
            opts is not None and not getattr(opts, "asyncOp", True) and self._coalescing is None
        )
        call = Call(self.group, self.rank(), text, [send.data for send in sends], [])
        call.recv = [output.data for output in outputs]
        work = SimulatedWork(call, list(outputs) if result is None else result)
        if not blocking:
            call.send, call.recv = work.delay(call.send, call.recv)

        def move(sends: Lists, recvs: Lists) -> None:
            for rank, (recv, values) in enumerate(zip(recvs, received(sends), strict=True)):
                for source, (tensor, value) in enumerate(zip(recv, values, strict=False)):
                    if value.numel() != tensor.numel():  # possible only if each rank sends to each
                        who, whom = self.group.ranks[source], self.group.ranks[rank]
                        raise ValueError(
                            f"in {text} of group {self.group.name!r} rank {who} sends"
                            f" {value.numel()} elements to rank {whom}, which receives"
                            f" {tensor.numel()}"
                        )
                    tensor.copy_(value.reshape(tensor.shape))

        self.group.post(call, move, strict=True)
        if blocking:
            work.wait()
        return self._track(work)

    def _track(self, work: SimulatedWork) -> SimulatedWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _of_root(self, name: str, lists: Any, like: Tensor, root: int) -> list[Tensor]:
        """Return the list of tensors, one per rank, that only the root of a collective passes."""
        if self.rank() != root:
            return []
        _check(name, lists[0], [like] * self.size())
        return list(lists[0])

    def _check_devices(self, operation: str, tensors: Sequence[Tensor]) -> None:
        refuse = functools.partial(self.group.scheduler.refuse, "unsupported", operation=operation)
        for tensor in tensors:
            if tensor.device.type != "cpu":
                advice = (
                    "Let the script choose its device by torch.cuda.is_available() or an argument,"
                    " and run it on the CPU"
                )
                refuse(
                    f"passes {operation} a tensor on {tensor.device}",
                    advice=f"; ranks have CPU tensors only. {advice}",
                )
            if tensor.layout != torch.strided:
                refuse(
                    f"passes {operation} a tensor of layout {tensor.layout}",
                    advice=", which is not simulated: use to_dense()",
                )

    # The names of other versions of torch.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _combined(sends: Lists, op: ReduceOp) -> list[Tensor]:
    """Return the reduction over ranks of the i-th tensors, for each i."""
    return [collectives.combine(column, op) for column in zip(*sends, strict=True)]


def _columns(sends: Lists) -> list[Tensor]:
    """Return all ranks' tensors: the first of each rank, then the second ones, and so on."""
    return [tensor for column in zip(*sends, strict=True) for tensor in column]


def _listed(tensors: Any) -> list[Tensor]:
    """Return a list of one tensor, or of a sequence of tensors."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _reduction(opts: Any) -> ReduceOp:
    """Return the reduction operator of a call's options, or the operator passed instead; SUM by
    default.
    """
    op: Any = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    try:
        return _OPERATIONS[int(getattr(op, "op", op))]
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"op={op} is not simulated; allowed are"
            f" {', '.join(o.name for o in _OPERATIONS.values())}"
        ) from None


def _describe(tensor: Tensor) -> str:
    """Return dtype and shape of a tensor as text, for messages."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def _check(name: str, tensors: Sequence[Tensor], likes: Sequence[Tensor | None]) -> None:
    """Raise ValueError unless tensors match ``likes`` in number, dtype and shape; None there
    matches any tensor.
    """
    if len(tensors) != len(likes):
        raise ValueError(
            f"{name} needs {len(likes)} tensors in its lists, one per rank and tensor, not"
            f" {len(tensors)}"
        )
    for tensor, like in zip(tensors, likes, strict=True):
        if like is not None and (tensor.dtype != like.dtype or tensor.shape != like.shape):
            raise ValueError(
                f"{name}: a tensor of {_describe(tensor)} goes with one of {_describe(like)}; they"
                " must be equal"
            )


def _check_sizes(name: str, large: Tensor, small: Tensor, n: int) -> None:
    """Raise ValueError unless a tensor has n times the elements of another, and its dtype."""
    if large.dtype != small.dtype or large.numel() != n * small.numel():
        raise ValueError(
            f"{name}: {_describe(large)} must have {n} times the elements of {_describe(small)},"
            " and its dtype"
        )


def _split(name: str, tensor: Tensor, sizes: Any, n: int) -> list[Tensor]:
    """Return the parts of a tensor along its first dimension, one per rank: equal ones if ``sizes``
    is empty.
    """
    sizes = list(sizes or ())
    if not sizes:
        if tensor.dim() == 0 or tensor.shape[0] % n:
            raise ValueError(
                f"all_to_all_single: {name} {_describe(tensor)} does not divide into {n} parts"
                " along its first dimension"
            )
        sizes = [tensor.shape[0] // n] * n
    if len(sizes) != n or sum(sizes) != tensor.shape[0]:
        raise ValueError(
            f"all_to_all_single: {name}_split_sizes={sizes} must be {n} numbers that sum to"
            f" {tensor.shape[0]}"
        )
    return list(tensor.split(sizes))

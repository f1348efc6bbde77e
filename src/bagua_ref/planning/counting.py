"""Communication counting: one rank out of any number runs the real algorithm, and its communicators
record calls instead of sending (S14.1).

There are no other ranks; each is assumed to do what this one does. Nothing runs concurrently: a
worker runs its jobs where they are submitted, and a thread that waits for time to pass ends there.
Large float tensors are never computed: they are zeros that take no memory.
"""

from __future__ import annotations

import copy
import inspect
import mmap
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from bagua_ref.backends import get_codec, list_codecs
from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.chunks import ChunkCoder
from bagua_ref.backends.codec import Codec
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.base.launch_environment import Identity
from bagua_ref.base.runtime import World, use_world
from bagua_ref.communicators.base import Communicator
from bagua_ref.data_parallel.training import Options
from bagua_ref.data_parallel.wrapping import context_of, wrap
from bagua_ref.groups.process_group import init_process_group
from bagua_ref.planning.exchanges import Call, Cluster, Exchange
from bagua_ref.types import ReduceOp

__all__ = ["count"]

_SMALL = 1024
"""Maximal number of elements of tensors with memory, as flags and checksums must have values."""


class _Parked(BaseException):
    """Raised in place of a blocking wait, to end a thread's run."""


class _World(World):
    """World of a single rank, whose connections to the other ranks are simulated.

    Attributes:
        phase: the current part of the step; "" while wrapping, when nothing is recorded.
        job: the worker's running job, if any.
    """

    has_streams = False

    def __init__(self, rank: int, cluster: Cluster) -> None:
        node = cluster.node_of[rank]
        ranks = cluster.ranks[node]
        self.known_identity = Identity(rank, cluster.n, rank - ranks[0], len(ranks), node)
        self.cluster, self.node_of, self.transport = cluster, tuple(cluster.node_of), self
        self.phase, self.step = "", 0
        self.recorded: list[Exchange] = []
        self.interval: float | None = None
        self.running: Callable[[], None] | None = None
        self.job: Any = None

    # The connections.

    def connect(self, name: str, ranks: Sequence[int], timeout: float) -> Communicator:
        """Return a communicator that records its calls."""
        kind = name.rpartition("/")[2].rstrip("0123456789")
        return _Communicator(self, kind, ranks.index(self.identity.rank), len(ranks))

    def close(self) -> None:
        """Do nothing."""

    # The records.

    @property
    def op(self) -> Any:
        """The running operation on a bucket, if any."""
        return getattr(getattr(self.job, "bucket", None), "running", None)

    def current(self) -> Exchange:
        """Return the record of the running operation, or a discarded one while wrapping."""
        key = None if self.job is None else (id(self.job), id(self.op))
        bucket, began = getattr(self.job, "bucket", None), (self.step, self.phase)
        if self.recorded and (self.recorded[-1].key, self.recorded[-1].began) == (key, began):
            return self.recorded[-1]
        # the calling thread itself waits, unless the worker runs
        waited = began if self.running is None else None
        nbytes = 0 if bucket is None else bucket.bytes()
        known = Exchange(key, began, self.cluster, nbytes, waited)
        if hasattr(self.op, "work"):
            known.work.update(dict([self.op.work()]))
        if self.phase:
            self.recorded.append(known)
        return known

    def waiting_for_own_thread(
        self, interrupt: Callable[[str], None], timeout: float = 0.0
    ) -> AbstractContextManager[None]:
        """Mark everything that the worker has begun as awaited by the training."""
        for known in self.recorded:
            if known.waited is None and not known.in_background:
                known.waited = (self.step, self.phase)
        return nullcontext()

    # The threads.

    def spawn(self, function: Callable[[], None], name: str) -> Any:
        """Run ``function()`` until it would wait."""
        self.run(function)
        return SimpleNamespace(join=lambda timeout: None)

    def run(self, function: Callable[[], None]) -> None:
        """Run a thread's function until it would wait."""
        outer, self.running = self.running, function
        try:
            function()
        except _Parked:
            pass
        finally:
            self.running, self.job = outer, None

    def event(self) -> Any:
        """Return an event; no other thread sets it."""
        return _Event(self)

    def lock(self) -> Any:
        """Return a lock; no other thread contends for it."""
        return threading.RLock()

    def queue(self) -> Any:
        """Return a queue whose reader runs whenever something is put into it."""
        return _Queue(self)


class _Event(threading.Event):
    """An event that no other thread will set: a thread that waits for it has finished its round."""

    def __init__(self, world: _World) -> None:
        super().__init__()
        self._world = world

    def wait(self, timeout: float | None = None) -> bool:
        """Return True if the event is set; else stop the thread, whose next round would be
        ``timeout`` seconds later.
        """
        if not self.is_set() and self._world.running is not None:
            self._world.interval = timeout
            for known in self._world.recorded:
                known.in_background |= known.waited is None
            raise _Parked
        return self.is_set()


class _Queue(deque[Any]):
    """A queue whose reader runs whenever something is put into it."""

    def __init__(self, world: _World) -> None:
        super().__init__()
        self._world = world
        self._reader: Callable[[], None] | None = None

    def put(self, item: Any, block: bool = True) -> None:
        """Append ``item``, and run the reader."""
        self.append(item)
        if self._reader is not None and self._world.running is not self._reader:
            self._world.run(self._reader)

    def get(self, *, timeout: float | None = None) -> Any:
        """Return the first item; on an empty queue, suspend the reader until the next `put`."""
        if not self:
            self._reader = self._world.running
            raise _Parked
        self._world.job = self.popleft()
        return self._world.job


class _Communicator(Communicator):
    """A communicator that records each call and returns at once."""

    def __init__(self, world: _World, among: str, rank: int, nranks: int) -> None:
        super().__init__(rank, nranks, among)
        self._world = world

    def rank(self) -> int:
        """Return the rank; while wrapping, 0 among all ranks, so that this rank acts as the source
        of the broadcast.
        """
        return self._rank if self._world.phase or self.name != "global" else 0

    def abort(self, reason: str = "") -> None:
        pass

    def barrier(self) -> None:
        pass

    def exchange_ints(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        return lambda: [list(values)] * self._nranks

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return obj

    def _record(self, call: Call) -> None:
        # a rank alone sends nothing, but it encodes and decodes
        self._world.current().calls.extend([call] if self._nranks > 1 else [])

    def _count(self, collective: str, tensor: Tensor, root: int = 0) -> None:
        self._record(Call(collective, self.name, tensor.numel(), tensor.element_size(), root))

    def _exchange(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> None:
        n, graph = self._nranks, list[Any](getattr(self._world.op, "graph", ()))
        if len(graph) == n:
            nbytes = next((tensor.nbytes for tensor, _ in sends or recvs), 0)
            pairs = [
                (source, rank, nbytes)
                for rank, row in enumerate(graph)
                for source, _ in row
                if source != rank
            ]
        else:  # the other ranks send to those that are as far from them
            pairs = [
                (rank, (rank + peer - self._rank) % n, tensor.nbytes)
                for tensor, peer in sends
                for rank in range(n)
            ]
        self._record(Call("one_round", self.name, pairs=tuple(pairs)))

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        self._count("broadcast", tensor, src)

    def _reduce_inplace(self, tensor: Tensor, dst: int, op: ReduceOp) -> None:
        self._count("reduce", tensor, dst)

    def _gather(self, send_tensor: Tensor, recv_tensor: Tensor, dst: int) -> None:
        self._count("gather", send_tensor, dst)

    def _scatter(self, send_tensor: Tensor, recv_tensor: Tensor, src: int) -> None:
        self._count("scatter", recv_tensor, src)

    def _allreduce_inplace(self, tensor: Tensor, op: ReduceOp) -> None:
        self._count("all_reduce", tensor)

    def _allgather(self, send_tensor: Tensor, recv_tensor: Tensor) -> None:
        self._count("all_gather", send_tensor)
        recv_tensor.view(self._nranks, -1).copy_(send_tensor.view(1, -1))

    def _reduce_scatter(self, send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp) -> None:
        self._count("reduce_scatter", send_tensor)

    def _alltoall(self, send_tensor: Tensor, recv_tensor: Tensor) -> None:
        self._count("all_to_all", send_tensor)


def _are_floats(tensors: Iterable[Tensor]) -> bool:
    return all(tensor.is_floating_point() for tensor in tensors)


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


_results: dict[Any, Any] = {}
"""Operation and the shapes of its tensors -> its results as meta tensors, or None if it must
run.
"""


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else value


def _result_of(func: Any, args: Any, kwargs: dict[str, Any], makes: bool) -> Any:
    """Return the result of ``func`` on meta tensors, or None if it must run; `_results` caches
    these.
    """
    on_meta, options = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    if makes or options.get("device") is not None:
        options["device"] = "meta"
    try:
        result = func(*on_meta, **options)
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # the shape of the result depends on values
    inputs, results = _tensors_in((*args, *kwargs.values())), _tensors_in([result])
    return result if makes or _are_floats(results) or _are_floats(inputs) else None


class _Lazy(TorchDispatchMode):
    """Dispatch mode in which large float tensors are zeros without memory: operations that read or
    write only them are skipped, and return zeros. Integer operations run, as message sizes may
    depend on indices.

    Attributes:
        live: current bytes of large tensors.
        peak: the maximum of `live` in this step.
    """

    live = peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, or return results without computing them."""
        kwargs, schema = kwargs or {}, func._schema
        tensors = list(_tensors_in((*args, *kwargs.values())))
        makes = not tensors or schema.name.startswith(("aten::new_", "aten::empty"))
        if not makes and all(tensor.numel() <= _SMALL for tensor in tensors):
            return func(*args, **kwargs)
        if func is torch.ops.aten.all.default:  # whether all elements are finite
            return torch.ones((), dtype=torch.bool)
        aliases = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        if aliases:
            values = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            written = [values[a.name] for a in aliases]
            if not _are_floats(_tensors_in(written)):
                return func(*args, **kwargs)
            return None if not schema.returns else written[0] if len(written) == 1 else written
        if any(value.alias_info for value in schema.returns):  # a view
            return func(*args, **kwargs)
        key = func, _key((*args, *kwargs.items()))
        if key not in _results:
            _results[key] = _result_of(func, args, kwargs, makes)
        result = _results[key]
        if result is None:
            return func(*args, **kwargs)
        if isinstance(result, Tensor):  # faster than the general case below
            return self._zeros(result)
        return tree_map_only(Tensor, self._zeros, result)

    def _zeros(self, like: Tensor) -> Tensor:
        if like.numel() <= _SMALL:
            return torch.zeros_like(like, device="cpu")
        # fresh pages, which are zeros and take no memory until they are written
        memory = mmap.mmap(-1, like.untyped_storage().nbytes())
        self._resize(len(memory))
        weakref.finalize(memory, self._resize, -len(memory)).atexit = False
        return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())

    def _resize(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)


class _Pass(torch.autograd.Function):
    """A forward and backward pass that sets every parameter's gradient, always to the same
    tensors.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.gradients


def _backend(world: _World) -> ReferenceBackend:
    """Return a backend whose codecs count elements and whose kernels do nothing."""

    def counting(kind: type[Codec]) -> type[Codec]:
        class Counting(kind):  # type: ignore[valid-type, misc]
            def _compress(
                self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor
            ) -> None:
                chunks = 1 if target_chunk is None else num_chunks
                world.current().work[self.name] += x.numel() // chunks

            def _decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
                world.current().work[self.name] += out.numel()

        return Counting

    class CountingCoder(ChunkCoder):
        def encode(self, y: Tensor) -> Tensor:
            return torch.zeros(self.nbytes, dtype=torch.uint8)

        def add_decoded(self, *_: Any) -> None:
            pass

    members: dict[str, Any] = dict.fromkeys(KernelBackend.__abstractmethods__, lambda *_: None)
    members["codecs"] = {
        name: counting(type(get_codec(name, "reference"))) for name in list_codecs("reference")
    }
    members["chunk_coder"] = CountingCoder
    backend: ReferenceBackend = type("CountingBackend", (ReferenceBackend,), members)()
    return backend


def _shortened(algorithm: Any, parameters: Sequence[Tensor]) -> tuple[Any, list[Any]]:
    """Return a copy of ``algorithm`` with any warm-up shortened to one step, and optimizers of
    these parameters for it.
    """
    found, optimizers = copy.copy(algorithm), list[Any]()
    for name, value in vars(algorithm).items():
        if isinstance(value, torch.optim.Optimizer):
            known = inspect.signature(type(value)).parameters
            options = {**value.defaults, "warmup_steps": 1}.items()
            kept = {key: option for key, option in options if key in known}
            optimizers.append(type(value)(parameters, **kept))
            vars(found)[name] = optimizers[-1]  # options are frozen
        elif name == "warmup_steps" and value:
            vars(found)[name] = 1
    return found, optimizers or [torch.optim.SGD(parameters, lr=0.0, foreach=True)]


def count(
    algorithm: Any,
    module: torch.nn.Module,
    cluster: Cluster,
    bucket_bytes: int | None,
    warm: int,
    cycle: int,
    rank: int,
) -> tuple[list[list[Exchange]], float | None, tuple[int, int]]:
    """Count one rank's communication in the first steps of a training, after one warm-up step if
    there is a warm-up.

    Args:
        algorithm: the algorithm with its options.
        module: a copy of it is trained; its parameters may be on "meta".
        cluster: the ranks.
        rank: the rank to count.
        warm: number of warm-up steps, 0 or 1.
        cycle: the steps that follow. As many later ones are taken, in which training waits for these.
        bucket_bytes: see `plan_of`.

    Returns:
        The operations of each step; seconds from one round in the background to the next, None if
        there are none; and bytes beyond weights, gradients and optimizer state: state, and scratch
        at its peak.

    Raises:
        ValueError, TypeError: as for wrapping on these ranks.
    """
    world, lazy = _World(rank, cluster), _Lazy()  # type: ignore[no-untyped-call]
    with (
        use_world(world),
        warnings.catch_warnings(),
        torch.enable_grad(),
        torch.device("cpu"),
        lazy,
    ):
        warnings.simplefilter("ignore")
        model: Any = copy.deepcopy(module).to_empty(device="cpu").train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = [torch.zeros((), dtype=p.dtype).expand(p.shape) for p in parameters]
        run: Any = lambda _: _Pass.apply(gradients, *parameters)  # type: ignore[no-untyped-call]  # noqa: E731
        model.__class__ = type(type(module).__name__, (torch.nn.Module,), {"forward": run})
        chosen, optimizers = _shortened(algorithm, parameters)
        init_process_group()
        options = Options(backend=_backend(world), bucket_bytes=bucket_bytes)
        wrap(model, optimizers, chosen, None, options, "plan_of")
        training: Any = context_of(model)
        memory = []
        try:
            for world.step in range(warm + 2 * cycle):
                world.phase, lazy.peak = "forward", lazy.live
                loss = model()
                training.rounds.loaded = False  # equal, whatever was loaded
                world.phase = "backward"
                loss.backward()
                world.phase = "step"
                for optimizer in optimizers:
                    optimizer.step()
                memory.append((lazy.live, lazy.peak - lazy.live))
            states = [list(one.values()) for o in optimizers for one in o.state.values()]
            usual = sum(
                x.nbytes for x in (*parameters, *parameters, *model.buffers(), *_tensors_in(states))
            )
        finally:
            world.phase = ""
            training.withdraw()
            training.close()
    found = [k for k in world.recorded if k.calls or any(k.work.values())]
    steps = [[known for known in found if known.began[0] == step] for step in range(warm + cycle)]
    if world.interval is not None:
        steps = [[known for known in found if known.in_background]] * (warm + cycle)
    state, scratch = map(max, zip(*memory[1:], strict=True))  # the first step makes the gradients
    return steps, world.interval, (max(0, state - usual), scratch)

"""Programs for torch.distributed, to be run by real processes over gloo and by simulated ranks.

With ``exact`` data all sums are exact, so that results do not depend on the order of a reduction.
"""

from __future__ import annotations

import collections
import functools
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.algorithms.model_averaging.averagers as averagers
import torch.distributed.algorithms.model_averaging.hierarchical_model_averager as hierarchical
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import bagua_ref
from bagua_ref.algorithms.gradient_allreduce import GradientAllReduceAlgorithm


def run(
    names: Iterable[str], exact: bool, programs: dict[str, Callable[[bool], Any]] | None = None
) -> dict[str, Any]:
    """Return the results of programs, by default of `PROGRAMS`, on this rank; each of them in a
    group of all ranks.
    """
    results = {}
    store, rank, size = next(dist.rendezvous("env://"))
    for name in names:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size
        )
        results[name] = (programs or PROGRAMS)[name](exact)
        dist.barrier()
        dist.destroy_process_group()
    return results


def small_model(exact: bool, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    if exact:
        model = model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape) / 2)
    return model


def batches(exact: bool, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(100 + dist.get_rank())
    return [
        torch.randint(-1, 2, (4, 4)).double() if exact else torch.randn(4, 4) for _ in range(steps)
    ]


def train(
    model: Any,
    exact: bool,
    optimizer: Any = None,
    steps: int = 3,
    after: Callable[[], None] = lambda: None,
) -> list[Any]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.25)
    for batch in batches(exact, steps):
        optimizer.zero_grad()
        loss(model, batch, exact).backward()
        optimizer.step()
        after()
    return state(model)


def loss(model: Any, batch: torch.Tensor, exact: bool) -> torch.Tensor:
    return model(batch).sum() if exact else model(batch).square().mean()


def state(model: Any) -> list[torch.Tensor]:
    return [
        p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach()
        for p in model.parameters()
    ]


def ddp(exact: bool, **options: Any) -> list[Any]:
    return train(DistributedDataParallel(small_model(exact), **options), exact)


def hooked(state: Any, hook: Any, steps: int = 3, **options: Any) -> list[Any]:
    model = DistributedDataParallel(small_model(False), **options)
    model.register_comm_hook(state, hook)
    return train(model, False, steps=steps)


def power_sgd(exact: bool) -> list[Any]:
    return hooked(
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
        4,
    )


def no_sync(exact: bool) -> list[Any]:
    model = DistributedDataParallel(small_model(exact))
    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    for batch in batches(exact):
        optimizer.zero_grad()
        with model.no_sync():
            loss(model, batch, exact).backward()
        loss(model, -batch, exact).backward()
        optimizer.step()
    return state(model)


def joined(exact: bool, with_zero: bool = False) -> list[Any]:
    model = DistributedDataParallel(small_model(exact))
    kind = (
        functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)
        if with_zero
        else torch.optim.SGD
    )
    optimizer: Any = kind(model.parameters(), lr=0.25)
    with Join([model, optimizer]) if with_zero else model.join():
        for batch in batches(exact, 2 + dist.get_rank()):
            optimizer.zero_grad()
            loss(model, batch, exact).backward()
            optimizer.step()
    return state(model)


def post_local_sgd(exact: bool) -> list[Any]:
    model = DistributedDataParallel(small_model(exact))
    own, _ = dist.new_subgroups(1)
    model.register_comm_hook(
        post_localSGD_hook.PostLocalSGDState(None, own, 1), post_localSGD_hook.post_localSGD_hook
    )
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=1)
    return train(
        model, exact, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.25), averager)
    )


def hierarchical_averager(exact: bool) -> list[Any]:
    periods = collections.OrderedDict(
        [(1, 2), (2, dist.get_world_size())] if dist.get_world_size() > 2 else [(2, 2)]
    )
    averager, model = hierarchical.HierarchicalModelAverager(periods), small_model(exact)
    return train(model, exact, after=lambda: averager.average_parameters(model.parameters()))


def zero(exact: bool) -> list[Any]:
    model = DistributedDataParallel(small_model(exact))
    kind, options = (torch.optim.SGD, {"lr": 0.25}) if exact else (torch.optim.Adam, {"lr": 0.1})
    return train(model, exact, ZeroRedundancyOptimizer(model.parameters(), kind, **options))


def hsdp(exact: bool) -> list[Any]:
    size, model = dist.get_world_size(), small_model(exact)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, exact)


def tensor_parallel(exact: bool) -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = small_model(exact)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    for seed in range(2):
        torch.manual_seed(seed)  # the same batch on all ranks
        optimizer.zero_grad()
        loss(model, torch.randint(-1, 2, (4, 4)).to(model[4].weight.dtype), exact).backward()
        optimizer.step()
    return state(model)


def reentrant(exact: bool) -> list[Any]:
    model = DistributedDataParallel(small_model(exact), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    for batch in batches(exact):
        optimizer.zero_grad()
        loss(
            lambda x: checkpoint(model, x, use_reentrant=True), batch.requires_grad_(), exact
        ).backward()
        optimizer.step()
    return state(model)


def gradient_hooks(exact: bool) -> list[Any]:
    model, works, sums = small_model(exact), [], []  # type: Any, list[Any], list[Any]
    first, second, *others = model.parameters()
    first.register_post_accumulate_grad_hook(
        lambda p: works.append(dist.all_reduce(p.grad, async_op=True))
    )
    second.register_post_accumulate_grad_hook(
        lambda p: sums.append(
            dist.all_reduce(p.grad, async_op=True)
            .get_future()
            .then(lambda future: future.value()[0].sum())
        )
    )
    for parameter in others:
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    loss(model, batches(exact)[0], exact).backward()
    for work in works:
        work.wait()
    return [
        *(future.wait() for future in sums),
        *(parameter.grad for parameter in model.parameters()),
    ]


def pipeline(exact: bool) -> list[Any]:
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layer = nn.Linear(4, 4).double() if exact else nn.Linear(4, 4)
    if exact:
        nn.init.ones_(layer.weight)
    stage = PipelineStage(layer, rank, n, torch.device("cpu"))
    schedule = ScheduleGPipe(
        stage, 2, loss_fn=lambda output, target: (output - target).square().sum()
    )
    torch.manual_seed(7)
    batch = torch.randint(-1, 2, (4, 4)).to(layer.weight.dtype)
    schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if rank == n - 1 else {}))
    return [parameter.grad for parameter in layer.parameters()]


def compiled(exact: bool) -> list[Any]:
    return train(torch.compile(DistributedDataParallel(small_model(exact)), backend="eager"), exact)


def bagua(exact: bool) -> list[Any]:
    bagua_ref.init_process_group()
    model = small_model(exact)
    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    model = model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    trained = train(model, exact, optimizer)
    bagua_ref.destroy_process_group()
    return trained


def distributed_checkpoint(exact: bool) -> list[Any]:
    model, folder = small_model(exact), [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    torch.distributed.checkpoint.async_save(
        {"model": model.state_dict()}, checkpoint_id=folder[0]
    ).result()  # type: ignore[union-attr]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id=folder[0])
    return state(model)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (
        torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) * (dist.get_rank() + 1)
    ).to(dtype)


def collectives(exact: bool) -> list[Any]:
    rank, n, out = dist.get_rank(), dist.get_world_size(), []  # type: int, int, list[Any]
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.uint8,
    ):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            dist.all_reduce(x := numbers(3, 2, dtype=dtype), op)
            out.append(x)
    dist.all_reduce(ored := numbers(5, dtype=torch.int64), dist.ReduceOp.BOR)
    dist.reduce(reduced := numbers(3), 1)
    dist.broadcast(sent := numbers(3), 1)
    dist.all_gather(listed := [torch.zeros(2, 3) for _ in range(n)], numbers(2, 3))
    dist.all_gather_into_tensor(gathered := torch.zeros(n * 2, 3), numbers(2, 3))
    parts = [torch.zeros(3) for _ in range(n)] if rank == 0 else None
    dist.gather(numbers(3), parts, 0)
    inputs = [numbers(3) + i for i in range(n)]
    dist.scatter(scattered := torch.zeros(3), inputs if rank == 1 else None, 1)
    dist.reduce_scatter(summed := torch.zeros(3), inputs)
    dist.reduce_scatter_tensor(part := torch.zeros(3), numbers(n * 3))
    dist.all_to_all_single(equal := torch.zeros(n * 2), numbers(n * 2))
    sizes, received = [rank + 1] * n, [r + 1 for r in range(n)]
    uneven = torch.zeros(sum(received))
    dist.all_to_all_single(uneven, numbers(sum(sizes)), received, sizes)
    works = [
        dist.all_reduce(x := numbers(4), async_op=True),
        dist.broadcast(y := numbers(2), 0, async_op=True),
        dist.all_gather_into_tensor(z := torch.zeros(n * 2), numbers(2), async_op=True),
    ]
    for work in works:
        work.wait()
    future = dist.all_reduce(numbers(4), async_op=True).get_future()
    doubled = future.then(lambda future: future.value()[0] * 2).wait()
    dist.monitored_barrier()
    out += [ored, reduced if rank == 1 else None, sent, *listed, gathered, *(parts or [])]
    return [*out, scattered, summed, part, equal, uneven, x, y, z, doubled]


def objects(exact: bool) -> list[Any]:
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.all_gather_object(everyone := [None] * n, {"rank": rank})
    dist.gather_object(rank, gathered := [None] * n if rank == 0 else None, 0)
    dist.broadcast_object_list(broadcast := [{"a": rank}, rank], 1)
    dist.scatter_object_list(
        scattered := [None], [str(i) for i in range(n)] if rank == 0 else None, 0
    )
    return [everyone, gathered, broadcast, scattered]


def messages(exact: bool) -> list[Any]:
    rank, n, out = dist.get_rank(), dist.get_world_size(), []  # type: int, int, list[Any]
    right, left = (rank + 1) % n, (rank - 1) % n
    works = [dist.isend(numbers(3), right, tag=3), dist.isend(numbers(3) + 100, right, tag=4)]
    works += [
        dist.irecv(x := torch.zeros(3), left, tag=4),
        dist.irecv(y := torch.zeros(3), left, tag=3),
    ]
    for work in works:
        work.wait()
    out += [x, y]
    sends = [
        dist.P2POp(dist.isend, numbers(3), right),
        dist.P2POp(dist.irecv, x := torch.zeros(3), left),
    ]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    out.append(x)
    if rank == 0:
        senders = []
        for _ in range(n - 1):
            senders.append(dist.recv(x := torch.zeros(1)))
            assert x.item() == senders[-1] + 1
        out.append(sorted(senders))
    else:
        dist.send(numbers(1), 0)
    return out


def subgroups(exact: bool) -> list[Any]:
    rank, n, out = dist.get_rank(), dist.get_world_size(), []  # type: int, int, list[Any]
    pair, _ = dist.new_subgroups(2)
    dist.all_reduce(x := numbers(2), group=pair)
    out += [x, dist.get_process_group_ranks(pair), dist.get_rank(pair), dist.get_backend(pair)]
    evens = dist.new_group(list(range(0, n, 2)))
    if rank % 2 == 0:
        dist.broadcast(x := numbers(2), 0, group=evens)
        out.append(x)
    mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("outer", "inner"))
    dist.all_reduce(x := numbers(2), group=mesh["inner"].get_group())
    return [*out, x, mesh.get_coordinate()]


def coalesced(exact: bool) -> list[Any]:
    n, xs = dist.get_world_size(), [numbers(2), numbers(3)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    ys = [torch.zeros(n * 2), torch.zeros(n * 3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x, y in zip(xs, ys, strict=True):
            dist.all_gather_into_tensor(y, x)
    manager.wait()
    return xs + ys


def functional_collectives(exact: bool) -> list[Any]:
    n, world = dist.get_world_size(), dist.group.WORLD
    results = [
        functional.all_reduce(numbers(2), "sum", world),
        functional.all_gather_tensor(numbers(2), 0, world),
        functional.reduce_scatter_tensor(numbers(n * 2), "sum", 0, world),
        functional.broadcast(numbers(2), 1, world),
        functional.all_to_all_single(numbers(n * 2), None, None, world),
    ]
    return [result * 1 for result in results]


PROGRAMS: dict[str, Callable[[bool], Any]] = {
    "DDP": ddp,
    "DDP, static graph": lambda exact: ddp(exact, static_graph=True),
    "DDP, small buckets that are views": lambda exact: ddp(
        exact, bucket_cap_mb=1e-4, gradient_as_bucket_view=True
    ),
    "DDP, static graph in a reentrant checkpoint": reentrant,
    "DDP, compiled": compiled,
    "DDP, no_sync": no_sync,
    "DDP, join": joined,
    "DDP, fp16 hook": lambda exact: hooked(None, default_hooks.fp16_compress_hook),
    "DDP, PowerSGD hook": power_sgd,
    "DDP, post-local SGD hook": post_local_sgd,
    "HSDP": hsdp,
    "gradient hooks": gradient_hooks,
    "GPipe": pipeline,
    "tensor parallel": tensor_parallel,
    "ZeRO": zero,
    "Join with ZeRO": functools.partial(joined, with_zero=True),
    "hierarchical averager": hierarchical_averager,
    "with_bagua": bagua,
    "DCP": distributed_checkpoint,
    "collectives": collectives,
    "objects": objects,
    "messages": messages,
    "subgroups": subgroups,
    "coalesced collectives": coalesced,
    "functional collectives": functional_collectives,
}

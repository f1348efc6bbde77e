"""S16 in plain steps, and small models and trainings to compare `bagua_ref.install` with them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import bagua_ref
from bagua_ref.simulation import SimulatedWorld

POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bfloat16, reduced in float32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "float32, reduced in bfloat16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "float16": MixedPrecisionPolicy(param_dtype=torch.float16),
}


def simulate(n: int, program: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of a program of torch.distributed on simulated ranks."""
    return SimulatedWorld(n, torch_distributed=True).run(_in_torch, program, args)


def _in_torch(program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    result = program(*args)
    dist.barrier()
    bagua_ref.destroy_process_group()
    dist.destroy_process_group()
    return result


def coded(codec: str | None, x: Tensor) -> Tensor:
    """Return what a chunk is after it was sent."""
    if codec is None:
        return x.clone()
    kernels, decoded = bagua_ref.get_codec(codec, "reference"), torch.empty_like(x)
    kernels.decompress(kernels.compress(x, 1), 1, decoded)
    return decoded


def everyones(x: Tensor, group: Any) -> list[Tensor]:
    received = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(received, x.contiguous(), group=group)
    return received


def summed(parts: Sequence[Tensor]) -> Tensor:
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total = total + part.float()
    return total


class Steps:
    """FSDP2's reduce-scatter by the steps of S16.2 and S16.3, each rank having all ranks' rows."""

    def __init__(self, codec: str | None, feedback: bool) -> None:
        self.codec, self.feedback = codec, feedback
        self.left: list[list[Tensor]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: Any = None
    ) -> None:
        n, own = group.size(), []
        inputs = everyones(input_tensor, group)
        if not self.left:
            self.left = [[torch.zeros(1)] * n for _ in range(n)]
        for rank, x in enumerate(inputs):
            for row, chunk in enumerate(x.float().view(n, -1)):
                p = chunk + self.left[rank][row] if self.feedback else chunk
                decoded = coded(self.codec, p)
                if self.feedback:
                    e = p - decoded
                    self.left[rank][row] = torch.where(e.isnan(), self.left[rank][row], e)
                if row == group.rank():
                    own.append(decoded)
        total = summed(own)
        output_tensor.copy_(total / n if op == dist.ReduceOp.AVG else total)


class ReplicaSteps:
    """The mean over replicas by the steps of S16.4: those of S3.1, S3.2 and S11.1."""

    def __init__(self, codec: str | None, feedback: bool, group: Any) -> None:
        self.codec, self.feedback, self.group = codec, feedback, group
        self.e: list[Tensor] = []
        self.f: list[Tensor] = []

    def __call__(self, shard: Tensor) -> None:
        n = self.group.size()
        size = -(-shard.numel() // n)
        padded = torch.cat([shard, shard.new_zeros(n * size - shard.numel())])
        inputs = [x.view(n, -1) for x in everyones(padded, self.group)]
        if not self.feedback:
            sent = [torch.stack([coded(self.codec, chunk) for chunk in x]) for x in inputs]
            means = [(summed([x[j] for x in sent]) / n).to(shard.dtype) for j in range(n)]
            result = torch.cat([coded(self.codec, mean) for mean in means])
        else:
            if not self.e:
                self.e = [torch.zeros(n, size) for _ in range(n)]
                self.f = [torch.zeros(size) for _ in range(n)]
            p = [x.float() + e for x, e in zip(inputs, self.e, strict=True)]
            sent = [torch.stack([coded(self.codec, chunk) for chunk in x]) for x in p]
            y = [summed([x[j] for x in sent]) / n + self.f[j] for j in range(n)]
            z = [coded(self.codec, chunk) for chunk in y]
            wide = torch.cat(z)
            is_padding = (torch.arange(n * size) >= shard.numel()).view(n, size)
            self.e = [
                torch.where(is_padding, torch.zeros(()), x - own)
                for x, own in zip(p, sent, strict=True)
            ]
            self.f = [torch.where(is_padding[j], torch.zeros(()), y[j] - z[j]) for j in range(n)]
            result = wide.to(shard.dtype)
        shard.copy_(result[: shard.numel()])


def network(seed: int = 0) -> nn.Sequential:
    """Return layers of 8, 3 and 1 rows, so that shards are even, uneven and empty."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 1))


def sharded(mesh: Any = None, policy: str = "float32", seed: int = 0) -> Any:
    module, options = network(seed), {"mesh": mesh, "mp_policy": POLICIES[policy]}
    for layer in (module[0], module[2]):
        fully_shard(layer, **options)
    return fully_shard(module, **options)


def batch(step: int, rank: int | None = None) -> Tensor:
    seed = 100 * (dist.get_rank() if rank is None else rank) + step
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def units(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def local(tensor: Any) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def train(
    module: Any, steps: Sequence[int] = range(3), clip: float | None = None, lr: float = 0.3
) -> list[Tensor]:
    """Train, in every other step with an accumulating pass before; return gradients and weights."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    found = []
    for step in steps:
        optimizer.zero_grad()
        for part, synchronize in ((-step, False), (step, True)):
            if synchronize or step % 2:
                if hasattr(module, "set_requires_gradient_sync"):
                    module.set_requires_gradient_sync(synchronize)
                skip = contextlib.nullcontext()
                if not synchronize and hasattr(module, "no_sync"):
                    skip = module.no_sync()
                with skip:
                    module(batch(part)).float().square().mean().backward()
        if clip is not None:
            found.append(local(nn.utils.clip_grad_norm_(module.parameters(), clip)))
        found += [local(p.grad) for p in module.parameters() if p.grad is not None]
        optimizer.step()
    return found + [local(p) for p in module.parameters()]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], what: str = "") -> None:
    assert len(found) == len(expected), what
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
        assert torch.equal(ours.nan_to_num(7e33), theirs.nan_to_num(7e33)), f"{what}, {place}"


class Zoo(nn.Module):
    """A random small model that maps 6 numbers to some.

    Args:
        seed: decides on layers, sharing, freezing and recomputation.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        choose = random.Random(seed)
        width, self.layers = 6, nn.ModuleList()
        for _ in range(choose.randint(2, 4)):
            out = choose.randint(1, 9)
            self.layers.append(nn.Linear(width, out, bias=choose.random() < 0.7))
            width = out
        self.back = nn.Linear(width, 6, bias=choose.random() < 0.5)
        self.middle, self.again = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        if choose.random() < 0.5:  # both in the root's unit
            self.again.weight = self.middle.weight
        self.scale = nn.Parameter(torch.rand(choose.randint(1, 3)))
        self.recomputed = choose.random() < 0.5
        if choose.random() < 0.5:
            choose.choice(list(self.layers)).weight.requires_grad_(False)
        if choose.random() < 0.3:
            self.layers[0].requires_grad_(False)
        self.policy = choose.choice([*POLICIES])
        # torch 2.13 refuses to reduce accumulated gradients beside zeros for what is not used
        self.unused = None if "reduced" in self.policy or seed % 2 else nn.Linear(2, 2)
        self.reshards = choose.choice([None, True, False])
        self.compiled = choose.random() < 0.2
        self.units = choose.sample([*self.layers], choose.randint(0, len(self.layers)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.recomputed and self.training:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
            x = torch.tanh(x)
        return self.again(torch.tanh(self.middle(self.back(x)))) * self.scale.sum()


def zoo(seed: int, mesh: Any = None) -> Any:
    model = Zoo(seed)
    options: Any = {"mesh": mesh, "mp_policy": POLICIES[model.policy]}
    for unit in model.units:
        fully_shard(unit, reshard_after_forward=model.reshards, **options)
        if model.compiled:
            unit.compile(backend="eager")
    return fully_shard(model, **options)

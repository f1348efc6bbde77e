"""PowerSGD and top-k as an outside user would write them, also as a hook of DDP's; some are
correct, others faulty.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs


class Training:
    """One rank's weights and steps; each parameter is a bucket of its own."""

    def __init__(self, world: Any, weights: list[torch.Tensor], settings: dict[str, Any]) -> None:
        self.world, self.settings, self.t = world, settings, 0
        self.weights = weights
        self.e: dict[int, torch.Tensor] = {}
        self.q: dict[int, torch.Tensor] = {}

    def play(self, program: list[Any]) -> list[Any]:
        act = {
            "step": self.step,
            "memories": self.memories,
            "factors": self.factors,
            "restart": list,
            "new buckets": list,
        }
        return [act[name](*arguments) for name, *arguments in program]

    def step(self, gradients: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        self.t += 1
        found = []
        for place, w in reversed([*enumerate(self.weights)]):
            g = gradients.get(place, torch.zeros_like(w)).clone()
            wide = g if g.dtype is torch.float64 else g.float()
            if self.t <= self.settings["warmup_steps"]:
                wide = self.mean(wide)
            else:
                wide = self.round(place, wide, self.t - self.settings["warmup_steps"] - 1)
            found.append(wide.to(w.dtype))
            w -= self.settings["lr"] * found[-1]
        return found[::-1]

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        self.world.transport.allreduce_inplace(x)
        return x / self.world.world_size

    def memories(self) -> list[torch.Tensor | None]:
        return [
            self.e[place].view(w.shape).clone() if place in self.e else None
            for place, w in enumerate(self.weights)
        ]

    def factors(self) -> list[torch.Tensor | None]:
        return [
            self.q[place].clone() if place in self.q else None for place in range(len(self.weights))
        ]


class PowerSGD(Training):
    """With Householder QR, whose columns differ from Gram-Schmidt's."""

    def round(self, place: int, g: torch.Tensor, k: int) -> torch.Tensor:
        s = self.settings
        if g.dim() < 2:
            return self.uncompressed(place, g)
        n, m = g.shape[0], math.prod(g.shape[1:])
        r = min(n, m, s["matrix_approximation_rank"])
        if not (n + m) * r * s["min_compression_rate"] < n * m:
            return self.uncompressed(place, g)
        matrix = g.reshape(n, m) + self.e.get(place, 0)
        i = len(self.weights) - 1 - place
        random = torch.randn(
            m, r, generator=torch.Generator().manual_seed(s["seed"] + 1000003 * k + 7919 * i)
        ).to(g.dtype)
        q = self.q[place] if place in self.q and s["warm_start"] else random
        q = self.started(q, random)
        p = (matrix @ q).contiguous()
        self.world.transport.allreduce_inplace(p)
        finite = bool(p.isfinite().all())
        p = self.orthonormal(p) if finite else p
        own = matrix.T @ p
        q = self.mean(own)
        if not (finite and q.isfinite().all()):
            return self.refused(g)
        self.q[place] = q
        result = p @ q.T
        if s["memory"] is not None:
            self.e[place] = matrix - (p @ own.T if s["memory"] == "local" else result)
        return result.view(g.shape)

    def started(self, q: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
        q = self.orthonormal(q)
        empty = (q == 0).all(0)
        q[:, empty] = random[:, empty]
        return self.orthonormal(q)

    def orthonormal(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        sizes = wide.norm(dim=0)
        found, triangle = torch.linalg.qr(wide / torch.where(sizes > 0, sizes, 1))
        full = torch.zeros_like(wide)
        full[:, : found.shape[1]] = found
        kept = torch.zeros(x.shape[1], dtype=torch.bool)
        kept[: triangle.shape[0]] = triangle.diagonal().abs() > 1e-6
        full[:, ~kept] = 0
        # A column that is left out takes its part of later ones along, so these are made again from
        # those that are kept.
        if not kept.all() and kept.any():
            full[:, kept] = torch.linalg.qr(wide[:, kept] / sizes[kept])[0]
        return full.to(x.dtype)

    def uncompressed(self, place: int, g: torch.Tensor) -> torch.Tensor:
        return self.mean(g)

    def refused(self, g: torch.Tensor) -> torch.Tensor:
        return torch.full_like(g, torch.nan)


class TopK(Training):
    def step(self, gradients: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        self.t += 1
        found = [torch.zeros_like(w) for w in self.weights]
        for bucket in self.buckets():
            flat = torch.cat(
                [gradients.get(place, found[place]).reshape(-1) for place in bucket]
            ).float()
            flat = (
                self.mean(flat)
                if self.t <= self.settings["warmup_steps"]
                else self.round(bucket[0], flat)
            )
            for place, part in zip(
                bucket, flat.split([found[place].numel() for place in bucket]), strict=True
            ):
                found[place].copy_(part.view(found[place].shape))
        return found

    def buckets(self) -> list[list[int]]:
        found, filled = [[]], 0
        for place, w in reversed([*enumerate(self.weights)]):
            found[-1].append(place)
            filled += w.numel() * w.element_size()
            if filled >= self.settings["bucket_bytes"]:
                found.append([])
                filled = 0
        return [bucket for bucket in found if bucket]

    def memories(self) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = [None] * len(self.weights)
        for bucket in self.buckets() if self.settings["error_feedback"] else []:
            sizes = [self.weights[place].numel() for place in bucket]
            parts = self.e.get(bucket[0], torch.zeros(sum(sizes))).split(sizes)
            for place, part in zip(bucket, parts, strict=True):
                found[place] = part.view(self.weights[place].shape).clone()
        return found

    def round(self, key: int, g: torch.Tensor) -> torch.Tensor:
        s, n = self.settings, self.world.world_size
        p = g + self.e.get(key, torch.zeros_like(g)) if s["error_feedback"] else g
        if not p.numel():
            return p
        count = min(p.numel(), max(1, math.ceil(s["ratio"] * p.numel())))
        order = torch.where(p.isnan(), torch.inf, torch.where(p.isinf(), 1e300, p.abs().double()))
        own = order.argsort(descending=True, stable=True)[:count].sort().values
        indices, values = torch.empty(n * count, dtype=torch.int32), torch.empty(n * count)
        self.world.transport.allgather(own.int(), indices)
        self.world.transport.allgather(p[own].contiguous(), values)
        total = torch.zeros_like(p)
        for where, what in zip(indices.view(n, count), values.view(n, count), strict=True):
            total[where.long()] += what
        if s["error_feedback"] and self.remembers(values):
            self.e[key] = p.index_fill(0, own, 0)
        return self.divided(total, indices)

    def remembers(self, values: torch.Tensor) -> bool:
        return bool(values.isfinite().all())

    def divided(self, total: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return total / self.world.world_size


# What has gone wrong in the field.


class ZeroGivesNaN(PowerSGD):
    """Divides columns by their norms, whatever these are, as torch's hook does."""

    def orthonormal(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for column in range(x.shape[1]):
            x[:, column] /= x[:, column].norm()
            x[:, column + 1 :] -= x[:, column : column + 1] @ (
                x[:, column : column + 1].T @ x[:, column + 1 :]
            )
        return x


class RemembersWhatIsNotCompressed(PowerSGD):
    """Keeps what its uncompressed gradients differ from their mean, round by round, as torch's hook
    does.
    """

    def uncompressed(self, place: int, g: torch.Tensor) -> torch.Tensor:
        g = g + self.e.get(place, 0)
        mean = self.mean(g)
        self.e[place] = g - mean
        return mean


class StaysDead(PowerSGD):
    """Never replaces columns of zeros."""

    def started(self, q: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
        return self.orthonormal(q)


class IsPoisoned(PowerSGD):
    """Puts what is not finite into its memory."""

    def refused(self, g: torch.Tensor) -> torch.Tensor:
        self.e = {place: torch.full_like(e, torch.nan) for place, e in self.e.items()}
        return super().refused(g)


class RemembersOverflows(TopK):
    """Keeps what it could not send of an overflow."""

    def remembers(self, values: torch.Tensor) -> bool:
        return True


class DividesBySenders(TopK):
    """Divides each coordinate by the number of ranks that have sent it."""

    def divided(self, total: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        senders = torch.zeros_like(total).index_add_(0, indices.long(), torch.ones(len(indices)))
        return total / senders.clamp(min=1)


# Communication hooks of DDP: a function of a state and a bucket that returns a future of the
# averaged bucket.


class Bucket:
    """DDP's bucket, as far as hooks use it."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        self._flat = torch.cat([g.reshape(-1) for g in gradients])
        self._shapes = [g.shape for g in gradients]

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        return [
            part.view(shape)
            for part, shape in zip(
                self._flat.split([s.numel() for s in self._shapes]), self._shapes, strict=True
            )
        ]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class Hooked(Training):
    """A target made of a communication hook: all gradients are one bucket, in DDP's order, last
    parameter first.

    A hook communicates through ``torch.distributed``, which has one process per rank; here
    `torchs_powersgd` lends it the simulated world's transport.
    """

    def __init__(
        self,
        world: Any,
        weights: list[torch.Tensor],
        settings: dict[str, Any],
        make: Callable[..., Any],
    ) -> None:
        super().__init__(world, weights, settings)
        self.state, self.hook = make(world, settings)

    def step(self, gradients: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        bucket = Bucket(
            [
                gradients.get(p, torch.zeros_like(w)).clone()
                for p, w in reversed([*enumerate(self.weights)])
            ]
        )
        self.bucket = bucket
        bucket.buffer().copy_(self.hook(self.state, bucket))
        return [g.clone() for g in bucket.gradients()][::-1]

    def memories(self) -> list[torch.Tensor | None]:
        if 0 not in self.state.error_dict:
            return [None] * len(self.weights)
        parts = self.state.error_dict[0].split([w.numel() for w in self.weights[::-1]])
        return [
            part.view(w.shape).clone() for part, w in zip(parts[::-1], self.weights, strict=True)
        ]

    def factors(self) -> list[torch.Tensor | None]:
        """Return None of all: which part of the hook's Q belongs to which parameter is the hook's
        own affair.
        """
        return [None] * len(self.weights)


def torchs_powersgd(
    world: Any, settings: dict[str, Any]
) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Return torch's own hook, whose all-reduces go through the simulated world."""
    group = SimpleNamespace(size=lambda: world.world_size)
    state = torchs.PowerSGDState(
        group,
        settings["matrix_approximation_rank"],
        start_powerSGD_iter=2,
        min_compression_rate=settings["min_compression_rate"],
        use_error_feedback=settings["memory"] is not None,
        warm_start=settings["warm_start"],
        random_seed=settings["seed"] % 2**31,
    )
    state.iter = 2

    def all_reduce(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        world.transport.allreduce_inplace(tensor)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future)

    def hook(state: Any, bucket: Bucket) -> torch.Tensor:
        # All ranks share the module, as they are threads; each has a copy of the function with a
        # transport of its own.
        names = {
            **vars(torchs),
            "dist": SimpleNamespace(all_reduce=all_reduce, group=SimpleNamespace(WORLD=group)),
        }
        run = type(torchs.powerSGD_hook)(
            torchs.powerSGD_hook.__code__, names, "hook", torchs.powerSGD_hook.__defaults__
        )
        return run(state, bucket).wait()

    return state, hook


class TorchsHook(Hooked):
    """torch's own hook."""

    def __init__(self, world: Any, weights: list[torch.Tensor], settings: dict[str, Any]) -> None:
        super().__init__(world, weights, settings, torchs_powersgd)


def target(
    powersgd: Callable[..., Training] | None = None, topk: Callable[..., Training] | None = None
) -> Any:
    """Return a target whose algorithms are these."""
    algorithms: dict[str, Any] = {}
    for name, kind in (("powersgd", powersgd), ("topk", topk)):
        if kind is not None:

            def run(
                world: Any,
                weights: Any,
                program: Any,
                *,
                kind: Callable[..., Training] = kind,
                **settings: Any,
            ) -> Any:
                return kind(world, copy.deepcopy(weights), settings).play(program)

            algorithms[name] = staticmethod(run)
    return type("Target", (), {"algorithms": type("Algorithms", (), algorithms)()})()

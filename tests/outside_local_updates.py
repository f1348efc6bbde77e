"""DiLoCo and local SGD as an outside user would write them, in plain torch over any communicator;
one is correct, others faulty.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


def mean_of(world: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the mean over ranks of tensors of one dtype, sent as one bucket."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    world.transport.allreduce_inplace(flat)
    flat /= world.world_size
    return [
        part.view(t.shape)
        for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)
    ]


class Training:
    """One rank's weights, inner optimizer and steps."""

    def __init__(self, world: Any, weights: list[torch.Tensor], settings: dict[str, Any]) -> None:
        self.world, self.settings, self.t = world, settings, 0
        self.weights = [torch.nn.Parameter(w) for w in weights]
        self.inner = torch.optim.SGD(self.weights, lr=settings["lr"], momentum=settings["momentum"])

    def play(self, program: list[Any]) -> list[list[torch.Tensor]]:
        act = {"step": self.step, "failing step": self.failing_step, "restart": self.restart}
        look = {"global weights": self.global_weights, "gradients": self.gradients}
        seen = []
        for name, *arguments in program:
            if name in look:
                seen.append(look[name]())
                continue
            act[name](*arguments)
            seen.append([w.detach().clone() for w in self.weights])
        return seen

    def step(self, gradients: dict[int, torch.Tensor]) -> None:
        for place, w in enumerate(self.weights):
            w.grad = gradients[place].clone() if place in gradients else None
        self.t += 1
        self.before_step()
        self.inner.step()
        self.after_step(self.t - self.settings["warmup_steps"])

    def before_step(self) -> None:
        if self.t <= self.settings["warmup_steps"]:
            for w in self.weights:
                (w.grad,) = mean_of(self.world, [torch.zeros_like(w) if w.grad is None else w.grad])

    def after_step(self, t: int) -> None:
        raise NotImplementedError

    def failing_step(self, gradients: dict[int, torch.Tensor]) -> None:
        try:
            self.step(gradients)
        except FloatingPointError:
            return
        raise AssertionError("no error")

    def gradients(self) -> list[torch.Tensor]:
        return [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in self.weights]

    def global_weights(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def restart(self) -> None:
        state = copy.deepcopy(self.inner.state_dict())
        self.inner = torch.optim.SGD(
            self.weights, lr=self.settings["lr"], momentum=self.settings["momentum"]
        )
        self.inner.load_state_dict(state)


class LocalSGD(Training):
    def after_step(self, t: int) -> None:
        if t >= 1 and (t - self.settings["offset"]) % self.settings["period"] == 0:
            with torch.no_grad():
                for bucket in self.buckets():
                    for w, mean in zip(bucket, mean_of(self.world, bucket), strict=True):
                        w.copy_(mean)

    def buckets(self) -> list[list[torch.Tensor]]:
        return [[w] for w in self.weights]


class DiLoCo(Training):
    def __init__(self, world: Any, weights: list[torch.Tensor], settings: dict[str, Any]) -> None:
        super().__init__(world, weights, settings)
        self.fragments = self.assigned(settings["fragments"])
        self.gap = settings["period"] // len(self.fragments)
        self.g: list[torch.nn.Parameter] = []
        self.sent: dict[int, list[torch.Tensor]] = {}

    def assigned(self, fragments: Any) -> list[list[int]]:
        if not isinstance(fragments, int):
            return fragments
        sizes = [w.numel() * w.element_size() for w in self.weights]
        found, before, last = [[] for _ in range(fragments)], 0, -1
        for place, size in enumerate(sizes):
            middle = fragments * (2 * before + size) // (2 * sum(sizes)) if sum(sizes) else 0
            last = max(min(middle, last + 1, fragments - 1), fragments - len(sizes) + place)
            found[last].append(place)
            before += size
        return found

    def before_step(self) -> None:
        super().before_step()
        if not self.g and self.t > self.settings["warmup_steps"]:
            wide = [
                torch.float64 if w.dtype is torch.float64 else torch.float32 for w in self.weights
            ]
            self.g = [
                torch.nn.Parameter(w.detach().to(d, copy=True))
                for w, d in zip(self.weights, wide, strict=True)
            ]
            self.outer = self.outer_optimizers()

    def outer_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer([self.g[place] for place in places]) for places in self.fragments]

    def optimizer(self, tensors: list[Any]) -> torch.optim.Optimizer:
        options = dict(
            self.settings["outer_optimizer"]
            or {"class": "SGD", "lr": 0.7, "momentum": 0.9, "nesterov": True}
        )
        return getattr(torch.optim, options.pop("class"))(tensors, **options)

    def after_step(self, t: int) -> None:
        if t < 1:
            return
        if self.settings["compression"] is not None:
            raise NotImplementedError("compression")
        for p, places in enumerate(self.fragments):
            if (t - ((p + 1) * self.gap - self.settings["delay"])) % self.settings["period"] == 0:
                with torch.no_grad():
                    self.sent[p] = [
                        mean_of(self.world, [self.g[i] - self.weights[i]])[0] for i in places
                    ]
            if (t - (p + 1) * self.gap) % self.settings["period"] == 0:
                self.apply(p, places, self.sent.pop(p))

    def apply(self, p: int, places: list[int], mean: list[torch.Tensor]) -> None:
        if not all(d.isfinite().all() for d in mean):
            raise FloatingPointError(f"fragment {p}")
        for i, d in zip(places, mean, strict=True):
            self.g[i].grad = d
        self.outer[p].step()
        for i in places:
            self.g[i].grad = None
        with torch.no_grad():
            for i in self.returned(places):
                self.weights[i].copy_(self.mixed(self.weights[i], self.g[i], self.settings["mix"]))

    def returned(self, places: list[int]) -> list[int]:
        return places

    def mixed(self, x: torch.Tensor, g: torch.Tensor, mix: float) -> torch.Tensor:
        if mix == 0:
            return g
        return g + (x - g) * mix if mix < 0.5 else x - (x - g) * (1 - mix)

    def global_weights(self) -> list[torch.Tensor]:
        shown = self.g or self.weights
        return [g.detach().to(w.dtype, copy=True) for g, w in zip(shown, self.weights, strict=True)]

    def restart(self) -> None:
        super().restart()
        if self.g:
            states = copy.deepcopy([optimizer.state_dict() for optimizer in self.outer])
            self.outer = self.outer_optimizers()
            for optimizer, state in zip(self.outer, states, strict=True):
                optimizer.load_state_dict(state)


# What has gone wrong in the field.


class LastBucketOnly(LocalSGD):
    """Averages in several buckets, and copies the last one back into the weights."""

    def buckets(self) -> list[list[torch.Tensor]]:
        return super().buckets()[-1:]


class SkipsWithoutGradient(LocalSGD):
    """Never averages a tensor that has no gradient on any rank at the moment, as torch's averager
    does.
    """

    def buckets(self) -> list[list[torch.Tensor]]:
        known = [torch.tensor([w.grad is not None], dtype=torch.float32) for w in self.weights]
        (used,) = mean_of(self.world, [torch.cat(known)])
        return [[w] for w, share in zip(self.weights, used.tolist(), strict=True) if share]


class OffsetOne(LocalSGD):
    """Counts from 0, so that the first averaging follows the first step."""

    def after_step(self, t: int) -> None:
        super().after_step(t - 1 + self.settings["period"])


class LastOfFragmentOnly(DiLoCo):
    """Copies only the last tensor of a fragment back."""

    def returned(self, places: list[int]) -> list[int]:
        return places[-1:]


class SharedOuterOptimizer(DiLoCo):
    """Gives all fragments one outer optimizer, whose step also moves the others by gradients left
    in them.
    """

    def outer_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer(self.g)] * len(self.fragments)

    def apply(self, p: int, places: list[int], mean: list[torch.Tensor]) -> None:
        for g, w in zip(self.g, self.weights, strict=True):
            g.grad = None if w.grad is None else w.grad.to(g.dtype)
        super().apply(p, places, mean)


class WeightsOfTheApply(DiLoCo):
    """Sends late: the difference is that of the weights at the apply."""

    def after_step(self, t: int) -> None:
        delay, self.settings["delay"] = self.settings["delay"], 0
        super().after_step(t)
        self.settings["delay"] = delay


class Lerp(DiLoCo):
    """Mixes with torch's fused function."""

    def mixed(self, x: torch.Tensor, g: torch.Tensor, mix: float) -> torch.Tensor:
        return torch.lerp(g, x.to(g.dtype), mix)


class StartsInTheWarmUp(DiLoCo):
    """Takes the global copy when training begins."""

    def before_step(self) -> None:
        if self.t == 1:
            warmup, self.settings["warmup_steps"] = self.settings["warmup_steps"], 0
            super().before_step()
            self.settings["warmup_steps"] = warmup
        super().before_step()


def target(local_sgd: type[Training] | None = None, diloco: type[Training] | None = None) -> Any:
    """Return a target whose algorithms are these."""
    algorithms: dict[str, Any] = {}
    for name, kind in (("local_sgd", local_sgd), ("diloco", diloco)):
        if kind is not None:

            def run(
                world: Any,
                weights: Any,
                program: Any,
                *,
                kind: type[Training] = kind,
                **settings: Any,
            ) -> Any:
                if settings.get("hierarchical"):
                    raise NotImplementedError("hierarchical")
                return kind(world, weights, settings).play(program)

            algorithms[name] = staticmethod(run)
    return type("Target", (), {"algorithms": type("Algorithms", (), algorithms)()})()

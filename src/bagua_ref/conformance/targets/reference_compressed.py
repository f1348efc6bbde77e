"""The package's trainings with compressed gradients, action by action (S10, S11.2)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from bagua_ref.conformance.targets.world import RankWorld

__all__ = ["CompressedTrainings"]


class CompressedTrainings:
    """`powersgd` and `topk` of a target's ``algorithms``; the class that inherits them makes modules and takes steps."""

    def powersgd(
        self, world: RankWorld, weights: list[Tensor], program: list[Any], *, lr: float, bucket_bytes: int, **options: Any
    ) -> list[list[Tensor | None]]:
        """Train as S10 says; return a list by parameter for each action.

        Args:
            world: world of this rank.
            weights: its parameters, named by their places.
            program: actions in order. ``("step", gradients)``: take a step; return the averaged gradients. ``("memories",)``:
                return e of each parameter in its shape, float32 (float64 for float64); None for those without one.
                ``("factors",)``: return Q, m x r, likewise; None for those that are not compressed.
                ``("new buckets",)``: put gradients into new buckets of the same tensors. ``("restart",)``: save weights and
                states, and continue with a new training that has loaded them. The last two return an empty list.
            lr: of the optimizer, plain SGD.
            bucket_bytes: bucket size.
            options: ``matrix_approximation_rank``, ``warmup_steps``, ``min_compression_rate``, ``memory``, ``warm_start`` and
                ``seed``.
        """
        return self._compressed("powersgd", weights, program, lr, bucket_bytes, options)

    def topk(
        self, world: RankWorld, weights: list[Tensor], program: list[Any], *, lr: float, bucket_bytes: int, **options: Any
    ) -> list[list[Tensor | None]]:
        """Train as S11.2 says, like `powersgd`, but without factors; ``options`` are ratio, error_feedback and warmup_steps."""
        return self._compressed("topk", weights, program, lr, bucket_bytes, options)

    def _compressed(
        self, name: str, weights: list[Tensor], program: list[Any], lr: float, bucket_bytes: int, options: dict[str, Any]
    ) -> list[list[Tensor | None]]:
        trainer = cast("Any", self)
        begin = partial(trainer._begin, name, weights, lr, bucket_bytes, options)
        module, optimizer = begin()
        seen: list[list[Tensor | None]] = []
        for action, *arguments in program:
            found: list[Tensor | None] = []
            if action == "step":
                trainer._step(module, optimizer, *arguments)
                found = [torch.zeros_like(w) if w.grad is None else w.grad.detach() for w in module.weights]
            elif action in ("memories", "factors"):
                found = _by_place(getattr(module.bagua_algorithm, action).state(), module.weights, reshape=action == "memories")
            elif action == "new buckets":
                module._bagua.reset()
            else:
                module, optimizer = trainer._restarted(begin, module, optimizer)
            seen.append([None if x is None else x.cpu().clone() for x in found])
        return seen


def _by_place(kept: Mapping[str, Tensor], weights: Any, reshape: bool) -> list[Tensor | None]:
    """Return what is kept by the names of parameters, by their places."""
    found = [kept.get(f"weights.{place}") for place in range(len(weights))]
    return [x.view(w.shape) if x is not None and reshape else x for x, w in zip(found, weights, strict=True)]

"""A training with local updates, put together action by action with what each must give (S9)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected.tolerances import EXACT, SUM, Tolerance
from bagua_ref.conformance.inputs.strategies import Draw, name_of, seeds
from bagua_ref.conformance.inputs.training_cases import ONE_BUCKET, ByRank, array, copies
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import Training

__all__ = ["Trial"]


class Trial:
    """A training with local updates that is put together step by step, and what it must give.

    Args:
        draw: Hypothesis's.
        nodes: number of ranks on each node.
        weights: that all ranks start from.
        gradients: by rank and step.
        options: ``momentum`` of the inner optimizer, and those of the algorithm.
        exact: whether sums over ranks do not depend on their order.
    """

    def __init__(
        self,
        draw: Draw,
        nodes: tuple[int, ...],
        weights: list[Tensor],
        gradients: ByRank,
        options: dict[str, Any],
        exact: bool = True,
    ) -> None:
        self.nodes, self.weights, self._gradients, self.n = nodes, weights, gradients, sum(nodes)
        self.options = {"lr": 1.0, "momentum": 0.0, "bucket_bytes": draw(st.sampled_from([1, 40, ONE_BUCKET])), **options}
        self._seed, self._exact = draw(seeds), exact
        self._programs: list[list[Any]] = [[] for _ in range(self.n)]
        self._expected: list[tuple[list[list[Any]], Tolerance, str]] = []
        self._taken = 0
        self.dtypes = [name_of(w.dtype) for w in weights]
        self.start = [array(w) for w in weights]

    @property
    def steps(self) -> int:
        """The number of steps for which there are gradients."""
        return len(self._gradients[0])

    def gradients(self, step: int) -> list[list[Any]]:
        """Return a step's gradients as arrays by rank and parameter, None for those that are not used."""
        return [[array(rank[step][p]) if p in rank[step] else None for p in range(len(self.weights))] for rank in self._gradients]

    def step(self, expected: list[list[Any]], how: str = "step") -> None:
        """Let every rank take its next step, after which it must have the expected weights."""
        for rank, program in enumerate(self._programs):
            program.append((how, self._gradients[rank][self._taken]))
        self._taken += 1
        self._expect(expected, f"{how} {self._taken}")

    def look(self, action: str, expected: list[list[Any]], tolerance: Tolerance | None = None) -> None:
        """Let every rank do something that is no step."""
        for program in self._programs:
            program.append((action,))
        self._expect(expected, f"{action} after step {self._taken}", tolerance)

    def _expect(self, expected: list[list[Any]], what: str, tolerance: Tolerance | None = None) -> None:
        if tolerance is None:
            # Each sum over ranks may be rounded in another order, and the difference stays in the weights.
            tolerance = EXACT if self._exact else SUM(8 * (self._taken + 1) * (self.n + 2))
        self._expected.append((expected, tolerance, what))

    def run(self, lab: Lab, method: str) -> Training:
        """Train, and compare."""
        training = Training(lab, method, self.nodes, copies(self.weights, self.n), self._programs, self._seed, self.options)
        for index, (expected, tolerance, what) in enumerate(self._expected):
            for rank, of_rank in enumerate(expected):
                for place, (numbers, w) in enumerate(zip(of_rank, self.weights, strict=True)):
                    want = torch.from_numpy(np.ascontiguousarray(numbers)).to(w.dtype).view(w.shape)
                    magnitude = None if tolerance is EXACT else self._largest
                    training.expect(rank, index, place, want, tolerance, magnitude, what)
        return training

    @property
    def _largest(self) -> Tensor:
        seen = [abs(x).max() for expected, *_ in self._expected for rank in expected for x in rank if x.size]
        return torch.tensor(float(max([*map(float, seen), 0.0])) + 1)

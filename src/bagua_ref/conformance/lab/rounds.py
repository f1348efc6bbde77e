"""A training with compressed gradients: what is applied and kept in each round (S10, S11.2)."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected.tolerances import EXACT, Tolerance
from bagua_ref.conformance.inputs.strategies import Draw, seeds
from bagua_ref.conformance.inputs.training_cases import ONE_BUCKET, ByRank, copies
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import Training

__all__ = ["Rounds", "check_rounds", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of ``dtype`` are computed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def check_rounds(results: list[Any], weights: list[list[Tensor]], programs: list[list[Any]]) -> None:
    """Raise AssertionError unless every rank returned, for each of its actions, tensors of the right form."""
    for rank, (found, mine, program) in enumerate(zip(results, weights, programs, strict=True)):
        if not isinstance(found, list | tuple) or len(found) != len(program):
            raise AssertionError(f"rank {rank} did not return a list of {len(program)} entries, one for each action")
        for (action, *_), entry in zip(program, found, strict=True):
            if action in ("restart", "new buckets"):
                continue
            if not isinstance(entry, list | tuple) or len(entry) != len(mine):
                raise AssertionError(f"rank {rank} did not return a list of {len(mine)} for {action!r}, one for each parameter")
            for place, (x, w) in enumerate(zip(entry, mine, strict=True)):
                if x is None and action != "step":
                    continue
                dtype = w.dtype if action == "step" else wide(w.dtype)
                right = isinstance(x, Tensor) and x.dtype is dtype and (x.dim() == 2 if action == "factors" else x.shape == w.shape)
                if not right:
                    raise AssertionError(
                        f"rank {rank} returned {_described(x)} for {action!r} of parameter {place}, {_described(w)}"
                    )


def _described(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


class Rounds:
    """A training of a target with compressed gradients, whose results are looked at after every step.

    Args:
        lab: provides the target.
        draw: Hypothesis's.
        method: "powersgd" or "topk".
        nodes: number of ranks on each node.
        weights: the parameters.
        gradients: by rank and step.
        options: those of the algorithm; ``bucket_bytes`` is drawn unless it is among them.
        before: step -> an action that precedes it.
        record: whether to note what is sent.

    Attributes:
        training: the training.
        n: number of ranks.
        steps: their number.
        index: (action, step) -> its place in the program.
    """

    def __init__(
        self,
        lab: Lab,
        draw: Draw,
        method: str,
        nodes: tuple[int, ...],
        weights: list[Tensor],
        gradients: ByRank,
        options: dict[str, Any],
        before: dict[int, str] | None = None,
        record: bool = False,
    ) -> None:
        self.n, self.steps, self.gradients, self.weights = sum(nodes), len(gradients[0]), gradients, weights
        looks = ("memories", "factors") if method == "powersgd" else ("memories",)
        programs: list[list[Any]] = [[] for _ in gradients]
        self.index: dict[tuple[str, int], int] = {}
        for step in range(self.steps):
            actions = [*([before[step]] if before is not None and step in before else []), "step", *looks]
            for action in actions:
                self.index[action, step] = len(programs[0])
                for program, mine in zip(programs, gradients, strict=True):
                    program.append((action, mine[step]) if action == "step" else (action,))
        self.options = {"lr": 0.5, "bucket_bytes": draw(st.sampled_from([1, 40, ONE_BUCKET])), **options}
        self.training = Training(
            lab, method, nodes, copies(weights, self.n), programs, draw(seeds), self.options, form=check_rounds, record=record
        )

    def given(self, step: int, place: int) -> list[Tensor]:
        """Return every rank's gradient of a parameter in a step, zero where it is not used, in the dtype of the arithmetic."""
        w = self.weights[place]
        found = [rank[step].get(place) for rank in self.gradients]
        return [(torch.zeros_like(w) if g is None else g).to(wide(w.dtype)) for g in found]

    def seen(self, action: str, rank: int, step: int, place: int) -> Any:
        """Return what a rank returned for an action after a step (or "step": for the step)."""
        return self.training.results[rank][self.index[action, step]][place]

    def expect(
        self,
        action: str,
        rank: int,
        step: int,
        place: int,
        want: Tensor,
        tolerance: Tolerance = EXACT,
        magnitude: Tensor | float | None = None,
        why: str = "",
    ) -> None:
        """Raise `Violation` unless a rank returned ``want``."""
        source = self.source(action, rank, step, place)
        self.expect_that(action, rank, step, place, source, self.seen(action, rank, step, place), want, tolerance, magnitude, why)

    def expect_that(
        self,
        action: str,
        rank: int,
        step: int,
        place: int,
        source: str,
        found: Tensor | None,
        want: Tensor,
        tolerance: Tolerance,
        magnitude: Tensor | float | None,
        why: str = "",
    ) -> None:
        """Raise `Violation` unless ``found``, which a script computes by ``source`` from what a rank returned, equals ``want``."""
        where = f"{why}{': ' if why else ''}rank {rank}, step {step}, {_WHAT[action]} of parameter {place}"
        self.training.expect_true(
            f"{self.source(action, rank, step, place)} is not None", found is not None, f"{where}: there is none"
        )
        assert found is not None
        mass = None if magnitude is None else torch.as_tensor(magnitude, dtype=torch.float64)
        self.training.expect_that(source, found, want, where, tolerance, mass)

    def expect_none(self, action: str, rank: int, step: int, place: int, why: str) -> None:
        """Raise `Violation` unless a rank keeps nothing for a parameter."""
        message = f"rank {rank}, step {step}: there is {_WHAT[action]} of parameter {place}, {why}"
        self.training.expect_true(
            f"{self.source(action, rank, step, place)} is None", self.seen(action, rank, step, place) is None, message
        )

    def gram(self, rank: int, step: int, place: int) -> tuple[str, Tensor | None]:
        """Return Q Q^T in float64, which does not depend on the basis, and how a script computes it."""
        q, source = self.seen("factors", rank, step, place), self.source("factors", rank, step, place)
        return f"{source}.double() @ {source}.double().T", None if q is None else q.double() @ q.double().T

    def source(self, action: str, rank: int, step: int, place: int) -> str:
        """Return how a script names what a rank returned."""
        return f"results[{rank}][{self.index[action, step]}][{place}]"


_WHAT = {"step": "the averaged gradient", "memories": "a memory", "factors": "a factor"}

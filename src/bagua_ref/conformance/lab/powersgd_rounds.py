"""Rounds of powersgd, compared with plain ones from the target's own memories and factors (S10)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.conformance.expected import power_sgd_numpy as plain
from bagua_ref.conformance.expected.algorithms_plain import buckets
from bagua_ref.conformance.expected.tolerances import EXACT, SUM
from bagua_ref.conformance.inputs.strategies import Draw, name_of
from bagua_ref.conformance.inputs.training_cases import ByRank
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.rounds import Rounds, wide

__all__ = ["ROUNDED", "PowerSGDRounds"]

ROUNDED = SUM(400)
"""For projections on columns whose span is known to 100 times the rounding of what was added up for them (`is_tame`)."""


class PowerSGDRounds(Rounds):
    """A training with powersgd, whose rounds can be compared with plain ones."""

    def __init__(
        self,
        lab: Lab,
        draw: Draw,
        nodes: tuple[int, ...],
        weights: list[Tensor],
        gradients: ByRank,
        options: dict[str, Any],
        before: dict[int, str] | None = None,
        record: bool = False,
    ) -> None:
        super().__init__(lab, draw, "powersgd", nodes, weights, gradients, options, before, record)
        self.warmup_steps: int = options["warmup_steps"]
        self.layout = buckets([w.numel() for w in weights], [name_of(w.dtype) for w in weights], self.options["bucket_bytes"])
        self._order = list(itertools.chain(*self.layout))

    def rank_of(self, place: int) -> int:
        """Return r, 0 where a gradient is not compressed."""
        rank, rate = self.options["matrix_approximation_rank"], self.options["min_compression_rate"]
        return plain.compressed_rank(tuple(self.weights[place].shape), rank, rate)

    def matrices_of(self, step: int, place: int) -> list[Any]:
        """Return every rank's gradient as a matrix."""
        return [g.reshape(g.shape[0], -1).numpy() for g in self.given(step, place)]

    def errors(self, step: int, place: int) -> list[Any] | None:
        """Return every rank's e before a round, None without memory."""
        if self.options["memory"] is None:
            return None
        like = self.matrices_of(step, place)[0]
        if step == self.warmup_steps:
            return [np.zeros_like(like)] * self.n
        before = [self.seen("memories", rank, step - 1, place) for rank in range(self.n)]
        return [np.zeros_like(like) if e is None else e.reshape(like.shape).numpy() for e in before]

    def same_on_all_ranks(self, step: int, place: int, action: str = "step") -> None:
        """Compare the averaged gradients, or the factors, of all ranks, bit for bit."""
        first = self.seen(action, 0, step, place)
        for rank in range(1, self.n if first is not None else 0):
            self.expect(action, rank, step, place, first, why="compared with rank 0")

    def start(self, step: int, place: int) -> tuple[Any, dict[str, int], Any]:
        """Return Q as the last round left it (None: there is none), what N is drawn from, and the columns that begin the round."""
        k, like = step - self.warmup_steps, self.matrices_of(step, place)[0]
        q = None if k == 0 else self.seen("factors", 0, step - 1, place)
        if q is not None:
            known = f"{self.source('factors', 0, step - 1, place)}.isfinite().all()"
            self.training.expect_true(known, bool(q.isfinite().all()), f"step {step - 1}: Q of parameter {place} is not finite")
        drawn = {"seed": self.options["seed"], "k": k, "i": self._order.index(place)}
        q = None if q is None else q.numpy()
        columns = plain.start(
            q if self.options["warm_start"] else None, (like.shape[1], self.rank_of(place)), like.dtype.type, **drawn
        )
        return q, drawn, columns

    def mean(self, step: int, place: int, exact: bool = False) -> None:
        """Expect the mean."""
        given = torch.stack(self.given(step, place)).double()
        want = given.mean(0).to(self.weights[place].dtype)
        for rank in range(self.n):
            self.expect("step", rank, step, place, want, EXACT if exact else SUM(self.n + 1), given.abs().mean(0))

    def round(self, step: int, place: int, exact: bool = False) -> None:
        """Compare a round of one parameter with a plain one from equal e and Q."""
        r, w = self.rank_of(place), self.weights[place]
        if r == 0:
            self.mean(step, place, exact)
            for rank, action in itertools.product(range(self.n), ("memories", "factors")):
                self.expect_none(action, rank, step, place, "which is not compressed")
            return
        self.same_on_all_ranks(step, place)
        self.same_on_all_ranks(step, place, "factors")
        sent, errors, (q, drawn, columns) = self.matrices_of(step, place), self.errors(step, place), self.start(step, place)
        memory, warm_start = self.options["memory"], self.options["warm_start"]
        size = plain.norm([*sent, *(errors or [])])
        if not plain.is_tame(plain.added([*sent, *(errors or [])]) @ columns, size) or (
            q is not None and warm_start and not plain.is_tame(q)
        ):
            self._conserved(step, place, sent, errors)
            return
        wanted = plain.power_sgd_round(sent, errors, q, r, memory=memory, warm_start=warm_start, **drawn)
        gram = torch.from_numpy(wanted.q).double() @ torch.from_numpy(wanted.q).double().T if wanted.q is not None else None
        narrow = w.dtype.itemsize == 2
        for rank in range(self.n):
            result = torch.from_numpy(wanted.result).to(w.dtype).view(w.shape)
            self.expect("step", rank, step, place, result, SUM(4) if narrow else ROUNDED, size)
            if wanted.errors is None:
                self.expect_none("memories", rank, step, place, "though memory=None")
            else:
                left = torch.from_numpy(wanted.errors[rank]).view(w.shape)
                self.expect("memories", rank, step, place, left, ROUNDED, size)
            source, found = self.gram(rank, step, place)
            if gram is not None:
                eps = torch.finfo(wide(w.dtype)).eps / torch.finfo(torch.float64).eps
                mass = size * size * sent[0].shape[0] * eps
                self.expect_that("factors", rank, step, place, source, found, gram, ROUNDED, mass, "Q Q^T")

    def _conserved(self, step: int, place: int, sent: list[Any], errors: list[Any] | None) -> None:
        """Expect that what is applied and the mean of the new memories is the mean of the gradients and the old ones."""
        w = self.weights[place]
        if errors is None or w.dtype.itemsize == 2:
            return
        left = [self.seen("memories", rank, step, place) for rank in range(self.n)]
        self.training.expect_true(
            "False", all(x is not None for x in left), f"step {step}: there is no memory of parameter {place}"
        )
        found = self.seen("step", 0, step, place).double() + torch.stack(left).double().mean(0)
        want = torch.from_numpy(plain.added([*sent, *errors]).astype(np.float64) / self.n).view(w.shape)
        steps = [f"torch.stack([r[{self.index['memories', step]}][{place}] for r in results]).double().mean(0)"]
        source = f"(results[0][{self.index['step', step]}][{place}].double() + {steps[0]}).to(torch.{name_of(wide(w.dtype))})"
        kind = wide(w.dtype)
        self.expect_that(
            "memories",
            0,
            step,
            place,
            source,
            found.to(kind),
            want.to(kind),
            SUM(60 * self.n),
            plain.norm([*sent, *errors]),
            "conservation",
        )

    def follow(self, exact: bool = False) -> None:
        """Compare every step."""
        for step, place in itertools.product(range(self.steps), range(len(self.weights))):
            if step < self.warmup_steps:
                self.mean(step, place, exact)
            else:
                self.round(step, place, exact)

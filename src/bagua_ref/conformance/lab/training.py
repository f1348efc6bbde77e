"""A training in a simulated world, put together action by action with what each must return (S2,
S5, S9 to S11).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import Draw, name_of, seeds, worlds
from bagua_ref.conformance.cases.training_cases import (
    ONE_BUCKET,
    ByRank,
    any_gradients,
    any_weights,
    exact_gradients,
)
from bagua_ref.conformance.expected.algorithms_numpy import buckets
from bagua_ref.conformance.expected.kernels_numpy import Array, array, wide
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, Tolerance
from bagua_ref.conformance.lab.lab import Lab

__all__ = ["ANYTHING", "SHOWS_GRADIENTS", "TrainedAlgorithm", "Training", "exactly", "of_kinds"]

ANYTHING = Ellipsis
"""An expected value that is not compared."""

SHOWS_GRADIENTS = {"shows_gradients": True}
"""The option of trainings whose steps return averaged gradients, and no weights."""
_HOW = ("starts", "looks", "exact", "record")
_STATE = {"memories": "a memory", "factors": "a factor"}


@dataclass
class Training:
    """A training with one of the target's ``algorithms``, and what every rank must return.

    `step` and `look` add an action to every rank's program, and say what each rank must return for
    it; `run` trains and compares.

    Attributes:
        lab: provides the target.
        seed: seed of the interleaving.
        method: name of a method of `ReferenceAlgorithms`.
        nodes: number of ranks on each node.
        weights: the parameters.
        given: gradients by rank and step.
        options: keyword arguments.
        before: step, from 0, -> an action that precedes it.
        starts: the weights of each rank before training; by default ``weights``.
        looks: actions that follow each step.
        exact: whether sums over ranks do not depend on their order; None: of two ranks at most they
            do not.
        record: whether to note what is sent, as ``lab.messages``.
        n: number of ranks.
        steps: number of steps for which there are gradients.
        taken: number of steps so far.
        index: (action, step) -> the place of what is returned for it.
        results: what each rank has returned.
    """

    lab: Lab
    seed: int
    method: str
    nodes: tuple[int, ...]
    weights: list[Tensor]
    given: ByRank
    options: dict[str, Any]
    before: dict[int, str] = field(default_factory=dict)
    starts: list[list[Tensor]] = field(default_factory=list)
    looks: tuple[str, ...] = ()
    exact: bool | None = None
    record: bool = False

    def __post_init__(self) -> None:
        self.n = sum(self.nodes)
        self.starts = self.starts or [self.weights] * self.n
        self.exact = self.n <= 2 if self.exact is None else self.exact
        self.dtypes = [name_of(w.dtype) for w in self.weights]
        self.start = [self.ravel(place, w) for place, w in enumerate(self.weights)]
        self.steps, self.taken = len(self.given[0]) if self.given else 0, 0
        self.index: dict[tuple[str, int], int] = {}
        self.results: list[Any] = []
        self._programs: list[list[Any]] = [[] for _ in range(self.n)]
        self._expected: list[tuple[list[list[Any]], Tolerance, Any, str]] = []

    def layout(self) -> list[list[int]]:
        """Return the places of the parameters in each bucket."""
        return buckets([w.numel() for w in self.weights], self.dtypes, self.options["bucket_bytes"])

    def leaders(self) -> list[int] | None:
        """Return the number of ranks on each node if node leaders communicate, None if all ranks
        do.
        """
        return list(self.nodes) if self.options["hierarchical"] else None

    def of_buckets(
        self,
        layout: list[list[int]],
        train: Callable[[Array, list[list[Array]], str], list[list[Array]]],
    ) -> list[list[list[Any]]]:
        """Return the weights by step, rank and parameter.

        ``train`` takes a bucket's weights, its gradients by step and rank, and its dtype, and
        returns its weights by step and rank.
        """
        found: list[list[list[Any]]] = [
            [[None] * len(self.start) for _ in range(self.n)] for _ in range(self.steps)
        ]
        for bucket in layout:
            start = np.concatenate([self.start[place] for place in bucket])
            history = train(
                start,
                [self.flat(step, bucket) for step in range(self.steps)],
                self.dtypes[bucket[0]],
            )
            for expected, of_ranks in zip(found, history, strict=True):
                for mine, flat in zip(expected, of_ranks, strict=True):
                    for place, numbers in self.by_place(flat, bucket).items():
                        mine[place] = numbers
        return found

    def flat(self, step: int, bucket: list[int]) -> list[Any]:
        """Return every rank's gradients of a bucket, one after another, as `tensors` has them."""
        parts = [[self.ravel(p, x) for x in self.tensors(step, p)] for p in bucket]
        return [np.concatenate(of_rank) for of_rank in zip(*parts, strict=True)]

    def ravel(self, place: int, x: Tensor) -> Array:
        """Return the numbers of a parameter, or its gradient, in the order of the parameter's
        memory (S2.3).
        """
        return array(self._in_memory(place, x))

    def _in_memory(self, place: int, x: Any) -> Any:
        """Return what is shaped like a parameter in the order of the parameter's memory, all else
        as it is.
        """
        w = self.weights[place]
        if not isinstance(x, Tensor) or x.shape != w.shape:
            return x
        axes = sorted(range(w.dim()), key=lambda axis: -w.stride()[axis])
        return x.permute(axes).reshape(-1)

    def by_place(self, flat: Any, bucket: list[int]) -> dict[int, Any]:
        """Return each parameter's part of a bucket's numbers."""
        ends = np.cumsum([self.weights[place].numel() for place in bucket])[:-1]
        return dict(zip(bucket, np.split(flat, ends), strict=True))

    def gradients(self, step: int) -> list[list[Any]]:
        """Return a step's gradients as arrays by rank and parameter, None for those that are not
        used.
        """
        places = range(len(self.weights))
        return [
            [self.ravel(p, rank[step][p]) if p in rank[step] else None for p in places]
            for rank in self.given
        ]

    def nearly(self) -> Tolerance:
        """Return the tolerance of weights after the next step.

        Each sum over ranks may be rounded in another order, and the difference stays in the
        weights.
        """
        return EXACT if self.exact else SUM(8 * (self.taken + 2) * (self.n + 2))

    def tensors(self, step: int, place: int) -> list[Tensor]:
        """Return every rank's gradient of a parameter, zero where it is not used, in the dtype of
        the arithmetic.
        """
        w = self.weights[place]
        return [rank[step].get(place, torch.zeros_like(w)).to(wide(w.dtype)) for rank in self.given]

    def mean(self, step: int, place: int) -> Tensor:
        """Return the mean over ranks of a parameter's gradients."""
        return torch.stack(self.tensors(step, place)).double().mean(0).to(self.weights[place].dtype)

    def step(
        self,
        expected: Any = ANYTHING,
        tolerance: Tolerance = EXACT,
        magnitude: Any = None,
        how: str = "step",
    ) -> None:
        """Let every rank take its next step.

        Args:
            expected: by rank and parameter, what is returned: a tensor, array or list of numbers,
                None, or `ANYTHING`.
            tolerance: tolerance of these.
            magnitude: by parameter, for `SUM`; None: of the largest number that is expected of the
                whole training.
            how: the action.
        """
        if self.taken in self.before:
            weights, *how_near, _ = self._expected[-1]  # what keeps the weights returns them again
            seen = (ANYTHING,) if self.options.get("shows_gradients") else (weights, *how_near)
            self.look(self.before[self.taken], *seen)
        for rank, program in enumerate(self._programs):
            program.append((how, self.given[rank][self.taken]))
        self.taken += 1
        self._expect(how, expected, tolerance, magnitude, f"{how} {self.taken}")

    def look(
        self,
        action: str,
        expected: Any = ANYTHING,
        tolerance: Tolerance = EXACT,
        magnitude: Any = None,
    ) -> None:
        """Let every rank do something that is no step; arguments are those of `step`."""
        for program in self._programs:
            program.append((action,))
        self._expect(action, expected, tolerance, magnitude, f"{action} after step {self.taken}")

    def _expect(
        self, action: str, expected: Any, tolerance: Tolerance, magnitude: Any, where: str
    ) -> None:
        self.index[action, self.taken - 1] = len(self._expected)
        self._expected.append(
            ([] if expected is ANYTHING else expected, tolerance, magnitude, where)
        )

    def run(self, programs: list[list[Any]] | None = None) -> None:
        """Train, and compare what every rank returns for each action; ``programs`` replace those of
        `step` and `look`.
        """
        inputs = self._programs if programs is None else programs
        given = {"weights": self.starts, "program": inputs}
        self.results = self.lab.on_ranks(
            "algorithms",
            self.method,
            self.nodes,
            self.seed,
            given,
            self.options,
            record=self.record,
        )
        for rank, actions in enumerate(inputs):
            self._check_form(rank, actions)
        largest: list[float] | None = None
        for index, (expected, tolerance, magnitude, where) in enumerate(self._expected):
            if magnitude is None and tolerance is not EXACT:
                magnitude = largest = largest or [self._largest()] * len(self.weights)
            for rank, of_rank in enumerate(expected):
                for place, want in enumerate(of_rank):
                    size = None if magnitude is None else magnitude[place]
                    self.compare(rank, index, place, want, tolerance, size, where)

    def _check_form(self, rank: int, actions: list[Any]) -> None:
        """Raise `Violation` unless a rank returned a list of tensors like its weights for each of
        its inputs.

        For ``("memories",)`` and ``("factors",)`` it may also return None for a weight; they have
        the dtype of the arithmetic, and factors are matrices.
        """

        def expect(right: bool, value: Any, wanted: str) -> None:
            if not right:
                raise self.lab.violation(f"rank {rank} returned {_form(value)}{wanted}")

        found, weights = self.results[rank], self.starts[rank]
        expect(_is_list(found, len(actions)), found, f", not a list of {len(actions)}")
        for entry, (tensors, action) in enumerate(zip(found, actions, strict=True)):
            name = action[0]
            said = f" as entry {entry}, not {len(weights)} tensors"
            expect(_is_list(tensors, len(weights)), tensors, said)
            for place, (x, w) in enumerate(zip(tensors, weights, strict=True)):
                dtype = wide(w.dtype) if name in _STATE else w.dtype
                like = x is None if name in _STATE else False
                if isinstance(x, Tensor) and x.dtype is dtype:
                    like = x.dim() == 2 if name == "factors" else x.shape == w.shape
                said = f" as parameter {place} in entry {entry}, not {dtype} of {tuple(w.shape)}"
                expect(like, x, said)

    def _largest(self) -> float:
        seen = [
            np.abs(x).max()
            for expected, *_ in self._expected
            for rank in expected
            for x in rank
            if np.size(x)
        ]
        return float(max([*map(float, seen), 0.0])) + 1

    def compare(
        self,
        rank: int,
        index: int,
        place: int,
        want: Any,
        tolerance: Tolerance = EXACT,
        magnitude: Tensor | float | None = None,
        where: str = "",
    ) -> None:
        """Raise `Violation` unless a rank returned ``want`` for a parameter as entry ``index``;
        numbers and arrays are in the order of the parameter's memory.
        """
        if want is ANYTHING:
            return
        found, where = self.results[rank][index][place], f"rank {rank}, {where}, parameter {place}"
        if want is None:
            self.lab.assert_that(found is None, f"{where}: there is one")
            return
        found, want, magnitude = (self._in_memory(place, x) for x in (found, want, magnitude))
        if not isinstance(want, Tensor) and isinstance(found, Tensor):
            want = torch.from_numpy(np.array(want, np.float64)).to(found.dtype)
        self.lab.assert_equal(found, want, tolerance, magnitude=magnitude, where=where)

    # What a rank returned for an action after a step.

    def seen(self, action: str, rank: int, step: int, place: int) -> Any:
        """Return what a rank returned."""
        return self.results[rank][self.index[action, step]][place]

    def expect_seen(
        self,
        action: str,
        rank: int,
        step: int,
        place: int,
        want: Tensor | None,
        tolerance: Tolerance = EXACT,
        magnitude: Tensor | float | None = None,
        why: str = "",
    ) -> None:
        """Raise `Violation` unless a rank returned ``want``."""
        what = f"step {step}, {_STATE.get(action, 'the averaged gradient')}{', ' * bool(why)}{why}"
        self.compare(rank, self.index[action, step], place, want, tolerance, magnitude, what)


Gradients = Callable[[Draw, list[Tensor], int, int, dict[str, Any]], ByRank]
"""Draws the gradients for weights, a number of ranks and one of steps, and options."""


def of_kinds(kinds: st.SearchStrategy[str]) -> Gradients:
    """Return what draws gradients of these kinds."""
    return lambda draw, like, ranks, steps, options: any_gradients(draw, like, ranks, steps, kinds)


def exactly(
    draw: Draw, like: list[Tensor], ranks: int, steps: int, options: dict[str, Any]
) -> ByRank:
    """Return gradients whose sum and mean over ranks are exact in any order of operations."""
    return exact_gradients(draw, like, ranks, steps)


@dataclass(frozen=True)
class TrainedAlgorithm:
    """An algorithm of a target: how its trainings are drawn, and what they must give.

    Attributes:
        method: name of a method of `ReferenceAlgorithms`.
        options: draws options for weights.
        follow: takes the steps of a training, each with what it must give.
        judge: compares what depends on the results of a training.
        worlds: number of ranks on each node, for a dtype.
        weights: draws weights of a dtype.
        gradients: draws their gradients.
        steps: draws their number for options.
    """

    method: str
    options: Callable[[Draw, list[Tensor]], dict[str, Any]]
    follow: Callable[[Training], None]
    judge: Callable[[Training], None] = lambda training: None
    worlds: Callable[[torch.dtype], st.SearchStrategy[tuple[int, ...]]] = lambda dtype: worlds(4)
    weights: Callable[[Draw, torch.dtype], list[Tensor]] = any_weights
    gradients: Gradients = exactly
    steps: Callable[[Draw, dict[str, Any]], int] = lambda draw, options: 3

    def train(
        self,
        lab: Lab,
        draw: Draw,
        *,
        nodes: tuple[int, ...] | None = None,
        weights: list[Tensor] | None = None,
        gradients: Gradients | None = None,
        change: Callable[[ByRank], ByRank] = lambda given: given,
        steps: int | None = None,
        before: Callable[[int], dict[int, str]] = lambda steps: {},
        follow: Callable[[Training], None] | None = None,
        judge: Callable[[Training], None] | None = None,
        **options: Any,
    ) -> Training:
        """Draw what is not given, train, and compare; arguments are the attributes, the other
        attributes of `Training`, and options.

        ``change`` gets the gradients and returns those to train with, ``before`` the number of
        steps.
        """
        how = {name: options.pop(name) for name in _HOW if name in options}
        nodes = draw(self.worlds(lab.dtype)) if nodes is None else nodes
        lab.need_ranks(sum(nodes))  # before all the rest is drawn
        weights = self.weights(draw, lab.dtype) if weights is None else weights
        options = {
            **self.options(draw, weights),
            "bucket_bytes": draw(st.sampled_from([1, 40, ONE_BUCKET])),
            **options,
        }
        steps = self.steps(draw, options) if steps is None else steps
        given = change((gradients or self.gradients)(draw, weights, sum(nodes), steps, options))
        how["before"] = before(steps)
        training = Training(lab, draw(seeds), self.method, nodes, weights, given, options, **how)
        with np.errstate(all="ignore"):
            (follow or self.follow)(training)
        training.run()
        (judge or self.judge)(training)
        return training


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _form(value: Any) -> str:
    """Return the form of what was returned, for messages."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    name = f"a {type(value).__name__}"
    return f"{name} of {len(value)}" if isinstance(value, list | tuple) else name

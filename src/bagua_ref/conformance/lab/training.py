"""A training in a simulated world, built action by action with the expected results (S2, S5, S9 to
S11).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import name_of, worlds
from bagua_ref.conformance.cases.training_cases import (
    ONE_BUCKET,
    ByRank,
    any_gradients,
    any_weights,
    exact_gradients,
    grid_weights,
)
from bagua_ref.conformance.expected.algorithms_numpy import buckets
from bagua_ref.conformance.expected.kernels_numpy import Array, array, wide
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, Tolerance
from bagua_ref.conformance.lab.lab import Lab

__all__ = ["ANYTHING", "LOST", "SHOWS_GRADIENTS", "TrainedAlgorithm", "Training"]

ANYTHING = Ellipsis
"""An expected value that is not compared."""

LOST = "restart without memories"
"""The action that continues from a checkpoint with error memories of zero."""

SHOWS_GRADIENTS = {"shows_gradients": True}
"""The option of trainings whose steps return averaged gradients, and no weights."""
_NODES = worlds(4)
_COMPRESSED = {"warmup_steps": 0, "compression": None, "mean": "all"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {"hierarchical": False, "average": True},
    "bytegrad": {"hierarchical": True, "average": True, "compression": "MinMaxUInt8"},
    "decentralized": {
        "hierarchical": True,
        "peer_selection_mode": "all",
        "communication_interval": 1,
    },
    "low_precision_decentralized": {
        "hierarchical": True,
        "communication_interval": 1,
        "compression": "MinMaxUInt8",
    },
    "qadam": {"hierarchical": True, "compression": "MinMaxUInt8"},
    "async_model_average": {"sync_interval_ms": 500, "warmup_steps": 0},
    "local_sgd": {"warmup_steps": 0, "offset": 0, "hierarchical": False},
    "diloco": {
        **_COMPRESSED,
        "outer_optimizer": None,
        "fragments": 1,
        "delay": 0,
        "mix": 0.0,
        "error_feedback": False,
        "chunk": 64,
        "error_decay": 0.95,
    },
    "powersgd": {
        "matrix_approximation_rank": 1,
        "min_compression_rate": 2.0,
        "memory": "local",
        "warm_start": True,
        "seed": 0,
    },
    "topk": {"ratio": 0.01, "error_feedback": True, "warmup_steps": 0},
    "demo": {
        **_COMPRESSED,
        "top_k": 32,
        "chunk": 64,
        "decay": 0.999,
        "transform": "dct",
        "sign": True,
    },
}
"""Default options of each method (S5, S9, S10, S11.2, S15)."""
_OF_GROUPS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""Default options of QAdam's parameter groups (S5.5)."""
_STATE = {"memories": "a memory", "factors": "a factor"}


@dataclass
class Training:
    """A training with one of the target's ``algorithms``, and the expected results of every rank.

    `step` and `look` add an action to every rank's program, with the expected result of each rank;
    `run` trains and compares.

    Attributes:
        lab: the harness, which has the target.
        method: name of a method of `ReferenceAlgorithms`.
        nodes: number of ranks on each node.
        weights: the parameters.
        given: gradients by rank and step.
        options: options of the algorithm.
        before: mapping from steps, from 0, to preceding actions.
        starts: weights of each rank before training; by default ``weights``.
        looks: actions that follow each step.
        exact: whether sums over ranks are independent of their order; None: if there are at most
            two ranks.
        record: whether to record the messages sent, as ``lab.messages``.
        n: number of ranks.
        steps: number of steps for which there are gradients.
        taken: number of steps so far.
        index: mapping from (action, step) to the index of its result.
        results: results of each rank.
    """

    lab: Lab
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
        self._expected: list[tuple[list[list[Any]], Tolerance, str]] = []

    def layout(self) -> list[list[int]]:
        """Return the parameter indices of each bucket."""
        return buckets([w.numel() for w in self.weights], self.dtypes, self.options["bucket_bytes"])

    def leaders(self) -> list[int] | None:
        """Return the number of ranks on each node if only node leaders communicate, else None."""
        return list(self.nodes) if self.options["hierarchical"] else None

    def of_buckets(
        self, train: Callable[[Array, list[list[Array]], str], list[list[Array]]]
    ) -> list[list[list[Any]]]:
        """Return the weights by step, rank and parameter.

        ``train`` takes a bucket's weights, its gradients by step and rank, and its dtype, and
        returns its weights by step and rank.
        """
        found: list[list[list[Any]]] = [
            [[None] * len(self.start) for _ in range(self.n)] for _ in range(self.steps)
        ]
        for bucket in self.layout():
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
        """Return every rank's gradients of a bucket, concatenated, in the dtype of `tensors`."""
        parts = [[self.ravel(p, x) for x in self.tensors(step, p)] for p in bucket]
        return [np.concatenate(of_rank) for of_rank in zip(*parts, strict=True)]

    def ravel(self, place: int, x: Tensor) -> Array:
        """Return the numbers of a parameter, or its gradient, in the order of the parameter's
        memory (S2.3).
        """
        return array(self._in_memory(place, x))

    def _in_memory(self, place: int, x: Any) -> Any:
        """Return a tensor with the parameter's shape flattened in memory order; return other values
        unchanged.
        """
        w = self.weights[place]
        if not isinstance(x, Tensor) or x.shape != w.shape:
            return x
        axes = sorted(range(w.dim()), key=lambda axis: -w.stride()[axis])
        return x.permute(axes).reshape(-1)

    def by_place(self, flat: Any, bucket: list[int]) -> dict[int, Any]:
        """Split a bucket's numbers by parameter."""
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
        """Return the tolerance of the weights after the next step.

        Each sum over ranks may be rounded in a different order, and the error remains in the
        weights.
        """
        return EXACT if self.exact else SUM(8 * (self.taken + 2) * (self.n + 2))

    def tensors(self, step: int, place: int) -> list[Tensor]:
        """Return every rank's gradient of a parameter in the dtype of the arithmetic, zeros if
        unused.
        """
        w = self.weights[place]
        return [rank[step].get(place, torch.zeros_like(w)).to(wide(w.dtype)) for rank in self.given]

    def mean(self, step: int, place: int) -> Tensor:
        """Return the mean over ranks of a parameter's gradients."""
        return torch.stack(self.tensors(step, place)).double().mean(0).to(self.weights[place].dtype)

    def step(
        self, expected: Any = ANYTHING, tolerance: Tolerance = EXACT, how: str = "step"
    ) -> None:
        """Add a step to every rank's program, with its expected results.

        Args:
            expected: expected result by rank and parameter: a tensor, array or list of numbers,
                None, or `ANYTHING`.
            tolerance: tolerance of the result; the magnitude of `SUM` is the largest number that is
                expected of a parameter in the whole training.
            how: name of the action.
        """
        if self.taken in self.before:
            kept = () if self.options.get("shows_gradients") else self._expected[-1][:2]
            self.look(self.before[self.taken], *kept)  # returns the weights unchanged
        for rank, program in enumerate(self._programs):
            program.append((how, self.given[rank][self.taken]))
        self.taken += 1
        self._expect(how, expected, tolerance, f"{how} {self.taken}")

    def look(self, action: str, expected: Any = ANYTHING, tolerance: Tolerance = EXACT) -> None:
        """Add an action other than a step to every rank's program; arguments are those of
        `step`.
        """
        for program in self._programs:
            program.append((action,))
        self._expect(action, expected, tolerance, f"{action} after step {self.taken}")

    def _expect(self, action: str, expected: Any, tolerance: Tolerance, where: str) -> None:
        self.index[action, self.taken - 1] = len(self._expected)
        self._expected.append(([] if expected is ANYTHING else expected, tolerance, where))

    def run(self, programs: list[list[Any]] | None = None) -> None:
        """Train, and compare the results of every action on every rank; ``programs`` replace those
        of `step` and `look`.
        """
        inputs = self._programs if programs is None else programs
        given, options = {"weights": self.starts, "program": inputs}, self.options
        if "algorithms" not in self.lab.target.parts:
            # only the package's own must have SPEC's defaults: options that have them are left out
            options = _without(_DEFAULTS.get(self.method, {}), options)
            if "groups" in options:
                options["groups"] = [_without(_OF_GROUPS, group) for group in options["groups"]]
        self.results = self.lab.on_ranks(
            "algorithms", self.method, self.nodes, given, options, record=self.record
        )
        for rank, actions in enumerate(inputs):
            self._check_form(rank, actions)
        largest = self._largest()
        for index, (expected, tolerance, where) in enumerate(self._expected):
            for rank, of_rank in enumerate(expected):
                for place, want in enumerate(of_rank):
                    self.compare(rank, index, place, want, tolerance, largest[place], where)

    def _check_form(self, rank: int, actions: list[Any]) -> None:
        """Raise `Violation` unless a rank's results have the expected form: a list of tensors like
        its weights for each action.

        For ``("memories",)`` and ``("factors",)`` it may also return None for a weight; they have
        the dtype of the arithmetic, and factors are matrices.
        """
        found, weights = self.results[rank], self.starts[rank]
        self._check_list(found, len(actions), f"rank {rank}")
        for entry, (tensors, action) in enumerate(zip(found, actions, strict=True)):
            name = action[0]
            where = f"rank {rank}, entry {entry}"
            self._check_list(tensors, len(weights), where)
            for place, (x, w) in enumerate(zip(tensors, weights, strict=True)):
                if x is None and name in _STATE:
                    continue
                dtype = wide(w.dtype) if name in _STATE else w.dtype
                right = isinstance(x, Tensor) and x.dtype is dtype
                if right:
                    right = x.dim() == 2 if name == "factors" else x.shape == w.shape
                if not right:
                    said = f"{_form(x)} instead of {dtype} of shape {tuple(w.shape)}"
                    raise self.lab.violation(f"{where}, parameter {place}: {said}")

    def _check_list(self, found: Any, length: int, where: str) -> None:
        if not (isinstance(found, list | tuple) and len(found) == length):
            raise self.lab.violation(f"{where}: {_form(found)} instead of a list of {length}")

    def _largest(self) -> list[float]:
        """Return 1 plus the largest expected finite magnitude of each parameter."""
        largest = [1.0] * len(self.weights)
        for expected, *_ in self._expected:
            for place, want in ((p, x) for rank in expected for p, x in enumerate(rank)):
                if want is not ANYTHING and want is not None:
                    numbers = torch.as_tensor(want, dtype=torch.float64).abs().flatten()
                    finite = torch.cat([numbers[numbers.isfinite()], torch.zeros(1)])
                    largest[place] = max(largest[place], finite.max().item() + 1)
        return largest

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
        """Raise `Violation` unless entry ``index`` of a rank's results equals ``want`` for a
        parameter; numbers and arrays are in the order of the parameter's memory.
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
        """Return a rank's result for a parameter, after an action at a step."""
        return self.results[rank][self.index[action, step]][place]

    def expect_seen(
        self,
        action: str,
        step: int,
        place: int,
        want: Any,
        tolerance: Tolerance = EXACT,
        magnitude: Tensor | float | None = None,
        why: str = "",
    ) -> None:
        """Raise `Violation` unless every rank's result equals ``want``, or its own item if that is
        a list.
        """
        what = f"step {step}, {_STATE.get(action, 'the averaged gradient')}{', ' * bool(why)}{why}"
        for rank in range(self.n):
            mine = want[rank] if isinstance(want, list) else want
            index = self.index[action, step]
            self.compare(rank, index, place, mine, tolerance, magnitude, what)


@dataclass(frozen=True)
class TrainedAlgorithm:
    """An algorithm of a target: the strategies of its trainings, and their expected results.

    Every drawn value may be a Hypothesis strategy.

    Attributes:
        method: name of a method of `ReferenceAlgorithms`.
        options: its keyword arguments by name, or a function of ``draw`` and the weights that
            returns them.
        follow: adds the steps of a training, with the expected result of each.
        judge: compares results that depend on earlier results of the training.
        nodes: number of ranks on each node.
        weights: the weights, or a function of ``draw`` and a dtype that draws them.
        shapes: shapes of the weights, in place of ``weights``.
        kinds: kinds of the gradients. Those of warm-up steps, and all without kinds, have sums and
            means that are exact in any order of operations.
        change: function from the drawn gradients to those used in training.
        steps: number of steps, or a function of the options.
        before: function from the number of steps to a mapping from steps, from 0, to preceding
            actions.
    """

    method: str
    options: Any
    follow: Callable[[Training], object]
    judge: Callable[[Training], object] = lambda training: None
    nodes: Any = _NODES
    weights: Any = any_weights
    shapes: Any = None
    kinds: tuple[str, ...] = ()
    change: Callable[[ByRank], ByRank] = lambda gradients: gradients
    steps: Any = 3
    before: Callable[[int], dict[int, str]] = lambda steps: {}

    def train(self, lab: Lab, **given: Any) -> Training:
        """Draw a training, run it, and compare the results; arguments override attributes of this
        object, of `Training`, or options.
        """

        def drawn(value: Any, *arguments: Any) -> Any:
            found = value(*arguments) if callable(value) else value
            return lab.draw(found) if isinstance(found, st.SearchStrategy) else found

        def take(names: set[str]) -> dict[str, Any]:
            return {name: given.pop(name) for name in names & given.keys()}

        how = replace(self, **take({attribute.name for attribute in fields(self)}))
        further = take({"starts", "looks", "exact", "record"})
        nodes = drawn(how.nodes)
        lab.need_ranks(sum(nodes))  # before all the rest is drawn
        if how.shapes is None:
            weights = drawn(how.weights, lab.draw, lab.dtype)
        else:
            forms = drawn(how.shapes)
            weights = grid_weights(lab.draw, [lab.dtype] * len(forms), forms)
        sizes = st.sampled_from([1, 40, ONE_BUCKET])
        options = {**drawn(how.options, lab.draw, weights), "bucket_bytes": sizes, **given}
        options = {name: drawn(value) for name, value in options.items()}
        steps = drawn(how.steps, options)
        gradients = exact_gradients(lab.draw, weights, sum(nodes), steps)
        if how.kinds:
            warm = options.get("warmup_steps", 0)
            others = any_gradients(lab.draw, weights, sum(nodes), steps, how.kinds)
            gradients = [
                exact[:warm] + mine[warm:] for exact, mine in zip(gradients, others, strict=True)
            ]
        further |= {"before": how.before(steps)}
        gradients = how.change(gradients)
        training = Training(lab, how.method, nodes, weights, gradients, options, **further)
        with np.errstate(all="ignore"):
            how.follow(training)
        training.run()
        how.judge(training)
        return training


def _without(defaults: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    return {
        name: value
        for name, value in options.items()
        if name not in defaults or value != defaults[name]
    }


def _form(value: Any) -> str:
    """Return the type and shape of a result, for messages."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    name = f"a {type(value).__name__}"
    return f"{name} of {len(value)}" if isinstance(value, list | tuple) else name

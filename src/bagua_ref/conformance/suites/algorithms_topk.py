"""Top-k, bit for bit (S11.2)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected.algorithms_plain import buckets
from bagua_ref.conformance.expected.tolerances import EXACT, SUM
from bagua_ref.conformance.expected.topk_numpy import kept, sent_count, topk_round
from bagua_ref.conformance.inputs.local_update_cases import multi_rank_worlds, used_parts
from bagua_ref.conformance.inputs.low_rank_cases import ratios
from bagua_ref.conformance.inputs.strategies import COMPRESSIBLE, Draw, name_of, seeds, worlds
from bagua_ref.conformance.inputs.training_cases import ONE_BUCKET, ByRank, any_gradients, exact_gradients, grid_weights
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.rounds import Rounds
from bagua_ref.conformance.suites.checks import check

_NEEDS = ("topk",)


class _Training(Rounds):
    """A training with topk, and what each round must give."""

    def __init__(
        self,
        lab: Lab,
        draw: Draw,
        nodes: tuple[int, ...],
        weights: list[Tensor],
        gradients: ByRank,
        before: dict[int, str] | None = None,
        record: bool = False,
        **given: Any,
    ) -> None:
        options = {"ratio": draw(ratios), "error_feedback": draw(st.sampled_from([True, True, False])), "warmup_steps": 0, **given}
        super().__init__(lab, draw, "topk", nodes, weights, gradients, options, before, record)
        sizes = [w.numel() for w in weights]
        self.layout = buckets(sizes, [name_of(w.dtype) for w in weights], self.options["bucket_bytes"])
        self.layout = [bucket for bucket in self.layout if sum(sizes[place] for place in bucket)]
        self.sent: list[list[Any]] = []
        """p of every rank, by round and bucket."""

    def follow(self) -> None:
        """Compare every step, bit for bit."""
        errors: list[list[Any] | None] = [None] * len(self.layout)
        for step in range(self.steps):
            if step < self.options["warmup_steps"]:
                self._mean(step)
                continue
            for number, bucket in enumerate(self.layout):
                given = [
                    np.concatenate(parts)
                    for parts in zip(*([g.reshape(-1).numpy() for g in self.given(step, place)] for place in bucket), strict=True)
                ]
                if self.options["error_feedback"] and errors[number] is None:
                    errors[number] = [np.zeros_like(x) for x in given]
                known = errors[number]
                with np.errstate(all="ignore"):
                    self.sent.append(given if known is None else [g + e for g, e in zip(given, known, strict=True)])
                    result, errors[number] = topk_round(given, known, self.options["ratio"], name_of(self.weights[bucket[0]].dtype))
                self._compare(step, bucket, result, errors[number])

    def _mean(self, step: int) -> None:
        for place, w in enumerate(self.weights):
            want = torch.stack(self.given(step, place)).double().mean(0).to(w.dtype)
            for rank in range(self.n):
                self.expect("step", rank, step, place, want)

    def _compare(self, step: int, bucket: list[int], result: Any, errors: list[Any] | None) -> None:
        start = 0
        for place in bucket:
            w, end = self.weights[place], start + self.weights[place].numel()
            for rank in range(self.n):
                self.expect("step", rank, step, place, torch.from_numpy(result[start:end]).to(w.dtype).view(w.shape))
                if errors is None:
                    self.expect_none("memories", rank, step, place, "though error_feedback=False")
                else:
                    self.expect("memories", rank, step, place, torch.from_numpy(errors[rank][start:end]).view(w.shape))
            start = end


def _weights(draw: Draw, dtype: torch.dtype = torch.float32, most: int = 4) -> list[Tensor]:
    return grid_weights(draw, [dtype] * draw(st.integers(1, most)))


@check("algorithms", "S11.2", "rounds", dtypes=COMPRESSIBLE, needs=_NEEDS, effort=0.5)
def rounds(lab: Lab, draw: Draw) -> None:
    """Each round applies the sum of what was sent in rank order, divided by n; what was not sent is added next."""
    nodes, weights = draw(worlds(4)), _weights(draw, lab.dtype)
    _Training(lab, draw, nodes, weights, any_gradients(draw, weights, sum(nodes), 3)).follow()


@check("algorithms", "S11.2", "count", needs=_NEEDS, effort=0.7)
def count(lab: Lab, draw: Draw) -> None:
    """Of each bucket of m elements max(1, ceil(ratio * m)) are sent, the product in float64; padding does not count."""
    m = draw(st.sampled_from([100, 100, 100, 7, 1, 30, 33]))
    ratio = draw(st.sampled_from([0.07, 0.14, 0.28, 0.29, 0.55, 0.57, 0.01, 1e-9, 1.0]) | st.floats(0.01, 1))
    weights = grid_weights(draw, [torch.float32] * 2, [(m,), (3,)])
    nodes = draw(st.sampled_from([(1,), (2,), (3,)]))
    _Training(lab, draw, nodes, weights, any_gradients(draw, weights, sum(nodes), 2, st.just("tame")), ratio=ratio).follow()


@check("algorithms", "S11.2", "ties", needs=_NEEDS, effort=0.4)
def ties(lab: Lab, draw: Draw) -> None:
    """Of equal absolute values, those of lower index in the bucket are sent."""
    nodes, weights, seed = draw(worlds(3)), _weights(draw), draw(seeds)
    generator = np.random.default_rng(seed)

    def gradient(w: Tensor) -> Tensor:
        return torch.from_numpy(generator.choice([-2.0, -1, 1, 2], tuple(w.shape))).float()

    gradients = [[{place: gradient(w) for place, w in enumerate(weights)} for _ in range(2)] for _ in range(sum(nodes))]
    _Training(lab, draw, nodes, weights, gradients, ratio=draw(st.floats(0.1, 0.9))).follow()


@check("algorithms", "S11.2", "not_finite", dtypes=COMPRESSIBLE, needs=_NEEDS, effort=0.4)
def not_finite(lab: Lab, draw: Draw) -> None:
    """NaN counts as larger than infinity, and that as larger than numbers; a round with one of them leaves every rank's memory."""
    nodes, weights = draw(worlds(3)), grid_weights(draw, [lab.dtype] * 2, [(17,), (8, 3)])
    gradients = any_gradients(draw, weights, sum(nodes), 3)
    generator = np.random.default_rng(draw(seeds))
    for _ in range(draw(st.integers(1, 6))):
        step = gradients[generator.integers(len(gradients))][generator.integers(3)]
        x = step[int(generator.integers(2))].view(-1)
        x[generator.integers(x.numel())] = float(generator.choice([np.nan, np.inf, -np.inf]))
    if draw(st.booleans()):  # NaNs are equal, whatever their other bits
        x = gradients[0][0][0].view(-1)
        x[0], x[1::3] = np.inf, np.nan
        bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32)[1::3]
        bits += torch.from_numpy(generator.integers(4, size=bits.numel())).to(bits.dtype)
    _Training(lab, draw, nodes, weights, gradients, ratio=draw(st.sampled_from([0.01, 0.05, 0.1, 0.3]))).follow()


@check("algorithms", "S11.2", "huge", dtypes=COMPRESSIBLE, needs=_NEEDS, effort=0.3)
def huge(lab: Lab, draw: Draw) -> None:
    """Memories are float32 whatever the gradients are, sums overflow in rank order only, and results are rounded once."""
    nodes, weights = draw(worlds(4)), _weights(draw, lab.dtype)
    kinds = st.sampled_from(["huge", "edges", "tiny", "halfway", "bits"])
    _Training(lab, draw, nodes, weights, any_gradients(draw, weights, sum(nodes), 3, kinds)).follow()


@check("algorithms", "S11.2", "many", needs=_NEEDS, effort=0.15)
def many(lab: Lab, draw: Draw) -> None:
    """Of many elements, too, exactly the largest are sent, however they are spread, and of equal ones those of lower index."""
    nodes, m, seed = draw(st.sampled_from([(1,), (2,)])), draw(st.sampled_from([5000, 20_000])), draw(seeds)
    weights = [torch.zeros(m)]
    levels = draw(st.sampled_from([3, 1000, 2**20]))
    gradients: ByRank = []
    for rank in range(sum(nodes)):
        x = torch.from_numpy(np.random.default_rng([seed, rank]).integers(-levels, levels, m)).float()
        x[:: 1 + seed % 64] *= 3  # larger where one in so many is looked at
        gradients.append([{0: x}])
    training = _Training(
        lab, draw, nodes, weights, gradients, ratio=draw(st.sampled_from([0.001, 0.01, 0.05])), bucket_bytes=ONE_BUCKET
    )
    training.follow()


@check("algorithms", "S11.2", "unused_parameters", needs=_NEEDS, effort=0.3)
def unused_parameters(lab: Lab, draw: Draw) -> None:
    """A rank that does not use a parameter contributes a gradient of zero, and its memory."""
    nodes, weights = draw(multi_rank_worlds), grid_weights(draw, [torch.float32] * 3)
    _Training(lab, draw, nodes, weights, used_parts(draw, any_gradients(draw, weights, sum(nodes), 3))).follow()


@check("algorithms", "S11.2", "warmup", needs=_NEEDS, effort=0.3)
def warmup(lab: Lab, draw: Draw) -> None:
    """Up to warmup_steps, gradients are averaged, and nothing is remembered."""
    nodes, weights, warmup_steps = draw(worlds(4)), _weights(draw), draw(st.integers(1, 3))
    gradients = exact_gradients(draw, weights, sum(nodes), warmup_steps + 2)
    _Training(lab, draw, nodes, weights, gradients, warmup_steps=warmup_steps).follow()


@check("algorithms", "S11.2", "new_buckets", needs=_NEEDS, effort=0.2)
def new_buckets(lab: Lab, draw: Draw) -> None:
    """Memories outlive new buckets."""
    nodes, weights = draw(worlds(3)), _weights(draw)
    gradients = any_gradients(draw, weights, sum(nodes), 4)
    _Training(lab, draw, nodes, weights, gradients, {2: "new buckets"}, error_feedback=True).follow()


@check("algorithms", "S11.2", "restart", needs=_NEEDS, effort=0.2)
def restart(lab: Lab, draw: Draw) -> None:
    """Training that continues from saved weights and states goes on as if it had never stopped."""
    nodes, weights, warmup_steps = draw(worlds(3)), _weights(draw), draw(st.integers(0, 2))
    gradients = exact_gradients(draw, weights, sum(nodes), 4)
    _Training(lab, draw, nodes, weights, gradients, {draw(st.integers(1, 3)): "restart"}, warmup_steps=warmup_steps).follow()


@check("algorithms", "S11.2", "conservation", needs=_NEEDS, effort=0.2)
def conservation(lab: Lab, draw: Draw) -> None:
    """What was applied in all rounds, and the mean of the memories, is the sum of the mean gradients."""
    nodes, weights = draw(worlds(4)), _weights(draw)
    gradients = any_gradients(draw, weights, sum(nodes), 5, st.sampled_from(["tame", "ties", "near"]))
    training = _Training(lab, draw, nodes, weights, gradients, error_feedback=True)
    for place in range(len(weights)):
        given = torch.stack([x for step in range(5) for x in training.given(step, place)]).double()
        applied = torch.stack([training.seen("step", 0, step, place) for step in range(5)]).double().sum(0)
        left = [training.seen("memories", rank, 4, place) for rank in range(training.n)]
        if any(x is None for x in left):
            training.expect("memories", 0, 4, place, torch.zeros_like(weights[place]))
        found = (applied + torch.stack(left).double().mean(0)).float()
        steps = f"sum(results[0][i][{place}].double() for i in range(0, 10, 2))"
        source = f"({steps} + sum(r[-1][{place}].double() for r in results) / {training.n}).float()"
        want, size = (given.sum(0) / training.n).float(), given.abs().sum(0)
        training.expect_that("step", 0, 4, place, source, found, want, SUM(16 * training.n), size, "the sum")


@check("algorithms", "S11.2", "messages", needs=_NEEDS, effort=0.4)
def messages(lab: Lab, draw: Draw) -> None:
    """Each rank all-gathers its k int32 indices, ascending, and then their k float32 values."""
    nodes, weights = draw(multi_rank_worlds), _weights(draw)
    training = _Training(lab, draw, nodes, weights, any_gradients(draw, weights, sum(nodes), 2), record=True)
    training.follow()
    filtered = "[sends for what, sends in messages if what == 'allgather()' and sends[0].numel()]"
    found = [sends for what, sends in training.training.messages if what == "allgather()" and sends[0].numel()]
    wanted = []
    for sent in training.sent:
        places = [torch.tensor(kept(p, sent_count(p.size, training.options["ratio"])), dtype=torch.int32) for p in sent]
        wanted += [places, [torch.from_numpy(p)[place.long()] for p, place in zip(sent, places, strict=True)]]
    count = len(wanted)
    training.training.expect_true(f"len({filtered}) == {count}", len(found) == count, f"{len(found)} all-gathers, not {count}")
    for (number, all_ranks), rank in itertools.product(enumerate(wanted), range(training.n)):
        what = f"rank {rank}, {('indices', 'values')[number % 2]} in all-gather {number}"
        training.training.expect_that(f"{filtered}[{number}][{rank}]", found[number][rank], all_ranks[rank], what, EXACT)

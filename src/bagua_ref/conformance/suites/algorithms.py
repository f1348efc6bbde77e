"""Whole trainings compared with plain loops over all ranks (S2, S5.1 to S5.5, S13).

`algorithms_async` has S5.6, `algorithms_local_sgd` and `algorithms_diloco` S9, `algorithms_powersgd` S10,
and `algorithms_topk` S11.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected import algorithms_plain as plain
from bagua_ref.conformance.expected import decentralized_numpy, qadam_numpy
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, Tolerance
from bagua_ref.conformance.inputs.graph_cases import graph_cases
from bagua_ref.conformance.inputs.strategies import (
    COMPRESSIBLE,
    FLOATS,
    Draw,
    dtype_named,
    name_of,
    paired_worlds,
    seeds,
    worlds,
)
from bagua_ref.conformance.inputs.training_cases import (
    ONE_BUCKET,
    ByRank,
    any_gradients,
    array,
    copies,
    exact_gradients,
    grid_weights,
    lists,
    tensor,
)
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import Training
from bagua_ref.conformance.suites.checks import check

_bucket_bytes = st.sampled_from([1, 40, ONE_BUCKET])


def _of_one_dtype(lab: Lab, draw: Draw) -> list[Tensor]:
    return grid_weights(draw, [lab.dtype] * draw(st.integers(1, 4)))


def _compare_all(
    training: Training, history: list[list[list[float]]], tolerance: Tolerance = EXACT, magnitudes: list[list[Tensor]] | None = None
) -> None:
    """Compare every rank's weights after each step with ``history``, which is the same for all ranks, as ``magnitudes`` are."""
    for step, wanted in enumerate(history):
        for rank, found in enumerate(training.results):
            for place, numbers in enumerate(wanted):
                mass = None if magnitudes is None else magnitudes[step][place]
                training.expect(rank, step, place, tensor(numbers, found[step][place]), tolerance, mass)


def _train_on_gradients(
    lab: Lab,
    draw: Draw,
    method: str,
    nodes: tuple[int, ...],
    weights: list[Tensor],
    gradients: ByRank,
    bucket_bytes: int,
    options: dict[str, Any],
    starts: list[list[Tensor]] | None = None,
) -> None:
    """Train with gradient_allreduce or bytegrad and compare with one loop over all ranks."""
    lr = draw(st.sampled_from([1.0, 0.5])) if all(w.dtype.itemsize > 2 for w in weights) else 1.0
    given = {"lr": lr, "bucket_bytes": bucket_bytes, **options}
    starts = starts or copies(weights, sum(nodes))
    training = Training(lab, method, nodes, starts, gradients, draw(seeds), given)
    if method == "bytegrad":
        exchange = plain.one_byte(options["average"], list(nodes), options["hierarchical"])
    else:
        exchange = plain.full_precision(options["average"])
    names = [name_of(w.dtype) for w in weights]
    history = plain.train_on_gradients(lists(weights), _by_step(gradients, weights), lr, names, bucket_bytes, exchange)
    if method == "bytegrad" or not (options["hierarchical"] and options["average"]):
        _compare_all(training, history)
    else:  # n/L may not be a float32 number; then the leaders' inputs are not exact
        taken = [step for rank in gradients for step in rank]
        mass = [torch.stack([w.abs(), *[step[place].abs() for step in taken]]).double().sum(0) for place, w in enumerate(weights)]
        _compare_all(training, history, SUM((sum(nodes) + 2) * len(history)), [mass] * len(history))


def _by_step(gradients: ByRank, weights: list[Tensor]) -> list[list[list[list[float] | None]]]:
    steps = zip(*gradients, strict=True)
    return [
        [[rank[place].reshape(-1).tolist() if place in rank else None for place in range(len(weights))] for rank in ranks]
        for ranks in steps
    ]


def _either_sum(draw: Draw) -> dict[str, Any]:
    return {"hierarchical": draw(st.booleans()), "average": draw(st.booleans())}


def prepare() -> None:
    """Import what torch imports with the first optimizer, a second's worth."""
    torch.optim.SGD([torch.zeros(1)], lr=1.0)


# All algorithms.


@check("algorithms", "S5", "first_rank", needs=("gradient_allreduce",), effort=0.3)
def first_rank(lab: Lab, draw: Draw) -> None:
    """Training starts from the first rank's weights on every rank."""
    methods = ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized")
    own = lab.target.parts.get("algorithms")
    method = draw(st.sampled_from([name for name in methods if own is None or hasattr(own, name)]))
    nodes = draw(worlds(4).filter(lambda nodes: sum(nodes) > 1))
    n, count = sum(nodes), draw(st.integers(1, 3))
    starts = [grid_weights(draw, [torch.float32] * count, [(3,)] * count) for _ in range(n)]
    gradients = exact_gradients(draw, starts[0], n, 1)
    if method in ("gradient_allreduce", "bytegrad"):
        sums = {"hierarchical": False, "average": draw(st.booleans())}
        _train_on_gradients(lab, draw, method, nodes, starts[0], gradients, draw(_bucket_bytes), sums, starts)
        return
    options = {"lr": 1.0, "bucket_bytes": ONE_BUCKET, "hierarchical": False, "communication_interval": 1}
    if method == "low_precision_decentralized":
        _follow_ring(lab, draw, nodes, starts, gradients, options)
        return
    training = Training(lab, method, nodes, starts, gradients, draw(seeds), {**options, "peer_selection_mode": "all"})
    for rank, (given,) in enumerate(gradients):  # a mean of equal weights equals each of them
        for place, w in enumerate(starts[0]):
            training.expect(rank, 0, place, w - given[place], SUM(n + 1), w.abs().double() + 64)


@check("algorithms", "S2.1", "buckets", needs=("bytegrad",), effort=0.7)
def buckets(lab: Lab, draw: Draw) -> None:
    """Parameters fill buckets in reverse order, by dtype; a bucket is closed once it holds at least the bucket size."""
    names = [name for name in COMPRESSIBLE if lab.target.dtypes is None or name in lab.target.dtypes]
    if not names:
        return
    used = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2))
    dtypes = [dtype_named(draw(st.sampled_from(used))) for _ in range(draw(st.integers(3, 6)))]
    nodes = draw(worlds(3))
    weights = grid_weights(draw, dtypes)
    gradients = any_gradients(draw, weights, sum(nodes), 2)
    of_one = [w.nbytes for w in reversed(weights) if w.dtype is weights[-1].dtype]
    filled = sum(of_one[: draw(st.integers(1, len(of_one)))])  # a bucket of so many parameters is just full
    bucket_bytes = max(1, draw(st.sampled_from([filled, filled, filled + 1, filled - 1, filled - 1, 40, ONE_BUCKET])))
    options = {"hierarchical": False, "average": True}
    _train_on_gradients(lab, draw, "bytegrad", nodes, weights, gradients, bucket_bytes, options)


@check("algorithms", "S2.2", "padding", dtypes=COMPRESSIBLE, needs=("bytegrad",), effort=0.15)
def padding(lab: Lab, draw: Draw) -> None:
    """Padding is zero at every step and belongs to the last chunk."""
    nodes = draw(worlds(5).filter(lambda nodes: sum(nodes) > 1))
    n, between = sum(nodes), draw(st.booleans())
    size = draw(st.integers(1, 30).filter(lambda size: size % n != 0))
    weights = grid_weights(draw, [lab.dtype] * 2, [(size - size // 2,), (size // 2,)])
    gradients = any_gradients(draw, weights, n, 2)
    for rank in gradients:  # far from zero, so that zeros beside them matter
        for given in rank:
            given.update({place: g.abs() / 8 + 1 for place, g in given.items()})
    options = {"hierarchical": between, "average": draw(st.booleans())}
    _train_on_gradients(lab, draw, "bytegrad", nodes, weights, gradients, ONE_BUCKET, options)


@check("algorithms", "S2.4", "any_order", needs=("gradient_allreduce",), effort=0.5)
def any_order(lab: Lab, draw: Draw) -> None:
    """Ranks whose gradients become ready in different orders exchange the same buckets at every step."""
    nodes = draw(worlds(4).filter(lambda nodes: sum(nodes) > 1))
    n, count, steps = sum(nodes), draw(st.integers(2, 5)), draw(st.integers(2, 3))
    weights = grid_weights(draw, [torch.float32] * count, [(2,)] * count)
    gradients = exact_gradients(draw, weights, n, steps)
    orders = st.permutations(range(count))
    shuffled = [[{place: given[place] for place in draw(orders)} for given in rank] for rank in gradients]
    bucket_bytes = draw(st.sampled_from([1, 1, 16]))
    options = {"hierarchical": False, "average": True}
    _train_on_gradients(lab, draw, "gradient_allreduce", nodes, weights, shuffled, bucket_bytes, options)


@check("algorithms", "S2.5", "unused_parameters", needs=("gradient_allreduce",), effort=0.5)
def unused_parameters(lab: Lab, draw: Draw) -> None:
    """A parameter that a rank does not use in a step contributes a zero gradient."""
    nodes = draw(worlds(4))
    n, count, steps = sum(nodes), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    weights = grid_weights(draw, [torch.float32] * count)
    gradients = exact_gradients(draw, weights, n, steps)
    for rank in gradients:
        for given in rank:
            for place in draw(st.sets(st.integers(0, count - 1), max_size=count - 1)):
                del given[place]
    options = {"hierarchical": False, "average": draw(st.booleans())}
    _train_on_gradients(lab, draw, "gradient_allreduce", nodes, weights, gradients, draw(_bucket_bytes), options)


# Gradients.


@check("algorithms", "S5.1", "gradients", dtypes=FLOATS, needs=("gradient_allreduce",), effort=0.2)
def gradient_allreduce(lab: Lab, draw: Draw) -> None:
    """Every rank updates its weights with the sum or mean of all ranks' gradients."""
    nodes, weights = draw(worlds(5)), _of_one_dtype(lab, draw)
    gradients = exact_gradients(draw, weights, sum(nodes), draw(st.integers(1, 3)))
    _train_on_gradients(lab, draw, "gradient_allreduce", nodes, weights, gradients, draw(_bucket_bytes), _either_sum(draw))


@check("algorithms", "S5.2", "gradients", dtypes=COMPRESSIBLE, needs=("bytegrad",), effort=0.3)
def bytegrad(lab: Lab, draw: Draw) -> None:
    """Every rank updates its weights with gradients sent as one byte per element, bit for bit."""
    nodes, weights = draw(worlds(5) | st.sampled_from([(2, 1), (1, 3), (2, 2), (2, 1, 2)])), _of_one_dtype(lab, draw)
    gradients = any_gradients(draw, weights, sum(nodes), draw(st.integers(1, 3)))
    options = {"hierarchical": draw(st.sampled_from([True, True, False])), "average": draw(st.booleans())}
    _train_on_gradients(lab, draw, "bytegrad", nodes, weights, gradients, draw(_bucket_bytes), options)


# Weights.


def _joined(tensors: list[Tensor]) -> decentralized_numpy.Array:
    return np.concatenate([array(x) for x in tensors])


def _two_pairs(between: bool) -> st.SearchStrategy[tuple[int, ...]]:
    """Worlds in which consecutive steps have different peers."""
    return st.sampled_from([(1, 1, 1, 1), (2, 1, 1, 1)] if between else [(4,), (3, 1)])


def _decentralized(
    lab: Lab,
    draw: Draw,
    mode: Any,
    nodes: tuple[int, ...],
    between: bool,
    restart: int | None = None,
    weights: list[Tensor] | None = None,
) -> None:
    n, steps, interval = sum(nodes), draw(st.integers((restart or 0) + 1, 6)), draw(st.integers(1, 3))
    weights = _of_one_dtype(lab, draw) if weights is None else weights
    gradients = any_gradients(draw, weights, n, steps)
    given = {"lr": 1.0, "bucket_bytes": draw(_bucket_bytes), "hierarchical": between, "communication_interval": interval}
    given |= {"peer_selection_mode": mode} if restart is None else {"graph": mode, "restart": restart}
    method = "decentralized" if restart is None else _GRAPHS[0]
    training = Training(lab, method, nodes, copies(weights, n), gradients, draw(seeds), given)
    for dtype in dict.fromkeys(w.dtype for w in weights):
        places = [place for place, w in enumerate(weights) if w.dtype is dtype]
        mine = [weights[place] for place in places]
        by_step = [[_joined([rank[step][place] for place in places]) for rank in gradients] for step in range(steps)]
        with np.errstate(all="ignore"):
            history = decentralized_numpy.train_decentralized(
                _joined(mine), by_step, 1.0, name_of(dtype), list(nodes), mode, between, interval
            )
        mass = np.abs(_joined(mine)) + np.abs(np.stack([np.stack(ranks) for ranks in by_step])).max(1).sum(0)
        for step, ranks in enumerate(history):
            # Each mean may be rounded in another order, and the difference stays in the weights.
            tolerance = SUM((step + 1) * (n + 2)) if mode == "all" else EXACT
            for rank, flat in enumerate(ranks):
                for place, want, bound in zip(places, _split(flat, mine), _split(mass, mine), strict=True):
                    training.expect(rank, step, place, want, tolerance, bound.double() if mode == "all" else None)


def _split(flat: decentralized_numpy.Array, like: list[Tensor]) -> list[Tensor]:
    """Split ``flat`` into tensors like ``like``."""
    parts = np.split(flat, np.cumsum([w.numel() for w in like])[:-1])
    return [torch.from_numpy(np.ascontiguousarray(part)).to(w.dtype).view(w.shape) for part, w in zip(parts, like, strict=True)]


@check("algorithms", "S5.3", "shift_one", dtypes=FLOATS, needs=("decentralized",), effort=0.2)
def shift_one(lab: Lab, draw: Draw) -> None:
    """At steps divisible by the interval, weights are averaged with the next peer; then each rank applies its own gradient."""
    between = draw(st.booleans())
    _decentralized(lab, draw, "shift_one", draw(_two_pairs(between) | paired_worlds(between, 6)), between)


@check("algorithms", "S5.3", "several_dtypes", needs=("decentralized",), effort=0.3)
def several_dtypes(lab: Lab, draw: Draw) -> None:
    """Weights of each dtype are averaged in every round, all with the same peer."""
    names = [name for name in FLOATS if lab.target.dtypes is None or name in lab.target.dtypes]
    if len(names) < 2:
        return
    used = draw(st.permutations(names))[:2]
    weights = grid_weights(draw, [dtype_named(name) for name in [*used, *draw(st.lists(st.sampled_from(used), max_size=2))]])
    _decentralized(lab, draw, "shift_one", draw(_two_pairs(False)), False, weights=weights)


@check("algorithms", "S5.3", "all", dtypes=FLOATS, needs=("decentralized",), effort=0.2)
def all_ranks(lab: Lab, draw: Draw) -> None:
    """At steps divisible by the interval, weights are averaged over all ranks; then each rank applies its own gradient."""
    _decentralized(lab, draw, "all", draw(worlds(5)), draw(st.booleans()))


_GRAPHS = ("decentralized_on_graph",)


@check("algorithms", "S13.5", "interval", dtypes=FLOATS, needs=_GRAPHS, effort=0.2)
def along_graphs(lab: Lab, draw: Draw) -> None:
    """At steps divisible by the interval, weights are averaged along the next graph; then each rank applies its own gradient."""
    graph, nodes, between = draw(graph_cases(6, changing=draw(st.booleans())))
    _decentralized(lab, draw, graph, nodes, between, restart=0)


@check("algorithms", "S13", "restart", needs=_GRAPHS, effort=0.5)
def restart(lab: Lab, draw: Draw) -> None:
    """Training that continues from a saved state goes on with the next graph, as if it had never stopped."""
    graph, nodes, between = draw(graph_cases(6, changing=True))
    _decentralized(lab, draw, graph, nodes, between, restart=draw(st.integers(1, 5)))


def _follow_ring(
    lab: Lab, draw: Draw, nodes: tuple[int, ...], starts: list[list[Tensor]], gradients: ByRank, options: dict[str, Any]
) -> None:
    """Train on the ring and compare with one loop over all ranks, bucket by bucket."""
    weights, steps = starts[0], len(gradients[0])
    dtype = name_of(weights[0].dtype)
    training = Training(lab, "low_precision_decentralized", nodes, starts, gradients, draw(seeds), options)
    for places in plain.buckets([w.numel() for w in weights], [dtype] * len(weights), options["bucket_bytes"]):
        by_step = [[_joined([rank[step][place] for place in places]) for rank in gradients] for step in range(steps)]
        start = _joined([weights[place] for place in places])
        with np.errstate(all="ignore"):
            history = decentralized_numpy.train_on_ring(
                start, by_step, options["lr"], dtype, list(nodes), options["hierarchical"], options["communication_interval"]
            )
        for step, ranks in enumerate(history):
            for rank, flat in enumerate(ranks):
                for place, want in zip(places, _split(flat, [weights[place] for place in places]), strict=True):
                    training.expect(rank, step, place, want)


@check("algorithms", "S5.4", "ring", dtypes=COMPRESSIBLE, needs=("low_precision_decentralized",), effort=0.3)
def ring(lab: Lab, draw: Draw) -> None:
    """After optimizer steps divisible by the interval, weights are averaged on the ring, bucket by bucket, bit for bit."""
    nodes, weights = draw(worlds(5)), _of_one_dtype(lab, draw)
    gradients = any_gradients(draw, weights, sum(nodes), draw(st.integers(1, 5)))
    options = {"lr": 1.0, "bucket_bytes": draw(_bucket_bytes), "hierarchical": draw(st.booleans())}
    options["communication_interval"] = draw(st.integers(1, 3))
    _follow_ring(lab, draw, nodes, copies(weights, sum(nodes)), gradients, options)


# QAdam.

_groups = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.01, 0.3]),
        "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.8, 0.99), (0.0, 0.5)]),
        "eps": st.sampled_from([1e-8, 1e-3, 0.5]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
    }
)


@check("algorithms", "S5.5", "steps", dtypes=COMPRESSIBLE, needs=("qadam",), effort=0.25)
def qadam(lab: Lab, draw: Draw) -> None:
    """Steps are Adam's up to warmup_steps; later ones use momenta in bytes, bit for bit, and move nothing whose frozen v is 0."""
    nodes, weights, steps = draw(worlds(4)), _of_one_dtype(lab, draw), 6
    n, warmup_steps = sum(nodes), draw(st.integers(2, 5))
    exact = exact_gradients(draw, weights, n, steps)
    late = draw(st.sampled_from([None, 1, 2, 3]))
    for g in (g for mine in exact for step in mine for g in step.values() if late is not None):
        g.view(-1)[::late] = 0  # so v stays 0, and later gradients make m of it
    own = any_gradients(draw, weights, n, steps)
    gradients = [mine[:warmup_steps] + others[warmup_steps:] for mine, others in zip(exact, own, strict=True)]
    groups, between, bucket_bytes = [draw(_groups) for _ in weights], draw(st.booleans()), draw(_bucket_bytes)
    given = {"groups": groups, "warmup_steps": warmup_steps, "hierarchical": between, "bucket_bytes": bucket_bytes}
    training = Training(lab, "qadam", nodes, copies(weights, n), gradients, draw(seeds), given)
    layout = plain.buckets([w.numel() for w in weights], [lab.dtype_name] * len(weights), bucket_bytes)
    model = qadam_numpy.QAdam(lists(weights), groups, warmup_steps, list(nodes), layout, between, lab.dtype_name)
    history = [lists(weights)]
    # S1 leaves it to optimizers how they round, in Adam's steps all take torch's. Weights have no say in the momenta.
    rounded, magnitudes = [torch.zeros(w.numel(), dtype=torch.float64) for w in weights], []
    for s, ranks in enumerate(zip(*gradients, strict=True), 1):
        model.step([[rank[place].reshape(-1).tolist() for place in range(len(weights))] for rank in ranks])
        history.append([list(numbers) for numbers in model.weights])
        if s >= warmup_steps:
            before, after = ([torch.tensor(numbers, dtype=torch.float64) for numbers in history[at]] for at in (-2, -1))
            rounded = [mass + old.abs() + (new - old).abs() for mass, old, new in zip(rounded, before, after, strict=True)]
        magnitudes.append([mass.view_as(w) for mass, w in zip(rounded, weights, strict=True)])
    _compare_all(training, history[1:], SUM(4), magnitudes)

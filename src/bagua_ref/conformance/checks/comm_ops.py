"""Operations on buckets compared with plain loops over all ranks (S3.1 to S3.5, S13)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.answers import answer
from bagua_ref.conformance.cases.strategies import (
    COMPRESSIBLE,
    FLOATS,
    bulk,
    mixed,
    paired_worlds,
    tensors,
    worlds,
)
from bagua_ref.conformance.cases.training_cases import (
    doubly_stochastic,
    flawed,
    graph_cases,
    sizes_of,
    worlds_of,
)
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected import decentralized_numpy
from bagua_ref.conformance.expected.kernels_numpy import Array, array
from bagua_ref.conformance.expected.tolerances import SUM
from bagua_ref.conformance.lab.lab import Lab


def _inputs(lab: Lab, ranks: int, multiple: int, compressed: bool = False) -> list[Tensor]:
    """Return each rank's elements; their number is divisible by ``multiple``."""
    more = "tame" if compressed else "mixed"  # one edge poisons a whole chunk
    kind = lab.choice(["drawn", "mixed", "tame", more])
    few = st.integers(0, 40 // multiple + 1)
    # often large enough for all pairs of edge cases
    size = multiple * lab.draw(few if kind == "drawn" else few | st.integers(0, 400 // multiple))
    if kind == "mixed":
        return mixed(lab.dtype, ranks, lab.seed(), size)
    if kind == "tame":  # numbers that differ between ranks, as in training
        return [bulk(lab.dtype, "tame", lab.seed(), size) for _ in range(ranks)]
    return [lab.draw(tensors(lab.dtype, size)) for _ in range(ranks)]


def _expect_rounds(lab: Lab, results: list[Any], wanted: Iterable[list[Array]]) -> None:
    """Compare each rank's elements after each round with the expected ones."""
    rounds = [
        [torch.from_numpy(np.ascontiguousarray(x)).to(lab.dtype) for x in ranks] for ranks in wanted
    ]
    by_rank = [list(of_rank) for of_rank in zip(*rounds, strict=True)]
    lab.assert_equal(results, by_rank, where="elements by rank and step")


def _run(
    lab: Lab,
    nodes: tuple[int, ...],
    method: str,
    inputs: list[Any],
    refusal: type[Exception] | tuple[()] = (),
    **options: Any,
) -> list[Any]:
    """Return the results of ``comm_ops.method(world, inputs[rank], **options)`` by rank."""
    return lab.on_ranks("comm_ops", method, nodes, {"inputs": inputs}, options, refusal=refusal)


def _centralized(
    lab: Lab,
    nodes: tuple[int, ...],
    compression: str | None,
    hierarchical: bool,
    given: list[Tensor] | None = None,
) -> None:
    mean, n = lab.flag(), sum(nodes)
    multiple = len(nodes) if hierarchical else n
    inputs = given or _inputs(lab, n, multiple, compressed=compression is not None)
    results = _run(
        lab,
        nodes,
        "centralized",
        inputs,
        average=mean,
        scattergather=True,
        compression=compression,
        hierarchical=hierarchical,
    )
    kind = "low_precision" if compression else "scatter_gather"
    how = {"nodes": list(nodes) if hierarchical else None, "average": mean}
    x = torch.stack(inputs)
    wanted = answer(f"comm_ops/centralized_{kind}", lab.dtype_name, {"x": x}, how)["x"]
    lab.assert_equal(results, [*wanted], where="elements by rank")


def _expect_refusal(
    lab: Lab,
    nodes: tuple[int, ...],
    method: str,
    mine: Any,
    error: type[Exception] = ValueError,
    named: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Expect an error on every rank, with the words ``named`` in its message."""
    n = sum(nodes)
    results = lab.on_ranks(
        "comm_ops", method, nodes, {"inputs": [mine] * n}, options, refusal=error, seed=0
    )
    refused = [
        isinstance(found, error) and all(x in str(found) for x in named) for found in results
    ]
    where = f"refused with a {error.__name__}" + "".join(f" that names {x}" for x in named)
    lab.assert_equal(refused, [True] * n, where=f"{where}, by rank")


def _walk_refusals(lab: Lab) -> None:
    """Compression without scattergather, unknown compression, and float64 are refused."""
    given = {"average": True, "scattergather": True, "compression": "MinMaxUInt8"}
    changes: list[dict[str, Any]] = [{"scattergather": False}, {"compression": "MinMaxUInt9"}]
    x = torch.ones(6, dtype=lab.dtype)
    for nodes, between in (((2,), False), ((2, 1), True)):
        how: dict[str, Any] = {**given, "hierarchical": between}
        for wrong in changes:
            _expect_refusal(lab, nodes, "centralized", x, **{**how, **wrong})
        if "float64" in lab.dtypes(FLOATS):
            _expect_refusal(lab, nodes, "centralized", x.double(), TypeError, ("float64",), **how)


def _walk_uneven(lab: Lab) -> None:
    """A size that the number of ranks does not divide is refused, or no element is left out; sums
    start at +0 on any number of ranks.
    """
    how = {"average": False, "scattergather": True, "compression": None, "hierarchical": False}
    errors = (ValueError, TypeError, RuntimeError)

    def run(x: Tensor, n: int) -> list[Any]:
        given = {"inputs": [x] * n}
        return lab.on_ranks("comm_ops", "centralized", (n,), given, how, refusal=errors, seed=0)

    x = torch.arange(5).to(lab.dtype)
    results = run(x, 2)
    if not all(isinstance(result, errors) for result in results):
        lab.assert_equal(results, [2 * x] * 2, where="elements by rank")
    for n in (1, 3):
        zeros = torch.zeros(3, dtype=lab.dtype)
        lab.assert_equal(run(-zeros, n), [zeros] * n, where="elements by rank")


@check("comm_ops.S3.1.scatter_gather", dtypes=FLOATS, effort=0.35, walk=_walk_uneven)
def scatter_gather(lab: Lab) -> None:
    """Scatter-gather adds in rank order, and every rank ends with identical bits."""
    _centralized(lab, lab.world(worlds()), None, False)


@check("comm_ops.S3.2.low_precision", dtypes=COMPRESSIBLE, effort=0.35, walk=_walk_refusals)
def low_precision(lab: Lab) -> None:
    """With one byte per element, every rank ends with identical bits, as specified."""
    _centralized(lab, lab.world(worlds()), "MinMaxUInt8", False)


@check("comm_ops.S3.3.hierarchical", dtypes=COMPRESSIBLE, effort=0.35)
def hierarchical(lab: Lab) -> None:
    """Leaders operate on node sums divided by n/L, so that every rank counts once, even on uneven
    nodes.
    """
    any_worlds = worlds() | worlds(least_nodes=3) | worlds(least_nodes=2)
    _centralized(lab, lab.world(any_worlds), "MinMaxUInt8", True)


def _long_inputs(lab: Lab, ranks: int) -> list[Tensor]:
    """Return inputs longer than an implementation's internal blocks; with up to 4 ranks, in equal
    chunks.
    """
    size = 12 * (5500 if len(lab.long_sizes) > 1 else 90)
    return [bulk(lab.dtype, "tame", lab.seed(), size) for _ in range(ranks)]


@check("comm_ops.S3.2.long", dtypes=COMPRESSIBLE, effort=0.06)
def long(lab: Lab) -> None:
    """Scatter-gather gives the specified bits for long tensors, too, with and without
    compression.
    """
    nodes = lab.world(st.sampled_from([(2,), (3,), (3, 1)]))
    compression = lab.choice([None, "MinMaxUInt8"])
    inputs = _long_inputs(lab, sum(nodes))
    _centralized(lab, nodes, compression, lab.flag(), inputs)


def _walk_large(lab: Lab) -> None:
    """The sum of a mean of float16 may be larger than float16 allows."""
    x = torch.full((2,), 6e4 if lab.dtype is torch.float16 else 6.0, dtype=lab.dtype)
    how = {"average": True, "compression": None, "hierarchical": False}
    for scattergather in (False, True):
        options = {**how, "scattergather": scattergather}
        given = {"inputs": [x] * 2}
        results = lab.on_ranks("comm_ops", "centralized", (2,), given, options, seed=0)
        lab.assert_equal(results, [x] * 2, where="elements by rank")


@check("comm_ops.S3.1.full_precision", dtypes=FLOATS, effort=0.35, walk=_walk_large)
def full_precision(lab: Lab) -> None:
    """Full precision gives the sum or mean over all ranks, up to the rounding of a different
    summation order; means are computed in float32 at least.
    """
    nodes, mean = lab.world(worlds()), lab.flag()
    between, scattergather = lab.flag(), lab.flag()
    n = sum(nodes)
    multiple = (len(nodes) if between else n) if scattergather else 1
    inputs = [x / 64 for x in _inputs(lab, n, multiple)]  # so that the sum does not overflow
    results = _run(
        lab,
        nodes,
        "centralized",
        inputs,
        average=mean,
        scattergather=scattergather,
        compression=None,
        hierarchical=between,
    )
    _in_any_order(lab, results, inputs, n if mean else 1)
    lab.assert_equal(results, results[:1] * n, where="elements by rank, compared with rank 0")


def _in_any_order(lab: Lab, results: list[Any], inputs: list[Tensor], divisor: int) -> None:
    """Compare each rank's result with the sum of all inputs divided by ``divisor``; the order of
    summation is free.
    """
    exact = torch.stack([x.double() for x in inputs])
    wanted, magnitude = (exact.sum(0) / divisor).to(lab.dtype), exact.abs().sum(0) / divisor
    every, tolerance = [wanted] * len(inputs), SUM(len(inputs) + 1)
    lab.assert_equal(results, every, tolerance, magnitude=magnitude, where="elements by rank")


def _rounds(lab: Lab, first: list[Tensor], more: int) -> list[list[Tensor]]:
    """Return each rank's elements for the first round and for ``more`` further rounds."""
    size = first[0].numel()
    return [
        first,
        *([bulk(lab.dtype, "tame", lab.seed(), size) for _ in first] for _ in range(more)),
    ]


def _decentralized(
    lab: Lab,
    mode: Any,
    nodes: tuple[int, ...],
    between: bool,
    given: list[Tensor] | None = None,
) -> tuple[list[Any], list[list[Tensor]]]:
    """Compare a few rounds of averaging on several ranks; return the results by rank, and the
    inputs by round.
    """
    method, name = ("decentralized", "mode") if mode == "shift_one" else (_GRAPHS[0], "graph")
    first = given or _inputs(lab, sum(nodes), 1)
    rounds = _rounds(lab, first, lab.integer(0, 4))
    by_rank = [list(ranks) for ranks in zip(*rounds, strict=True)]
    results = _run(lab, nodes, method, by_rank, **{name: mode}, hierarchical=between)
    with np.errstate(all="ignore"):
        wanted = [
            decentralized_numpy.average(
                [*map(array, ranks)], lab.dtype_name, mode, list(nodes) if between else None, step
            )
            for step, ranks in enumerate(rounds)
        ]
    _expect_rounds(lab, results, wanted)
    return results, rounds


def _walk_odd(lab: Lab) -> None:
    """An odd number of ranks, or of leaders, is refused, and so is an unknown mode."""
    x = [torch.ones(3, dtype=lab.dtype)]
    _expect_refusal(lab, (2,), "decentralized", x, mode="shift_two", hierarchical=False)
    for nodes, between, named in (
        ((3,), False, ("3",)),
        ((2, 1, 1), True, ("hierarchical=False",)),
        ((4, 1), False, ("5",)),
    ):
        given: dict[str, Any] = {"mode": "shift_one", "hierarchical": between}
        _expect_refusal(lab, nodes, "decentralized", x, named=named, **given)


@check("comm_ops.S3.4.shift_one", dtypes=FLOATS, effort=0.35, walk=_walk_odd)
def shift_one(lab: Lab) -> None:
    """Each rank averages with its peer of the step; with hierarchical, leaders average node
    means.
    """
    between = lab.flag()
    _decentralized(lab, "shift_one", lab.world(paired_worlds(between)), between)


@check("comm_ops.S3.4.long", dtypes=FLOATS, effort=0.06)
def long_shift_one(lab: Lab) -> None:
    """Averages with the peer of the step have the specified bits for long tensors, too."""
    nodes = lab.world(st.sampled_from([(2,), (4,), (3, 1)]))
    between = len(nodes) == 2 and lab.flag()
    _decentralized(lab, "shift_one", nodes, between, _long_inputs(lab, sum(nodes)))


@check("comm_ops.S3.4.many_steps", effort=0.025)
def many_steps(lab: Lab) -> None:
    """Peers depend on the step also after many steps."""
    nodes, count = lab.world(st.sampled_from([(6,), (3, 3)])), lab.integer(260, 520)
    first = [torch.full((1,), float(2**rank)) for rank in range(6)]  # the sum identifies the ranks
    inputs = [[x] * count for x in first]
    results = _run(lab, nodes, "decentralized", inputs, mode="shift_one", hierarchical=False)
    averages = (
        decentralized_numpy.average([*map(array, first)], "float32", "shift_one", None, step)
        for step in range(count)
    )
    _expect_rounds(lab, results, averages)


@check("comm_ops.S3.4.all", dtypes=FLOATS, effort=0.35)
def all_ranks(lab: Lab) -> None:
    """The result is the mean over all ranks, even on uneven nodes, up to the rounding of a
    different summation order.
    """
    between, nodes = lab.flag(), lab.world(worlds())
    n = sum(nodes)
    first = [x / 64 for x in _inputs(lab, n, 1)]
    rounds = _rounds(lab, first, 1)
    by_rank = [list(ranks) for ranks in zip(*rounds, strict=True)]
    results = _run(lab, nodes, "decentralized", by_rank, mode="all", hierarchical=between)
    for step, inputs in enumerate(rounds):
        _in_any_order(lab, [of_rank[step] for of_rank in results], inputs, n)


_GRAPHS = ("decentralized_on_graph",)

_NAMED_GRAPHS = {
    "one_peer_exponential": (
        "S13.1",
        "one_peer_exponential",
        "Each rank is averaged with the rank 2^(t mod K) before it.",
    ),
    "hypercube": ("S13.2", "hypercube", "Ranks whose numbers differ in bit t mod K are averaged."),
    "neighbours": (
        "S13.3",
        "ring",
        (
            "On the ring, each rank is averaged with both neighbours, added in the order own, left,"
            " right."
        ),
    ),
    "exponential": (
        "S13.3",
        "exponential",
        "Each rank is averaged with the ranks 1, 2, 4, ... before it, added in this order.",
    ),
}
"""Check -> its clause, graph and sentence."""


def _on_graph(lab: Lab, graph: str) -> None:
    # signs of zeros only show where there is no mean over a node
    between = lab.choice([False, False, True])
    _decentralized(lab, graph, lab.world(worlds_of(between, sizes_of(graph, 9))), between)


for _name, (_clause, _graph, _sentence) in _NAMED_GRAPHS.items():
    check(
        f"comm_ops.{_clause}.{_name}", dtypes=FLOATS, needs=_GRAPHS, effort=0.25, sentence=_sentence
    )(partial(_on_graph, graph=_graph))


@check("comm_ops.S13.4.weights", dtypes=FLOATS, needs=_GRAPHS, effort=0.25)
def weighted(lab: Lab) -> None:
    """Weighted sums are formed in the order of the row, each product rounded."""
    between = lab.flag()
    nodes = lab.world(worlds_of(between, st.integers(1, 9)))
    n = len(nodes) if between else sum(nodes)
    graphs = [doubly_stochastic(n, lab.seed()) for _ in range(lab.integer(1, 3))]
    most = lab.choice([1 + 8 * 2.0**-23, 1 - 16 * 2.0**-24])  # within the tolerance
    graphs.insert(lab.integer(0, 1), [[(rank, most)] for rank in range(n)])
    _decentralized(lab, graphs, nodes, between)


@check("comm_ops.S13.4.refuses", needs=_GRAPHS, effort=0.2)
def refuses_graphs(lab: Lab) -> None:
    """A graph that is not doubly stochastic is a ValueError on every rank, before its first use."""
    nodes = lab.world(worlds(5))
    n, between = sum(nodes), lab.flag()
    talking = len(nodes) if between else n
    good = [doubly_stochastic(talking, lab.seed()) for _ in range(lab.integer(0, 2))]
    for graph in flawed(talking, lab.integer(0, talking - 1)):
        graphs = [*good, graph]
        rounds = [[torch.ones(3)] * len(graphs)] * n
        results = _run(
            lab, nodes, _GRAPHS[0], rounds, ValueError, graph=graphs, hierarchical=between
        )
        refused = [isinstance(result, ValueError) for result in results]
        where = "the last graph, refused with a ValueError by rank"
        lab.assert_equal(refused, [True] * n, where=where)


@check("comm_ops.S13.5.mean", needs=_GRAPHS, effort=0.35)
def mean_is_kept(lab: Lab) -> None:
    """No averaging changes the mean of the ranks that take part, up to rounding."""
    graph, nodes, _ = lab.draw(graph_cases(9).filter(lambda case: not case[2]))
    lab.need_ranks(sum(nodes))
    results, rounds = _decentralized(lab, graph, nodes, between=False)
    for step, before in enumerate(rounds):
        after = [of_rank[step] for of_rank in results]
        was, now = (torch.stack(ranks).double() for ranks in (before, after))
        # Weights of float32 may sum to 1 +- 1e-6; beyond that, each rank rounds twice for each of n
        # sources.
        info = torch.finfo(lab.dtype)
        allowed = (1e-6 + 2 * len(after) * info.eps) * was.abs().mean(0) + info.tiny
        wrong = ((was.mean(0) - now.mean(0)).abs() > allowed) & now.isfinite().all(0)
        said = f"the mean changed at step {step}: {was.mean(0)} to {now.mean(0)}"
        lab.assert_that(not wrong.any(), said)


def _walk_ring(lab: Lab) -> None:
    """float64 is refused."""
    if "float64" in lab.dtypes(FLOATS):
        x, method = torch.ones(3, dtype=torch.float64), "low_precision_decentralized"
        for nodes, between in (((2,), False), ((2, 1), True)):
            _expect_refusal(
                lab, nodes, method, [x, x], TypeError, ("float64",), hierarchical=between
            )


@check("comm_ops.S3.5.ring", dtypes=COMPRESSIBLE, effort=0.35, walk=_walk_ring)
def ring(lab: Lab) -> None:
    """Steps on the ring are as specified, bit for bit, so that replicas stay equal."""
    nodes = lab.world(worlds(8))
    first = _inputs(lab, sum(nodes), 1, compressed=True)
    _ring(lab, nodes, lab.integer(1, 4), first)


@check("comm_ops.S3.5.long", dtypes=COMPRESSIBLE, effort=0.06)
def long_ring(lab: Lab) -> None:
    """Steps on the ring give the specified bits for long tensors, too."""
    nodes = lab.world(st.sampled_from([(2,), (3,), (2, 1)]))
    _ring(lab, nodes, 1, _long_inputs(lab, sum(nodes)))


def _ring(lab: Lab, nodes: tuple[int, ...], count: int, first: list[Tensor]) -> None:
    between, rounds = lab.flag(), _rounds(lab, first, count - 1)
    start = bulk(lab.dtype, "tame", lab.seed(), first[0].numel())
    inputs = [[start, *mine] for mine in zip(*rounds, strict=True)]
    method = "low_precision_decentralized"
    results = _run(lab, nodes, method, inputs, hierarchical=between)
    model = decentralized_numpy.Ring.of([array(start)] * (len(nodes) if between else sum(nodes)))

    def step(ranks: list[Array]) -> list[Array]:
        return model.step(ranks, lab.dtype_name)

    leading, run = list(nodes) if between else None, decentralized_numpy.between_leaders
    with np.errstate(all="ignore"):
        wanted = [run(step, [*map(array, ranks)], lab.dtype_name, leading) for ranks in rounds]
    _expect_rounds(lab, results, wanted)

"""Properties that algorithms share: each is one function, and a table says which algorithm has it
by which clause.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from bagua_ref.conformance.cases.strategies import COMPRESSIBLE, FLOATS, Draw, seeds, worlds
from bagua_ref.conformance.cases.training_cases import (
    PLAIN,
    ByRank,
    any_weights,
    graph_cases,
    grid_weights,
    momenta,
    multi_rank_worlds,
    outer_optimizers,
    schedules,
    used_parts,
)
from bagua_ref.conformance.checks.algorithms import (
    BYTEGRAD,
    DECENTRALIZED,
    GRADIENT_ALLREDUCE,
    QADAM,
    RING,
)
from bagua_ref.conformance.checks.algorithms_compressed import TOPK
from bagua_ref.conformance.checks.algorithms_local import (
    DILOCO,
    LOCAL_SGD,
    fragments_of,
    tame_after_warm_up,
)
from bagua_ref.conformance.checks.algorithms_powersgd import (
    POWERSGD,
    judge_exactly,
    rank_of,
    same_on_all_ranks,
)
from bagua_ref.conformance.checks.algorithms_sparse import DEMO, SPARSELOCO
from bagua_ref.conformance.checks.registry import check, check_trainings, nothing
from bagua_ref.conformance.expected.compression_numpy import norm
from bagua_ref.conformance.expected.tolerances import SUM
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import TrainedAlgorithm, Training, exactly, of_kinds

_ON_WEIGHTS = (GRADIENT_ALLREDUCE, BYTEGRAD, DECENTRALIZED, RING, QADAM, LOCAL_SGD, DILOCO)
"""Algorithms of which weights are returned."""


def _one_of(lab: Lab, draw: Draw, algorithms: tuple[TrainedAlgorithm, ...]) -> TrainedAlgorithm:
    """Draw one of the algorithms that the target has."""
    own = lab.target.parts.get("algorithms")
    found: TrainedAlgorithm = draw(
        st.sampled_from([row for row in algorithms if own is None or hasattr(own, row.method)])
    )
    return found


# Algorithms that are drawn.


@check("S5", "first_rank", needs=("gradient_allreduce",), effort=0.4)
def first_rank(lab: Lab, draw: Draw) -> None:
    """Training starts from the first rank's weights on every rank."""
    algorithm, nodes = (
        _one_of(lab, draw, _ON_WEIGHTS),
        draw(worlds(4).filter(lambda nodes: sum(nodes) > 1)),
    )
    count = draw(st.integers(1, 3))
    starts = [
        grid_weights(draw, [torch.float32] * count, [(3,)] * count) for _ in range(sum(nodes))
    ]
    steps = 3 if algorithm is QADAM else 1
    algorithm.train(
        lab, draw, nodes=nodes, weights=starts[0], starts=starts, gradients=exactly, steps=steps
    )


@check("S2.4", "any_order", needs=("gradient_allreduce",), effort=0.4)
def any_order(lab: Lab, draw: Draw) -> None:
    """Ranks whose gradients become ready in different orders exchange the same buckets at every
    step.
    """
    count = draw(st.integers(2, 5))
    orders = st.permutations(range(count))

    def shuffled(gradients: ByRank) -> ByRank:
        return [
            [{place: given[place] for place in draw(orders)} for given in rank]
            for rank in gradients
        ]

    _one_of(lab, draw, (GRADIENT_ALLREDUCE, BYTEGRAD)).train(
        lab,
        draw,
        nodes=draw(worlds(4).filter(lambda nodes: sum(nodes) > 1)),
        change=shuffled,
        steps=draw(st.integers(2, 3)),
        weights=grid_weights(draw, [torch.float32] * count, [(2,)] * count),
        bucket_bytes=draw(st.sampled_from([1, 1, 16])),
        hierarchical=False,
        average=True,
    )


# Algorithms of the table.


def warm_up(algorithm: TrainedAlgorithm, lab: Lab, draw: Draw, **given: Any) -> None:
    """Train with a warm-up."""
    algorithm.train(lab, draw, gradients=exactly, warmup_steps=draw(st.integers(1, 3)), **given)


def restart(algorithm: TrainedAlgorithm, lab: Lab, draw: Draw, **given: Any) -> None:
    """Save weights and states somewhere in a training, and continue with a new one that has loaded
    them.
    """
    some = draw(st.sampled_from(["one", "all"]))

    def before(steps: int) -> dict[int, str]:
        return dict.fromkeys(
            [draw(st.integers(1, steps - 1))] if some == "one" else range(1, steps), "restart"
        )

    algorithm.train(lab, draw, before=before, **given)


def new_buckets(algorithm: TrainedAlgorithm, lab: Lab, draw: Draw, **given: Any) -> None:
    """Put gradients into new buckets in the middle of a training."""
    algorithm.train(lab, draw, steps=4, before=lambda steps: {2: "new buckets"}, **given)


def unused_parameters(algorithm: TrainedAlgorithm, lab: Lab, draw: Draw, **given: Any) -> None:
    """Train with gradients of which each rank lacks some."""
    weights = algorithm.weights(draw, lab.dtype) + any_weights(draw, lab.dtype, 2)
    algorithm.train(
        lab,
        draw,
        **{"nodes": draw(multi_rank_worlds), "weights": weights, **given},
        change=partial(used_parts, draw),
    )


def not_finite(algorithm: TrainedAlgorithm, lab: Lab, draw: Draw, **given: Any) -> None:
    """Train with gradients some of which are NaN or infinite."""
    generator = np.random.default_rng(draw(seeds))

    def poisoned(gradients: ByRank) -> ByRank:
        for _ in range(draw(st.integers(1, 6))):
            step = gradients[generator.integers(len(gradients))][generator.integers(3)]
            x = step[int(generator.integers(2))].view(-1)
            x[generator.integers(x.numel())] = float(generator.choice([np.nan, np.inf, -np.inf]))
        if draw(st.booleans()):  # NaNs are equal, whatever their other bits
            x = gradients[0][0][0].view(-1)
            x[0], x[1::3] = np.inf, np.nan
            bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32)[1::3]
            bits += torch.from_numpy(generator.integers(4, size=bits.numel())).to(bits.dtype)
        return gradients

    weights = grid_weights(draw, [lab.dtype] * 2, [(17,), (8, 3)])
    algorithm.train(
        lab, draw, nodes=draw(worlds(3)), weights=weights, change=poisoned, steps=3, **given
    )


def conservation(algorithm: TrainedAlgorithm, lab: Lab, draw: Draw, **given: Any) -> None:
    """Check that applied updates and final memories add up to the gradients' means."""

    def judge(training: Training) -> None:
        n, steps, compresses = training.n, range(training.steps), algorithm is not POWERSGD
        for place, w in enumerate(training.weights):
            every = [x for step in steps for x in training.tensors(step, place)]
            found = sum(training.seen("step", 0, step, place).double() for step in steps)
            left = [training.seen("memories", rank, steps[-1], place) for rank in range(n)]
            if compresses or rank_of(training, place):
                found = found + sum(memory.double() for memory in left) / n
            size: Any = torch.stack(every).double().abs().sum(0)
            if not compresses:
                size = norm([x.reshape(1, -1).numpy() for x in [*every, *left] if x is not None])
            want = (torch.stack(every).double().sum(0) / n).to(w.dtype)
            tolerance = SUM((16 if compresses else 100) * n)
            lab.assert_equal(
                found.to(w.dtype), want, tolerance, magnitude=size, where=f"the sum of {place}"
            )

    algorithm.train(lab, draw, steps=5, judge=judge, **given)


def same_bits(algorithm: TrainedAlgorithm, lab: Lab, draw: Draw, **given: Any) -> None:
    """Compare what all ranks return, bit for bit."""

    def judge(training: Training) -> None:
        for action, step, place in (
            _global_and_applied if algorithm is DILOCO else _averages_and_factors
        )(training):
            same_on_all_ranks(training, action, step, place)

    algorithm.train(lab, draw, nodes=draw(multi_rank_worlds), judge=judge, **given)


def _averages_and_factors(training: Training) -> Iterable[tuple[str, int, int]]:
    return itertools.product(
        ("step", "factors"), range(training.steps), range(len(training.weights))
    )


def _global_and_applied(training: Training) -> Iterator[tuple[str, int, int]]:
    """Yield the global weights after every step, and the weights of each fragment that has just
    been applied.
    """
    fragments = fragments_of(training)
    gap = training.options["period"] // len(fragments)
    for step in range(training.steps):
        yield from (("global weights", step, place) for place in range(len(training.weights)))
        if (step + 1) % gap == 0:
            yield from (
                ("step", step, place) for place in fragments[(step + 1) // gap % len(fragments) - 1]
            )


# The table.


def _some_warm_up(lab: Lab, draw: Draw) -> dict[str, Any]:
    return {"warmup_steps": draw(st.integers(0, 2))}


def _with_memory(lab: Lab, draw: Draw) -> dict[str, Any]:
    return {"memory": draw(st.sampled_from(["local", "averaged"])), **_some_warm_up(lab, draw)}


def _in_flight(lab: Lab, draw: Draw) -> dict[str, Any]:
    """Draw a training with diloco that may have sent a fragment when it is saved."""
    weights, mix = any_weights(draw, torch.float32, 3), draw(st.sampled_from([0.0, 0.25, 0.5]))
    drawn = schedules(draw, len(weights), smallest_gap=2) | _some_warm_up(lab, draw)
    # so fragments are applied twice
    drawn["steps"] = drawn["warmup_steps"] + drawn["period"] + draw(st.integers(2, 5))
    drawn["outer_optimizer"] = draw(outer_optimizers.filter(lambda outer: outer is not PLAIN))
    drawn["delay"] = max(drawn["delay"], draw(st.integers(0, 1)))
    return {
        "weights": weights,
        "mix": mix,
        "momentum": draw(momenta),
        "gradients": tame_after_warm_up,
        **drawn,
    }


def _on_graphs(lab: Lab, draw: Draw) -> dict[str, Any]:
    names = ("peer_selection_mode", "nodes", "hierarchical")
    return dict(zip(names, draw(graph_cases(6, changing=True)), strict=True))


def _one_period(lab: Lab, draw: Draw) -> dict[str, Any]:
    """Draw a training with diloco that shows bits of which none depends on a tolerance."""
    kinds = of_kinds(st.sampled_from(["tame", "near"]))
    return {
        "looks": ("global weights",),
        "exact": False,
        "gradients": kinds,
        "outer_optimizer": draw(outer_optimizers | st.none()),
    }


_AS_IF = "Training that continues from saved weights and states goes on as if it had never stopped"
_UNUSED = "Parameters that a rank has not used, or never uses, are averaged all the same."
_ZERO = "A rank that does not use a parameter contributes a gradient of zero"
_SUM = (
    "What was applied in all rounds, and the mean of the memories, is the sum of the mean"
    " gradients."
)

check_trainings(
    (
        warm_up,
        LOCAL_SGD,
        0.3,
        "S9.1.warmup",
        (),
        nothing,
        (
            "Up to warmup_steps, every step applies the mean gradient; steps of periods are counted"
            " from there."
        ),
    ),
    (
        warm_up,
        DILOCO,
        0.3,
        "S9.warmup",
        (),
        lambda lab, draw: {"nodes": draw(multi_rank_worlds)},
        (
            "Up to warmup_steps, every step applies the mean gradient; then the global weights are"
            " taken, and windows begin."
        ),
    ),
    (
        warm_up,
        POWERSGD,
        0.3,
        "S10.1.warmup",
        (),
        lambda lab, draw: {"judge": judge_exactly},
        (
            "Up to warmup_steps, gradients are averaged; then rounds are counted from 0, and"
            " nothing was remembered."
        ),
    ),
    (
        warm_up,
        TOPK,
        0.3,
        "S11.2.warmup",
        (),
        nothing,
        "Up to warmup_steps, gradients are averaged, and nothing is remembered.",
    ),
    (
        warm_up,
        DEMO,
        0.2,
        "S15.6.warmup",
        (),
        nothing,
        "Up to warmup_steps, gradients are averaged, and M stays 0.",
    ),
    (
        restart,
        DECENTRALIZED,
        0.5,
        "S13.restart",
        (),
        _on_graphs,
        (
            "Training that continues from a saved state goes on with the next graph, as if it had"
            " never stopped."
        ),
    ),
    (restart, RING, 0.15, "S5.4.restart", (), nothing, f"{_AS_IF}, with the same replicas."),
    (restart, QADAM, 0.3, "S5.5.restart", (), nothing, f"{_AS_IF}, in the warm-up and after it."),
    (
        restart,
        LOCAL_SGD,
        0.3,
        "S9.restart_of_local_sgd",
        (),
        _some_warm_up,
        (
            "Training that continues from saved weights and states averages at the steps at which"
            " it would have."
        ),
    ),
    (restart, DILOCO, 1, "S9.restart", (), _in_flight, f"{_AS_IF}, whatever was in flight."),
    (restart, POWERSGD, 0.6, "S10.1.restart", (), _with_memory, f"{_AS_IF}."),
    (
        restart,
        TOPK,
        0.3,
        "S11.2.restart",
        (),
        lambda lab, draw: {"gradients": exactly, **_some_warm_up(lab, draw)},
        f"{_AS_IF}.",
    ),
    (restart, SPARSELOCO, 0.3, "S15.5.restart", (), _in_flight, f"{_AS_IF}."),
    (
        restart,
        DEMO,
        0.3,
        "S15.6.restart",
        (),
        lambda lab, draw: {"gradients": exactly, **_some_warm_up(lab, draw)},
        f"{_AS_IF}.",
    ),
    (
        new_buckets,
        POWERSGD,
        0.3,
        "S10.1.new_buckets",
        (),
        nothing,
        "Memories and factors belong to parameters, and outlive new buckets.",
    ),
    (
        new_buckets,
        TOPK,
        0.2,
        "S11.2.new_buckets",
        (),
        lambda lab, draw: {"error_feedback": True},
        "Memories outlive new buckets.",
    ),
    (new_buckets, DEMO, 0.2, "S15.6.new_buckets", (), nothing, "Memories outlive new buckets."),
    (
        unused_parameters,
        GRADIENT_ALLREDUCE,
        0.5,
        "S2.5.unused_parameters",
        (),
        lambda *_: {"hierarchical": False},
        f"{_ZERO}.",
    ),
    (
        unused_parameters,
        BYTEGRAD,
        0.1,
        "S5.2.unused_parameters",
        (),
        nothing,
        f"{_ZERO}, which shares chunks with others.",
    ),
    (unused_parameters, DECENTRALIZED, 0.1, "S5.3.unused_parameters", (), nothing, _UNUSED),
    (unused_parameters, RING, 0.1, "S5.4.unused_parameters", (), nothing, _UNUSED),
    (
        unused_parameters,
        LOCAL_SGD,
        0.3,
        "S9.1.unused_parameters",
        (),
        lambda lab, draw: {"warmup_steps": draw(st.integers(0, 3)), "momentum": 0.5},
        f"{_UNUSED} In the warm-up, one that no rank has used gets no gradient.",
    ),
    (
        unused_parameters,
        DILOCO,
        0.3,
        "S9.4.unused_parameters",
        (),
        lambda lab, draw: {"nodes": draw(st.sampled_from([(2,), (1, 1)]))},
        "Parameters that a rank has not used, or never uses, are sent and applied all the same.",
    ),
    (
        unused_parameters,
        POWERSGD,
        0.3,
        "S10.2.unused_parameters",
        (),
        nothing,
        f"{_ZERO}, and its memory.",
    ),
    (
        unused_parameters,
        TOPK,
        0.3,
        "S11.2.unused_parameters",
        (),
        nothing,
        f"{_ZERO}, and its memory.",
    ),
    (
        unused_parameters,
        DEMO,
        0.3,
        "S15.6.unused_parameters",
        (),
        nothing,
        f"{_ZERO}, and its memory.",
    ),
    (
        not_finite,
        BYTEGRAD,
        0.1,
        "S5.2.not_finite",
        COMPRESSIBLE,
        nothing,
        (
            "A chunk in which a value of any rank is not finite becomes NaN on every rank, and no"
            " other does."
        ),
    ),
    (
        not_finite,
        TOPK,
        0.4,
        "S11.2.not_finite",
        COMPRESSIBLE,
        lambda lab, draw: {"ratio": draw(st.sampled_from([0.01, 0.05, 0.1, 0.3]))},
        (
            "NaN counts as larger than infinity, and that as larger than numbers; a round with one"
            " of them leaves every rank's memory."
        ),
    ),
    (
        not_finite,
        DEMO,
        0.4,
        "S15.6.not_finite",
        COMPRESSIBLE,
        nothing,
        (
            "A parameter whose mean is not finite has a gradient of NaN throughout, and M as it"
            " was, on every rank."
        ),
    ),
    (conservation, POWERSGD, 0.3, "S10.5.conservation", ("float32", "float64"), _with_memory, _SUM),
    (
        conservation,
        TOPK,
        0.2,
        "S11.2.conservation",
        (),
        lambda lab, draw: {
            "gradients": of_kinds(st.sampled_from(["tame", "ties", "near"])),
            "error_feedback": True,
        },
        _SUM,
    ),
    (
        conservation,
        DEMO,
        0.2,
        "S15.6.conservation",
        (),
        lambda lab, draw: {
            "gradients": of_kinds(st.sampled_from(["tame", "ties", "near"])),
            "decay": 1.0,
            "sign": False,
            "mean": "all",
        },
        _SUM,
    ),
    (
        same_bits,
        DILOCO,
        0.3,
        "S9.5.same_bits",
        (),
        _one_period,
        (
            "After every apply, all ranks have the same global weights, bit for bit, and with mix 0"
            " the same weights of the fragment."
        ),
    ),
    (
        same_bits,
        POWERSGD,
        0.2,
        "S10.5.same_bits",
        FLOATS,
        lambda lab, draw: {
            "gradients": of_kinds(st.sampled_from(["tame", "near", "ties", "constant", "tiny"]))
        },
        (
            "All ranks have the same averaged gradients and factors, bit for bit, whatever the"
            " gradients are."
        ),
    ),
)

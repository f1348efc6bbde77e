"""Expected results of local updates: averages of weights that are due, and DiLoCo's rounds with
their outer steps (S9).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua_ref.algorithms.fragments import FragmentSchedule
from bagua_ref.backends.base import FLOATS
from bagua_ref.conformance.expected import local_updates_numpy
from bagua_ref.conformance.expected.algorithms_numpy import array, wide
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, where_equal
from bagua_ref.conformance.formats import name_of
from bagua_ref.conformance.trace.exchanges import (
    Expected,
    NotReplayable,
    full_precision,
    inputs,
    low_precision,
    shared,
)
from bagua_ref.conformance.trace.files import Record

__all__ = ["MOST_LR", "OuterState", "averages_due", "diloco_round"]

MOST_LR = 1e30

_OTHER_STEP = (
    "as if weights had been averaged after another step than the period and the offset say"
)
_OTHER_FRAGMENT = "as if another fragment had been sent after that step than is due (-1: none)"
_LATE = "as if the fragment had been applied after another step than the delay says"
_TWICE = "as if the fragment had been sent again within a period"
_CHANGED = "as if g had been changed between rounds"


@dataclass
class OuterState:
    """The state of a fragment's outer SGD after a round, by rank.

    Attributes:
        execution: number of the round's record.
        fragment: the fragment's number.
        momentum: v, in float64.
        mass: the same of absolute values, which rounding depends on.
        step: what the learning rate was multiplied by.
        rounds: number of rounds that v has added up.
    """

    execution: int
    fragment: int
    momentum: list[Tensor]
    mass: list[Tensor]
    step: list[Tensor]
    rounds: int


def averages_due(records: Sequence[Record], options: Mapping[str, Any]) -> list[Expected]:
    """Return whether weights are averaged after step t (S9.1); the record says that they were."""
    period, warmup = options["period"], options["warmup_steps"] or 0
    if period is None or not all(
        "t" in record.info and record.info.get("averages") == "weights" for record in records
    ):
        return []
    rule = {"period": period, "offset": options["offset"], "warmup_steps": warmup}
    due = [int(local_updates_numpy.is_averaged(record.info["t"], **rule)) for record in records]
    return [_numbers(records, "averages", [1] * len(due), due, _OTHER_STEP)]


def diloco_round(
    records: Sequence[Record],
    before: Sequence[Record] | None,
    nodes: Sequence[int],
    options: Mapping[str, Any],
    states: dict[str, OuterState],
    first: bool,
) -> Iterator[Expected]:
    """Yield the mean of what was sent (S9.5); and where they were recorded, what led to it and what
    follows from it (S9.2, S9.4).

    Args:
        records: of a round, by rank.
        before: those of the bucket's round before; None: this is the first, or that one was not
            recorded.
        nodes: number of ranks on each node.
        options: of `diloco`.
        states: of outer optimizers by bucket; updated.
        first: whether the outer optimizer has not stepped before.

    Raises:
        NotReplayable: what is recorded does not fit; or, after the last result, something that the
            options declare is missing.
    """
    lossy = options["compression"] or options["scattergather"]
    found = [
        (
            low_precision(records, nodes, options["compression"])
            if lossy
            else full_precision(records, nodes)
        )
    ]
    missing: list[str] = []
    if _have(records, {"g", "weights"}):
        found.append(_differences(records))
    if (
        before is not None
        and _fragment(before) == _fragment(records)
        and _have(before, (), {"g"})
        and _have(records, {"g"})
    ):
        found.append(
            _with(
                records,
                "g before",
                inputs(records, "g"),
                [r.outputs["g"] for r in before],
                _CHANGED,
            )
        )
    if options["outer_lr"] is not None or "outer_lr" in records[0].info:
        found += _outer_step(records, options, states, first, missing)
    if _have(records, (), {"g"}):
        found.append(Expected("g", [records[0].outputs["g"]] * len(records)))
    if _have(records, (), {"g", "before", "weights"}):
        found.append(_mixed(records, options["mix"] or 0.0))
    if options["delay"] == 0 and _have(records, {"weights"}, {"before"}):
        found.append(Expected("before", inputs(records, "weights"), cause=lambda found: _LATE))
    if options["period"] is not None:
        found += _schedule(records, before, options, missing)
    yield from found
    if missing:
        raise NotReplayable("; ".join(missing))


def _have(records: Sequence[Record], given: Collection[str], results: Collection[str] = ()) -> bool:
    return all(
        {*given} <= record.inputs.keys() and {*results} <= record.outputs.keys()
        for record in records
    )


def _fragment(records: Sequence[Record]) -> int:
    return int(records[0].info.get("fragment", 0))


def _differences(records: Sequence[Record]) -> Expected:
    """Return g - x in g's dtype, padded with zeros (S9.4)."""
    sent, gs, weights = (inputs(records, role, FLOATS) for role in ("x", "g", "weights"))
    padding = sent[0].numel() - gs[0].numel()
    if gs[0].shape != weights[0].shape or padding < 0:
        raise NotReplayable(
            f"inputs g and weights have {gs[0].numel()} and {weights[0].numel()} elements, and x"
            f" has {sent[0].numel()}"
        )
    return _with(
        records,
        "difference",
        sent,
        [torch.nn.functional.pad(g - w, (0, padding)) for g, w in zip(gs, weights, strict=True)],
    )


def _outer_step(
    records: Sequence[Record],
    options: Mapping[str, Any],
    states: dict[str, OuterState],
    first: bool,
    missing: list[str],
) -> list[Expected]:
    """Return g after outer SGD: v <- momentum*v + D, g <- g - lr*v; with Nesterov g <- g - lr*(D +
    momentum*v) (S9.2, S9.4).

    v is made up of the recorded D. Where it is unknown, ``missing`` says so.
    """
    lr, momentum, nesterov = (
        shared(records, "outer_lr", options["outer_lr"]),
        options["outer_momentum"],
        options["outer_nesterov"],
    )
    last, fragment = states.pop(records[0].bucket, None), _fragment(records)
    if not 0 <= lr <= MOST_LR:
        raise NotReplayable(f"outer_lr={lr!r} must be a number from 0 to {MOST_LR:g}")
    if not _have(records, {"g"}, {"g", "x"}):
        missing.append(
            "outer_lr is declared, but g was not recorded before and after the outer step"
        )
        return []
    gs = [g.double() for g in inputs(records, "g", FLOATS)]
    means = [record.outputs["x"][: gs[0].numel()].double() for record in records]
    zeros = [torch.zeros_like(g) for g in gs]
    if first or not momentum:
        last = OuterState(-1, fragment, zeros, zeros, zeros, 0)
    elif last is None or last.execution != records[0].execution - 1 or last.fragment != fragment:
        missing.append(
            "the outer momentum depends on rounds of this fragment that are not in the trace, or"
            " not in the same bucket"
        )
        return []
    if any(x.shape != gs[0].shape for x in (*means, *last.momentum)):
        raise NotReplayable(
            f"g has {gs[0].numel()} elements, and the mean or g in the round before has fewer or"
            " more"
        )
    lost = not all(bool(mean.isfinite().all()) for mean in means)  # then nothing is applied (S9.5)

    def step(
        means: list[Tensor], kept: list[Tensor], nesterov: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        velocity = [momentum * v + d for d, v in zip(means, kept, strict=True)]
        return velocity, (
            [d + momentum * v for d, v in zip(means, velocity, strict=True)]
            if nesterov
            else velocity
        )

    def moved(steps: list[Tensor], lr: float) -> Tensor:
        return torch.stack([g - lr * step for g, step in zip(gs, steps, strict=True)]).to(
            records[0].outputs["g"].dtype
        )

    velocity, steps = (last.momentum, zeros) if lost else step(means, last.momentum, nesterov)
    mass, masses = (
        (last.mass, zeros) if lost else step([mean.abs() for mean in means], last.mass, nesterov)
    )
    state = OuterState(records[0].execution, fragment, velocity, mass, steps, last.rounds + 1)
    magnitude = torch.stack([g.abs() + lr * m for g, m in zip(gs, masses, strict=True)]).amax(0)
    # v is rounded up to three times in each round, by eps/2 of what it has added up
    tolerance = SUM(2 * state.rounds + 4)
    states[records[0].bucket] = state

    def cause(found: Tensor) -> str | None:
        near = functools.partial(where_equal, found, tolerance=tolerance, magnitude=magnitude)
        others = {
            f"as if Nesterov momentum had {'not ' * nesterov}been used": step(
                means, last.momentum, not nesterov
            )[1]
        }
        if last.rounds:
            others["as if the outer momentum had been lost"] = step(means, zeros, nesterov)[1]
            others["as if the outer step of the round before had been taken"] = last.step
        for text, other in others.items():
            if near(moved(other, lr)).all():
                return text
        size, way = torch.stack(steps), torch.stack(gs) - found.double()
        rate = float((way * size).sum() / size.square().sum())
        return f"as if outer_lr had been {rate:.4g}" if near(moved(steps, rate)).all() else None

    recorded = [record.outputs["g"] for record in records]
    return [
        _with(records, "g after", recorded, list(moved(steps, lr)), cause, tolerance, magnitude)
    ]


def _mixed(records: Sequence[Record], mix: float) -> Expected:
    """Return the weights mixed with g (S9.4)."""
    gs, values = [record.outputs["g"] for record in records], []
    for rank, (record, g) in enumerate(zip(records, gs, strict=True)):
        x = record.outputs["before"]
        if x.dtype not in FLOATS or g.dtype is not wide(x.dtype) or x.shape != g.shape:
            raise NotReplayable(
                f"output g of rank {rank} has {g.numel()} elements of {g.dtype}, before {x.numel()}"
                f" of {x.dtype}"
            )
        mixed = local_updates_numpy.mixed(array(x), g.numpy(), mix, name_of(x.dtype))
        values.append(torch.from_numpy(mixed).to(x.dtype))
    return Expected("weights", values)


def _schedule(
    records: Sequence[Record],
    before: Sequence[Record] | None,
    options: Mapping[str, Any],
    missing: list[str],
) -> list[Expected]:
    """Return the fragment that is due after step t, the step after which it is applied, and t
    (S9.4).

    ``missing`` is told of a schedule that is unknown, and of rounds that are not in the trace.
    """
    period, delay = options["period"], options["delay"]
    try:
        schedule = FragmentSchedule(period, options["fragments"], delay)
    except ValueError as error:
        raise NotReplayable(str(error)) from None
    needed = ("t", "fragment") if options["fragments"] > 1 else ("t",)
    if absent := [name for name in needed if not all(name in record.info for record in records)]:
        missing.append(f"the schedule is declared, but info {absent[0]!r} was not recorded")
        return []
    ts, sent = (
        [record.info["t"] for record in records],
        [record.info.get("fragment", 0) for record in records],
    )
    due = [
        schedule.sent_after(t) if t > 0 else None
        for t in (t - (options["warmup_steps"] or 0) for t in ts)
    ]
    found = [
        _numbers(
            records,
            "fragment",
            sent,
            [-1 if place is None else place for place in due],
            _OTHER_FRAGMENT,
        )
    ]
    if (
        before is not None
        and _fragment(before) == sent[0]
        and all("t" in record.info for record in before)
    ):
        earlier = [record.info["t"] for record in before]
        rounds = [max(1, (t - last) // period) for t, last in zip(ts, earlier, strict=True)]
        found.append(
            _numbers(
                records,
                "t",
                ts,
                [last + n * period for last, n in zip(earlier, rounds, strict=True)],
                _TWICE,
            )
        )
        if max(rounds) > 1:
            missing.append(
                f"{max(rounds) - 1} rounds between steps t={earlier[0]} and {ts[0]} were not sent,"
                " or not recorded"
            )
    if all("applied" in record.info for record in records):
        found.append(
            _numbers(
                records,
                "applied",
                [record.info["applied"] for record in records],
                [t + delay for t in ts],
                _LATE,
            )
        )
    return found


def _numbers(
    records: Sequence[Record], name: str, recorded: Sequence[int], due: Sequence[int], why: str
) -> Expected:
    """Return numbers that are due, to be compared with those recorded."""
    found, wanted = (
        [torch.tensor([min(x, 2**63 - 1)]) for x in values] for values in (recorded, due)
    )
    return _with(records, name, found, wanted, why)


def _with(
    records: Sequence[Record],
    name: str,
    recorded: Sequence[Tensor],
    expected: list[Tensor],
    why: str | Callable[[Tensor], str | None] | None = None,
    tolerance: Any = EXACT,
    magnitude: Tensor | None = None,
) -> Expected:
    """Return what is expected of ``recorded``, which becomes an output of this name."""
    for record, x in zip(records, recorded, strict=True):
        record.outputs[name] = x
    return Expected(
        name, expected, tolerance, magnitude, (lambda found: why) if isinstance(why, str) else why
    )

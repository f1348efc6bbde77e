"""Likely causes of the first difference between two recordings."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from bagua_ref.record.files import Entry
from bagua_ref.record.pair import Mismatch, Pair, kind_of

CAUSES = {
    "random state": "another seed, or random numbers drawn by other code",
    "initial weights": "weights differ before the first step: another checkpoint or initialization",
    "restored state": "the run did not continue from what the step before had left",
    "model": "a parameter or buffer is in one model only",
    "settings of a module": (
        "an option of the model, such as the probability of dropout, or train and eval mode"
    ),
    "other data": (
        "other samples, shuffled in another way, or changed before the model takes them"
    ),
    "other order of data": "the other recording has the batch elsewhere",
    "skipped step": "a run has left out a step, or done one again",
    "gradient accumulation": "the runs add gradients of another number of batches",
    "dtype or device": "another dtype, device or rounding to 16 bits",
    "reduction order": (
        "the same numbers added or rounded in another order: threads, kernels, order of ranks"
    ),
    "not finite": "a NaN or an infinity begins here",
    "buffers of ranks": "one run broadcasts rank 0's buffers before each forward, the other does not",
    "buffer": "buffers were updated in another way",
    "missing gradient": "a parameter has a gradient in one run only: frozen, unused or not reached",
    "missing mean": "a sum for a mean, or no communication",
    "scaled gradient": "gradients differ by one factor, such as that of a scaled loss",
    "clipping": "gradients were clipped in one run, or to another norm",
    "forward": (
        "the model computes something else from equal inputs and weights, or weights were changed"
        " between steps"
    ),
    "loss": "the loss is another function of equal outputs",
    "backward": (
        "gradients differ though the loss does not; if the loss is not recorded, it may be another"
    ),
    "communication": (
        "ranks have exchanged something else: other peers, another operation or compression, or"
        " nothing"
    ),
    "gradient changed": (
        "gradients were changed after the backward pass, as by clipping of values, or were not"
        " reset before it"
    ),
    "learning rate": "another learning rate",
    "option": "another option of the optimizer",
    "update": (
        "the optimizer, or an exchange of weights, computes something else from equal gradients,"
        " options and state"
    ),
}
"""Explanations of causes, by name."""

_COMPUTED = {
    "output": "forward",
    "loss": "loss",
    "local": "backward",
    "buffer_after": "buffer",
}
"""Causes of differences in values of the forward and backward passes, if no other cause is
known.
"""

_ORDER = 64
"""Maximal difference of norms, in eps, that the order of summation can explain."""


def explain(pair: Pair, step: int, kind: str, found: Sequence[Mismatch]) -> tuple[str, str]:
    """Return the likely cause of a step's first differing values, all of one kind, and details;
    empty details if the cause explains itself.
    """
    first = found[0]
    if first.a is None or first.b is None:
        return _missing(pair, step, kind, first)
    if kind == "option":
        return _options(_parse(first.a), _parse(first.b))
    if kind in ("batch", "input") and (cause := _order_of_data(pair, step, first.rank)):
        return cause
    metadata = f"{first.a.metadata} in A, {first.b.metadata} in B"
    if first.a.dtype != first.b.dtype:
        return "dtype or device", metadata
    if kind == "start":
        return _start(pair, step)
    both = [(m.a, m.b) for m in found if m.a is not None and m.b is not None]
    for m in found:
        finite = [side is None or math.isfinite(side.norm or 0.0) for side in (m.a, m.b)]
        if finite[0] != finite[1]:
            return "not finite", f"in {'AB'[finite[0]]}, first in {m.name}"
    if kind in ("batch", "input"):
        return "other data", metadata if first.a.metadata != first.b.metadata else ""
    if (text := _small(found)) is not None:
        return "reduction order", text
    if kind in _COMPUTED and (cause := _settings(pair, step, first)):
        return cause
    if first.a.metadata.partition("]")[2] != first.b.metadata.partition("]")[2]:
        return "dtype or device", metadata  # or rounded to 16 bits
    if kind in _COMPUTED and (drawn := _drawn(pair, step, first.rank)):
        return "random state", f"that of {drawn}, from which the forward pass draws"
    if kind in ("loss", "local", "grad") and (factor := _factor(both)):
        return _scaled(pair, step, kind, both, factor)
    # With DDP, ranks differ from rank 0 on only within a step.
    if kind in ("buffer", "buffer_after") and first.rank > 0:
        return "buffers of ranks", "DDP does it by default: broadcast_buffers=True"
    if kind in _COMPUTED:
        return _COMPUTED[kind], ""
    if kind == "grad" and len(pair.runs[0]) == 1:
        return "gradient changed", ""
    if kind == "grad":
        local = first.name.replace("grad", "local", 1)
        for run, name in enumerate("AB"):
            given = pair.digest(run, first.rank, step, first.name)
            if given == pair.digest(run, first.rank, step, local):
                return "missing mean", f"{name} has not averaged: its gradients are those before"
        return "communication", ""
    for run, name in enumerate("AB"):
        if all(
            pair.digest(run, m.rank, step, m.name) == pair.digest(run, m.rank, step - 1, m.name)
            for m in found
        ):
            return "skipped step", f"{name} has changed nothing in step {step}"
    return ("buffer" if kind == "buffer" else "update"), ""


def other_states(pair: Pair, step: int, rank: int) -> list[str]:
    """Return the names of the generators whose states differ at the start of a step."""
    a, b = (pair.at(run, rank, step) for run in range(2))
    return [
        name.partition(":")[2]
        for name, entry in a.items()
        if kind_of(name) == "rng" and name in b and entry.digest != b[name].digest
    ]


def _drawn(pair: Pair, step: int, rank: int) -> str:
    """Return the generators that differ in state and from which both runs draw in their forward
    passes.
    """
    return ", ".join(
        name
        for name in other_states(pair, step, rank)
        if all(f"drawn:{name}" in pair.at(run, rank, step) for run in range(2))
    )


def _parse(entry: Entry | None) -> dict[str, Any]:
    """Parse options or settings, which are recorded as JSON."""
    return json.loads(entry.metadata) if entry else {}


def _settings(pair: Pair, step: int, first: Mismatch) -> tuple[str, str] | None:
    """Explain differing outputs by a difference in a module's settings."""
    a, b = (_parse(pair.at(run, first.rank, step).get("settings:")) for run in range(2))
    for name in [name for name in a if name in b]:
        for key in {**a[name], **b[name]}:
            x, y = a[name].get(key), b[name].get(key)
            if x != y:
                cause = "dtype or device" if name == "torch.autocast" else "settings of a module"
                of = a[name].get("class", "mode")
                return cause, f"{of} {name!r}: {key}={x} in A, {y} in B"
    return None


def _missing(pair: Pair, step: int, kind: str, first: Mismatch) -> tuple[str, str]:
    """Explain an entry that is missing in one run."""
    more, fewer = ("A", "B") if first.b is None else ("B", "A")
    only = f"only {more} has {first.name}"
    if "#" in first.name:
        if any(
            first.name in pair.at("AB".index(more), first.rank, other)
            for other in pair.steps
            if other != step
        ):
            return "gradient accumulation", f"{more} has more batches in a step than {fewer}"
        return "skipped step", f"{fewer} has stepped between two batches, and {more} has not"
    if kind == "start":
        return ("restored state" if kind_of(first.name) == "state" else "model"), only
    if kind in ("local", "grad"):
        return "missing gradient", only
    if kind in ("batch", "input", "output"):
        if not _data(pair, "AB".index(fewer), first.rank, step):
            return "skipped step", f"{fewer} has stepped again without another batch"
        return ("forward" if kind in _COMPUTED else "other data"), only
    return ("option" if kind in ("state", "option") else "model"), only


def _start(pair: Pair, step: int) -> tuple[str, str]:
    if step != min(pair.steps) or any(step - 1 in run[0].steps for run in pair.runs):
        return "restored state", f"at the start of step {step}"
    if "torch" in other_states(pair, step, pair.ranks[0]):
        return (
            "random state",
            "initial weights differ, and so does the state of torch's generator: another seed",
        )
    return "initial weights", ""


def _options(a: dict[str, str], b: dict[str, str]) -> tuple[str, str]:
    other = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    if "optimizer" in other:
        other = ["optimizer"]
    text = ", ".join(f"{name}: {a.get(name)} in A, {b.get(name)} in B" for name in other)
    return ("learning rate" if {*other} <= {"lr", "initial_lr"} else "option"), text


def _data(pair: Pair, run: int, rank: int, step: int) -> tuple[int, ...]:
    entries = pair.at(run, rank, step)
    kind = "batch" if any(kind_of(name) == "batch" for name in entries) else "input"
    return tuple(entry.digest for name, entry in entries.items() if kind_of(name) == kind)


def _order_of_data(pair: Pair, step: int, rank: int) -> tuple[str, str] | None:
    """Explain a differing batch by its position: the other recording has it at another step or
    rank.
    """
    a, b = (
        {(s, r): _data(pair, run, r, s) for s in pair.steps for r in pair.ranks} for run in range(2)
    )
    if a[step, rank] == b[step, rank]:
        return None  # the model's input was changed after the batch
    here, before, after, later = ((step + shift, rank) for shift in (0, -1, 1, 2))
    for name, one, other in (("B", b, a), ("A", a, b)):
        following = {one.get(after), other.get(later)} - {None}
        if one[here] == other.get(after) != other.get(before) and len(following) < 2:
            return "skipped step", f"{name} is one batch ahead from step {step} on"
    for (s, r), batch in a.items():
        if batch == b[here]:
            return "other order of data", f"A has the batch of B in step {s}, rank {r}"
    return None


def _small(found: Sequence[Mismatch]) -> str | None:
    """Return a text if all differences are small enough for a different order of summation; else
    None, also if no norm differs, as with flipped signs.
    """
    largest = 0.0
    for m in found:
        dtype, far = None if m.a is None else m.a.dtype, m.distance()
        if dtype is None or not dtype.is_floating_point or far is None:
            return None
        largest = max(largest, far / torch.finfo(dtype).eps)
    if not 0 < largest <= _ORDER:
        return None
    return f"norms differ by up to {largest:.2g} ulps"


def _factor(both: Sequence[tuple[Entry, Entry]]) -> float | None:
    """Return the factor between the norms of both runs if it is the same for all values, else
    None.
    """
    factors = [b.norm / a.norm for a, b in both if a.norm and b.norm is not None]
    if not factors or max(factors) - min(factors) > 1e-4 * max(factors):
        return None
    return factors[0] if abs(factors[0] - 1) > 1e-3 and factors[0] else None


def _scaled(
    pair: Pair, step: int, kind: str, both: Sequence[tuple[Entry, Entry]], factor: float
) -> tuple[str, str]:
    """Explain values that differ by a common factor."""
    text = f"B has {factor:.6g} times what A has"
    times = max(factor, 1 / factor)
    counts = [len(pair.runs[0])]
    for name, entry in pair.at(0, pair.ranks[0], step).items():
        if kind_of(name) in ("batch", "input", "output"):
            counts += itertools.accumulate(entry.shape, operator.mul)
    if any(count > 1 and math.isclose(times, count, rel_tol=1e-4) for count in counts):
        return "missing mean", f"{text}, a number of samples, elements or ranks"
    if kind == "loss":
        return "loss", text
    if kind == "local" or math.isclose(times, round(times), rel_tol=1e-4):
        return "scaled gradient", text
    a, b = (math.hypot(*(side.norm or 0.0 for side in sides)) for sides in zip(*both, strict=True))
    return "clipping", f"the gradients' norm is {a:.4g} in A and {b:.4g} in B"

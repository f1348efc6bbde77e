"""Likely causes of the first difference between two records."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import torch

from bagua_ref.conformance.trace.pair import Digested, Mismatch, Pair, kind_of

__all__ = ["CAUSES", "explain"]

CAUSES = {
    "random state": (
        "the generators' states differ: another seed, or random numbers drawn by other code"
    ),
    "initial weights": (
        "weights differ before the first step, and random states do not: another checkpoint or"
        " initialization"
    ),
    "restored state": "the training did not continue from what the step before had left",
    "model": "a parameter or buffer is in one model only",
    "train or eval mode": "modules are in train mode in one run and in eval mode in the other",
    "other data": (
        "the batch is nowhere in the other record: other samples, or shuffled in another way"
    ),
    "other order of data": "the other record has the batch in another step",
    "skipped step": "a run has left out a step",
    "repeated step": "a run has done a step again",
    "gradient accumulation": "the runs add gradients of another number of batches",
    "ranks swapped": "ranks have what other ranks have in the other run",
    "dtype or device": "another dtype, device or rounding to 16 bits",
    "reduction order": (
        "the same numbers added or rounded in another order: threads, kernels, order of ranks"
    ),
    "not finite": "a NaN or an infinity begins here",
    "stale buffer": "a buffer has the value of an earlier step",
    "buffer": "buffers were updated in another way",
    "stale gradient": "a gradient is that of the step before",
    "missing gradient": "a parameter has a gradient in one run only: frozen, unused or not reached",
    "scaled gradient": "gradients differ by one factor",
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
    "gradient changed": "gradients were changed after the backward pass, as clipping does",
    "learning rate": "another learning rate",
    "option": "another option of the optimizer",
    "update": "the optimizer computes something else from equal gradients, options and state",
}
"""Names of causes and what they mean."""

_COMPUTED_BY = {"module": "forward", "output": "forward", "loss": "loss", "local": "backward"}

_ORDER = 64
"""Differences of up to this many eps of the largest value may come from the order of adding."""


def explain(pair: Pair, step: int, kind: str, found: Sequence[Mismatch]) -> tuple[str, str]:
    """Return the name of the likely cause of a step's first differing records, all of one kind, and
    details.
    """
    first = found[0]
    if first.a is None or first.b is None:
        return _missing(pair, step, kind, first)
    about = f"{first.a.about} in A, {first.b.about} in B"
    if kind == "start":
        return _start(pair, step)
    if kind == "rng":
        return "random state", f"that of {first.name.partition(':')[2]}"
    if kind == "mode":
        return "train or eval mode", about
    if kind == "option":
        return _options(first.a.about, first.b.about)
    both = [(m.a, m.b) for m in found if m.a is not None and m.b is not None]
    if len(pair.ranks) > 1 and (text := _swapped(pair, step, found)):
        return "ranks swapped", text
    if kind in ("batch", "input") and (cause := _order_of_data(pair, step, first)):
        return cause
    if first.a.dtype != first.b.dtype:
        return "dtype or device", about
    if kind in ("batch", "input"):
        return "other data", about if first.a.about != first.b.about else ""
    finite = [
        all(math.isfinite(side.norm or 0.0) for side in sides) for sides in zip(*both, strict=True)
    ]
    if finite[0] != finite[1]:
        bad = next(
            m
            for m in found
            if any(side is not None and not math.isfinite(side.norm or 0.0) for side in (m.a, m.b))
        )
        return "not finite", f"in {'AB'[finite[0]]}, first in {bad.name}"
    if kind in ("buffer", "buffer_after"):
        return _buffers(pair, step, first)
    if (cause := _not_updated(pair, step, kind, found)) is not None:
        return cause
    if " values of " in about and first.a.about != first.b.about:
        return "dtype or device", about
    if (text := _small(pair, step, found)) is not None:
        return "reduction order", text
    if any(a.device != b.device for a, b in both):
        return "dtype or device", about
    if kind in ("local", "grad") and (factor := _factor(both)):
        return (
            "scaled gradient",
            (
                f"those of B are {factor:.6g} times those of A, as by clipping, a scaled loss, a"
                " sum for a mean"
            ),
        )
    return _computed(pair, step, kind, found)


def _missing(pair: Pair, step: int, kind: str, first: Mismatch) -> tuple[str, str]:
    """Explain a record that one run lacks."""
    more, fewer = ("A", "B") if first.b is None else ("B", "A")
    if "#" in first.name:
        others = [pair.at("AB".index(more), first.rank, s) for s in pair.steps if s != step]
        if any(first.name in entries for entries in others):
            return "gradient accumulation", f"{more} has more batches in a step than {fewer}"
        return (
            "skipped step",
            (
                f"{more} has computed gradients of another batch without a step of the optimizer in"
                " between"
            ),
        )
    if kind == "start":
        return (
            "restored state" if kind_of(first.name) == "state" else "model"
        ), f"only {more} has {first.name}"
    if kind in ("local", "grad"):
        return "missing gradient", f"only {more} has {first.name}"
    if kind in ("batch", "input", "module", "output"):
        if not _data(pair, "AB".index(fewer), first.rank, step):
            return (
                "repeated step",
                f"the optimizer of {fewer} has stepped again without another batch",
            )
        return "other data" if kind != "output" else "forward", f"only {more} has {first.name}"
    return ("option" if kind in ("state", "option") else "model"), f"only {more} has {first.name}"


def _start(pair: Pair, step: int) -> tuple[str, str]:
    if step != min(pair.steps) or any(step - 1 in run[0].steps for run in pair.runs):
        return "restored state", f"at the start of step {step}"
    a, b = (pair.at(run, pair.ranks[0], step) for run in range(2))
    if "rng:torch" in a and a["rng:torch"].digest != getattr(b.get("rng:torch"), "digest", None):
        return (
            "random state",
            "weights differ before the first step, and so does the state of torch's generator",
        )
    return "initial weights", ""


def _options(a: str, b: str) -> tuple[str, str]:
    """Explain other options, which are texts such as "SGD lr=0.1 momentum=0.9"."""
    of_runs = []
    for text in (a, b):
        name, *rest = re.split(r" ?(\w+)=", text)
        of_runs.append({"optimizer": name, **dict(zip(rest[::2], rest[1::2], strict=True))})
    if of_runs[0]["optimizer"] != of_runs[1]["optimizer"]:
        return (
            "option",
            f"optimizer: {of_runs[0]['optimizer']} in A, {of_runs[1]['optimizer']} in B",
        )
    other = [
        name
        for name in {**of_runs[0], **of_runs[1]}
        if of_runs[0].get(name) != of_runs[1].get(name)
    ]
    text = ", ".join(
        f"{name}: {of_runs[0].get(name)} in A, {of_runs[1].get(name)} in B" for name in other
    )
    return ("learning rate" if {*other} <= {"lr", "initial_lr"} else "option"), text


def _swapped(pair: Pair, step: int, found: Sequence[Mismatch]) -> str | None:
    for name in dict.fromkeys(m.name for m in found):
        a, b = ([pair.digest(run, rank, step, name) for rank in pair.ranks] for run in range(2))
        if None in a or Counter(a) != Counter(b):
            return None
    rank, name = found[0].rank, found[0].name
    there = next(
        other
        for other in pair.ranks
        if pair.digest(0, other, step, name) == pair.digest(1, rank, step, name)
    )
    return f"rank {rank} of B has what rank {there} of A has"


def _data(pair: Pair, run: int, rank: int, step: int) -> tuple[int, ...]:
    entries = pair.at(run, rank, step)
    kind = "batch" if any(kind_of(name) == "batch" for name in entries) else "input"
    return tuple(entry.digest for name, entry in entries.items() if kind_of(name) == kind)


def _order_of_data(pair: Pair, step: int, first: Mismatch) -> tuple[str, str] | None:
    """Explain a batch that the other record has elsewhere."""
    a, b = ({s: _data(pair, run, first.rank, s) for s in pair.steps} for run in range(2))

    def follows(
        of_run: dict[int, tuple[int, ...]], s: int, of_other: dict[int, tuple[int, ...]], t: int
    ) -> bool:
        """Return whether a run goes on from step s as the other one does from step t."""
        known = s + 1 in of_run and t + 1 in of_other
        return (
            t in of_other
            and of_run[s] == of_other[t]
            and (not known or of_run[s + 1] == of_other[t + 1])
        )

    both = (("B", b, a), ("A", a, b))
    for name, one, other in both:
        if (
            step - 1 in one
            and one[step] == one[step - 1]
            and one.get(step + 1, other[step]) == other[step]
        ):
            return "repeated step", f"{name} has the batch of step {step - 1} again"
    for name, one, other in both:
        if follows(one, step, other, step + 1):
            return "skipped step", f"{name} has left out the batch of step {step}"
    elsewhere = [s for s, batch in a.items() if batch == b[step]]
    if elsewhere:
        return "other order of data", f"A has the batch of B in step {elsewhere[0]}"
    return None


def _buffers(pair: Pair, step: int, first: Mismatch) -> tuple[str, str]:
    """Explain a buffer's value, which may be that of an earlier moment: before or after a step."""
    kind, _, buffer = first.name.partition(":")
    moments = [
        (s, after)
        for s in reversed(pair.steps)
        for after in (True, False)
        if (s, after) < (step, kind == "buffer_after")
    ]
    for run in (1, 0):
        value = pair.digest(run, first.rank, step, first.name)
        for earlier, after in moments:
            name = f"{'buffer_after' if after else 'buffer'}:{buffer}"
            if value in [pair.digest(r, first.rank, earlier, name) for r in range(2)]:
                return (
                    "stale buffer",
                    (
                        f"{'AB'[run]} has the value from {'after' if after else 'before'} step"
                        f" {earlier}"
                    ),
                )
    return "buffer", ""


def _not_updated(
    pair: Pair, step: int, kind: str, found: Sequence[Mismatch]
) -> tuple[str, str] | None:
    """Explain values that are those of a neighbouring step."""

    def has(run: int, of_run: int, of_step: int) -> bool:
        """Return whether a run has the values of a run after a step."""
        return all(
            pair.digest(run, m.rank, step, m.name) == pair.digest(of_run, m.rank, of_step, m.name)
            for m in found
        )

    for run, name in ((1, "B"), (0, "A")):
        stays = has(run, run, step - 1) and not has(1 - run, 1 - run, step - 1)
        if stays and kind in ("state", "weight"):
            return "skipped step", f"{name} has changed nothing in step {step}"
        if stays and kind == "grad":
            return "stale gradient", f"{name} has the gradients of step {step - 1}"
        if kind in ("state", "weight") and has(run, 1 - run, step + 1):
            return (
                "repeated step",
                f"{name} is already where the other run is after step {step + 1}",
            )
    return None


def _small(pair: Pair, step: int, found: Sequence[Mismatch]) -> str | None:
    """Return how small all differences are, or None if they are larger than an order of adding can
    make them.
    """
    largest, exact = 0.0, True
    for m in found:
        assert m.a is not None
        dtype = getattr(torch, m.a.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            return None
        eps = torch.finfo(dtype).eps
        values = pair.values(step, m)
        if values is not None:
            x, y = (side.double() for side in values)
            error = float((x - y).abs().max()) / (float(torch.cat([x, y]).abs().max()) or 1.0)
        elif (far := m.distance()) is not None or kind_of(m.name) == "state":
            # of which norms are not kept
            error, exact = far or 0.0, False
        else:
            return None
        if not error <= _ORDER * eps:
            return None
        largest = max(largest, error / eps)
    return (
        f"{'values' if exact else 'norms'} differ by up to {largest:.2g} ulps of the"
        f" largest{'' if exact else '; not kept'}"
    )


def _factor(both: Sequence[tuple[Digested, Digested]]) -> float | None:
    """Return the factor by which all norms differ, if it is one."""
    factors = [b.norm / a.norm for a, b in both if a.norm and b.norm is not None]
    if (
        not factors
        or max(factors) - min(factors) > 1e-4 * max(factors)
        or abs(factors[0] - 1) < 1e-3
    ):
        return None
    return factors[0]


def _computed(pair: Pair, step: int, kind: str, found: Sequence[Mismatch]) -> tuple[str, str]:
    """Explain values that were computed in another way."""
    if kind in _COMPUTED_BY:
        return _COMPUTED_BY[kind], ""
    m = found[0]
    parameter = m.name.partition(":")[2]
    if kind == "grad":
        for run in (1, 0) if len(pair.ranks) > 1 else ():
            if pair.digest(run, m.rank, step, m.name) == pair.digest(
                run, m.rank, step, f"local:{parameter}"
            ):
                return (
                    "communication",
                    f"{'AB'[run]} has communicated nothing: its gradients are those before",
                )
        return ("communication" if len(pair.runs[0]) > 1 else "gradient changed"), ""
    of_ranks = {pair.digest(run, rank, step, m.name) for run in range(2) for rank in pair.ranks}
    # ranks have their own, so that the weights are exchanged
    if kind == "weight" and len(of_ranks) > 2:
        return "communication", "weights, or the update before"
    return "update", ""

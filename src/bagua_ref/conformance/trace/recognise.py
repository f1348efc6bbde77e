"""Likely causes of divergences: rounding to 16 bits, a sum instead of a mean, another peer, a source left out, nothing received."""

from __future__ import annotations

import torch
from torch import Tensor

from bagua_ref.backends import get_backend
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, where_equal
from bagua_ref.conformance.trace.exchanges import Expected
from bagua_ref.conformance.trace.replay import Replay
from bagua_ref.formulas.graphs import MODES, Graph

__all__ = ["recognise"]

_PAIRS = ("shift_one", "one_peer_exponential", "hypercube")
"""Modes in which each rank averages with one other."""

_SCHEDULES = {
    "averages": "as if weights had been averaged after another step than the period and the offset say",
    "fragment": "as if another fragment had been sent after that step than is due (-1: none)",
}

_ROUGHLY = 1e-3  # of the largest value: smaller than the distance between a codec's levels


def recognise(expected: Expected, got: list[Tensor], inputs: list[Tensor] | None, replay: Replay) -> str | None:
    """Return the likely cause of a divergence, or None if it matches no known cause.

    Args:
        expected: the expected outputs.
        got: the recorded outputs, by rank.
        inputs: the recorded inputs, by rank.
        replay: the operation.
    """
    if expected.name in _SCHEDULES:
        return _SCHEDULES[expected.name]
    wanted = torch.stack(expected.values)
    found = torch.stack(got)
    if not found.dtype.is_floating_point:
        return None
    if inputs is not None and _same(found, torch.stack(inputs)):
        return "as if nothing had been communicated: the outputs equal the inputs"
    n = len(got)
    for factor, what in ((n, "summed, where a mean was expected"), (1 / n, "averaged, where a sum was expected")):
        if n > 1 and _roughly(found, wanted, factor):
            return f"as if {what}"
    if inputs is not None and _compresses(replay) and _uncompressed(found, inputs, replay):
        return "as if it had been communicated in full precision, not compressed"
    if (narrow := _narrower(found, expected, wanted)) is not None:
        return narrow
    if inputs is not None and replay.algorithm == "decentralized" and not replay.options["hierarchical"]:
        mode = replay.options["peer_selection_mode"]
        if mode in _PAIRS and (peer := _other_peer(found, wanted, inputs)):
            return peer
        if mode in ("ring", "exponential") and (missing := _left_out(found, wanted, inputs, MODES[mode].graph(0, n))):
            return missing
    if mixed := _mixed_up(found, wanted):
        return mixed
    if all(_same(row, wanted[0]) for row in wanted) and not all(_same(row, found[0]) for row in found):
        return "as if ranks had ended with different values, where all must have the same"
    return None


def _compresses(replay: Replay) -> bool:
    return replay.algorithm in ("bytegrad", "qadam") or replay.options.get("compression") is not None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(where_equal(a, b, EXACT).all())


def _roughly(found: Tensor, wanted: Tensor, factor: float) -> bool:
    scaled = wanted.double() * factor
    largest = scaled.abs().max().item() if scaled.numel() else 0.0
    return 0 < largest < float("inf") and bool(((found.double() - scaled).abs() <= _ROUGHLY * largest).all())


def _uncompressed(found: Tensor, inputs: list[Tensor], replay: Replay) -> bool:
    """Return whether a compressed operation gave the result of one in full precision."""
    xs = torch.stack(inputs).double()
    divisor = len(inputs) if replay.options.get("average", True) else 1
    result = (xs.sum(0) / divisor).to(found.dtype).expand_as(found)
    return bool(where_equal(found, result.contiguous(), SUM(len(inputs)), magnitude=xs.abs().sum(0) / divisor).all())


def _narrower(found: Tensor, expected: Expected, wanted: Tensor) -> str | None:
    """Return the 16-bit format to which inputs and sum seem to have been rounded, or None."""
    if found.dtype not in (torch.float32, torch.float64) or not found.numel():
        return None
    magnitude = expected.magnitude if expected.magnitude is not None else wanted.double().abs()
    matches: list[tuple[int, str]] = []
    for dtype in (torch.float16, torch.bfloat16):
        rounded = wanted.to(dtype).to(found.dtype)
        if not _same(found.to(dtype).to(found.dtype), found):
            continue
        info = torch.finfo(dtype)
        allowed = (len(found) + 1) * info.eps * (magnitude + info.smallest_normal)
        near = (found.double() - wanted.double()).abs() <= allowed
        overflow = ~found.isfinite() & (wanted.double().abs() > info.max / len(found))
        if bool((near | overflow | where_equal(found, wanted, EXACT)).all()):
            exact = int(where_equal(found, rounded, EXACT).sum())
            name = str(dtype).removeprefix("torch.")
            text = f"all values are numbers of {name}, and {exact} of {found.numel()} are the expected one rounded"
            matches.append((exact, f"as if rounded to {name}: {text}"))
    return max(matches)[1] if matches else None


def _other_peer(found: Tensor, wanted: Tensor, inputs: list[Tensor]) -> str | None:
    """Return which rank averaged with another rank than its peer, or None."""
    kernels = get_backend("reference")
    for rank, row in enumerate(found):
        if _same(row, wanted[rank]):
            continue
        for other, x in enumerate(inputs):
            mean = x.clone()
            kernels.average_(mean, inputs[rank])
            if other != rank and _same(mean, row):
                return f"as if rank {rank} had averaged with rank {other}, which is not its peer now"
    return None


def _left_out(found: Tensor, wanted: Tensor, inputs: list[Tensor], graph: Graph) -> str | None:
    """Return which rank left out one of its sources, or None."""
    for rank, row in enumerate(found):
        sources = [source for source, _ in graph[rank]]
        if _same(row, wanted[rank]):
            continue
        for left_out in sources:
            rest = torch.stack([inputs[source].double() for source in sources if source != left_out])
            for divisor in {len(rest), len(sources)}:
                result, magnitude = (rest.sum(0) / divisor).to(row.dtype), rest.abs().sum(0) / divisor
                if len(rest) and where_equal(row, result, SUM(len(sources)), magnitude=magnitude).all():
                    whose = "its own values" if left_out == rank else f"those of rank {left_out}"
                    return f"as if rank {rank} had left out {whose}"
    return None


def _mixed_up(found: Tensor, wanted: Tensor) -> str | None:
    """Return which rank has the result of another one, if all diverging ranks do, or None."""
    wrong = [rank for rank in range(len(found)) if not _same(found[rank], wanted[rank])]
    sources = [next((other for other in range(len(wanted)) if _same(found[rank], wanted[other])), None) for rank in wrong]
    if not wrong or None in sources:
        return None
    return f"as if ranks were mixed up: rank {wrong[0]} has the result of rank {sources[0]}"

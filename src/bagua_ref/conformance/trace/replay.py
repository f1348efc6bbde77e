"""Replay of an algorithm's bucket operations from the recorded inputs of all ranks, and the options that it depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bagua_ref.algorithms.fragments import FragmentSchedule
from bagua_ref.backends import get_backend, list_codecs
from bagua_ref.backends.base import FLOATS
from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.conformance.expected import local_updates_numpy
from bagua_ref.conformance.expected.tolerances import SUM
from bagua_ref.conformance.formats.safetensors_file import name_of
from bagua_ref.conformance.trace import exchanges
from bagua_ref.conformance.trace.exchanges import Expected, NotReplayable, full_precision, inputs, low_precision
from bagua_ref.conformance.trace.files import Record
from bagua_ref.formulas.graphs import MODES

__all__ = ["ALGORITHMS", "Replay", "merged_options", "parse_options"]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {"hierarchical": False, "average": True, "scattergather": False, "wire": None},
    "bytegrad": {"hierarchical": True, "average": True, "compression": "MinMaxUInt8"},
    "decentralized": {"hierarchical": True, "peer_selection_mode": "all"},
    "low_precision_decentralized": {"hierarchical": True, "compression": "MinMaxUInt8"},
    "qadam": {"hierarchical": True, "warmup_steps": None, "beta1": 0.9, "compression": "MinMaxUInt8"},
    "async": {},
    "local_sgd": {"hierarchical": False, "period": None, "offset": 0, "warmup_steps": None},
    "diloco": {
        "compression": None,
        "scattergather": False,
        "mix": None,
        "period": None,
        "fragments": 1,
        "delay": 0,
        "warmup_steps": None,
    },
    "powersgd": {"memory": "local", "warm_start": True, "seed": 0},
    "topk": {"ratio": 0.01, "error_feedback": True},
}
"""Options of each algorithm with their defaults."""

_MODES = (*MODES, "function")
"""Of functions, the graph is recorded with each execution."""


@dataclass(frozen=True)
class Replay:
    """Replays executions of one algorithm's operation.

    Args:
        algorithm: its name.
        options: all its options, see `merged_options`.
        nodes: number of ranks on each node.
    """

    algorithm: str
    options: dict[str, Any]
    nodes: tuple[int, ...]

    @np.errstate(all="ignore")
    def __call__(self, step: int, records: list[Record], before: list[Record] | None) -> list[Expected]:
        """Return the expected outputs of one execution of a bucket's operation.

        Args:
            step: the step of the execution.
            records: its records, by rank.
            before: the records of the same bucket's previous recorded execution, if there is one.

        Raises:
            NotReplayable: inputs are missing or do not match.
        """
        if len({record.info.get("execution", record.execution) for record in records}) > 1:
            raise NotReplayable("ranks count their executions differently: they did not begin to record at the same step")
        inside_nodes = self._is_inside_nodes(records)
        if not inside_nodes and (members := records[0].info.get("ranks", len(records))) != len(records):
            raise NotReplayable(
                f"the operation ran on a group of {members} ranks, but the trace has {len(records)}: pass the rank, world_size and "
                "nodes of the group to Recorder"
            )
        options, nodes = self.options, self.nodes
        match self.algorithm:
            case "gradient_allreduce" if options["scattergather"] and not options["wire"]:
                return [low_precision(records, nodes, None, options["average"], options["hierarchical"])]
            case "gradient_allreduce":
                return [full_precision(records, nodes, options["average"], options["hierarchical"], options["wire"])]
            case "bytegrad":
                return [low_precision(records, nodes, **options)]
            case "decentralized":
                return [exchanges.decentralized(records, nodes, options["peer_selection_mode"], options["hierarchical"])]
            case "low_precision_decentralized":
                return [exchanges.on_ring(records, before, nodes, **options)]
            case "local_sgd":
                mean = _mean_inside_nodes(records, nodes) if inside_nodes else full_precision(records, nodes)
                return [mean, *_averages_due(records, options)]
            case _ if self._is_in_warm_up(step, records[0]):
                return [full_precision(records, nodes)]
            case "async":
                return exchanges.async_round(records)
            case "qadam":
                _update_momenta(records, options["beta1"])
                return [low_precision(records, nodes, options["compression"], True, options["hierarchical"])]
            case "diloco":
                return _diloco(records, nodes, options)
            case "powersgd":
                return exchanges.powersgd_round(records, options)
        return exchanges.topk_round(records, options)

    def _is_in_warm_up(self, step: int, record: Record) -> bool:
        """Return whether the operation was in full precision, or was recorded with ``warmup=True``."""
        if self.algorithm == "async":
            return "snapshot" not in record.inputs
        if self.algorithm == "qadam" and self.options["warmup_steps"] is not None:
            return bool(step < self.options["warmup_steps"])
        return bool(record.info.get("warmup", record.info.get("operation") == "CentralizedFullPrecision"))

    def _is_inside_nodes(self, records: list[Record]) -> bool:
        """Return whether the operation ran among the ranks of each node, as gradients of post-local SGD do (S9.1)."""
        members = [record.info.get("ranks", len(records)) for record in records]
        hierarchical = self.algorithm == "local_sgd" and self.options["hierarchical"]
        return hierarchical and members == [size for size in self.nodes for _ in range(size)]


def _mean_inside_nodes(records: Sequence[Record], nodes: Sequence[int]) -> Expected:
    """Return the mean of S3.1 inside each node."""
    inputs(records, "x", FLOATS)
    ends = np.cumsum(nodes).tolist()
    found = [full_precision(records[end - size : end], (size,)) for end, size in zip(ends, nodes, strict=True)]
    magnitudes = torch.stack([expected.magnitude for expected in found if expected.magnitude is not None])
    return Expected("x", [x for expected in found for x in expected.values], SUM(max(nodes)), magnitudes.amax(0))


def _averages_due(records: Sequence[Record], options: Mapping[str, Any]) -> list[Expected]:
    """Return whether weights are averaged after step t (S9.1); the record says that they were."""
    period, warmup = options["period"], options["warmup_steps"] or 0
    if period is None or not all("t" in record.info and record.info.get("averages") == "weights" for record in records):
        return []
    steps = [record.info["t"] - warmup for record in records]
    return _schedule(records, "averages", [1] * len(steps), [int(t > 0 and (t - options["offset"]) % period == 0) for t in steps])


def _update_momenta(records: Sequence[Record], beta1: float) -> None:
    """Put ``x <- beta1*momentum + (1-beta1)*grad`` in place of each rank's x, if momenta were recorded (S5.5)."""
    if "momentum" not in records[0].inputs:
        return
    momenta, gradients = (inputs(records, role, COMPRESSIBLE) for role in ("momentum", "grad"))
    for record, momentum, gradient in zip(records, momenta, gradients, strict=True):
        factor = record.info.get("beta1", beta1)
        if not 0 <= factor <= 1:
            raise NotReplayable(f"beta1={factor!r} must be a number from 0 to 1")
        record.inputs["x"] = momentum.clone()
        get_backend("reference").update_momentum_(record.inputs["x"], gradient, factor)


def _diloco(records: Sequence[Record], nodes: Sequence[int], options: Mapping[str, Any]) -> list[Expected]:
    """Return the mean of what was sent (S9.5); and of S9.4 the difference, the mix and the schedule, where these were recorded."""
    if options["compression"] or options["scattergather"]:
        found = [low_precision(records, nodes, options["compression"])]
    else:
        found = [full_precision(records, nodes)]
    if all({"g", "weights"} <= record.inputs.keys() for record in records):
        found.append(_differences(records))
    if all({"g", "before", "weights"} <= record.outputs.keys() for record in records):
        found += _applied(records, options["mix"] or 0.0)
    if options["period"] is not None and all({"t", "fragment"} <= record.info.keys() for record in records):
        try:
            schedule = FragmentSchedule(options["period"], options["fragments"], options["delay"])
        except ValueError as error:
            raise NotReplayable(str(error)) from None
        steps = [record.info["t"] - (options["warmup_steps"] or 0) for record in records]
        due = [schedule.sent_after(t) if t > 0 else None for t in steps]
        sent = [record.info["fragment"] for record in records]
        found += _schedule(records, "fragment", sent, [-1 if place is None else place for place in due])
    return found


def _differences(records: Sequence[Record]) -> Expected:
    """Return g - x in g's dtype, padded with zeros (S9.4)."""
    sent, gs, weights = (inputs(records, role, FLOATS) for role in ("x", "g", "weights"))
    padding = sent[0].numel() - gs[0].numel()
    if gs[0].shape != weights[0].shape or padding < 0:
        raise NotReplayable(
            f"inputs g and weights have {gs[0].numel()} and {weights[0].numel()} elements, and x has {sent[0].numel()}"
        )
    for record, x in zip(records, sent, strict=True):
        record.outputs["difference"] = x
    return Expected("difference", [torch.nn.functional.pad(g - w, (0, padding)) for g, w in zip(gs, weights, strict=True)])


def _applied(records: Sequence[Record], mix: float) -> list[Expected]:
    """Return g, the same on all ranks, and the weights mixed with it (S9.4)."""
    gs, values = [record.outputs["g"] for record in records], []
    for rank, (record, g) in enumerate(zip(records, gs, strict=True)):
        x = record.outputs["before"]
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        if x.dtype not in FLOATS or g.dtype is not wide or x.shape != g.shape:
            raise NotReplayable(f"output g of rank {rank} has {g.numel()} elements of {g.dtype}, before {x.numel()} of {x.dtype}")
        mixed = local_updates_numpy.mixed(x.to(wide).numpy(), g.numpy(), mix, name_of(x.dtype))
        values.append(torch.from_numpy(mixed).to(x.dtype))
    return [Expected("g", [gs[0]] * len(gs)), Expected("weights", values)]


def _schedule(records: Sequence[Record], name: str, recorded: Sequence[int], due: Sequence[int]) -> list[Expected]:
    """Return numbers that are due, to be compared with those recorded."""
    for record, value in zip(records, recorded, strict=True):
        record.outputs[name] = torch.tensor([value])
    return [Expected(name, [torch.tensor([value]) for value in due])]


_FLAG = ("true or false", lambda value: isinstance(value, bool))
_STEPS = ("a number of steps", lambda value: type(value) is int and value >= 0)

_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("hierarchical", "average", "scattergather", "warm_start", "error_feedback"), _FLAG),
    **dict.fromkeys(("warmup_steps", "offset", "delay"), _STEPS),
    "wire": (" or ".join(exchanges.WIRES), lambda value: value in exchanges.WIRES),
    "compression": ("the name of a codec", lambda value: value in list_codecs("reference")),
    "peer_selection_mode": (f"one of {', '.join(_MODES)}", lambda value: value in _MODES),
    "period": ("a number of steps, at least 1", lambda value: type(value) is int and value >= 1),
    "fragments": ("a number, at least 1", lambda value: type(value) is int and value >= 1),
    "memory": ("local, averaged or none", lambda value: value in ("local", "averaged", None)),
    "seed": ("a number from 0 to 2**32 - 1", lambda value: type(value) is int and 0 <= value < 2**32),
    "ratio": ("a number above 0 and at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1),
    "mix": ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "beta1": ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
}
"""Of each option that is not at its default: what it may be."""


def merged_options(algorithm: str, recorded: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of ``algorithm``: given ones take precedence over recorded ones, and these over defaults.

    Raises:
        ValueError: the algorithm or a given option is unknown, or a value is out of range.

    >>> merged_options("bytegrad", {"hierarchical": False}, {})
    {'hierarchical': False, 'average': True, 'compression': 'MinMaxUInt8'}
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} must be one of {', '.join(ALGORITHMS)}")
    known = ALGORITHMS[algorithm]
    for name in given:
        if name not in known:
            raise ValueError(f"option {name!r} is unknown; {algorithm} has {', '.join(known) or 'no options'}")
    options = {**known, **{name: value for name, value in recorded.items() if name in known}, **given}
    for name, value in options.items():
        allowed, fits = _ALLOWED[name]
        if value != known[name] and not fits(value):
            raise ValueError(f"option {name}={value!r} must be {allowed}")
    return options


def parse_options(typed: Iterable[str]) -> dict[str, Any]:
    """Parse options given as ``name=value`` on a command line.

    Raises:
        ValueError: one has no ``=``.

    >>> parse_options(["hierarchical=false", "warmup_steps=10", "peer_selection_mode=shift_one"])
    {'hierarchical': False, 'warmup_steps': 10, 'peer_selection_mode': 'shift_one'}
    """
    options: dict[str, Any] = {}
    for entry in typed:
        name, equals, text = entry.partition("=")
        if not equals or not name:
            raise ValueError(f"option {entry!r} must be name=value, such as hierarchical=false")
        options[name] = _value(text)
    return options


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

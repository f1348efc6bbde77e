"""Replay of an algorithm's bucket operations from the recorded inputs of all ranks, and the options
that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bagua_ref.backends import get_backend, list_codecs
from bagua_ref.backends.base import FLOATS
from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.conformance.expected.tolerances import SUM
from bagua_ref.conformance.trace import exchanges
from bagua_ref.conformance.trace.exchanges import (
    Expected,
    NotReplayable,
    full_precision,
    inputs,
    low_precision,
)
from bagua_ref.conformance.trace.files import Record
from bagua_ref.conformance.trace.local_updates import (
    MOST_LR,
    OuterState,
    averages_due,
    diloco_round,
)
from bagua_ref.formulas.graphs import MODES

__all__ = ["ALGORITHMS", "Replay", "merged_options", "parse_options"]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {
        "hierarchical": False,
        "average": True,
        "scattergather": False,
        "wire": None,
    },
    "bytegrad": {"hierarchical": True, "average": True, "compression": "MinMaxUInt8"},
    "decentralized": {"hierarchical": True, "peer_selection_mode": "all"},
    "low_precision_decentralized": {"hierarchical": True, "compression": "MinMaxUInt8"},
    "qadam": {
        "hierarchical": True,
        "warmup_steps": None,
        "beta1": 0.9,
        "compression": "MinMaxUInt8",
    },
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
        "outer_lr": None,
        "outer_momentum": 0.0,
        "outer_nesterov": False,
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
    _outer: dict[str, OuterState] = field(default_factory=dict, repr=False)

    def __call__(
        self, step: int, records: list[Record], before: list[Record] | None
    ) -> Iterable[Expected]:
        """Return the expected outputs of one execution of a bucket's operation.

        Args:
            step: the step of the execution.
            records: its records, by rank.
            before: the records of the same bucket's previous recorded execution, if there is one.

        Raises:
            NotReplayable: inputs are missing or do not match.
        """
        if len({record.info.get("execution", record.execution) for record in records}) > 1:
            raise NotReplayable(
                "ranks count their executions differently: they did not begin to record at the same"
                " step"
            )
        inside_nodes = self._is_inside_nodes(records)
        if not inside_nodes and (members := records[0].info.get("ranks", len(records))) != len(
            records
        ):
            raise NotReplayable(
                f"the operation ran on a group of {members} ranks, but the trace has"
                f" {len(records)}: pass the rank, world_size and nodes of the group to Recorder"
            )
        options, nodes = self.options, self.nodes
        match self.algorithm:
            case "gradient_allreduce" if options["scattergather"] and not options["wire"]:
                return [
                    low_precision(records, nodes, None, options["average"], options["hierarchical"])
                ]
            case "gradient_allreduce":
                return [
                    full_precision(
                        records, nodes, options["average"], options["hierarchical"], options["wire"]
                    )
                ]
            case "bytegrad":
                return [low_precision(records, nodes, **options)]
            case "decentralized":
                return [
                    exchanges.decentralized(
                        records, nodes, options["peer_selection_mode"], options["hierarchical"]
                    )
                ]
            case "low_precision_decentralized":
                return [exchanges.on_ring(records, before, nodes, **options)]
            case "local_sgd":
                mean = (
                    _mean_inside_nodes(records, nodes)
                    if inside_nodes
                    else full_precision(records, nodes)
                )
                return [mean, *averages_due(records, options)]
            case _ if self._is_in_warm_up(step, records[0]):
                return [full_precision(records, nodes)]
            case "async":
                return exchanges.async_round(records)
            case "qadam":
                _update_momenta(records, options["beta1"])
                return [
                    low_precision(
                        records, nodes, options["compression"], True, options["hierarchical"]
                    )
                ]
            case "diloco":
                follows = before is not None and before[0].execution == records[0].execution - 1
                warm_up = follows and before is not None and self._is_in_warm_up(step, before[0])
                first = warm_up or not records[0].info.get("execution", records[0].execution)
                return diloco_round(
                    records,
                    before if follows and not warm_up else None,
                    nodes,
                    options,
                    self._outer,
                    first,
                )
            case "powersgd":
                return exchanges.powersgd_round(records, options)
        return exchanges.topk_round(records, options)

    def _is_in_warm_up(self, step: int, record: Record) -> bool:
        """Return whether the operation was in full precision, or was recorded with
        ``warmup=True``.
        """
        if self.algorithm == "async":
            return "snapshot" not in record.inputs
        if self.algorithm == "qadam" and self.options["warmup_steps"] is not None:
            return bool(step < self.options["warmup_steps"])
        return bool(
            record.info.get("warmup", record.info.get("operation") == "CentralizedFullPrecision")
        )

    def _is_inside_nodes(self, records: list[Record]) -> bool:
        """Return whether the operation ran among the ranks of each node, as gradients of post-local
        SGD do (S9.1).
        """
        members = [record.info.get("ranks", len(records)) for record in records]
        hierarchical = self.algorithm == "local_sgd" and self.options["hierarchical"]
        return hierarchical and members == [size for size in self.nodes for _ in range(size)]


def _mean_inside_nodes(records: Sequence[Record], nodes: Sequence[int]) -> Expected:
    """Return the mean of S3.1 inside each node."""
    inputs(records, "x", FLOATS)
    ends = np.cumsum(nodes).tolist()
    found = [
        full_precision(records[end - size : end], (size,))
        for end, size in zip(ends, nodes, strict=True)
    ]
    magnitudes = torch.stack(
        [expected.magnitude for expected in found if expected.magnitude is not None]
    )
    return Expected(
        "x", [x for expected in found for x in expected.values], SUM(max(nodes)), magnitudes.amax(0)
    )


def _update_momenta(records: Sequence[Record], beta1: float) -> None:
    """Put ``x <- beta1*momentum + (1-beta1)*grad`` in place of each rank's x, if momenta were
    recorded (S5.5).
    """
    if "momentum" not in records[0].inputs:
        return
    momenta, gradients = (inputs(records, role, COMPRESSIBLE) for role in ("momentum", "grad"))
    for record, momentum, gradient in zip(records, momenta, gradients, strict=True):
        factor = record.info.get("beta1", beta1)
        if not 0 <= factor <= 1:
            raise NotReplayable(f"beta1={factor!r} must be a number from 0 to 1")
        record.inputs["x"] = momentum.clone()
        get_backend("reference").update_momentum_(record.inputs["x"], gradient, factor)


_FLAG = ("true or false", lambda value: isinstance(value, bool))
_STEPS = ("a number of steps", lambda value: type(value) is int and value >= 0)

_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        (
            "hierarchical",
            "average",
            "scattergather",
            "warm_start",
            "error_feedback",
            "outer_nesterov",
        ),
        _FLAG,
    ),
    **dict.fromkeys(("warmup_steps", "offset", "delay"), _STEPS),
    "wire": (" or ".join(exchanges.WIRES), lambda value: value in exchanges.WIRES),
    "compression": ("the name of a codec", lambda value: value in list_codecs("reference")),
    "peer_selection_mode": (f"one of {', '.join(_MODES)}", lambda value: value in _MODES),
    "period": ("a number of steps, at least 1", lambda value: type(value) is int and value >= 1),
    "fragments": ("a number, at least 1", lambda value: type(value) is int and value >= 1),
    "memory": ("local, averaged or none", lambda value: value in ("local", "averaged", None)),
    "seed": (
        "a number from 0 to 2**32 - 1",
        lambda value: type(value) is int and 0 <= value < 2**32,
    ),
    "ratio": (
        "a number above 0 and at most 1",
        lambda value: type(value) in (int, float) and 0 < value <= 1,
    ),
    **dict.fromkeys(
        ("mix", "beta1", "outer_momentum"),
        ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    ),
    "outer_lr": (
        f"a number from 0 to {MOST_LR:g}",
        lambda value: type(value) in (int, float) and 0 <= value <= MOST_LR,
    ),
}
"""Of each option that is not at its default: what it may be."""


def merged_options(
    algorithm: str, recorded: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all options of ``algorithm``: given ones take precedence over recorded ones, and these
    over defaults.

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
            raise ValueError(
                f"option {name!r} is unknown; {algorithm} has {', '.join(known) or 'no options'}"
            )
    options = {
        **known,
        **{name: value for name, value in recorded.items() if name in known},
        **given,
    }
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

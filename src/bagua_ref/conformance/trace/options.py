"""Options of algorithms that affect a replay: defaults and parsing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bagua_ref.backends import list_codecs
from bagua_ref.conformance.trace.wire import WIRES
from bagua_ref.formulas.graphs import MODES

__all__ = ["ALGORITHMS", "merged_options", "parse_options"]

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

_ALLOWED: dict[str, tuple[str, Any]] = {
    "hierarchical": ("true or false", lambda value: isinstance(value, bool)),
    "average": ("true or false", lambda value: isinstance(value, bool)),
    "scattergather": ("true or false", lambda value: isinstance(value, bool)),
    "wire": (" or ".join(WIRES), lambda value: value in WIRES),
    "compression": ("the name of a codec", lambda value: value in list_codecs("reference")),
    "peer_selection_mode": (f"one of {', '.join(_MODES)}", lambda value: value in _MODES),
    "warmup_steps": ("a number of steps", lambda value: value is None or (type(value) is int and value >= 0)),
    "period": ("a number of steps, at least 1", lambda value: value is None or (type(value) is int and value >= 1)),
    "fragments": ("a number, at least 1", lambda value: type(value) is int and value >= 1),
    "offset": ("a number of steps", lambda value: type(value) is int and value >= 0),
    "delay": ("a number of steps", lambda value: type(value) is int and value >= 0),
    "memory": ("local, averaged or none", lambda value: value in ("local", "averaged", None)),
    "warm_start": ("true or false", lambda value: isinstance(value, bool)),
    "error_feedback": ("true or false", lambda value: isinstance(value, bool)),
    "seed": ("a number from 0 to 2**32 - 1", lambda value: type(value) is int and 0 <= value < 2**32),
    "ratio": ("a number above 0 and at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1),
    "mix": ("a number from 0 to 1", lambda value: value is None or (type(value) in (int, float) and 0 <= value <= 1)),
    "beta1": ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
}


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

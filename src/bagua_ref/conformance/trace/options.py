"""Options of algorithms that affect a replay: defaults and parsing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["ALGORITHMS", "merged_options", "parse_options"]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {"hierarchical": False, "average": True, "scattergather": False},
    "bytegrad": {"hierarchical": True, "average": True},
    "decentralized": {"hierarchical": True, "peer_selection_mode": "all"},
    "low_precision_decentralized": {"hierarchical": True},
    "qadam": {"hierarchical": True, "warmup_steps": None, "beta1": 0.9},
    "async": {},
}
"""Options of each algorithm with their defaults."""

_ALLOWED: dict[str, tuple[str, Any]] = {
    "hierarchical": ("true or false", lambda value: isinstance(value, bool)),
    "average": ("true or false", lambda value: isinstance(value, bool)),
    "scattergather": ("true or false", lambda value: isinstance(value, bool)),
    "peer_selection_mode": ("all or shift_one", lambda value: value in ("all", "shift_one")),
    "warmup_steps": ("a number of steps", lambda value: value is None or (type(value) is int and value >= 0)),
    "beta1": ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
}


def merged_options(algorithm: str, recorded: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of ``algorithm``: given ones take precedence over recorded ones, and these over defaults.

    Raises:
        ValueError: the algorithm or a given option is unknown, or a value is out of range.

    >>> merged_options("bytegrad", {"hierarchical": False}, {})
    {'hierarchical': False, 'average': True}
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
        if not fits(value):
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
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

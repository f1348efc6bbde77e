"""Texts about ranks, for messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

USE_JOIN = "if ranks have different numbers of batches, use bagua_ref.join"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text, with ranges.

    >>> format_ranks([0, 2, 3, 4])
    'ranks 0, 2-4'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join("-".join(map(str, run)) for run in runs)


def describe_ends(steps: Mapping[int, int | None]) -> str:
    """Describe ranks that ended without an error while others were communicating.

    Args:
        steps: number of optimizer steps by rank; None: the rank trained nothing.

    >>> describe_ends({0: 5, 2: 5})
    'ranks 0, 2 ended normally after 5 steps; if ranks have different numbers of batches, use
    bagua_ref.join'
    >>> describe_ends({1: None})
    'rank 1 ended normally'
    """
    found: dict[str, list[int]] = {}
    for rank, count in sorted(steps.items()):
        found.setdefault(
            "" if count is None else f" after {count} step{'s' * (count != 1)}", []
        ).append(rank)
    advice = [USE_JOIN] if any(found) else []
    return "; ".join(
        [
            *(f"{format_ranks(ranks)} ended normally{after}" for after, ranks in found.items()),
            *advice,
        ]
    )

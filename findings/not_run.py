"""Implementations that were not judged, and why."""

from __future__ import annotations

from collections.abc import Iterator

from findings.common import Row

PEER = "torch==2.13.0"  # none of them is run
REASONS = {
    ("DeepSpeed OnebitAdam and ZeroOneAdam", "S12.2"): "not installed and not tried: no run without a GPU was attempted",
    ("hivemind averager", "S3.1"): "not installed and not tried",
    ("torch post_localSGD_hook", "S9.1"): "it was not run; the averager that it is used with is judged above",
}


def find() -> Iterator[Row]:
    for (implementation, clause), reason in REASONS.items():
        yield Row(implementation, clause, "all", "not judged", reason)

"""Implementations that were not judged, and why."""

from __future__ import annotations

from collections.abc import Iterator

from findings.common import Row

PEER = "torch==2.13.0"  # none of them is run
DEEPSPEED = (
    "version 0.19.8 has no one-bit optimizers any more. Version 0.18.9 installs and imports without"
    " a GPU, but their exchange does not run there: of its backends two need CuPy with a device,"
    " one an Ascend NPU, and the fourth a packing operation that is built for XPUs only"
)
WARM_START = (
    "warm_start=False: its random factors come from a generator of its own, so that no round can be"
    " compared from equal factors"
)
BATCHED = "it approximates a whole bucket as one square matrix, which no clause describes"
REASONS = {
    ("DeepSpeed OnebitAdam and ZeroOneAdam", "S12.2"): DEEPSPEED,
    ("torch powerSGD_hook", "S10.2"): WARM_START,
    ("torch batched_powerSGD_hook", "S10.2"): BATCHED,
}


def find() -> Iterator[Row]:
    for (implementation, clause), reason in REASONS.items():
        yield Row(implementation, clause, "all", "not judged", reason)

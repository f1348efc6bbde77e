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
# Read at these commits, in their public repositories.
TEMPLAR = (
    "commit c2397ac: of each chunk an even number of elements, at least 2, is sent, so that one of a"
    " single element fails; an element is divided by how many ranks sent it, and ranks above the"
    " lower median of the norms are scaled down to it; the two-bit code gives zeros a level"
)
CCLOCO = (
    "commit c01a785: the outer learning rate multiplies what enters the error memory, and the SGD"
    " step again; without the cosine transform a chunk is a whole row"
)
MULOCO = (
    "commit 475bbf4: the outer learning rate multiplies what enters the error memory, and the SGD"
    " step again; the largest elements are those of a whole tensor"
)
DEMO = (
    "commit 0e48145: the momentum holds the learning rate, a component is divided by how many ranks"
    " sent it, and the transform is in the parameter's dtype; NaN stays in the momentum, and the sign"
    " of NaN is taken for 0; a weight of three dimensions fails"
)
REASONS = {
    ("DeepSpeed OnebitAdam and ZeroOneAdam", "S12.2"): DEEPSPEED,
    ("torch powerSGD_hook", "S10.2"): WARM_START,
    ("torch batched_powerSGD_hook", "S10.2"): BATCHED,
    ("templar's SparseLoCo", "S15.5"): TEMPLAR,
    ("CCLoco", "S15.5"): CCLOCO,
    ("MuLoCo with top-k", "S15.5"): MULOCO,
    ("DeMo", "S15.6"): DEMO,
}


def find() -> Iterator[Row]:
    for (implementation, clause), reason in REASONS.items():
        yield Row(implementation, clause, "all", "not judged", reason)

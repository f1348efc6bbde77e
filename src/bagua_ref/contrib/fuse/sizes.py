"""Sizes in which elements are stepped: small parameters are joined, large ones cut into blocks that fit the cache (S6)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Sizes", "sizes_for"]

SMALL_ON_CPU, SMALL = 2**14, 2**20
"""Up to so many elements, an operation's launch costs more than copying a new gradient beside others. Measured with SGD, whose
steps have the fewest operations."""

RUN_ON_CPU, RUN = 2**19, 2**24
TENSORS = 5
"""A step usually reads and writes a weight, a gradient, two tensors of state and a temporary one."""
LEAST_BLOCK, MOST_BLOCK = 2**16, 2**19
"""In smaller blocks, Python takes longer than arithmetic; larger ones were not faster in any cache."""
USUAL_BLOCK = 2**18
"""Where the cache is unknown; measured to be about a seventh slower than the best size at most."""
WHOLE = 2**62
"""The block size where blocks do not help."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements.

    Attributes:
        small: parameters of up to so many are joined; larger ones stay where they are.
        run: the most that joined parameters have together, about.
        block: so many are stepped at once, parts of a run or of one large parameter.
    """

    small: int
    run: int
    block: int


def sizes_for(group: dict[str, Any]) -> Sizes:
    """Return the sizes for a parameter group.

    Blocks help where an optimizer takes all its operations on one parameter before the next, as by default on a CPU. ``foreach``
    takes each operation on all parameters, and ``fused`` has one operation only.
    """
    if any(p.device.type != "cpu" for p in group["params"]):
        return Sizes(SMALL, RUN, WHOLE)
    if group.get("fused"):
        return Sizes(SMALL_ON_CPU, RUN, WHOLE)
    if group.get("foreach"):
        return Sizes(SMALL_ON_CPU, RUN_ON_CPU, WHOLE)
    # Threads share the elements of an operation, and each has a cache.
    return Sizes(SMALL_ON_CPU, RUN_ON_CPU, block_of(cache_of_core()) * torch.get_num_threads())


def block_of(cache: int) -> int:
    """Return how many elements a thread steps at once: a power of two, so that its float32 tensors fit into ``cache`` bytes.

    >>> block_of(5 * 2**20)
    262144
    """
    if not cache:
        return USUAL_BLOCK
    return min(max(1 << (cache // (4 * TENSORS)).bit_length() >> 1, LEAST_BLOCK), MOST_BLOCK)


@functools.cache
def cache_of_core(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the bytes of a core's second-level cache and of its share of the third, as Linux reports them; 0 if unknown."""
    total = 0
    for level in sorted(folder.glob("index*")):
        try:
            number, kind, size, sharing = (
                (level / name).read_text(encoding="ascii").strip() for name in ("level", "type", "size", "shared_cpu_map")
            )
            if int(number) > 1 and kind in ("Data", "Unified"):
                total += int(size.rstrip("KMG")) * UNITS[size[-1]] // int(sharing.replace(",", ""), 16).bit_count()
        except (OSError, ValueError, KeyError, ZeroDivisionError):  # an incomplete or unknown description
            continue
    return total


UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

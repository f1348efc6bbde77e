"""Numbers of elements of long inputs: just beyond every block in which an implementation may work."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

__all__ = ["LONG", "TAIL", "sizes_beyond"]

TAIL = 7
"""Elements beyond a block: fewer than any vector has, and no multiple of one."""

LONG = (2**17 + TAIL,)
"""In all profiles but "large"."""

_SHORTEST, _LONGEST = 65, 2**20
_OURS = tuple(
    f"bagua_ref.{name}" for name in ("backends.codec", "backends.reference", "comm_ops", "communicators", "contrib.complexities")
)


def sizes_beyond(tile_sizes: Sequence[int], parts: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes that end `TAIL` elements beyond a tile.

    Tiles are those that a target declares, and as many elements as any integer from 65 to 2^20 in the code of the reference or of
    the modules of a target's parts says, as any of them may be one.

    >>> 262_151 in sizes_beyond([], [])
    True
    """
    modules = {getattr(part, "__module__", None) or type(part).__module__ for part in parts}
    loaded = [name for name in list(sys.modules) if name in modules or name.startswith(_OURS)]
    integers = {number for name in loaded for number in _integers_of(name)}
    found = {
        *tile_sizes,
        *(number for number in integers if _SHORTEST <= number <= _LONGEST),
        *(size - TAIL for size in LONG),
        _LONGEST,
    }
    return tuple(size + TAIL for size in sorted(found))


def _integers_of(name: str) -> Iterator[int]:
    loader = getattr(sys.modules[name], "__loader__", None)
    try:
        code = loader.get_code(name)  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError):  # it has none, as a module in C
        return
    waiting = [code]
    while waiting:
        for constant in getattr(waiting.pop(), "co_consts", ()):
            if isinstance(constant, CodeType):
                waiting.append(constant)
            elif type(constant) is int:
                yield constant

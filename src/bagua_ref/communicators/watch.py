"""What notices that a collective on a device does not come to an end, as the host does not wait for it (S2.5)."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Watch"]

_GLANCE = 0.05
"""Seconds between two looks at what is under way."""


@dataclass
class _UnderWay:
    work: Any
    deadline: float
    give_up: Callable[[], None]


class Watch:
    """Looks, on a thread of its own that lives while there is something to watch, whether works are done by their deadlines."""

    def __init__(self) -> None:
        self._under_way: deque[_UnderWay] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, work: Any, timeout: float, give_up: Callable[[], None]) -> None:
        """Call ``give_up()`` unless ``work.is_completed()`` within ``timeout`` seconds.

        Args:
            work: of torch.distributed; works that are added first are looked at first.
            timeout: in seconds.
            give_up: called once, on the watch's thread.
        """
        with self._lock:
            self._under_way.append(_UnderWay(work, time.monotonic() + timeout, give_up))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look, name="bagua_ref watch of collectives", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            late: list[_UnderWay] = []
            with self._lock:
                now, watched = time.monotonic(), self._under_way
                self._under_way = deque()
                for entry in watched:
                    if not _is_done(entry.work):
                        (late if now > entry.deadline else self._under_way).append(entry)
                if not self._under_way and not late:
                    self._thread = None
                    return
            for entry in late:
                entry.give_up()
            del late, watched
            time.sleep(_GLANCE)


def _is_done(work: Any) -> bool:
    """Return whether ``work`` has come to an end; one that has failed never does, and is given up in time."""
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return False

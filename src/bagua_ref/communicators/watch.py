"""Watchdog for hung collectives on a device, for which the host does not wait (S2.5)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Watch"]

_GLANCE = 0.05
"""Seconds between two checks of the works."""


@dataclass
class _UnderWay:
    work: Any
    deadline: float
    give_up: Callable[[], None]


class Watch:
    """Checks whether works finish by their deadlines, on a thread that exists only while there are works to watch."""

    def __init__(self) -> None:
        self._under_way: deque[_UnderWay] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, work: Any, timeout: float, give_up: Callable[[], None]) -> None:
        """Call ``give_up()`` unless ``work.is_completed()`` within ``timeout`` seconds.

        Args:
            work: a torch.distributed work; works are checked in the order in which they were added.
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
    """Return whether ``work`` has finished; a failed one never does, so it is given up at its deadline."""
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return False

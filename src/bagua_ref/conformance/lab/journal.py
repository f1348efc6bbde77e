"""Crash log of a check: the running call and its time limit; in a worker, a file that survives the
process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bagua_ref.conformance.lab.violation import assignments

__all__ = ["Journal", "last_call"]

_END = "\n---\n"
_BETWEEN = 10.0
"""Factor of the time limit between two calls, as computing expected values takes time."""


class Journal:
    """Log of a check's running call, with a watchdog.

    Args:
        time_limit: time limit of a single call in seconds.
        path: file written before each call. A watchdog in C then ends this process when a call
            takes longer, as a call may hold the interpreter lock, and the file says so; `last_call`
            reads it. None: the waiting thread polls `overdue`.
        records: whether to write also the arguments of calls, which takes time.
    """

    def __init__(
        self, time_limit: float = math.inf, path: Path | None = None, records: bool = False
    ) -> None:
        self._time_limit, self._records, self._running = time_limit, records, 0
        self._last, self._deadline = "", math.inf
        self._file = None if path is None else path.open("w", encoding="utf-8")
        if self._file is not None:
            faulthandler.enable(self._file)
        self.mark()

    @contextmanager
    def call(self, name: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Record a call as running until the block ends; blocks may be nested, also by threads.

        Args:
            name: name of the called function.
            arguments: arguments of the call, by name.
        """
        self._last = name
        if self._file is not None:
            said = ""
            if self._records:
                with contextlib.suppress(Exception):  # arguments that cannot be printed are omitted
                    said = assignments(arguments)
            self._file.seek(0)
            self._file.truncate()
            self._file.write(f"{name}\n{said}{_END}")
            self._file.flush()
        self._running += 1
        self.mark()
        try:
            yield
        finally:
            self._running -= 1
            self.mark()

    def mark(self) -> None:
        """Restart the time limit: the check has made progress."""
        limit = self._time_limit * (1.0 if self._running else _BETWEEN)
        self._deadline = time.monotonic() + limit
        if self._file is not None:
            faulthandler.dump_traceback_later(limit, exit=True, file=self._file)

    def overdue(self) -> str:
        """Return a message about the last call if it has exceeded the time limit, else an empty
        string.
        """
        over = time.monotonic() > self._deadline
        return _no_answer(self._last, self._time_limit) if over else ""

    def close(self) -> None:
        """Stop the watchdog and close the file."""
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
            self._file.close()
            self._file = None


def last_call(said: str, time_limit: float) -> tuple[str, str]:
    """Parse the file of a worker that has ended: a message on how it ended, and the last call's
    arguments, if recorded.
    """
    noted, _, dumped = said.rpartition(_END)
    name, _, arguments = noted.partition("\n")
    if dumped.startswith("Timeout"):
        return _no_answer(name, time_limit), arguments
    fatal = re.search(r"^Fatal Python error: (.*)", dumped, re.MULTILINE)
    return f"{name or 'a check'} ended the process" + (f": {fatal[1]}" if fatal else ""), arguments


def _no_answer(name: str, time_limit: float) -> str:
    return f"{name or 'a check'}: no answer within {time_limit:g} s"

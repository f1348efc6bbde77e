"""The demo's progress display: bars in a terminal, a line per algorithm elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bagua_ref.cli.recipes import ALONE, Settings
from bagua_ref.cli.results import Reports

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

__all__ = ["readable_bytes", "shown"]

_POLL_SECONDS = 0.1


@contextmanager
def shown(reports: Reports, settings: Settings, console: Console) -> Iterator[None]:
    """Poll ``reports`` and show their progress until the block ends; then they are complete."""
    if not console.is_terminal:
        with _polling(_Lines(reports, settings, console).update):
            yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress, _polling(_Bars(reports, settings, progress).update):
        yield


@contextmanager
def _polling(update: Callable[[], None]) -> Iterator[None]:
    """Call ``update()`` repeatedly on a separate thread, and once more after the block."""
    stop = threading.Event()
    errors: list[Exception] = []

    def poll() -> None:
        try:
            while not stop.wait(_POLL_SECONDS):
                update()
        except Exception as error:
            errors.append(error)

    # The launcher needs the main thread for its signal handlers.
    thread = threading.Thread(target=poll, name="bagua-ref demo progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
    update()


class _Bars:
    """One bar per algorithm."""

    def __init__(self, reports: Reports, settings: Settings, progress: Progress) -> None:
        self._reports, self._progress = reports, progress
        self._waiting: TaskID | None = progress.add_task(f"starting {settings.workers} workers", total=None, news="")
        self._tasks = {name: progress.add_task(name, start=False, total=settings.steps, news="") for name in reports.of}

    def update(self) -> None:
        self._reports.poll()
        for name, task in self._tasks.items():
            steps = self._reports.steps_done(name)
            if steps and not self._progress.tasks[self._progress.task_ids.index(task)].started:
                self._progress.start_task(task)
                if self._waiting is not None:
                    self._progress.remove_task(self._waiting)
                    self._waiting = None
            if steps:
                self._progress.update(task, completed=steps, news=_news(self._reports, name, steps))


class _Lines:
    """One line at the beginning and one at the end of each algorithm."""

    def __init__(self, reports: Reports, settings: Settings, console: Console) -> None:
        self._reports, self._settings, self._console = reports, settings, console
        self._begun: set[str] = set()
        self._done: set[str] = set()
        console.print(f"starting {settings.workers} workers")

    def update(self) -> None:
        self._reports.poll()
        for name in self._reports.of:
            steps = self._reports.steps_done(name)
            if steps and name not in self._begun:
                self._begun.add(name)
                self._console.print(f"{name}: training, {self._settings.steps} steps")
            if name not in self._done and (outcome := self._reports.outcome(name)) is not None:
                self._done.add(name)
                self._console.print(f"{name}: test accuracy {outcome.test_accuracy:.1%}, {_news(self._reports, name, steps)}")


def _news(reports: Reports, name: str, steps: int) -> str:
    ranks = reports.of[name]
    loss = sum(report.losses[steps - 1] for report in ranks) / len(ranks)
    sent = sum(report.bytes_sent[steps - 1] for report in ranks) / len(ranks)
    return f"loss {loss:.3f}" + ("" if name == ALONE else f", {readable_bytes(sent)} sent")


def readable_bytes(count: float) -> str:
    """Return ``count`` bytes in decimal units.

    >>> readable_bytes(229692)
    '229.7 kB'
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"

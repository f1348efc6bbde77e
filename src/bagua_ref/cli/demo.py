"""``bagua-ref demo``: start the workers, show their progress, and report the results."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from bagua_ref.base.not_provided import install_command
from bagua_ref.cli.command import CommandError, Commands, add_command, add_json_options, is_installed, write_json
from bagua_ref.cli.demo_worker import work
from bagua_ref.cli.recipes import ALONE, RECIPES, Digits, Settings
from bagua_ref.cli.report import TrainingOutcome, print_table, readable_bytes, write_report

__all__ = ["add_parser", "run_demo", "show"]

_PACKAGES = {"sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib"}
_POLL_SECONDS = 0.1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``demo`` to the commands of ``bagua-ref``."""
    demo = add_command(
        commands,
        "demo",
        _demo,
        help="train on handwritten digits with every algorithm and compare the results",
        description="Train a small network on scikit-learn's handwritten digits with every algorithm, on several processes of this "
        "machine, and compare accuracy, traffic and speed. Writes index.html and results.json.",
    )
    demo.add_argument("--workers", type=int, default=4, metavar="N", help="number of training processes (default: %(default)s)")
    demo.add_argument(
        "--epochs", type=int, default=10, metavar="N", help="number of passes over the training data (default: %(default)s)"
    )
    demo.add_argument(
        "--algorithms",
        nargs="+",
        action="extend",
        choices=list(RECIPES),
        metavar="NAME",
        help="algorithms to train with (default: all)",
    )
    demo.add_argument(
        "--output", type=Path, default=Path("demo-report"), metavar="DIR", help="folder for the report (default: %(default)s)"
    )
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="random seed for weights and batches (default: %(default)s)")
    demo.add_argument("--quick", action="store_true", help="train for ten steps only, to check that everything works")
    add_json_options(demo)


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    chosen = tuple(arguments.algorithms or RECIPES)
    try:
        settings = Settings(arguments.workers, arguments.epochs, arguments.seed, chosen, arguments.quick)
        arguments.output.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"output={str(arguments.output)!r} must be a writable folder: {error.strerror}")
    if missing := [package for module, package in _PACKAGES.items() if not is_installed(module)]:
        raise CommandError(f"the demo needs {', '.join(missing)}; install with: {install_command('demo')}")
    exit_code = run_demo(settings, arguments.output)
    if exit_code == 0:
        write_json(arguments, json.loads((arguments.output / "results.json").read_text()))
    return exit_code


class _StoppedError(Exception):
    """A signal asks the demo to stop."""


class _WorkerError(Exception):
    """A worker has failed."""


def run_demo(settings: Settings, output: Path) -> int:
    """Train with ``settings``, print a table, write the report into the folder ``output``; return the exit code."""
    from rich.console import Console

    console = Console(highlight=False)
    try:
        with _signals_raised(), closing(_train(settings)) as events:
            outcomes = show(events, settings, console)
    except _StoppedError as stopped:
        (number,) = stopped.args
        print(f"bagua-ref demo: stopped by {number.name}; all workers have ended", file=sys.stderr)
        return 128 + int(number)
    except _WorkerError as error:
        print(error, file=sys.stderr)
        return 1
    print_table(outcomes, settings, console)
    page = write_report(outcomes, settings, output)
    console.print(f"Curves: {page}", soft_wrap=True)
    return 0


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise `_StoppedError` at the first signal that asks to stop; ignore further ones, so that workers are ended."""

    def stop(number: int, frame: Any) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise _StoppedError(signal.Signals(number))

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python


def _train(settings: Settings) -> Generator[dict[str, Any], None, None]:
    """Run the workers, and yield what rank 0 reports; end them if this is closed.

    Raises:
        _WorkerError: a worker has failed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    events = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = store.port, settings, [tensor.numpy() for tensor in Digits.load()], events
    running = start_processes(work, arguments, settings.workers, join=False)
    assert running is not None
    try:
        ended = False
        while not ended:
            ended = running.join(timeout=_POLL_SECONDS)
            while not events.empty():
                yield events.get()
    except ProcessExitedException as error:
        how = f"was killed by {error.signal_name}" if error.signal_name else f"failed with exit code {error.exit_code}"
        raise _WorkerError(f"bagua-ref demo: worker {error.error_index} {how}") from None
    except ProcessRaisedException as error:
        raise _WorkerError(f"bagua-ref demo: worker {error.error_index} failed:\n{error.msg.strip()}") from None
    finally:
        for process in running.processes:
            process.kill()
            process.join()


def show(events: Iterable[dict[str, Any]], settings: Settings, console: Any) -> list[TrainingOutcome]:
    """Show the progress of a demo: bars in a terminal, elsewhere lines at begin and end of each algorithm; return the outcomes.

    Args:
        events: what rank 0 reports: ``algorithm`` with ``loss`` and ``bytes_sent`` after each step, and with the ``outcome``.
        settings: the settings of the demo.
        console: a ``rich.console.Console``.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[news]}"))
    outcomes, steps = [], dict.fromkeys((ALONE, *settings.algorithms), 0)
    starting = f"starting {settings.workers} workers"
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
        waiting = bars.add_task(starting, total=None, news="")
        tasks = {name: bars.add_task(name, start=False, total=settings.steps, news="") for name in steps}
        say = (lambda text: None) if console.is_terminal else console.print
        say(starting)
        for event in events:
            name = event["algorithm"]
            if not steps[name]:
                bars.update(waiting, visible=False)
                bars.start_task(tasks[name])
                say(f"{name}: training, {settings.steps} steps")
            outcome = event.get("outcome")
            if outcome is not None:
                outcomes.append(outcome)
                loss, sent = outcome.losses[-1], outcome.bytes_sent[-1]  # means over ranks
            else:
                steps[name] += 1
                loss, sent = event["loss"], event["bytes_sent"]
            news = f"loss {loss:.3f}" + ("" if name == ALONE else f", {readable_bytes(sent)} sent")
            bars.update(tasks[name], completed=steps[name], news=news)
            if outcome is not None:
                say(f"{name}: test accuracy {outcome.test_accuracy:.1%}, {news}")
    return outcomes

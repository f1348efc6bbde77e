"""``bagua-ref demo``: start the workers, show their progress, and report the results."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bagua_ref.base.extras import install_command
from bagua_ref.cli.command import CommandError, Commands, add_command, add_json_options, is_installed, write_json
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
        with _signals_raised(), tempfile.TemporaryDirectory(prefix="bagua-ref-demo-") as folder:
            exchange = Path(folder)
            (exchange / "settings.json").write_text(json.dumps(asdict(settings)))
            torch.save(tuple(Digits.load()), exchange / "digits.pt")
            outcomes = show(_train(settings.workers, exchange), settings, console)
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


def _train(workers: int, exchange: Path) -> Iterator[dict[str, Any]]:
    """Run the workers, and yield what rank 0 writes; end them if this is closed.

    Raises:
        _WorkerError: a worker has failed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    shared = {
        "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
    }  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with (exchange / "progress.jsonl").open("a+") as progress:
            for rank in range(workers):
                environment = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
                with (exchange / f"worker{rank}.log").open("wb") as log:
                    processes.append(
                        subprocess.Popen(  # nosec B603 # this interpreter and our own module
                            [sys.executable, "-m", "bagua_ref.cli.demo_worker", str(exchange)],
                            env={**os.environ, **environment},
                            stdout=subprocess.DEVNULL,
                            stderr=log,
                            start_new_session=True,  # Ctrl-C in a terminal is for this process
                        )
                    )
            rest, running = "", True
            while running:
                codes = [process.poll() for process in processes]
                if any(codes):
                    raise _WorkerError(_describe_failure(codes, exchange))
                running = None in codes
                *lines, rest = (rest + progress.read()).split("\n")  # the last line may be incomplete
                yield from map(json.loads, lines)
                time.sleep(_POLL_SECONDS if running else 0)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _describe_failure(codes: list[int | None], exchange: Path) -> str:
    """Return which workers failed, and the last lines of the first one's standard error."""
    failed = {rank: code for rank, code in enumerate(codes) if code}
    lines = []
    for rank, code in failed.items():
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        lines.append(f"bagua-ref demo: worker {rank} {how}")
    first = min(failed)
    if written := (exchange / f"worker{first}.log").read_text(errors="replace").splitlines():
        lines += [f"The end of worker {first}'s standard error:", *written[-20:]]
    return "\n".join(lines)


def show(events: Iterable[dict[str, Any]], settings: Settings, console: Any) -> list[TrainingOutcome]:
    """Show the progress of a demo: bars in a terminal, elsewhere lines at begin and end of each algorithm; return the outcomes.

    Args:
        events: what rank 0 writes: ``algorithm`` with ``loss`` and ``bytes_sent`` after each step, and with the ``outcome``.
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
            if "outcome" in event:
                outcomes.append(outcome := TrainingOutcome(**event["outcome"]))
                loss, sent = outcome.losses[-1], outcome.bytes_sent[-1]  # means over ranks
            else:
                steps[name] += 1
                loss, sent = event["loss"], event["bytes_sent"]
            news = f"loss {loss:.3f}" + ("" if name == ALONE else f", {readable_bytes(sent)} sent")
            bars.update(tasks[name], completed=steps[name], news=news)
            if "outcome" in event:
                say(f"{name}: test accuracy {outcome.test_accuracy:.1%}, {news}")
    return outcomes

"""``bagua-ref demo``: start the workers, show their progress, and report the results."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Generator, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException, start_processes

import bagua_ref
from bagua_ref.base.utils import readable_bytes
from bagua_ref.cli.command import (
    Commands,
    add_command,
    add_json_options,
    add_older_name,
    end_progress,
    require,
    show_progress,
    write_json,
)
from bagua_ref.cli.recipes import (
    ALONE,
    RECIPES,
    Digits,
    Settings,
    TrainingOutcome,
    make_model,
    make_optimizer,
    train,
)
from bagua_ref.cli.report import print_table, write_report

__all__ = ["add_parser", "run_demo", "show", "work"]


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``demo`` to the commands of ``bagua-ref``."""
    demo = add_command(
        commands,
        "demo",
        _demo,
        examples=("bagua-ref demo", "bagua-ref demo --quick --algorithms bytegrad powersgd"),
        help="train on handwritten digits with every algorithm and compare the results",
        description=(
            "Train a small network on scikit-learn's handwritten digits with every algorithm, on"
            " several processes of this machine, and compare accuracy, traffic and speed. Writes"
            " index.html and results.json."
        ),
    )
    for name, default, metavar, text in (
        ("ranks", 4, "N", "number of training processes"),
        ("epochs", 10, "N", "number of passes over the training data"),
        ("output", Path("demo-report"), "DIR", "folder for the report"),
        ("seed", 0, "N", "random seed for weights and batches"),
    ):
        note = " (default: %(default)s)"
        option = demo.add_argument(
            f"--{name}",
            type=Path if metavar == "DIR" else int,
            default=default,
            metavar=metavar,
            help=text + note,
        )
        if name == "ranks":
            add_older_name(demo, option, "--workers")
    names: dict[str, Any] = {
        "nargs": "+",
        "action": "extend",
        "choices": list(RECIPES),
        "metavar": "NAME",
    }
    demo.add_argument("--algorithms", **names, help="algorithms to train with (default: all)")
    demo.add_argument(
        "--quick",
        action="store_true",
        help="train for ten steps only, to check that everything works",
    )
    add_json_options(demo)


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    chosen = tuple(arguments.algorithms or RECIPES)
    try:
        settings = Settings(
            arguments.ranks, arguments.epochs, arguments.seed, chosen, arguments.quick
        )
        arguments.output.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(
            f"output={str(arguments.output)!r} must be a writable folder: {error.strerror}"
        )
    require("the demo", "demo", "sklearn", "rich", "matplotlib")
    # workers are ended as after Ctrl-C
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.default_int_handler)
    exit_code = run_demo(settings, arguments.output)
    if exit_code == 0:
        write_json(arguments, json.loads((arguments.output / "results.json").read_text()))
    return exit_code


def run_demo(settings: Settings, output: Path) -> int:
    """Train with ``settings``, print a table, write the report into the folder ``output``; return
    the exit code.
    """
    try:
        with closing(_train(settings)) as events:
            outcomes = show(events, settings)
    except ProcessException as error:
        how = f"failed:\n{error.msg.strip()}"
        if isinstance(error, ProcessExitedException):
            how = (
                f"was killed by {error.signal_name}"
                if error.signal_name
                else f"failed with exit code {error.exit_code}"
            )
        print(f"bagua-ref demo: worker {error.error_index} {how}", file=sys.stderr)
        return 1
    print_table(outcomes, settings)
    print(f"Curves: {write_report(outcomes, settings, output)}")
    return 0


def _train(settings: Settings) -> Generator[dict[str, Any], None, None]:
    """Run the workers and yield rank 0's reports; raise ProcessException if one fails; end all if
    this is closed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    # which imports torch once for all workers
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch._dynamo", "bagua_ref.cli"])
    events = processes.SimpleQueue()
    arguments = store.port, settings, [tensor.numpy() for tensor in Digits.load()], events
    running = start_processes(
        work, arguments, settings.ranks, join=False, start_method="forkserver"
    )
    assert running is not None
    try:
        ended = False
        while not ended:
            ended = running.join(timeout=0.1)
            while not events.empty():
                yield events.get()
    finally:
        for process in running.processes:
            process.kill()
            process.join()


def work(rank: int, port: int, settings: Settings, arrays: list[Any], events: Any) -> None:
    """Train with each algorithm in turn, as ``rank`` of a group whose store is at ``port``.

    Rank 0 puts a dict into the queue ``events`` after each step and at the end of each algorithm.
    """
    # warnings would appear among the progress bars; errors are raised
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)  # there may be more workers than cores
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": settings.ranks,
        "LOCAL_WORLD_SIZE": settings.ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    digits = Digits(*map(torch.from_numpy, arrays))
    # Rank 0 trains alone while the others wait, some milliseconds per step.
    bagua_ref.init_process_group(backend="gloo", timeout=60 + settings.steps)
    # The first optimizer makes torch import many modules, which must not count as training time.
    make_optimizer(ALONE, make_model().parameters())
    bagua_ref.barrier()
    for name in (ALONE, *settings.algorithms):

        def report(name: str = name, **news: Any) -> None:
            if rank == 0:
                events.put({"algorithm": name, **news})

        if name != ALONE or rank == 0:
            report(outcome=train(name, settings, digits, report))
        bagua_ref.barrier()
    bagua_ref.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort a process at its normal exit


def show(events: Iterable[dict[str, Any]], settings: Settings) -> list[TrainingOutcome]:
    """Show the progress of a demo on standard error, and print a line for each outcome; return the
    outcomes.

    Args:
        events: what rank 0 reports: ``algorithm`` with ``loss`` after each step, and with the
            ``outcome``.
        settings: the settings of the demo.
    """
    print(f"starting {settings.ranks} workers", flush=True)
    outcomes: list[TrainingOutcome] = []
    step = 0
    for event in events:
        name, outcome = event["algorithm"], event.get("outcome")
        if outcome is None:
            step += 1
            show_progress(
                f"{name}: step {step} of {settings.steps}, loss {event['loss']:.3f}",
                step,
                settings.steps,
            )
            continue
        end_progress()
        sent = "" if name == ALONE else f", {readable_bytes(outcome.bytes_sent[-1])} sent"
        print(
            f"{name}: test accuracy {outcome.test_accuracy:.1%}, loss"
            f" {outcome.losses[-1]:.3f}{sent}",
            flush=True,
        )
        outcomes.append(outcome)
        step = 0
    return outcomes

"""``bagua-ref demo``: start the workers, show their progress, and report the results."""

from __future__ import annotations

import json
import logging
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bagua_ref.cli.recipes import Digits, Settings
from bagua_ref.cli.results import Reports

__all__ = ["missing_packages", "run_demo"]

_EXTRA = {"sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib"}


def missing_packages() -> list[str]:
    """Return the packages of the extra ``demo`` that are not installed."""
    return [package for module, package in _EXTRA.items() if find_spec(module) is None]


def run_demo(settings: Settings, output: Path) -> int:
    """Train with ``settings``, print a table, write the report into the folder ``output``; return the exit code."""
    from rich.console import Console

    from bagua_ref.cli.progress import shown
    from bagua_ref.cli.report import print_table, write_report

    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="bagua-ref-demo-") as folder:
        exchange = Path(folder)
        (exchange / "settings.json").write_text(json.dumps(asdict(settings)))
        Digits.load().save(exchange / "digits.npz")
        reports = Reports(exchange, settings)
        try:
            with _quiet_launcher(), shown(reports, settings, console):
                _launch(settings.workers, exchange)
        except SignalException as interruption:
            print(f"bagua-ref demo: stopped by {interruption.sigval.name}; all workers have ended", file=sys.stderr)
            return 128 + interruption.sigval
        except ChildFailedError as error:
            print(_story(error, exchange), file=sys.stderr)
            return 1
    outcomes = [outcome for name in reports.of if (outcome := reports.outcome(name)) is not None]
    print_table(outcomes, settings, console)
    page = write_report(outcomes, settings, output)
    console.print(f"Curves: {page}", soft_wrap=True)
    return 0


def _launch(workers: int, exchange: Path) -> None:
    """Run the workers under torch's elastic launcher, as ``torchrun --standalone`` does."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",  # a machine may not be able to resolve its own name
        max_restarts=0,
        # One node needs no heartbeat, and the heartbeat's thread fails with a traceback if it is the one that frees the launcher.
        rdzv_configs={"keep_alive_interval": 24 * 60 * 60},
        logs_specs=DefaultLogsSpecs(log_dir=str(exchange / "logs"), redirects=Std.ALL),
    )
    elastic_launch(config, sys.executable)("-m", "bagua_ref.cli.demo_worker", str(exchange))


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keep the launcher's log lines out of the display, and undo its signal handlers afterwards."""
    disabled = logging.root.manager.disable
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        for number, handler in handlers.items():
            if handler is not None:  # else it was not set from Python
                signal.signal(number, handler)


def _story(error: ChildFailedError, exchange: Path) -> str:
    """Print which workers failed, and the last lines of the first one's standard error."""
    ended_by_launcher = {rank for rank, failure in error.failures.items() if failure.exitcode == -signal.SIGTERM}
    lines = []
    for rank in sorted(error.failures.keys() - ended_by_launcher) or sorted(ended_by_launcher):
        failure = error.failures[rank]
        how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"failed with exit code {failure.exitcode}"
        lines.append(f"bagua-ref demo: worker {rank} {how}")
    first, _ = error.get_first_failure()
    for path in exchange.glob(f"logs/**/{first}/stderr.log"):
        if written := path.read_text().splitlines():
            lines += [f"The end of worker {first}'s standard error:", *written[-20:]]
    return "\n".join(lines)

"""The command line: ``bagua-ref demo`` trains with every algorithm, ``bagua-ref doctor`` says what this machine can do.

``bagua-ref balance`` shows what the balanced sampler would do for given lengths, ``bagua-ref vectors`` writes golden vectors and
checks another implementation's outputs against them, ``bagua-ref trace`` checks a recorded training.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import bagua_ref
from bagua_ref.cli import trace, vectors

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bagua-ref`` with ``argv`` (None: the process's arguments); return the exit code.

    0: done. 1: the work failed. 2: bad input, raised as SystemExit by argparse. 130: interrupted.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        exit_code: int = arguments.command(parser, arguments)
    except KeyboardInterrupt:
        print("bagua-ref: interrupted", file=sys.stderr)
        return 130
    return exit_code


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from bagua_ref.cli.demo import missing_packages, run_demo
    from bagua_ref.cli.recipes import RECIPES, Settings

    if missing := missing_packages():
        print(f"bagua-ref demo needs {', '.join(missing)}: pip install 'bagua_ref[demo]'", file=sys.stderr)
        return 1
    try:
        settings = Settings(
            workers=arguments.workers,
            epochs=arguments.epochs,
            seed=arguments.seed,
            algorithms=tuple(arguments.algorithms or RECIPES),
            quick=arguments.quick,
        )
        arguments.output.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"output={str(arguments.output)!r} must be a folder that can be written: {error}")
    return run_demo(settings, arguments.output)


def _balance(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from bagua_ref.cli.balance import draw_plans, missing_packages, plans_of, print_plans, read_lengths

    if missing := missing_packages():
        print(f"bagua-ref balance needs {', '.join(missing)}: pip install 'bagua_ref[demo]'", file=sys.stderr)
        return 1
    from rich.console import Console

    try:
        lengths = read_lengths(arguments.lengths)
        plans = plans_of(lengths, arguments.replicas, arguments.batch_size, arguments.seed, arguments.random_level)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    console = Console(highlight=False)
    print_plans(*plans, console, arguments.steps)
    try:
        draw_plans(*plans).savefig(arguments.output, dpi=120, metadata={"Software": None})
    except (OSError, ValueError) as error:  # no such folder, no such format
        parser.error(f"output={str(arguments.output)!r} must be a picture that can be written: {error}")
    console.print(f"Picture: {arguments.output}", soft_wrap=True)
    return 0


def _doctor(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from bagua_ref.cli.doctor import examine, print_findings

    print_findings(examine(), as_json=arguments.json)
    return 0


def _verify(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from bagua_ref.cli.verify import verify

    if arguments.backend is None and arguments.communicator is None:
        parser.error("verify needs --backend, --communicator or both")
    return verify(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bagua-ref", description="PyTorch training with relaxed communication.")
    parser.add_argument("--version", action="version", version=f"bagua_ref {bagua_ref.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="train on handwritten digits with every algorithm and compare them",
        description="Train a small network on scikit-learn's handwritten digits with every algorithm, on several processes of this "
        "machine, and compare accuracy, traffic and speed. Writes index.html and results.json into the output folder.",
    )
    demo.set_defaults(command=_demo)
    demo.add_argument("--workers", type=int, default=4, metavar="N", help="processes that train together (default: %(default)s)")
    demo.add_argument("--epochs", type=int, default=10, metavar="N", help="passes over the training data (default: %(default)s)")
    demo.add_argument("--algorithms", nargs="+", metavar="NAME", help="which to train with (default: all)")
    demo.add_argument(
        "--output", type=Path, default=Path("demo-report"), metavar="DIR", help="where to write (default: %(default)s)"
    )
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (default: %(default)s)")
    demo.add_argument("--quick", action="store_true", help="ten steps instead of all epochs, to see whether everything works")

    doctor = commands.add_parser(
        "doctor",
        help="say what is installed here, what can run, and why the rest cannot",
        description="Print versions, kernel backends and why one cannot run, gloo, NCCL, GPUs, Redis and the environment.",
    )
    doctor.set_defaults(command=_doctor)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    balance = commands.add_parser(
        "balance",
        help="show the work per step and replica with and without the balanced sampler",
        description="Take the lengths of a dataset's samples as their cost, deal them out to replicas with torch's "
        "DistributedSampler and with LoadBalancingDistributedSampler, print each step's work and draw both.",
    )
    balance.set_defaults(command=_balance)
    balance.add_argument(
        "--lengths", type=Path, required=True, metavar="FILE", help="one number per line, or a .npy array of one dimension"
    )
    balance.add_argument("--replicas", type=int, required=True, metavar="N", help="processes that train together")
    balance.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="samples of a replica in each step (default: %(default)s)"
    )
    balance.add_argument(
        "--random-level", type=float, default=0.0, metavar="X", help="of the balanced sampler, 0 to 1 (default: %(default)s)"
    )
    balance.add_argument("--seed", type=int, default=0, metavar="N", help="of both samplers (default: %(default)s)")
    balance.add_argument("--steps", type=int, default=8, metavar="N", help="how many steps to print (default: %(default)s)")
    balance.add_argument(
        "--output", type=Path, default=Path("balance.png"), metavar="FILE", help="the picture (default: %(default)s)"
    )
    vectors.add_parser(commands)
    trace.add_parser(commands)
    _add_verify(commands)
    return parser


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = commands.add_parser(
        "verify",
        help="check an implementation against the specification, clause by clause",
        description="Search for inputs for which an implementation differs from the specification. Exit code 0: none was found; "
        "1: one was, or a known failure passed; 2: nothing could be run.",
    )
    verify.set_defaults(command=_verify)
    verify.add_argument("--backend", metavar="NAME|pkg.mod:Class", help="a kernel backend, or any target of run_conformance")
    verify.add_argument("--communicator", metavar="pkg.mod:factory", help="a function of a world, called on each rank")
    verify.add_argument("--suite", nargs="+", metavar="NAME", help="which suites (default: all that the target has something for)")
    verify.add_argument("--check", nargs="+", metavar="ID", help="only these checks, by id or by number of clause")
    verify.add_argument("--profile", choices=("quick", "full"), default="quick", help="how many inputs (default: %(default)s)")
    verify.add_argument("--xfails", type=Path, metavar="FILE", help="ids of known failures, one a line; # begins a comment")
    verify.add_argument("--seed", type=int, default=0, metavar="N", help="of all inputs (default: %(default)s)")
    verify.add_argument("--jobs", type=int, metavar="N", help="processes at a time; 0: threads of this one (default: one per core)")
    verify.add_argument(
        "--time-limit", type=float, default=10.0, metavar="S", help="seconds that one call may take (default: %(default)s)"
    )
    verify.add_argument("--fail-fast", action="store_true", help="stop at the first failure")
    verify.add_argument("--json", type=Path, metavar="PATH", help="write the report as JSON")
    verify.add_argument("--junit", type=Path, metavar="PATH", help="write the report as JUnit XML")

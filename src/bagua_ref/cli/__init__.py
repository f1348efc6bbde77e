"""The command line ``bagua-ref``, with these commands.

``demo`` trains with every algorithm; ``doctor`` reports what can run on this machine; ``balance`` shows the effect of the balanced
sampler on given lengths; ``graph`` shows who averages with whom in decentralized training; ``vectors`` writes golden vectors and
checks another implementation's outputs; ``trace`` checks a recorded training run; and ``verify`` checks an implementation against
the specification.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import bagua_ref
from bagua_ref.base.not_provided import install_command
from bagua_ref.cli import graph, trace, vectors
from bagua_ref.cli.command import CommandError, Commands, PrintCompletion, add_command, add_json_options, write_json
from bagua_ref.cli.recipes import RECIPES, Settings
from bagua_ref.conformance.clauses import SUITES

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bagua-ref`` with ``argv`` (None: the process's arguments); return the exit code.

    0: success. 1: a run or a check failed. 2: bad input (raised as SystemExit by argparse), a missing package, or a file that
    cannot be read or written. 130: interrupted.
    """
    arguments, unknown = _parser().parse_known_args(argv)
    parser: argparse.ArgumentParser = arguments.parser
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # parse_args would print the usage of bagua-ref itself
    arguments.stdout = sys.stdout
    try:
        # Other output, such as that of a tested implementation, must not get between the lines of JSON.
        with redirect_stdout(sys.stderr) if arguments.json else nullcontext():
            exit_code: int = arguments.command(parser, arguments)
    except CommandError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    return exit_code


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from bagua_ref.cli.demo import missing_packages, run_demo

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
        parser.error(f"output={str(arguments.output)!r} must be a writable folder: {error.strerror}")
    if missing := missing_packages():
        raise CommandError(f"the demo needs {', '.join(missing)}; install with: {install_command('demo')}")
    exit_code = run_demo(settings, arguments.output)
    if exit_code == 0:
        write_json(arguments, json.loads((arguments.output / "results.json").read_text()))
    return exit_code


def _doctor(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from bagua_ref.cli.doctor import examine, print_findings

    findings = examine()
    if not arguments.json:
        print_findings(findings)
    write_json(arguments, findings)
    return 0


def _balance(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from bagua_ref.cli.balance import as_json, draw_epochs, is_installed, print_epochs, read_lengths, simulate_epochs

    try:
        lengths = read_lengths(arguments.lengths)
        epochs = simulate_epochs(lengths, arguments.replicas, arguments.batch_size, arguments.seed, arguments.random_level)
    except OSError as error:
        parser.error(f"cannot read {str(arguments.lengths)!r}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
    if not arguments.json and not is_installed("rich"):
        raise CommandError(f"printing tables needs rich; install with: {install_command('demo')}")
    picture: Path | None = arguments.output or Path("balance.png")
    if is_installed("matplotlib"):
        try:
            draw_epochs(*epochs).savefig(picture, dpi=120, metadata={"Software": None})
        except (OSError, ValueError) as error:  # no such folder or format
            parser.error(f"output={str(picture)!r} must be a writable image file: {error}")
    else:
        complaint = f"the picture needs matplotlib; install with: {install_command('demo')}"
        if arguments.output is not None:
            raise CommandError(complaint)
        print(f"{parser.prog}: warning: {complaint}", file=sys.stderr)
        picture = None
    if not arguments.json:
        from rich.console import Console

        print_epochs(*epochs, Console(highlight=False), arguments.steps)
        if picture is not None:
            print(f"Picture: {picture}")
    write_json(arguments, as_json(*epochs, picture))
    return 0


def _verify(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from bagua_ref.cli.verify import verify

    named = arguments.backend is not None or arguments.communicator is not None
    if named == (arguments.command_line is not None):
        parser.error("one of --backend, --communicator (or both) and --command is required")
    if arguments.ranks < 1:
        parser.error(f"argument --ranks: {arguments.ranks} must be at least 1")
    if arguments.launch is not None and (arguments.command_line is None or "{ranks}" not in arguments.launch):
        parser.error("argument --launch: needs --command, and {ranks} in its text, such as 'mpirun -n {ranks}'")
    if arguments.xfails is not None and not arguments.xfails.is_file():
        parser.error(f"argument --xfails: no such file: {str(arguments.xfails)!r}")
    return verify(parser, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bagua-ref", description="PyTorch training with relaxed communication.")
    parser.add_argument("--version", action="version", version=f"bagua_ref {bagua_ref.__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a completion script for this shell and exit; needs shtab",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        help="report what is installed and what can run on this machine",
        description="Report versions, kernel backends, gloo, NCCL, GPUs, Redis and environment variables; where something cannot "
        "be used, say why.",
    )
    add_json_options(doctor)
    _add_balance(commands)
    graph.add_parser(commands)
    vectors.add_parser(commands)
    trace.add_parser(commands)
    _add_verify(commands)
    return parser


def _add_demo(commands: Commands[argparse.ArgumentParser]) -> None:
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


def _add_balance(commands: Commands[argparse.ArgumentParser]) -> None:
    balance = add_command(
        commands,
        "balance",
        _balance,
        help="compare the work per step and replica with and without the balanced sampler",
        description="Distribute samples of the given lengths over replicas, once with torch's DistributedSampler and once with "
        "LoadBalancingDistributedSampler. Print and plot how much work each replica has in each step, taking a sample's length as "
        "its cost.",
    )
    balance.add_argument(
        "--lengths",
        type=Path,
        required=True,
        metavar="FILE",
        help="lengths of the samples: a text file with one number per line, or a one-dimensional .npy array",
    )
    balance.add_argument("--replicas", type=int, required=True, metavar="N", help="number of training processes")
    balance.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="samples per replica and step (default: %(default)s)"
    )
    balance.add_argument(
        "--random-level", type=float, default=0.0, metavar="X", help="random_level of the sampler, 0 to 1 (default: %(default)s)"
    )
    balance.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of both samplers (default: %(default)s)")
    balance.add_argument("--steps", type=int, default=8, metavar="N", help="number of steps to print (default: %(default)s)")
    balance.add_argument("--output", type=Path, metavar="FILE", help="where to save the plot (default: balance.png)")
    add_json_options(balance)


def _add_verify(commands: Commands[argparse.ArgumentParser]) -> None:
    verify = add_command(
        commands,
        "verify",
        _verify,
        help="check an implementation against the specification, clause by clause",
        description="Search for inputs for which an implementation differs from the specification.",
        epilog="Exit status is 0 if all checks passed, 1 if one failed or a known failure passed, and 2 if nothing could be run.",
    )
    verify.add_argument(
        "--backend", metavar="NAME|pkg.mod:Class", help="a kernel backend, or any other target that run_conformance accepts"
    )
    verify.add_argument("--communicator", metavar="pkg.mod:factory", help="a function that each rank calls with its world")
    verify.add_argument(
        "--command",
        dest="command_line",
        metavar="PROGRAM",
        help="a program in any language, with its arguments, that answers requests on standard input and output",
    )
    verify.add_argument(
        "--launch", metavar="LAUNCHER", help="starts the ranks of --command: a command with {ranks}, such as 'mpirun -n {ranks}'"
    )
    verify.add_argument(
        "--ranks",
        type=_count,
        default=9,
        metavar="N",
        help="how many ranks --launch starts: the largest world (default: %(default)s)",
    )
    verify.add_argument(
        "--suite",
        nargs="+",
        action="extend",
        choices=SUITES,
        metavar="NAME",
        help="suites to run: %(choices)s (default: all that apply to the target)",
    )
    verify.add_argument("--check", nargs="+", action="extend", metavar="ID", help="run only these checks, given by id or by clause")
    verify.add_argument(
        "--profile",
        choices=("quick", "full", "large"),
        default="quick",
        help="number of inputs to try, and how long long ones are (default: %(default)s)",
    )
    verify.add_argument(
        "--xfails", type=Path, metavar="FILE", help="list of known failures: one id per line, comments start with #"
    )
    verify.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of all inputs (default: %(default)s)")
    verify.add_argument(
        "--jobs",
        type=_count,
        metavar="N",
        help="number of processes; 0: threads of this process (default: one per core, up to 4; 1 if the target is external)",
    )
    verify.add_argument(
        "--time-limit",
        type=_seconds,
        metavar="S",
        help="seconds after which a single call counts as hanging (default: 10, and 60 with --command, whose ranks must start)",
    )
    verify.add_argument("--fail-fast", action="store_true", help="stop at the first failure")
    add_json_options(verify)
    verify.add_argument("--junit", type=Path, metavar="PATH", help="also write the result as JUnit XML to PATH")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a non-negative integer")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds

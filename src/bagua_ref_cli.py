"""The console script ``bagua-ref``: its commands and their options, help, version and misspelt words.

It is a module beside the package, which imports torch: that takes a second, and only running a
command needs it. The module ``bagua_ref.cli.NAME`` runs the command NAME.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

__all__ = ["COMMANDS", "GROUPS", "Command", "Parser", "main", "number", "parser_of_all"]

_MAX_RANKS = 1024
"""An all-to-all of these has a million messages, and a matrix 8 MB."""
_SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def number(low: float, high: float, integer: bool = False) -> Callable[[str], Any]:
    """Return an argument type: a number from ``low`` to ``high``, such as 25, 340e6 or 124M."""

    def parse(text: str) -> float:
        factor = _SUFFIXES.get(text[-1:].upper())
        try:
            value = float(text[:-1]) * factor if factor else float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (integer and value != int(value)):
            raise argparse.ArgumentTypeError(
                f"{text!r} must be {'an integer' if integer else 'a number'} from {low:,g} to {high:,g}"
            )
        return int(value) if integer else value

    return parse


def _count(low: float = 1, high: float = 1e9) -> Callable[[str], int]:
    return number(low, high, integer=True)


def _cluster(text: str) -> tuple[int, int | None]:
    """Return the number of ranks, and of nodes if ``text`` has both, as in 2x8."""
    nodes, by, ranks = text.lower().partition("x")
    parse = _count(high=_MAX_RANKS)
    n = parse(nodes) * parse(ranks) if by else parse(text)
    if not 2 <= n <= _MAX_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be 2 to {_MAX_RANKS} ranks" + ": a rank alone sends nothing" * (n == 1)
        )
    return n, parse(nodes) if by else None


class Option(NamedTuple):
    """An option or an argument: its name, and the arguments of `argparse` for it."""

    name: str
    settings: dict[str, Any]


def option(
    name: str, metavar: str, text: str, type: Any = str, default: Any = None, **more: Any
) -> Option:
    """Return an option that takes a value; its help names the default, if there is one."""
    text += "" if default is None else " (default: %(default)s)"
    return Option(
        name, {"metavar": metavar, "help": text, "type": type, "default": default, **more}
    )


def flag(name: str, text: str, **more: Any) -> Option:
    """Return an option without a value."""
    return Option(name, {"help": text, "action": "store_true", **more})


class OneOf(NamedTuple):
    """Options of which at most one may be given, or exactly one."""

    options: list[Option]
    required: bool = False


class Command(NamedTuple):
    """A command: the texts of its ``--help``, and its options.

    Attributes:
        help: its line in the list of commands.
        description: the beginning of its help.
        examples: command lines.
        options: in the order of its help.
        epilog: the end of its help.
    """

    help: str
    description: str
    examples: list[str]
    options: Sequence[Option | OneOf] = ()
    epilog: str = "Exit status is 0 on success and 2 on errors."


GROUPS = {
    "vectors": (
        "export golden vectors, or check another implementation's outputs against them",
        (
            "Golden vectors are inputs and expected outputs, stored as safetensors files with a JSON"
            " manifest, to test implementations in any language."
        ),
    ),
    "trace": (
        "find where two recorded runs diverge",
        (
            "A recording is what bagua_ref.record wrote during a run: digests of everything each"
            " step computes."
        ),
    ),
}
"""Help and description of the first words of the commands that have two."""

_PNG = "needs matplotlib"

COMMANDS = {
    "demo": Command(
        "compare all algorithms on a small task, and draw what they do",
        "Train a small network on scikit-learn's handwritten digits with every algorithm, on several"
        " processes of this machine, and compare accuracy and traffic. Writes index.html and"
        " results.json.",
        ["bagua-ref demo", "bagua-ref demo --quick --algorithms bytegrad powersgd"],
        [
            option("--ranks", "N", "number of training processes", _count(high=64), 4),
            option("--epochs", "N", "passes over the training data", _count(high=1000), 10),
            option("--output", "DIR", "folder for the report", Path, Path("demo-report")),
            option("--seed", "N", "random seed for weights and batches", _count(0, 2**32 - 1), 0),
            option("--algorithms", "NAME", "algorithms to train with (default: all)", nargs="+"),
            flag("--quick", "train for ten steps only, as a check"),
        ],
    ),
    "doctor": Command(
        "report what is installed and what can run on this machine",
        "Report versions, kernel backends, gloo, NCCL, GPUs, Redis, extras, trainers and environment"
        " variables; where something cannot be used, say why.",
        ["bagua-ref doctor", "bagua-ref doctor --json"],
    ),
    "selftest": Command(
        "train with four algorithms in two processes of this machine",
        "Train a small model with four algorithms in two processes that communicate over gloo, and"
        " check that it learns and that ranks agree; takes about ten seconds.",
        ["bagua-ref selftest"],
        epilog="Exit status is 0 if all trainings passed, 1 if one failed and 2 on errors.",
    ),
    "measure": Command(
        "measure links, codecs and compute, for bagua-ref advise",
        "Fit latency and bandwidth of the links inside nodes and between them to the times of"
        " all-reduces, time codecs and a training step, and write the costs that bagua-ref advise"
        " reads. Start it on every rank.",
        ["torchrun --nproc-per-node 2 -m bagua_ref.cli measure --output costs.json"],
        [
            option("--output", "FILE", "the file that rank 0 writes", Path, required=True),
            option(
                "--step",
                "PKG.MOD:FACTORY",
                "a function that returns a function, which runs one forward and backward pass",
            ),
            option("--repeat", "N", "times that each is run", _count(2, 1e6), 10),
            option(
                "--residual",
                "X",
                "refuse fits that are off by more than this part of a time",
                number(0, 1e12),
                0.3,
            ),
        ],
    ),
    "advise": Command(
        "predict which algorithm trains fastest on a given network",
        "Predict the time of a training step with each algorithm: what it sends, from the buckets"
        " that wrapping would make, and how long that takes and how much of it compute hides, from"
        " the costs of links and codecs. Nothing is sent.",
        [
            "bagua-ref advise --params 124M --ranks 2x8 --bandwidth 1Gbps --compute 120ms",
            "bagua-ref advise --model mycode:make_model --ranks 64 --measured costs.json",
        ],
        [
            OneOf(
                [
                    option(
                        "--model",
                        "PKG.MOD:FACTORY",
                        "a function that returns the model; run on the meta device, so nothing is"
                        " allocated",
                    ),
                    option(
                        "--params",
                        "N",
                        "number of parameters, such as 124M or 7e9, modelled as 1024 x 1024"
                        " matrices",
                        _count(high=1e12),
                    ),
                ],
                required=True,
            ),
            option(
                "--ranks",
                "N|NODESxRANKS",
                "number of ranks, at least 2, each on a node of its own; 2x8: 2 nodes of 8 ranks",
                _cluster,
                required=True,
            ),
            option("--nodes", "N", "number of nodes for --ranks N", _count()),
            option(
                "--device",
                "NAME",
                "what computes codecs, such as h100, by measurements of this project",
                default="cpu",
            ),
            option("--bandwidth", "RATE", "of each node, such as 1Gbps or 100MB a second"),
            option("--latency", "TIME", "of a message between nodes", default="50us"),
            option("--inside", "RATE,TIME", "inside a node", default="100Gbit,5us"),
            option("--compute", "TIME", "of a forward and backward pass, such as 120ms"),
            option("--measured", "FILE", "costs that bagua-ref measure wrote", Path),
            option(
                "--error",
                "X",
                "relative uncertainty of the result, such as 0.1 for 10 %% either way (default: the"
                " largest errors that this project has measured)",
                number(0, 0.99),
            ),
            option(
                "--algorithm",
                "NAME[:OPTION=VALUE,...]",
                "compare only these, each in an option of its own",
                action="append",
            ),
        ],
        "Exit status is 0 on success and 2 on errors. Formulas: bagua_ref.planning, clause S14.",
    ),
    "sim": Command(
        "find errors of a torch.distributed program on simulated ranks",
        "Run an unmodified torch.distributed program on simulated ranks in one process, under many"
        " schedules, and report the first error: deadlocks, calls that do not match, exceptions,"
        " replicas that differ, and results that depend on the schedule. Each run has an empty"
        " working folder of its own.",
        [
            "bagua-ref sim train.py --ranks 4",
            "bagua-ref sim train.py --link 100Mbit,1ms --seeds 1 -- --epochs 1",
        ],
        [
            option(
                "program",
                "PROGRAM",
                "script.py or package.module:function; its arguments come last, after --",
            ),
            flag("-m", "PROGRAM is a module, as for python -m", dest="is_module"),
            option("--cwd", "DIR", "run in this folder (default: an empty one for each run)", Path),
            option(
                "--ranks", "N", "the number of ranks (default: 2, or the sum of --nodes)", _count()
            ),
            option(
                "--nodes",
                "N,N,...",
                "the number of ranks on each node (default: one node)",
                lambda text: tuple(map(_count(), text.split(","))),
            ),
            OneOf(
                [
                    option("--seeds", "N", "try N random schedules", _count(), 100),
                    option(
                        "--deviations",
                        "N",
                        "try all schedules with up to N deviations from the default",
                        _count(0),
                    ),
                    option(
                        "--schedule",
                        "PLACE:CHOICE,...",
                        "run only this schedule, as a report names it",
                    ),
                ]
            ),
            option(
                "--faults",
                "KIND,...",
                "also try these faults at each communication: kill, stop, slow",
            ),
            option("--fault", "KIND:RANK:NUMBER", "run only with this fault, as a report names it"),
            option(
                "--limit",
                "TIME",
                "time for the runs after the first, which has as much",
                str,
                "60s",
            ),
            option(
                "--link",
                "BANDWIDTH,LATENCY",
                "let communication take time, such as 1Gbit,20ms; with two such pairs, between and"
                " inside nodes",
            ),
            option(
                "--compute",
                "TIME",
                "with --link, of a forward and backward pass, such as 120ms (default: measured CPU"
                " time)",
            ),
            option(
                "--trace",
                "FILE",
                "with --link, write the times for chrome://tracing (default: sim-trace.json)",
                Path,
            ),
            option(
                "--workers",
                "0",
                "let data loaders run without their worker processes, which are real ones",
                choices=("0",),
            ),
            flag("--cpu", "let devices that the program names, such as cuda:0, be the CPU"),
            option(
                "--compare",
                "stdout",
                "what ranks print must not depend on the schedule either",
                choices=("stdout",),
            ),
        ],
        "Exit status is 0 if all schedules agree, 1 if an error was found, 2 for bad usage, 3 if"
        " there is no verdict (the program uses something that is not simulated, communicates"
        " nothing or does not repeat itself, or the time limit came first), and 130 after Ctrl-C.",
    ),
    "explain": Command(
        "say why a real job hangs, from what its ranks have dumped",
        "Read what the ranks of a job that hangs have dumped, and say which calls do not match, who"
        " waits for whom and what the likely cause is. Files are torch's flight recorder's"
        " (torch_trace_rank_0, ...), those of bagua_ref.explain_hangs(folder) and of"
        " bagua_ref.flight_recorder, and the output of py-spy dump (spy_rank_0.txt, ...).",
        ["bagua-ref explain dumps", "bagua-ref explain dumps --json"],
        [
            option("folder", "DIR", "folder of the dumps", Path),
            option("--png", "FILE", f"draw the ranks' last calls; {_PNG}", Path),
        ],
        "Exit status is 0 if the job is healthy, 1 if an error was found, and 2 if a dump cannot be"
        " read or does not belong to the others.",
    ),
    "same": Command(
        "compare a training step on several ranks with that of one process",
        "Run one training step on simulated ranks, with the batch divided in several ways, and"
        " compare gradients and weights with those of one process: every sample and token must weigh"
        " the same. step(model, microbatches) makes the backward passes; step(microbatches) also"
        " makes the model, and returns it.",
        [
            "bagua-ref same train:step --batch batch.pt --model train:make_model",
            "bagua-ref same train:train_one_step --batch batch.pt",
        ],
        [
            option("step", "MODULE:STEP", "the function that makes one step"),
            option("--batch", "FILE", "a batch, saved by torch.save", Path, required=True),
            option("--model", "MODULE:FUNCTION", "makes the model on each rank"),
            option("--labels", "KEY", "of the labels", default="labels"),
        ],
        "Exit status is 0 if all agree, 1 if some differ, 2 for bad usage, 3 if none can be compared.",
    ),
    "balance": Command(
        "show how much time balanced batches save",
        "Distribute samples of the given lengths over ranks: with torch's DistributedSampler, with"
        " LoadBalancingDistributedSampler and with BudgetBatchSampler. Print and plot how much of"
        " the work is padding, and how long ranks wait for the slowest one.",
        ["bagua-ref balance --lengths lengths.txt --ranks 8 --batch-size 16"],
        [
            option(
                "--lengths",
                "FILE",
                "a number per line, a .npy array, or package:name",
                required=True,
            ),
            option("--ranks", "N", "number of training processes", _count(), required=True),
            option("--batch-size", "N", "samples per rank and step", _count(), 8),
            option("--random-level", "X", "random_level of the sampler, 0 to 1", float, 0.0),
            option("--seed", "N", "random seed of all samplers", _count(0, 2**32 - 1), 0),
            option("--max-cost", "X", "budget of a batch", float),
            option(
                "--cost",
                "NAME",
                "of m samples, the longest of length h: padded, m * h; attention, m * h * h",
                default="padded",
                choices=("padded", "attention"),
            ),
            option("--png", "FILE", f"draw it; {_PNG}", Path),
        ],
    ),
    "graph": Command(
        "show who averages with whom in decentralized training",
        "Print the graphs of a peer_selection_mode: in each round, who sends to whom; and how fast"
        " averaging along them brings ranks to consensus.",
        ["bagua-ref graph ring --ranks 8", "bagua-ref graph mycode:my_graph --ranks 8 --period 3"],
        [
            option(
                "mode",
                "MODE",
                "a mode, such as ring; or pkg.mod:function, a function (t, n) -> graph of your own",
            ),
            option(
                "--ranks",
                "N",
                "number of ranks (hierarchical: of nodes)",
                _count(high=_MAX_RANKS),
                required=True,
            ),
            option(
                "--period",
                "P",
                "number of rounds after which a function's graphs repeat (default: 1)",
                _count(high=1e6),
            ),
            option(
                "--tolerance",
                "X",
                "distance from the mean, relative to that at the start, that counts as consensus",
                number(1e-300, 0.999),
                1e-6,
            ),
            option("--png", "FILE", f"draw the graphs of the rounds; {_PNG}", Path),
        ],
    ),
    "vectors export": Command(
        "write all test cases to a folder",
        "Write all test cases to a folder. The files are identical on every machine.",
        ["bagua-ref vectors export vectors"],
        [option("directory", "DIR", "folder to create; if it exists, it must be empty", Path)],
    ),
    "vectors check": Command(
        "compare an implementation's outputs with the expected ones",
        "Compare an implementation's outputs with the expected ones, within the tolerance of each"
        " test case.",
        [
            "bagua-ref vectors check outputs",
            "bagua-ref vectors check --command ./serve --only codecs/ --only MinMaxUInt8",
        ],
        [
            option(
                "outputs",
                "DIR",
                "folder of the outputs: safetensors files with tensors named ID:NAME",
                Path,
                nargs="?",
            ),
            option(
                "--command",
                "COMMAND",
                "program that answers requests for the outputs, instead of a folder",
                dest="program",
            ),
            option(
                "--only",
                "TEXT",
                "check only cases whose id contains one of the texts; each --only narrows further",
                nargs="+",
                action="append",
            ),
        ],
        "Exit status is 0 if all cases passed, 1 if a case failed or is missing or the outputs"
        " contain anything else, and 2 if the outputs cannot be read or the program broke the"
        " protocol.",
    ),
    "trace diff": Command(
        "find where two recorded runs diverge",
        "Compare two recordings: find the first value that differs although everything it depends on"
        " is equal, and its likely cause.",
        ["bagua-ref trace diff run1 run2"],
        [
            option("a", "DIR", "folder that contains rank0, rank1, ... of one run", Path),
            option("b", "DIR", "that of the other run", Path),
            option("--png", "FILE", f"plot the distance by step; {_PNG}", Path),
        ],
        "Exit status is 0 if the recordings are equal, 1 if they differ, and 2 if they cannot be"
        " compared.",
    ),
    "trace show": Command(
        "summarize a recording",
        "Summarize what was recorded.",
        ["bagua-ref trace show run1"],
        [option("directory", "DIR", "folder that contains rank0, rank1, ...", Path)],
        "Exit status is 0 on success and 2 if the recording cannot be read.",
    ),
    "verify": Command(
        "check an implementation against the specification",
        "Search for inputs for which an implementation differs from the specification.",
        [
            "bagua-ref verify --backend mycode:MyKernels",
            "bagua-ref verify --command ./serve --suite kernels codec",
            "bagua-ref verify --target reference --check S4.1",
        ],
        [
            option(
                "--backend",
                "NAME|pkg.mod:Class",
                "a kernel backend, or any other target that run_conformance accepts",
            ),
            option(
                "--target",
                "NAME|pkg.mod:Class",
                "all parts of bagua_ref with this kernel backend ('reference': as it is installed),"
                " or an object with some of them",
            ),
            option(
                "--communicator",
                "pkg.mod:factory",
                "a function that each rank calls with its world",
            ),
            option(
                "--command",
                "PROGRAM",
                "a program in any language, with its arguments, that answers requests on standard"
                " input and output",
                dest="program",
            ),
            option(
                "--suite",
                "NAME",
                "suites to run, such as kernels codec (default: all that apply to the target)",
                nargs="+",
                action="extend",
            ),
            option(
                "--check",
                "ID",
                "run only these checks, given by id or by clause; S4 stands for S4.1, S4.2, ..., too",
                nargs="+",
                action="extend",
            ),
            option(
                "--profile",
                "NAME",
                "number of inputs to try, and how long long ones are: %(choices)s",
                default="quick",
                choices=("quick", "full", "large"),
            ),
            option(
                "--xfails",
                "FILE",
                "list of known failures: one id per line, comments start with #",
                Path,
            ),
            option("--seed", "N", "random seed of all inputs", int, 0),
            option(
                "--jobs",
                "N",
                "number of worker processes (default: one per core, up to 4; 1 if the target is"
                " external)",
                _count(),
            ),
            option(
                "--time-limit",
                "S",
                "seconds after which a single call counts as hanging (default: 10, and 60 with"
                " --command, whose ranks must start)",
                number(1e-3, 1e9),
            ),
            flag("--fail-fast", "stop at the first failure"),
            option("--junit", "PATH", "also write the result as JUnit XML to PATH", Path),
        ],
        "Exit status is 0 if all checks passed, 1 if one failed or a known failure passed, and 2 if"
        " nothing could be run.",
    ),
}

_JSON = [
    flag("--json", "print the result as JSON instead of text"),
    option("--json-file", "PATH", "also write the result as JSON to PATH", Path),
]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are two lines, with the nearest word for a misspelt one."""

    _words: Sequence[str] = ()

    def __init__(self, **options: Any) -> None:
        # An abbreviation might be an option of the program that sim runs.
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as usual, and keep the words for `error`."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print `complaint` and exit with 2."""
        self.exit(2, self.complaint(message))

    def complaint(self, message: str) -> str:
        """Return two lines: ``message`` with a hint, and where to find help."""
        known = self._option_string_actions
        words = itertools.takewhile("--".__ne__, self._words)
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        hint = _nearest(message)
        if unknown := [name for name in options if name not in known]:
            hint = _near(unknown[0], known)
            if not message.startswith("unrecognized"):  # a required option, perhaps this one
                message = f"unrecognized arguments: {unknown[0]}"
        return f"{self.prog}: error: {message}{hint}\nHelp: {self.prog} --help\n"


class _HelpFormatter(argparse.HelpFormatter):
    """Argparse's layout, with indented lines left as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(
            line if line[:1] == " " else fill(line, width, indent) for line in text.split("\n")
        )


def _nearest(message: str) -> str:
    """Return a hint at the word of a message that is nearest to the first one in quotes."""
    wrong = re.search(r"'([\w./-]+)'", message)
    if wrong is None or "did you mean" in message.lower():
        return ""
    return _near(wrong[1], re.findall(r"[A-Za-z_][\w.-]*", message[wrong.end() :]))


def _near(word: str, known: Iterable[str]) -> str:
    names = {name.lstrip("-").lower(): name for name in known}
    near = difflib.get_close_matches(word.lstrip("-").lower(), names, 1)
    return f". Did you mean {names[near[0]]!r}?" if near and names[near[0]] != word else ""


def parser_of_all() -> Parser:
    """Return the parser of ``bagua-ref``; results have the ``name`` and the ``parser`` of the
    command.
    """
    whole = Parser(prog="bagua-ref", description="PyTorch training with relaxed communication.")
    whole.set_defaults(parser=whole, name="")
    whole.add_argument("--version", action="store_true", help="print the version and exit")
    commands = whole.add_subparsers(title="commands", metavar="COMMAND")
    verbs: dict[str, Any] = {}
    for name, command in COMMANDS.items():
        group, _, verb = name.rpartition(" ")
        if group and group not in verbs:
            text, description = GROUPS[group]
            parser = commands.add_parser(group, help=text, description=description)
            parser.set_defaults(parser=parser)
            verbs[group] = parser.add_subparsers(title="commands", metavar="COMMAND")
        lines = "\n".join(f"  {example}" for example in command.examples)
        parser = verbs.get(group, commands).add_parser(
            verb,
            help=command.help,
            description=command.description,
            epilog=f"examples:\n{lines}\n\n{command.epilog}",
            formatter_class=_HelpFormatter,
        )
        parser.set_defaults(parser=parser, name=name)
        for each in (*command.options, *_JSON):
            target = parser
            if isinstance(each, OneOf):
                target = parser.add_mutually_exclusive_group(required=each.required)
            for one in each.options if isinstance(each, OneOf) else [each]:
                target.add_argument(one.name, **one.settings)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bagua-ref`` with ``argv`` (None: the process's arguments); return the exit code.

    0: success. 1: a run or a check failed. 2: bad input, a missing package, or a file that cannot
    be read or written. 130: interrupted.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except SystemExit as ended:  # argparse has printed help or an error
        return 2 if ended.code else 0
    except BrokenPipeError:  # the reader, such as head, has closed it
        # else flushing at exit fails again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    end = words.index("--") if words[:1] == ["sim"] and "--" in words else len(words)
    arguments, unknown = parser_of_all().parse_known_args(
        ["--help"] if words == ["help"] else words[:end]
    )
    parser: Parser = arguments.parser
    if unknown:
        # parse_args would name bagua-ref itself
        text = f"unrecognized arguments: {' '.join(unknown)}"
        if arguments.name == "sim":
            text += f" (those of the program come last: {arguments.program} -- {' '.join(unknown)})"
        parser.error(text)
    if arguments.version:
        print(f"bagua_ref {_version()}")
    elif not arguments.name:
        parser.print_help()
    else:
        from bagua_ref.cli import run

        arguments.after = words[end + 1 :]  # the arguments of the program that sim runs
        return run(parser, arguments)
    return 0


def _version() -> str:
    try:
        return version("bagua_ref")
    except PackageNotFoundError:  # a checkout that is not installed
        from bagua_ref import __version__

        return __version__


if __name__ == "__main__":
    sys.exit(main())

"""``bagua-ref advise``: a prediction, before any training, of the time of a step with each
algorithm on a given network.
"""

from __future__ import annotations

import argparse
import ast
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from bagua_ref.algorithms import Algorithm, QAdamOptimizer
from bagua_ref.base.untrusted import load_json
from bagua_ref.base.utils import readable_bytes
from bagua_ref.cli.command import (
    COLORS,
    CommandError,
    Commands,
    add_command,
    add_json_options,
    call_object,
    number,
    print_rows,
    write_json,
    write_picture,
)
from bagua_ref.formulas.costs import LinkCosts, parse_seconds
from bagua_ref.planning import (
    Cluster,
    Estimate,
    MeasuredMachine,
    StepPlan,
    module_of,
    plan_of,
    predict,
)
from bagua_ref.planning.advice import (
    Candidate,
    Verdict,
    compare,
    error_of,
    learnt,
    verdict_of,
    warnings_of,
    with_bandwidth,
)
from bagua_ref.planning.measured import exact
from bagua_ref.planning.shapes import parameters_of

__all__ = ["CANDIDATES", "add_parser", "draw"]

CANDIDATES = (
    "gradient_allreduce",
    "gradient_allreduce:hierarchical=True",
    "bytegrad",
    "qadam",
    "powersgd:matrix_approximation_rank=4",
    "topk:ratio=0.01",
    "decentralized",
    "decentralized:peer_selection_mode='shift_one'",
    "low_precision_decentralized",
    "local_sgd:period=32",
    "diloco:period=32",
    "diloco:period=32,fragments=4,delay=7,mix=0.5",
    "async",
)
"""The algorithms that are compared unless the user names others."""

_MOST_WORKERS = 1024
"""An all-to-all of so many has a million messages."""
_WORKERS = 64
"""The most workers of the picture: rings of more take long to add up."""
_VALUES = (ast.Constant, ast.Name, ast.UnaryOp)
_DASHES = ("-", "--")


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``advise`` to the commands of ``bagua-ref``."""
    advise = add_command(
        commands,
        "advise",
        _advise,
        examples=(
            "bagua-ref advise --params 124M --ranks 2x8 --bandwidth 1Gbps --compute 120ms",
            "bagua-ref advise --model mycode:make_model --ranks 64 --measured costs.json",
        ),
        description=(
            "Predict the time of a training step with each algorithm: what it sends, from the"
            " buckets that wrapping would make, and how long that takes and how much of it compute"
            " hides, from the costs of links and codecs. Nothing is sent."
        ),
        epilog=(
            "Exit status is 0 on success and 2 on errors. Formulas: bagua_ref.planning, clause S14."
        ),
    )
    model = advise.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model",
        metavar="PKG.MOD:FACTORY",
        help="a function that returns the model; run on the meta device, so nothing is allocated",
    )
    model.add_argument(
        "--params",
        type=number(1, 1e12, whole=True),
        metavar="N",
        help="number of parameters, such as 124M or 7e9, modelled as 1024 x 1024 matrices",
    )
    advise.add_argument(
        "--ranks",
        type=_ranks,
        required=True,
        metavar="N|NODESxRANKS",
        help="number of ranks, at least 2; 2x8 are 2 nodes with 8 ranks each",
    )
    advise.add_argument(
        "--nodes",
        type=number(1, _MOST_WORKERS, whole=True),
        metavar="N",
        help="the number of nodes (default: one for each rank)",
    )
    advise.add_argument(
        "--device",
        choices=sorted(_devices()),
        default="cpu",
        help="what computes codecs, by measurements of this project (default: %(default)s)",
    )
    advise.add_argument(
        "--measured", type=Path, metavar="FILE", help="costs that bagua-ref measure wrote"
    )
    advise.add_argument(
        "--bandwidth", metavar="RATE", help="of each node, such as 1Gbps or 100MB a second"
    )
    advise.add_argument(
        "--latency",
        default="50us",
        metavar="TIME",
        help="of a message between nodes (default: %(default)s)",
    )
    advise.add_argument(
        "--inside",
        default="100Gbit,5us",
        metavar="RATE,TIME",
        help="inside a node (default: %(default)s)",
    )
    advise.add_argument(
        "--codec", metavar="TIME", help="to compress or decompress a million elements"
    )
    advise.add_argument(
        "--error",
        type=number(0, 0.99),
        metavar="X",
        help=(
            "relative uncertainty of the result, such as 0.1 for 10 %% either way (default: the"
            " largest errors that this project has measured)"
        ),
    )
    advise.add_argument(
        "--compute", metavar="TIME", help="of a forward and backward pass, such as 120ms"
    )
    advise.add_argument(
        "--slowest",
        type=number(1, 1e6),
        default=1.0,
        metavar="X",
        help="compute of the slowest rank / mean (default: 1)",
    )
    advise.add_argument(
        "--jitter",
        type=number(0, 1e6),
        default=0.0,
        metavar="X",
        help="deviation of compute / mean (default: 0)",
    )
    advise.add_argument(
        "--algorithm",
        action="append",
        metavar="NAME[:OPTION=VALUE,...]",
        help="compare only these, each in an option of its own",
    )
    advise.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="draw step times over bandwidth and ranks; needs matplotlib",
    )
    add_json_options(advise)


def _devices() -> dict[str, Any]:
    found: dict[str, Any] = load_json(
        files("bagua_ref.planning").joinpath("devices.json").read_bytes()
    )
    return found


def _ranks(text: str) -> tuple[int, int | None]:
    """Return the ranks, and the nodes if ``text`` has both, as in 2x8."""
    nodes, by, ranks = text.partition("x")
    parse = number(1, _MOST_WORKERS, whole=True)
    found = (parse(nodes) * parse(ranks), parse(nodes)) if by else (parse(text), None)
    if not 2 <= found[0] <= _MOST_WORKERS:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be 2 to {_MOST_WORKERS} ranks: a rank alone sends nothing"
        )
    return found


def _advise(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    ranks, nodes = arguments.ranks
    try:
        cluster = Cluster.even(ranks, nodes or arguments.nodes or ranks)
        if nodes is not None and arguments.nodes not in (None, nodes):
            raise ValueError(f"nodes={arguments.nodes} and --ranks {nodes}x{ranks // nodes} differ")
        costs = _costs(arguments, len(cluster.nodes) > 1)
        module = module_of(arguments.params) if arguments.params else _model(arguments.model)
        parameters_of(module)
    except (ValueError, TypeError, NotImplementedError) as error:
        parser.error(str(error))
    # On nodes of one rank, hierarchical communication is the same as the other.
    default = [text for text in CANDIDATES if max(cluster.nodes) > 1 or "hierarchical" not in text]
    algorithms = {text: _algorithm(parser, text, module) for text in arguments.algorithm or default}
    plans, warnings = dict[str, StepPlan](), list[str]()
    for text, algorithm in algorithms.items():
        try:
            plans[text] = plan_of(algorithm, module, cluster)
        except (ValueError, TypeError) as error:
            warnings.append(f"{text} is left out: {error}")
    if not plans:
        raise CommandError("; ".join(warnings))
    stragglers = {"slowest": arguments.slowest, "jitter": arguments.jitter}
    ranked = compare(plans, costs, error_of(costs, arguments.error), **stragglers)
    warnings += warnings_of(ranked)
    first = next(candidate for candidate in ranked if candidate.name == next(iter(plans)))
    verdict = verdict_of(ranked, first)
    if not arguments.json:
        _print(ranked, first, costs, verdict, warnings)
    write_picture(lambda: draw(ranked, costs, **stragglers), arguments.png)
    write_json(arguments, _as_json(arguments, ranked, first, costs, verdict, warnings))
    return 0


def _costs(arguments: argparse.Namespace, several: bool) -> MeasuredMachine:
    """Return the costs that are measured or given; ``several``: whether there are links between
    nodes.
    """

    def link(rate_and_latency: str) -> tuple[Estimate, Estimate]:
        alpha, beta = LinkCosts.parse(rate_and_latency).between
        return exact(alpha), exact(beta)

    between = link(f"{arguments.bandwidth or '1Gbit'},{arguments.latency}")
    device = _devices()[arguments.device]
    codec, operation = (
        {name: exact(cost) for name, cost in device[kind].items()}
        for kind in ("codec", "operation")
    )
    about = f"codecs on {arguments.device}: {device['about']}"
    found = MeasuredMachine(
        None, link(arguments.inside), None, codec, operation, device["shared_processor"], about
    )
    if arguments.measured is not None:
        measured = _measured(arguments.measured)
        found = replace(
            measured,
            inside=measured.inside or found.inside,
            codec=measured.codec or codec,
            operation=measured.operation or operation,
        )
    if arguments.codec is not None:
        found.codec = {"": exact(parse_seconds(arguments.codec, 0.0) / 1e6)}
    if arguments.compute is not None:
        found.compute = exact(parse_seconds(arguments.compute))
    if found.compute is None:
        raise ValueError("argument --compute is needed: the time of a forward and backward pass")
    if arguments.bandwidth is not None:
        found.between = between
    if found.between is None and several:
        raise ValueError("argument --bandwidth is needed, as links between nodes were not measured")
    found.between = found.between or found.inside  # of one node, there are none
    return found


def _measured(path: Path) -> MeasuredMachine:
    try:
        return MeasuredMachine.from_json(load_json(path.read_bytes()))
    except OSError as error:
        raise CommandError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{str(path)!r}: {error}") from None


def _model(path: str) -> torch.nn.Module:
    try:
        with torch.device("meta"):
            module = call_object(path)
    except CommandError as error:
        raise CommandError(
            f"{error} (it is called on torch's device 'meta', where tensors have no values)"
        ) from None
    if not isinstance(module, torch.nn.Module):
        raise CommandError(
            f"{path}() returned a {type(module).__name__}; it must return a torch.nn.Module"
        )
    return module


def _algorithm(parser: argparse.ArgumentParser, text: str, module: torch.nn.Module) -> Algorithm:
    name, _, options = text.partition(":")
    try:
        call = ast.parse(f"f({options})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or not all(
            keyword.arg and isinstance(keyword.value, _VALUES) for keyword in call.keywords
        ):
            raise ValueError(
                "options must be of the form OPTION=VALUE, where a value is a number, a word, True,"
                " False or None"
            )
        named = [(str(keyword.arg), keyword.value) for keyword in call.keywords]
        given: dict[str, Any] = {
            key: value.id if isinstance(value, ast.Name) else ast.literal_eval(value)
            for key, value in named
        }
        if name == "qadam":
            given["q_adam_optimizer"] = QAdamOptimizer(module.parameters())
        return Algorithm.init(name, **given)
    except (SyntaxError, ValueError, TypeError) as error:
        parser.error(f"argument --algorithm: {text!r}: {error}")


def _print(
    ranked: Sequence[Candidate],
    first: Candidate,
    costs: MeasuredMachine,
    verdict: Verdict,
    warnings: Sequence[str],
) -> None:
    cluster = first.plan.cluster
    slow = max(candidate.seconds.high for candidate in ranked) >= 1
    factor, unit = (1.0, "s") if slow else (1e3, "ms")

    def time(*seconds: float) -> str:
        return "-".join(f"{number * factor:,.3g}" for number in seconds)

    rows = [
        (
            candidate.name.replace(":", "\n  ").replace(",", "\n  "),
            time(candidate.seconds.value),
            time(candidate.seconds.low, candidate.seconds.high),
            time(candidate.prediction.exposed),
            candidate.share_of(first),
            readable_bytes(sum(candidate.plan.memory)),
            candidate.same_loss(first),
        )
        for candidate in ranked
    ]
    headers = [
        "algorithm",
        f"step\n({unit})",
        f"interval\n({unit})",
        f"exposed\n({unit})",
        "bytes\nsent",
        "extra\nmemory",
        "time to the\nsame loss",
    ]
    several = len(cluster.nodes) > 1
    print_rows(
        f"A training step of {cluster.n} ranks on {len(cluster.nodes)} node{'s' * several}",
        headers,
        rows,
    )
    print(f"Bytes and times to the same loss are those of {first.name} = 100 %.")
    print(f"Costs: {costs.about or 'measured'}.\n")
    for candidate in ranked:
        print(f"{candidate.name}: {candidate.reason}")
        if candidate.halving is not None:
            rounds, seconds = candidate.halving
            print(
                f"  mixing: ranks' distances from their mean halve within {rounds}"
                f" round{'s' * (rounds != 1)}, {seconds:,.3g} s"
            )
        for text in learnt(candidate.plan.algorithm):
            print(f"  measured: {text}")
    print()
    for text in warnings:
        print(f"warning: {text}")
    print(f"\n{verdict.text}\n\n    {verdict.line}\n\n{verdict.then}")


def _as_json(
    arguments: argparse.Namespace,
    ranked: Sequence[Candidate],
    first: Candidate,
    costs: MeasuredMachine,
    verdict: Verdict,
    warnings: Sequence[str],
) -> dict[str, Any]:
    rows = [
        {
            "algorithm": candidate.name,
            "seconds": list(candidate.seconds),
            "exposed_seconds": candidate.prediction.exposed,
            "communication_seconds": candidate.prediction.communication,
            "bytes_per_step": candidate.sent[0],
            "messages_per_step": candidate.sent[1],
            "extra_memory_bytes": sum(candidate.plan.memory),
            "equal_ranks": candidate.equal_ranks,
            "time_to_same_loss": candidate.same_loss(first),
            "halving": (
                candidate.halving
                and dict(zip(("rounds", "seconds"), candidate.halving, strict=True))
            ),
            "reason": candidate.reason,
            "learnt": learnt(candidate.plan.algorithm),
        }
        for candidate in ranked
    ]
    return {
        "nodes": list(first.plan.cluster.nodes),
        "parameter_bytes": first.plan.nbytes,
        "costs": costs.as_json(),
        "rows": rows,
        "verdict": verdict._asdict(),
        "warnings": list(warnings),
        "picture": None if arguments.png is None else str(arguments.png),
    }


def draw(ranked: Sequence[Candidate], costs: MeasuredMachine, **stragglers: float) -> Any:
    """Return a matplotlib Figure of step times over bandwidth between nodes, and over the number of
    workers.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    machine = costs.machine(**stragglers)
    rate = 8 / machine.links.between.beta if machine.links.between.beta else math.inf
    figure = Figure(figsize=(12.0, 5.0), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    cluster = ranked[0].plan.cluster
    per_node = max(cluster.nodes)
    workers = [per_node * 2**k for k in range(12) if per_node * 2**k <= max(_WORKERS, per_node)]
    for place, candidate in enumerate(ranked):
        style = {
            "color": COLORS[place % len(COLORS)],
            "linestyle": _DASHES[place // len(COLORS) % 2],
            "linewidth": 1.6,
        }
        factors = [2 ** (k / 2) for k in range(-14, 15)]
        times = [
            predict(candidate.plan, with_bandwidth(machine, factor)).seconds for factor in factors
        ]
        left.plot([rate * factor / 1e9 for factor in factors], times, label=candidate.name, **style)
        points = []
        for n in workers:
            try:
                plan = plan_of(
                    candidate.plan.algorithm,
                    candidate.plan.module,
                    Cluster.even(n, n // per_node),
                )
            except ValueError:  # a graph that does not take so many ranks
                continue
            points.append((n, predict(plan, machine).seconds))
        right.plot(*zip(*points, strict=True), **style) if points else None
    left.set_xlabel("bandwidth between nodes, Gbit/s")
    left.set_ylabel("seconds per step")
    right.set_xlabel(f"ranks, {per_node} on each node")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(color="#d5d8dd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    right.set_xticks(workers, [str(n) for n in workers])
    right.xaxis.set_minor_locator(NullLocator())
    figure.legend(
        *left.get_legend_handles_labels(),
        loc="outside right center",
        frameon=False,
        fontsize="small",
    )
    return figure

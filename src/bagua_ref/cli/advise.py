"""``bagua-ref advise``: a prediction, before any training, of the time of a step with each
algorithm on a given network.
"""

from __future__ import annotations

import argparse
import ast
import math
from collections.abc import Sequence
from dataclasses import replace
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
    Parameters,
    StepPlan,
    costs_of_job,
    module_of,
    plan_of,
    predict,
)
from bagua_ref.planning.advice import (
    Candidate,
    changed,
    compare,
    first_of,
    learnt,
    turning_point,
    warnings_of,
)

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
        tables=True,
        examples=(
            "bagua-ref advise --params 340e6 --ranks 16 --bandwidth 1Gbit --compute 120ms",
            "bagua-ref advise --model mycode:make_model --ranks 64 --measured costs.json",
        ),
        help="predict which algorithm trains fastest on a given network",
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
        help="a function that returns the module, which is called without memory",
    )
    model.add_argument(
        "--params",
        type=number(1, 1e12, whole=True),
        metavar="N",
        help="the number of parameters, such as 340e6, in matrices of 1024 x 1024",
    )
    advise.add_argument(
        "--ranks",
        type=number(1, _MOST_WORKERS, whole=True),
        required=True,
        metavar="N",
        help="the number of ranks",
    )
    advise.add_argument(
        "--nodes",
        type=number(1, _MOST_WORKERS, whole=True),
        metavar="N",
        help="the number of nodes (default: one for each rank)",
    )
    advise.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help=(
            "costs that bagua-ref measure wrote; or model.bagua_metrics() of a job, of one rank or"
            " a list of all ranks: it trains with the first --algorithm"
        ),
    )
    advise.add_argument(
        "--bandwidth", metavar="RATE", help="of each node, such as 1Gbit or 100MB a second"
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
        "--codec",
        default="1ms",
        metavar="TIME",
        help="to compress or decompress a million elements (default: %(default)s)",
    )
    advise.add_argument(
        "--error",
        type=number(0, 0.99),
        default=0.1,
        metavar="X",
        help="how far off these may be (default: %(default)s)",
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


def _advise(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        cluster = Cluster.even(arguments.ranks, arguments.nodes or arguments.ranks)
        parameters = Parameters(
            module_of(arguments.params) if arguments.params else _model(arguments.model)
        )
    except (ValueError, TypeError, NotImplementedError) as error:
        parser.error(str(error))
    # On nodes of one rank, hierarchical communication is the same as the other.
    default = [text for text in CANDIDATES if max(cluster.nodes) > 1 or "hierarchical" not in text]
    algorithms = {
        text: _algorithm(parser, text, parameters) for text in arguments.algorithm or default
    }
    plans, warnings = dict[str, StepPlan](), list[str]()
    for text, algorithm in algorithms.items():
        try:
            plans[text] = plan_of(algorithm, parameters, cluster)
        except (ValueError, TypeError) as error:
            warnings.append(f"{text} is left out: {error}")
    if not plans:
        raise CommandError("; ".join(warnings))
    try:
        costs = _costs(arguments, next(iter(plans.values())))
    except ValueError as error:
        parser.error(str(error))
    stragglers = {"slowest": arguments.slowest, "jitter": arguments.jitter}
    ranked = compare(plans, costs, **stragglers)
    likely = costs.machine(**stragglers)
    verdicts = {}
    for who, among in (
        ("of all", ranked),
        ("of those with equal weights on all ranks", [c for c in ranked if c.equal_ranks]),
    ):
        if len(among) > 1:
            verdicts[who] = _verdict(among, likely)
    warnings += warnings_of(ranked)
    if not arguments.json:
        _print(ranked, costs, verdicts, warnings)
    write_picture(lambda: draw(ranked, costs, **stragglers), arguments.png)
    write_json(arguments, _as_json(arguments, ranked, costs, verdicts, warnings))
    return 0


def _costs(arguments: argparse.Namespace, job: StepPlan) -> MeasuredMachine:
    """Return the costs that are measured or given; if they are a job's metrics, ``job`` is the plan
    of its algorithm.
    """

    def given(cost: float) -> Estimate:
        return Estimate.within(cost, arguments.error)

    def link(rate_and_latency: str) -> tuple[Estimate, Estimate]:
        alpha, beta = LinkCosts.parse(rate_and_latency).between
        return given(alpha), given(beta)

    several, inside = len(job.cluster.nodes) > 1, link(arguments.inside)
    between = link(
        f"{'1Gbit' if arguments.bandwidth is None else arguments.bandwidth},{arguments.latency}"
    )
    found = MeasuredMachine(
        None, inside, codec={"": given(parse_seconds(arguments.codec, 0.0) / 1e6)}
    )
    if arguments.measured is not None:
        measured = _measured(arguments.measured)
        if isinstance(measured, MeasuredMachine):
            found = replace(
                measured, inside=measured.inside or inside, codec=measured.codec or found.codec
            )
        else:
            found = costs_of_job(
                measured, job, (between if several else inside)[0], found, arguments.error
            )
    if arguments.compute is not None:
        found.compute = given(parse_seconds(arguments.compute))
    if found.compute is None:
        raise ValueError("argument --compute is needed: the time of a forward and backward pass")
    if arguments.bandwidth is not None:
        found.between = between
    if found.between is None and several:
        raise ValueError("argument --bandwidth is needed, as links between nodes were not measured")
    found.between = found.between or found.inside  # of one node, there are none
    rest = f"what is given or assumed may be off by {arguments.error:.0%}"
    found.about = f"{found.about}; {rest}" if found.about else rest
    return found


def _measured(path: Path) -> Any:
    """Return measured costs from a file, or the JSON of one rank's metrics or of a list of several
    ranks'.
    """
    try:
        value = load_json(path.read_bytes())
        if isinstance(value, dict) and "links" in value:
            return MeasuredMachine.from_json(value)
    except OSError as error:
        raise CommandError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{str(path)!r}: {error}") from None
    if not all(
        isinstance(rank, dict) and "bytes_sent" in rank
        for rank in (value if isinstance(value, list) else [value])
    ):
        raise CommandError(
            f"{str(path)!r} has neither the costs that bagua-ref measure writes, nor what"
            " model.bagua_metrics() returns, of one rank or of a list of ranks"
        )
    return value


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


def _algorithm(parser: argparse.ArgumentParser, text: str, parameters: Parameters) -> Algorithm:
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
            given["q_adam_optimizer"] = QAdamOptimizer(
                [parameter for _, parameter in parameters.named]
            )
        return Algorithm.init(name, **given)
    except (SyntaxError, ValueError, TypeError) as error:
        parser.error(f"argument --algorithm: {text!r}: {error}")


def _verdict(ranked: Sequence[Candidate], likely: Any) -> dict[str, Any]:
    found, turn = first_of(ranked), turning_point(ranked, likely)
    best = ranked[0]
    if found is None:
        near = [other.name for other in ranked[1:] if other.seconds.low <= best.seconds.high]
        text = f"none can be named, as the intervals of {best.name} and {', '.join(near)} overlap"
    else:
        text = f"{best.name}: its interval ends before all others begin"
    if turn is not None:
        what, factor, other = turn
        text += f". {other} would come first if {what} were {factor:.3g} times as large"
    return {"winner": found and found.name, "flip": turn, "text": text}


def _print(
    ranked: Sequence[Candidate], costs: MeasuredMachine, verdicts: Any, warnings: Sequence[str]
) -> None:
    cluster = ranked[0].plan.cluster
    factor, unit = (
        (1e3, "ms") if max(candidate.seconds.high for candidate in ranked) < 1 else (1.0, "s")
    )

    def time(*seconds: float) -> str:
        return "-".join(f"{number * factor:,.3g}" for number in seconds)

    rows = [
        (
            candidate.name.replace(":", "\n  ").replace(",", "\n  "),
            time(candidate.seconds.value),
            time(candidate.seconds.low, candidate.seconds.high),
            time(candidate.prediction.exposed),
            readable_bytes(candidate.sent[0]),
            readable_bytes(sum(candidate.plan.memory())),
        )
        for candidate in ranked
    ]
    headers = [
        "algorithm",
        f"step\n({unit})",
        f"interval\n({unit})",
        f"exposed\n({unit})",
        "sent per\nstep",
        "extra\nmemory",
    ]
    print_rows(f"A training step of {cluster.n} ranks on {len(cluster.nodes)} nodes", headers, rows)
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
            print(f"  learnt: {text}")
    print()
    for who, verdict in verdicts.items():
        print(f"Fastest {who}: {verdict['text']}.")
    for text in warnings:
        print(f"warning: {text}")


def _as_json(
    arguments: argparse.Namespace,
    ranked: Sequence[Candidate],
    costs: MeasuredMachine,
    verdicts: Any,
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
            "extra_memory_bytes": sum(candidate.plan.memory()),
            "equal_ranks": candidate.equal_ranks,
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
        "nodes": list(ranked[0].plan.cluster.nodes),
        "parameter_bytes": ranked[0].plan.parameters.nbytes,
        "costs": costs.as_json(),
        "rows": rows,
        "fastest": verdicts,
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
            predict(candidate.plan, changed(machine, "bandwidth", factor)).seconds
            for factor in factors
        ]
        left.plot([rate * factor / 1e9 for factor in factors], times, label=candidate.name, **style)
        points = []
        for n in workers:
            try:
                plan = plan_of(
                    candidate.plan.algorithm,
                    candidate.plan.parameters,
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

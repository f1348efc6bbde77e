"""``bagua-ref advise``: a prediction, before any training, of the time of a step with each
algorithm on a given network.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from bagua_ref.algorithms import Algorithm, QAdamOptimizer
from bagua_ref.base.untrusted import check_form, load_json
from bagua_ref.base.utils import readable_bytes
from bagua_ref.cli.command import (
    CommandError,
    Commands,
    add_command,
    call_object,
    number,
    print_rows,
    write_json,
)
from bagua_ref.formulas.costs import LinkCost, LinkCosts, parse_seconds
from bagua_ref.planning import Cluster, Machine, StepPlan, module_of, plan_of
from bagua_ref.planning.advice import (
    Candidate,
    Verdict,
    compare,
    error_of,
    learnt,
    parse_algorithm,
    verdict_of,
    warnings_of,
)
from bagua_ref.planning.plans import check_trainable

__all__ = ["CANDIDATES", "add_parser", "devices"]

CANDIDATES = (
    "gradient_allreduce",
    "gradient_allreduce:hierarchical=True",
    "bytegrad",
    "qadam",
    "powersgd:matrix_approximation_rank=4",
    "topk:ratio=0.01",
    "demo:compression='Stat2'",
    "decentralized",
    "decentralized:peer_selection_mode='shift_one'",
    "low_precision_decentralized",
    "local_sgd:period=32",
    "diloco:period=32",
    "diloco:period=32,fragments=4,delay=7,mix=0.5",
    "diloco:period=32,top_k=64,compression='Stat2'",
    "async",
)
"""The algorithms that are compared unless the user names others."""

_MAX_RANKS = 1024
"""An all-to-all of these has a million messages."""
_LINK = [(int, float)] * 2
_COSTS = {
    "between?": _LINK,
    "inside?": _LINK,
    "compute?": (int, float),
    "codec": {str: (int, float)},
    "operation": {str: (int, float)},
    "shared_processor": bool,
    "about": str,
}
"""Form of measured costs: seconds; of a link per message and per byte."""


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
        type=number(1, 1e12, integer=True),
        metavar="N",
        help="number of parameters, such as 124M or 7e9, modelled as 1024 x 1024 matrices",
    )
    advise.add_argument(
        "--ranks",
        type=_cluster,
        required=True,
        metavar="N|NODESxRANKS",
        help="number of ranks, at least 2, each on a node of its own; 2x8: 2 nodes of 8 ranks",
    )
    advise.add_argument(
        "--nodes",
        type=number(1, _MAX_RANKS, integer=True),
        metavar="N",
        help="number of nodes for --ranks N",
    )
    advise.add_argument(
        "--device",
        choices=sorted(devices()),
        default="cpu",
        help="what computes codecs, by measurements of this project (default: %(default)s)",
    )
    for name, default, metavar, text in (
        ("bandwidth", None, "RATE", "of each node, such as 1Gbps or 100MB a second"),
        ("latency", "50us", "TIME", "of a message between nodes"),
        ("inside", "100Gbit,5us", "RATE,TIME", "inside a node"),
        ("compute", None, "TIME", "of a forward and backward pass, such as 120ms"),
    ):
        shown = f"{text} (default: {default})" if default else text
        advise.add_argument(f"--{name}", default=default, metavar=metavar, help=shown)
    advise.add_argument(
        "--measured", type=Path, metavar="FILE", help="costs that bagua-ref measure wrote"
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
        "--algorithm",
        action="append",
        metavar="NAME[:OPTION=VALUE,...]",
        help="compare only these, each in an option of its own",
    )


def devices() -> dict[str, Any]:
    """Return the costs that this project has measured, by device."""
    found: dict[str, Any] = load_json(
        files("bagua_ref.planning").joinpath("devices.json").read_bytes()
    )
    return found


def _cluster(text: str) -> tuple[int, int | None]:
    """Return the number of ranks, and of nodes if ``text`` has both, as in 2x8."""
    nodes, by, ranks = text.lower().partition("x")
    parse = number(1, _MAX_RANKS, integer=True)
    n, known = (parse(nodes) * parse(ranks), parse(nodes)) if by else (parse(text), None)
    if not 2 <= n <= _MAX_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be 2 to {_MAX_RANKS} ranks" + ": a rank alone sends nothing" * (n == 1)
        )
    return n, known


def _advise(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    ranks, nodes = arguments.ranks
    try:
        if nodes is not None and arguments.nodes not in (None, nodes):
            raise ValueError(
                f"--nodes {arguments.nodes} and --ranks {nodes}x{ranks // nodes} differ"
            )
        nodes = nodes or arguments.nodes or ranks
        if nodes > ranks:
            raise ValueError(f"--nodes {nodes} must be at most the number of ranks, {ranks}")
        cluster = Cluster.even(ranks, nodes)
        machine, about = _costs(arguments, nodes > 1)
        module = module_of(arguments.params) if arguments.params else _model(arguments.model)
        check_trainable(module)
        default = [text for text in CANDIDATES if nodes < ranks or "hierarchical" not in text]
        algorithms = {text: _algorithm(text, module) for text in arguments.algorithm or default}
    except (ValueError, TypeError, NotImplementedError) as error:
        parser.error(str(error))
    plans, warnings = dict[str, StepPlan](), list[str]()
    for text, algorithm in algorithms.items():
        try:
            plans[text] = plan_of(algorithm, module, cluster)
        except (ValueError, TypeError) as error:
            warnings.append(f"{text} is left out: {error}")
    if not plans:
        raise CommandError("; ".join(warnings))
    ranked = compare(plans, machine, error_of(machine, arguments.error))
    warnings += warnings_of(ranked)
    first = next(candidate for candidate in ranked if candidate.name == next(iter(plans)))
    verdict = verdict_of(ranked, first)
    if not arguments.json:
        _print(ranked, first, about, verdict, warnings)
    result = {
        "nodes": list(cluster.nodes),
        "parameter_bytes": first.plan.nbytes,
        "costs": {**machine._asdict(), "about": about},
        "rows": [_row(candidate, first) for candidate in ranked],
        "verdict": verdict._asdict(),
        "warnings": warnings,
    }
    write_json(arguments, result)
    return 0


def _costs(arguments: argparse.Namespace, several: bool) -> tuple[Machine, str]:
    """Return the costs, and where they come from; ``several``: there are links between nodes."""
    costs = devices()[arguments.device]
    costs["about"] = f"codecs on {arguments.device}: {costs['about']}"
    costs["inside"] = LinkCosts.parse(arguments.inside).inside
    if arguments.measured is not None:
        measured = _measured(arguments.measured)
        costs |= {name: value for name, value in measured.items() if value not in (None, {})}
    if arguments.bandwidth is not None:
        costs["between"] = LinkCosts.parse(f"{arguments.bandwidth},{arguments.latency}").between
    if arguments.compute is not None:
        costs["compute"] = parse_seconds(arguments.compute)
    if "compute" not in costs:
        raise ValueError("argument --compute is needed: the time of a forward and backward pass")
    if "between" not in costs and several:
        raise ValueError("argument --bandwidth is needed, as links between nodes were not measured")
    inside = LinkCost(*costs["inside"])
    links = LinkCosts(LinkCost(*costs.get("between", inside)), inside)
    shared = costs["shared_processor"]
    machine = Machine(
        links, costs["compute"], 0.0, costs["codec"], costs["operation"], shared, at_once=True
    )
    return machine, costs["about"]


def _measured(path: Path) -> dict[str, Any]:
    try:
        costs: dict[str, Any] = load_json(path.read_bytes())
        check_form(costs, _COSTS, "the measured costs")
        numbers = [costs.get("compute"), *costs["codec"].values(), *costs["operation"].values()]
        numbers += [*(costs.get("between") or ()), *(costs.get("inside") or ())]
        if wrong := [value for value in numbers if value and not 0 < value < math.inf]:
            raise ValueError(f"the measured costs have {wrong[0]}; they must be seconds, from 0 on")
    except OSError as error:
        raise CommandError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{str(path)!r}: {error}") from None
    return costs


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


def _algorithm(text: str, module: torch.nn.Module) -> Algorithm:
    name, values = parse_algorithm(text)
    if name == "qadam":
        values["q_adam_optimizer"] = QAdamOptimizer(module.parameters())
    try:
        return Algorithm.init(name, **values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"argument --algorithm: {error}") from None


def _print(
    ranked: Sequence[Candidate],
    first: Candidate,
    about: str,
    verdict: Verdict,
    warnings: Sequence[str],
) -> None:
    cluster = first.plan.cluster
    slow = max(candidate.high for candidate in ranked) >= 1
    factor, unit = (1.0, "s") if slow else (1e3, "ms")

    def time(*seconds: float) -> str:
        return "-".join(f"{value * factor:,.3g}" for value in seconds)

    rows = [
        (
            candidate.name.replace(":", "\n  ").replace(",", "\n  "),
            time(candidate.seconds),
            time(candidate.low, candidate.high),
            time(candidate.prediction.exposed),
            candidate.share_of(first),
            readable_bytes(sum(candidate.plan.memory)),
            candidate.same_loss(first),
        )
        for candidate in ranked
    ]
    headers = (
        "algorithm",
        f"step\n({unit})",
        f"interval\n({unit})",
        f"waiting\n({unit})",
        "bytes\nsent",
        "extra\nmemory",
        "time to the\nsame loss",
    )
    several = "s" * (len(cluster.nodes) > 1)
    title = f"A training step of {cluster.n} ranks on {len(cluster.nodes)} node{several}"
    print_rows(title, headers, rows)
    print(f"Bytes and times to the same loss are those of {first.name} = 100 %.")
    print(f"Costs: {about}.\n")
    for candidate in ranked:
        print(f"{candidate.name}: {candidate.reason}")
        for text in learnt(candidate.plan.algorithm):
            print(f"  measured: {text}")
    print()
    for text in warnings:
        print(f"warning: {text}")
    print(f"\n{verdict.text}\n\n    {verdict.line}\n\n{verdict.then}")


def _row(candidate: Candidate, first: Candidate) -> dict[str, Any]:
    return {
        "algorithm": candidate.name,
        "seconds": [candidate.low, candidate.seconds, candidate.high],
        "exposed_seconds": candidate.prediction.exposed,
        "communication_seconds": candidate.prediction.communication,
        "bytes_per_step": candidate.sent[0],
        "messages_per_step": candidate.sent[1],
        "extra_memory_bytes": sum(candidate.plan.memory),
        "equal_ranks": candidate.equal_ranks,
        "time_to_same_loss": candidate.same_loss(first),
        "reason": candidate.reason,
        "learnt": learnt(candidate.plan.algorithm),
    }

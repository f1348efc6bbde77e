"""``bagua-ref advise``: predict the time per training step of each algorithm on a given network,
without training.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from bagua_ref.algorithms import Algorithm, GlobalAlgorithmRegistry, QAdamOptimizer
from bagua_ref.base.untrusted import check_form, load_json
from bagua_ref.base.utils import readable_bytes
from bagua_ref.cli.command import CommandError, Outcome, call_object, check_choice, table
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

__all__ = ["candidates", "devices", "run"]

_BASELINE = "gradient_allreduce"
_OPTIONS = {
    _BASELINE: ("", ":hierarchical=True"),
    "powersgd": (":matrix_approximation_rank=4",),
    "topk": (":ratio=0.01",),
    "demo": (":compression='Stat2'",),
    "decentralized": ("", ":peer_selection_mode='shift_one'"),
    "local_sgd": (":period=32",),
    "diloco": (
        ":period=32",
        ":period=32,fragments=4,delay=7,mix=0.5",
        ":period=32,top_k=64,compression='Stat2'",
    ),
}
"""Options with which algorithms are compared; algorithms without an entry use their defaults."""
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
"""Form of measured costs, in seconds; costs of a link are per message and per byte."""


def candidates() -> list[str]:
    """Return the default list of algorithms to compare: all registered ones, the baseline first."""
    names = [_BASELINE, *(name for name in GlobalAlgorithmRegistry if name != _BASELINE)]
    return [name + options for name in names for options in _OPTIONS.get(name, ("",))]


def devices() -> dict[str, Any]:
    """Return the costs measured by this project, by device."""
    found: dict[str, Any] = load_json(
        files("bagua_ref.planning").joinpath("devices.json").read_bytes()
    )
    return found


def run(arguments: Namespace) -> Outcome:
    """Compare the algorithms."""
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
        default = [text for text in candidates() if nodes < ranks or "hierarchical" not in text]
        algorithms = {text: _algorithm(text, module) for text in arguments.algorithm or default}
    except (ValueError, TypeError, NotImplementedError) as error:
        raise CommandError(str(error)) from None
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
    result = {
        "nodes": list(cluster.nodes),
        "parameter_bytes": first.plan.nbytes,
        "costs": {**machine._asdict(), "about": about},
        "rows": [_row(candidate, first) for candidate in ranked],
        "verdict": verdict._asdict(),
        "warnings": warnings,
    }
    return Outcome(_text(ranked, first, about, verdict, warnings), result)


def _costs(arguments: Namespace, several: bool) -> tuple[Machine, str]:
    """Return the costs and their origin; ``several``: whether there are links between nodes."""
    check_choice("--device", [arguments.device], devices())
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


def _text(
    ranked: Sequence[Candidate],
    first: Candidate,
    about: str,
    verdict: Verdict,
    warnings: Sequence[str],
) -> str:
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
    lines = [
        table(title, headers, rows),
        f"Bytes and times to the same loss are those of {first.name} = 100 %.",
        f"Costs: {about}.\n",
    ]
    for candidate in ranked:
        lines.append(f"{candidate.name}: {candidate.reason}")
        lines += [f"  measured: {text}" for text in learnt(candidate.plan.algorithm)]
    lines += ["", *(f"warning: {text}" for text in warnings)]
    return "\n".join([*lines, f"\n{verdict.text}\n\n    {verdict.line}\n\n{verdict.then}"])


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

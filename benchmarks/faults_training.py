"""Faults of ranks, run for real over gloo: what each rank of a training makes of them, and how long
that takes.

    python benchmarks/faults_training.py [--only TEXT] [--quick] [--json PATH]

Each row is a training of 2 ranks with a timeout of 12 s, in which something happens to rank 1,
after three steps if not told otherwise. The faults are in tests/faults.py. The ranks of the last
rows are in two network namespaces joined by a link.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
import zlib
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import common  # beside this file
import namespaces
import torch

sys.path.append(str(Path(__file__).parents[1]))

from tests import faults
from tests.launch import Outcome, outcomes

import bagua_ref
from bagua_ref.errors import CommunicationError

TIMEOUT, LIMIT = 12.0, 60.0
ALGORITHMS = (
    "gradient_allreduce",
    "bytegrad",
    "decentralized",
    "low_precision_decentralized",
    "qadam",
    "async in warm-up",
    "async",
    "local_sgd",
    "diloco",
    "powersgd",
    "topk",
)
FAULTS = {
    "skips a batch before its forward pass": faults.forgets_a_batch,
    "runs a forward pass without backward (rank 0)": faults.looks_at_a_batch,
    "has NaN in its gradients": partial(faults.has_no_number, value=math.nan),
    "has inf in its gradients": partial(faults.has_no_number, value=math.inf),
    "is stopped for 2 s": partial(faults.stops, seconds=2),
    "raises before backward, and goes on": faults.raises_before_backward,
    "raises in backward, and goes on": faults.abandons_a_backward,
    "raises after backward, and goes on": faults.raises_after_backward,
    "skips optimizer.step()": faults.skips_an_optimizer_step,
    "loads another checkpoint than rank 0": faults.loads_another_checkpoint,
    "loads weights alone": faults.loads_other_weights,
    "leaves parameters unused": faults.leaves_a_parameter_unused,
    "freezes a parameter": faults.freezes_a_parameter,
    "comes later than the module's timeout": faults.comes_late,
    "is stopped for longer than the timeout": partial(faults.stops, seconds=TIMEOUT + 3),
    "ends a step early and waits in a barrier": faults.ends_early,
    "ends early, without abort": faults.leaves,
    "destroys its groups": faults.destroys,
    "ends by an exception": faults.ends_by_an_exception,
    "gets Ctrl-C, and goes on": faults.is_interrupted,
    "is killed before init_process_group()": None,
    "is killed before wrapping": None,
    "is killed in the first step": faults.dies_in_backward,
    "is killed between steps": faults.dies,
    "is killed in backward": faults.dies_in_backward,
    "is killed; workers of its DataLoader are busy": partial(
        faults.dies_before_its_children, children=faults.workers
    ),
    "is killed; a process that it forked lives on": partial(
        faults.dies_before_its_children, children=faults.fork
    ),
    "is killed; a process that C forked lives on": partial(
        faults.dies_before_its_children, children=faults.fork_unseen
    ),
    "is killed; workers are busy, over gloo": partial(
        faults.dies_before_its_children, children=faults.workers
    ),
    "is killed; a process of C lives on, over gloo": partial(
        faults.dies_before_its_children, children=faults.fork_unseen
    ),
    "serves the store and is killed (rank 0)": faults.serves_and_dies,
    "loses its link for 5 s": partial(faults.loses_its_link, device=namespaces.DEVICE, seconds=5),
    "loses its link for ever": partial(
        faults.loses_its_link, device=namespaces.DEVICE, seconds=None
    ),
}
LINKS = [fault for fault in FAULTS if "link" in fault]
QUICK = ("skips optimizer.step()", "is killed in backward")
BAD = ("HANGS", "SIGABRT", "WEIGHTS DIFFER", "HIDES IT")
INSIDE = "BAGUA_REF_FAULTS_OF_LINKS"


def train(
    fault: str, algorithm: str, nodes: list[int] | None
) -> tuple[list[str], float, int | None, bool]:
    """Train as one rank.

    Returns:
        Its errors; the seconds from the fault to the end; a checksum of the weights, if all ranks
        must have the same; and whether they are finite.
    """
    rank = int(os.environ["RANK"])
    if nodes is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=namespaces.DEVICE, MASTER_ADDR=namespaces.HOME)
        namespaces.enter(nodes[rank])

    def comes_to(moment: str) -> None:
        if rank == 1 and fault == f"is killed before {moment}":
            os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    try:
        comes_to("init_process_group()")
        if "serves the store" in fault:
            faults.serve_the_store()
        bagua_ref.init_process_group(timeout=TIMEOUT)
        comes_to("wrapping")
        options = {"timeout": 1.0} if "module's timeout" in fault else {}
        training = faults.begin(algorithm, steps=0 if "first step" in fault else 3, **options)
    except CommunicationError as error:
        return [str(error)], time.monotonic() - start, None, True
    start = time.monotonic()
    FAULTS[fault](training)
    if algorithm == "async":
        training.try_to(lambda: training.module.bagua_algorithm.abort(training.module))
    seconds, module = time.monotonic() - start, training.module
    weights = torch.cat([parameter.detach().view(-1) for parameter in module.parameters()])
    checksum = zlib.crc32(weights.numpy()) if module.bagua_algorithm.replicas_are_equal else None
    return training.errors, seconds, checksum, bool(weights.isfinite().all())


def ending(outcome: Outcome) -> str:
    """Return how a rank ended, in a word or two."""
    if outcome.result is not None:
        return "error" if outcome.result[0] else "trains on"
    if outcome.exitcode is None:
        return "HANGS"
    if outcome.exitcode < 0:
        return {-9: "killed", -6: "SIGABRT"}.get(outcome.exitcode, f"signal {-outcome.exitcode}")
    return (
        type(outcome.error).__name__
        if outcome.error is not None
        else f"exits with {outcome.exitcode}"
    )


def row(fault: str, algorithm: str) -> dict[str, Any]:
    """Run one cell of the matrix."""
    has_link = fault in LINKS
    with namespaces.joined(2) if has_link else nullcontext() as nodes:
        shape = (1, 1) if has_link else (2,)
        over_gloo = "over gloo" in fault
        ends = outcomes(
            train,
            2,
            fault,
            algorithm,
            nodes,
            nodes=shape,
            init=False,
            limit=LIMIT,
            over_gloo=over_gloo,
        )
    results = [outcome.result for outcome in ends if outcome.result is not None]
    found = [ending(outcome) for outcome in ends]
    if found == ["trains on"] * 2:
        if len({checksum for _, _, checksum, _ in results}) > 1:
            found = ["WEIGHTS DIFFER"] * 2
        elif "in its gradients" in fault and results[1][3]:  # rank 1's weights are finite
            found = ["HIDES IT"] * 2
    return {
        "part": "training",
        "algorithm": algorithm,
        "fault": fault,
        "outcome": found,
        "seconds": round(max((seconds for _, seconds, _, _ in results), default=0.0), 1),
        "says": next((errors[0] for errors, _, _, _ in results if errors), ""),
    }


def again_in_a_namespace() -> int:
    """Run this program for the faults of links, and return its exit status."""
    try:
        command = namespaces.unshare()
    except namespaces.UnavailableError as error:
        print(f"faults of links were left out: {Path(__file__).name} {error}")
        return 0
    sys.stdout.flush()
    return subprocess.run(
        [*command, sys.executable, *sys.argv], env={**os.environ, INSIDE: "1"}
    ).returncode


def main() -> int:
    args = common.arguments(
        "Faults of ranks.",
        only={
            "default": "",
            "metavar": "TEXT",
            "help": "run the cells with TEXT in '<fault>, <algorithm>'; keep the other rows",
        },
    )
    cells = [
        (fault, algorithm)
        for fault in FAULTS
        for algorithm in ALGORITHMS
        if args.only in f"{fault}, {algorithm}"
    ]
    if args.quick:
        cells = [
            cell
            for cell in cells
            if (cell[0] in QUICK or args.only) and cell[1] == "gradient_allreduce"
        ]
    inside = INSIDE in os.environ
    here, found = [cell for cell in cells if (cell[0] in LINKS) == inside], []
    for cell in here:
        found.append(each := row(*cell))
        print(
            f"{each['fault']:45} {each['algorithm']:28} {each['seconds']:5.1f} s "
            f" {', '.join(each['outcome'])}",
            flush=True,
        )
    path = args.json or (None if args.quick else common.path_of("faults_training"))
    if path is not None and found:
        order = [(fault, algorithm) for fault in FAULTS for algorithm in ALGORITHMS]
        common.merge(path, "faults_training", found, ("fault", "algorithm"), order)
    bad = any(word in each["outcome"] for each in found for word in BAD)
    return int(bad) | (again_in_a_namespace() if len(here) < len(cells) and not inside else 0)


if __name__ == "__main__":
    sys.exit(main())

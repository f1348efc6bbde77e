"""Faults of ranks, run for real over gloo: what each rank of a training makes of them, and how long that takes.

    python benchmarks/faults_training.py [--quick] [--json PATH]

Each row is a training of 2 ranks with a timeout of 12 s, in which something happens to rank 1 after three steps. The faults are in
tests/faults.py.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import common  # beside this file

sys.path.append(str(Path(__file__).parents[1]))

from tests import faults
from tests.launch import Outcome, outcomes

TIMEOUT, LIMIT = 12.0, 45.0
ALGORITHMS = (
    "gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "async in warm-up"
)  # fmt: skip
FAULTS = {
    "skips a batch before its forward pass": faults.forgets_a_batch,
    "runs a forward pass without backward (rank 0)": faults.looks_at_a_batch,
    "has NaN in its gradients": faults.has_a_nan,
    "is stopped for 2 s": partial(faults.stops, seconds=2),
    "raises before backward, and goes on": faults.raises_before_backward,
    "raises in backward, and goes on": faults.abandons_a_backward,
    "skips optimizer.step()": faults.skips_an_optimizer_step,
    "loads another checkpoint than rank 0": faults.loads_another_checkpoint,
    "loads weights alone": faults.loads_other_weights,
    "leaves parameters unused": faults.leaves_a_parameter_unused,
    "comes later than the module's timeout": faults.comes_late,
    "is stopped for longer than the timeout": partial(faults.stops, seconds=TIMEOUT + 3),
    "ends a step early and waits in a barrier": faults.ends_early,
    "ends early": faults.leaves,
    "destroys its groups": faults.destroys,
    "ends by an exception": faults.ends_by_an_exception,
    "gets Ctrl-C, and goes on": faults.is_interrupted,
    "is killed between steps": faults.dies,
    "is killed in backward": faults.dies_in_backward,
}
QUICK = ("skips optimizer.step()", "is killed in backward")


def train(algorithm: str, fault: str) -> tuple[list[str], float]:
    """Return this rank's errors, and the seconds from the fault to the end."""
    training = faults.begin(algorithm, **({"timeout": 1.0} if "module's timeout" in fault else {}))
    start = time.monotonic()
    FAULTS[fault](training)
    return training.errors, time.monotonic() - start


def ending(outcome: Outcome) -> str:
    """Return how a rank ended, in a word or two."""
    if outcome.result is not None:
        errors, _ = outcome.result
        return "error" if errors else "trains on"
    if outcome.exitcode is None:
        return "HANGS"
    if outcome.exitcode < 0:
        return {-9: "killed", -6: "SIGABRT"}.get(outcome.exitcode, f"signal {-outcome.exitcode}")
    return type(outcome.error).__name__


def row(algorithm: str, fault: str) -> dict[str, Any]:
    """Run one cell of the matrix."""
    ends = outcomes(train, 2, algorithm, fault, collective_timeout=TIMEOUT, limit=LIMIT)
    results = [outcome.result for outcome in ends if outcome.result is not None]
    return {
        "part": "training",
        "algorithm": algorithm,
        "fault": fault,
        "outcome": [ending(outcome) for outcome in ends],
        "seconds": round(max((seconds for _, seconds in results), default=0.0), 1),
        "says": next((errors[0] for errors, _ in results if errors), ""),
    }


def main() -> int:
    args = common.arguments("Faults of ranks.")
    cells = [(algorithm, fault) for fault in FAULTS for algorithm in ALGORITHMS]
    if args.quick:
        cells = [(algorithm, fault) for algorithm, fault in cells if fault in QUICK and algorithm == "gradient_allreduce"]
    found = []
    for cell in cells:
        found.append(each := row(*cell))
        print(f"{each['fault']:42} {each['algorithm']:28} {each['seconds']:5.1f} s  {', '.join(each['outcome'])}", flush=True)
    path = args.json or (None if args.quick else common.path_of("faults_training"))
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(any("HANGS" in each["outcome"] or "SIGABRT" in each["outcome"] for each in found))


if __name__ == "__main__":
    sys.exit(main())

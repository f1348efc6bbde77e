"""The cost of recording: the digits network trained on 2 processes over gloo with and without a
Recorder, in the same run.

Each rank writes the input and the output of its bucket, 2 x 38,282 float32 per step. Blocks of
steps alternate: without recording, with it, and with it at every 10th step.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import common
import torch
import workers
from torch.nn.functional import cross_entropy

import bagua_ref
from bagua_ref.cli.demo import RECIPES, Digits, Settings, make_model, make_optimizer
from bagua_ref.conformance.trace import Recorder

ALGORITHMS = ("gradient_allreduce", "bytegrad")
PROCESSES, STEPS = 2, 20
KINDS = {"without": None, "recorded": 1, "every 10th": 10}


def measure(folder: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds per step of each algorithm and kind, and the bytes per
    recorded step, on this rank.
    """
    digits, settings = Digits.load(), Settings(ranks=PROCESSES, epochs=1)
    batches = list(digits.batches(settings, bagua_ref.get_rank(), PROCESSES))[:STEPS]
    found: dict[str, dict[str, float]] = {}
    for name in ALGORITHMS:
        torch.manual_seed(0)
        model = make_model()
        optimizer = make_optimizer(name, model.parameters())
        RECIPES[name].wrap(model, [optimizer])
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        size = 0.0
        for turn in range(rounds + 1):
            for kind, every in KINDS.items():
                directory = Path(folder) / f"{name}-{every}-{turn}"
                workers.barrier()
                with Recorder(directory, every=every) if every else nullcontext() as recorder:
                    start = time.perf_counter()
                    for images, labels in batches:
                        optimizer.zero_grad()
                        cross_entropy(model(images), labels).backward()
                        optimizer.step()
                    if recorder is not None:
                        recorder.step()  # the last one is written, too
                    seconds = time.perf_counter() - start
                if turn:  # the first warms up
                    times[kind].append(1e3 * seconds / STEPS)
                if every == 1:
                    size = recorder.bytes_written / recorder.steps_written
                shutil.rmtree(directory / f"rank{bagua_ref.get_rank()}", ignore_errors=True)
        found[name] = {
            **{kind: statistics.median(values) for kind, values in times.items()},
            "bytes": size,
        }
    return found


def main() -> int:
    args = common.arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        found = workers.launch(measure, PROCESSES, folder, 2 if args.quick else 15)[0]
    rows = []
    for name, medians in found.items():
        extra = {"bytes per recorded step and rank": medians["bytes"]}
        for kind in ("recorded", "every 10th"):
            rows.append(
                common.Row(
                    f"{name}, {kind}",
                    "ms a step",
                    medians[kind],
                    {"without": medians["without"]},
                    "without",
                    extra=extra,
                )
            )
        print(f"{name}: {medians['bytes']:,.0f} bytes per recorded step and rank")
    return common.report("trace_overhead", rows, args)


if __name__ == "__main__":
    sys.exit(main())

"""Test accuracy of gradients that are sent in fewer bytes, against `gradient_allreduce` on the same
samples, paired over 10 seeds.

    python benchmarks/learning_compressed.py [--quick] [--json PATH]

The training is that of `learning.py`. The bar: the mean over seeds is at most 0.5 points below that
of `gradient_allreduce`.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import common
import workers
from learning import EPOCHS, PROCESSES, accuracies

import bagua_ref
from bagua_ref.cli.demo import RECIPES
from bagua_ref.data_parallel.wrapping import Recipe

BASELINE = "gradient_allreduce"


def _codec(name: str, error_feedback: bool) -> Recipe:
    return Recipe(
        "bytegrad",
        {"hierarchical": False, "compression": name, "error_feedback": error_feedback},
        __name__,
    )


def _sparseloco(**options: Any) -> Recipe:
    return Recipe("diloco", {"period": 8, "top_k": 64, "compression": "Stat2", **options}, __name__)


CONTENDERS: dict[str, Recipe] = {
    BASELINE: RECIPES[BASELINE],
    "bytegrad": RECIPES["bytegrad"],
    **{
        f"bytegrad, {codec}, error memory": _codec(codec, True)
        for codec in ("MXFP8", "MXINT8", "MXFP4", "OneBit")
    },
    "bytegrad, MXFP4": _codec("MXFP4", False),
    "powersgd, rank 1": Recipe(
        "powersgd", {"matrix_approximation_rank": 1, "warmup_steps": 10}, __name__
    ),
    "powersgd, rank 4": Recipe(
        "powersgd", {"matrix_approximation_rank": 4, "warmup_steps": 10}, __name__
    ),
    "topk, 1 %": Recipe("topk", {"ratio": 0.01, "warmup_steps": 10}, __name__),
    "topk, 5 %": Recipe("topk", {"ratio": 0.05, "warmup_steps": 10}, __name__),
    "diloco": Recipe("diloco", {"period": 8}, __name__),
    "sparseloco": _sparseloco(),
    "sparseloco, contributors": _sparseloco(mean="contributors"),
    "demo": RECIPES["demo"],
    "demo, Stat2": Recipe("demo", {"compression": "Stat2"}, __name__),
}
JUDGED = (
    "bytegrad, MXFP4, error memory",
    "bytegrad, OneBit, error memory",
    "powersgd, rank 4",
    "topk, 1 %",
)


def measure(epochs: int, seeds: list[int], only: str) -> dict[str, list[list[float]]]:
    """Return the accuracies of the baseline and of contenders with ``only`` in their name, for each
    seed one after each epoch. All ranks end with the same weights, or global weights.
    """
    result = {}
    for name, recipe in CONTENDERS.items():
        if only not in name and name != BASELINE:
            continue
        kind = name.partition(",")[0]
        result[name] = [accuracies(kind, recipe, seed, epochs, shared=True) for seed in seeds]
        if bagua_ref.get_rank() == 0:
            print(f"{name}: {statistics.mean(seed[-1] for seed in result[name]):.2f} %", flush=True)
    return result


def rows(found: dict[str, list[list[float]]]) -> list[common.Row]:
    """Return one row for each contender, with the mean of its differences to the baseline and their
    standard error.
    """
    last = {name: [seed[-1] for seed in seeds] for name, seeds in found.items()}
    base = statistics.mean(last[BASELINE])
    bar = common.at_least((base - 0.5) / base)
    result = []
    for name, mine in last.items():
        differences = [ours - theirs for ours, theirs in zip(mine, last[BASELINE], strict=True)]
        error = (
            statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        )
        curve = [statistics.mean(epoch) for epoch in zip(*found[name], strict=True)]
        extra: dict[str, Any] = {
            "seeds": mine,
            "curve": curve,
            "difference": statistics.mean(differences),
            "standard_error": error,
        }
        limit = bar if name in JUDGED else common.NO_LIMIT
        result.append(
            common.Row(name, "%", statistics.mean(mine), {BASELINE: base}, BASELINE, limit, extra)
        )
    return result


def main() -> int:
    options = {
        "only": {"default": "", "metavar": "TEXT", "help": "those with TEXT in their name"},
        "seeds": {"type": int, "nargs": "+", "default": [*range(10)], "metavar": "SEED"},
    }
    args = common.arguments(__doc__.partition("\n\n")[0], **options)
    epochs, seeds = (1, [0]) if args.quick else (EPOCHS, args.seeds)
    ranks = workers.launch(measure, PROCESSES, epochs, seeds, args.only)
    assert all(rank == ranks[0] for rank in ranks), "ranks ended with different weights"
    return common.report("learning_compressed", rows(ranks[0]), args)


if __name__ == "__main__":
    sys.exit(main())

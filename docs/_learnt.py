"""What `bagua-ref advise` quotes of what was learnt in our benchmarks: ``python
docs/_learnt.py``.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from common import load  # noqa: E402
from time_to_quality import judged  # noqa: E402

DATA = ROOT / "src" / "bagua_ref" / "planning" / "learnt.json"
_PLAIN = {"compression": "MinMaxUInt8", "error_feedback": False}
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bytegrad": ("ByteGradAlgorithm", _PLAIN),
    "bytegrad, MXFP4": ("ByteGradAlgorithm", {"compression": "MXFP4", "error_feedback": False}),
    **{
        f"bytegrad, {codec}, error memory": (
            "ByteGradAlgorithm",
            {"compression": codec, "error_feedback": True},
        )
        for codec in ("MXFP8", "MXINT8", "MXFP4", "OneBit")
    },
    **{
        f"powersgd, rank {rank}": (
            "PowerSGDAlgorithm",
            {"matrix_approximation_rank": rank, "memory": "local"},
        )
        for rank in (1, 4)
    },
    **{
        f"topk, {ratio:.0%}".replace("%", " %"): (
            "TopKAlgorithm",
            {"ratio": ratio, "error_feedback": True},
        )
        for ratio in (0.01, 0.05)
    },
}
LEARNING: dict[str, tuple[str, dict[str, Any]]] = {
    "decentralized": (
        "DecentralizedAlgorithm",
        {"peer_selection_mode": "all", "communication_interval": 1},
    ),
    "low_precision_decentralized": (
        "LowPrecisionDecentralizedAlgorithm",
        {"compression": "MinMaxUInt8", "communication_interval": 1},
    ),
    "qadam": ("QAdamAlgorithm", _PLAIN),
    "async": ("AsyncModelAverageAlgorithm", {"sync_interval_ms": 50}),
}
PERIODIC: dict[str, tuple[str, dict[str, Any]]] = {
    "local_sgd": ("LocalSGDAlgorithm", {"period": 32, "hierarchical": False}),
    "diloco": ("DiLoCoAlgorithm", {"period": 32, "fragments": 1, "compression": None}),
    "diloco, streaming": (
        "DiLoCoAlgorithm",
        {"period": 32, "fragments": 4, "delay": 7, "mix": 0.5, "compression": None},
    ),
}


def rows() -> list[dict[str, Any]]:
    """Return the sentences, with the algorithm's class and the options for which they hold."""
    found = []
    for row in load("learning_compressed")["rows"]:
        if row["work"] in COMPRESSED:
            text = (
                f"{row['difference']:+.2f} ± {row['standard_error']:.2f} points of accuracy on"
                " digits against gradient_allreduce"
            )
            found.append(
                (
                    COMPRESSED[row["work"]],
                    f"{text} ({len(row['seeds'])} seeds, learning_compressed.json)",
                )
            )
    learning = {row["work"]: row for row in load("learning")["rows"]}
    for name, about in LEARNING.items():
        own, base = (
            statistics.mean(learning[work]["seeds"]) for work in (name, "gradient_allreduce")
        )
        found.append(
            (
                about,
                (
                    f"{own:.2f} % accuracy on digits, gradient_allreduce {base:.2f} % (5 seeds,"
                    " learning.json)"
                ),
            )
        )
    quality = [
        row for row in judged(load("time_to_quality")) if row.extra.get("task") == "language model"
    ]
    times = {(row.extra["contender"], row.extra["link"]): row for row in quality}
    for name, about in PERIODIC.items():
        steps = {
            who: times[who, "10 Mbit/s"].extra["steps"] for who in (name, "gradient_allreduce")
        }
        own, base = steps[name], steps["gradient_allreduce"]
        text = (
            f"a small language model took {own} steps, with gradient_allreduce {base}, to the same"
            " loss"
        )
        found.append((about, f"{text} (4 ranks, period 32, time_to_quality.json)"))
    return [
        {"algorithm": algorithm, "options": options, "text": text}
        for (algorithm, options), text in found
    ]


def data() -> str:
    """Return the file's text."""
    return json.dumps(rows(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    DATA.write_text(data(), encoding="utf-8")

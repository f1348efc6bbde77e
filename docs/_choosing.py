"""The page "What to choose", from what the benchmarks have written: ``python docs/_choosing.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from slow_link import AT_INTERVALS, EVERY_STEP, FASTER, LINKS  # noqa: E402

PAGE = ROOT / "docs" / "choosing.md"
WITH = ("torch", "torchft-nightly", "decent-dp")
SHOWN = {  # what slow_link.py calls it -> what learning_compressed.py calls it
    "gradient_allreduce": "gradient_allreduce",
    "bytegrad": "bytegrad",
    "bytegrad, MXFP8": "bytegrad, MXFP8, error memory",
    "bytegrad, MXFP4": "bytegrad, MXFP4, error memory",
    "bytegrad, OneBit": "bytegrad, OneBit, error memory",
    "powersgd": "powersgd, rank 1",
    "powersgd, rank 4": "powersgd, rank 4",
    "topk, 1 %": "topk, 1 %",
    "qadam": None,
    "decentralized": None,
    "low_precision_decentralized": None,
    "async": None,
    "local_sgd": None,
    "diloco": None,
    "diloco, streaming": None,
}
_PAGE = """\
# What to choose

Milliseconds per training step of two processes, for a perceptron with 6.5 million parameters, whose gradients fill 26 MB; each
process is behind a link of its own. "Learns" is the difference in test accuracy to `gradient_allreduce` after the same samples of
the digits, in percentage points: the mean of {seeds} seeds and its standard error. The named codecs of `bytegrad` have error memory
here; [What they learn](learning.md#gradients-in-fewer-bytes) has more. `local_sgd` and `diloco` exchange once in 32 steps,
"streaming" in 4 fragments with `delay=7`.

| algorithm | MB sent per step | {links} | learns |
|---|---|{rules}---|
{rows}

- **Is the link fast enough?** Compare your seconds per step with one process and with all. If they are about equal, keep
  [`gradient_allreduce`](algorithms/gradient_allreduce.md).
- **All ranks must have equal weights, with any optimizer**: take [`bytegrad`](algorithms/bytegrad.md) first. It needs no tuning.
  On slower links [`powersgd`](algorithms/powersgd.md) sends least; it needs large matrices, and one copy of the weights in memory.
- **You train with Adam**: [`qadam`](algorithms/qadam.md) compresses the momentum, which changes less than gradients do.
- **Ranks may differ between exchanges**: [`diloco`](algorithms/diloco.md) on very slow links, streaming where the link should be
  busy all the time. How its loss falls over seconds is in [Time to quality](time-to-quality.md); of the others, what is learnt is
  in [What they learn](learning.md).
- **Some ranks are slower than others**: [`async`](algorithms/async.md).

## Against peers

How many times as fast as the better of its peers an algorithm is, where there is a target.

| algorithm | link | ms per step | bytes alone | peer | times as fast | target |
|---|---|---|---|---|---|---|
{targets}

Made by `python benchmarks/slow_link.py`, `python benchmarks/learning_compressed.py` and `python docs/_choosing.py`, on {dates},
with {versions}, on a virtual machine with 2 cores.
"""


def load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def page() -> str:
    """Return the page's text."""
    steps, learning = load("slow_link"), load("learning_compressed")
    times = {(row["contender"], row["link"]): row for row in steps["rows"]}
    versions = {name: version for run in steps["runs"] for name, version in run["versions"].items()}
    learnt = {row["work"]: row for row in learning["rows"]}

    def cells(name: str) -> str:
        found = [times[name, link] for link in LINKS]
        sent = sorted(row["bytes_per_step"] / 1e6 for row in found)[len(found) // 2]
        return " | ".join([f"{sent:.3g}", *(f"{row['ours']:,.0f}" for row in found)])

    peers = [name for name in (*EVERY_STEP, *AT_INTERVALS) if name not in SHOWN]
    rows = [f"| {name} | {cells(name)} | - |" for name in peers]
    for name, other in SHOWN.items():
        first, comma, rest = name.partition(", ")
        row = learnt[other] if other is not None and other != "gradient_allreduce" else None
        text = "-" if row is None else f"{row['difference']:+.2f} ± {row['standard_error']:.2f}"
        rows.append(f"| [`{first}`](algorithms/{first}.md){comma}{rest} | {cells(name)} | {text} |")
    targets = []
    for link in LINKS:
        for name in FASTER[link]:
            row, target = times[name, link], f"{FASTER[link][name][0]:g}"
            peer, peers_time = row["against"], row["peers"][row["against"]]
            targets.append(
                f"| {name} | {link} | {row['ours']:,.0f} | {row['limit_ms']:,.0f} | {peer}, {peers_time:,.0f} ms "
                f"| {1 / row['ratio']:.2f} | {target if row['kept'] else f'{target}, **missed**'} |"
            )
    return _PAGE.format(
        seeds=len(learning["rows"][0]["seeds"]), links=" | ".join(LINKS), rules="---|" * len(LINKS),
        rows="\n".join(rows), targets="\n".join(targets), versions=", ".join(f"{name} {versions[name]}" for name in WITH),
        dates=" and ".join(sorted({result["date"][:10] for result in (*steps["runs"], learning)})),
    )  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

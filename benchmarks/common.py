"""What all benchmarks share: alternating runs, one table, the same as JSON.

args = common.arguments("What is measured.")
medians = common.alternate({"ours": f, "copy": g}, rounds=7)
rows = [common.Row("compress", "ms", 1e3 * medians["ours"], {"copy": 1e3 * medians["copy"]}, "copy",
common.at_most(5.0))] sys.exit(common.report("codec", rows, args))
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import bagua_ref

PACKAGES = (
    "torch",
    "numpy",
    "ml_dtypes",
    "redis",
    "hiredis",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "torchft",
    "decent-dp",
    "transformers",
    "lhotse",
)
PEERS = {"torchft-nightly": "torchft", "decent-dp": "Decent-DP"}
"""Packages that only contenders of these names need."""


@dataclass(frozen=True)
class Limit:
    """What the ratio must keep to; none: it is only shown."""

    kind: str = ""
    value: float = 0.0

    def holds(self, ratio: float) -> bool:
        return not self.kind or (
            ratio <= self.value if self.kind == "at most" else ratio >= self.value
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g}" if self.kind else "-"


NO_LIMIT = Limit()


def at_most(value: float) -> Limit:
    return Limit("at most", value)


def at_least(value: float) -> Limit:
    return Limit("at least", value)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    ``ours`` and ``peers`` are in ``unit`` (times or rates); the ratio is ours / peers[against].
    """

    work: str
    unit: str
    ours: float
    peers: dict[str, float]
    against: str
    limit: Limit = NO_LIMIT
    extra: dict[str, object] = field(default_factory=dict)
    """Goes into the JSON only."""
    paired: float | None = None
    """The median of the ratios of each round, if they were taken; less of a busy machine is in it
    than in medians' ratio.
    """

    @property
    def ratio(self) -> float:
        return self.ours / self.peers[self.against] if self.paired is None else self.paired


def arguments(description: str, **options: dict) -> argparse.Namespace:
    """Parse ``--quick``, ``--json PATH`` and further options: name -> keyword arguments of
    `add_argument`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: small, and no limit is judged"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help="where to write the same as JSON; default: benchmarks/results/, for full runs",
    )
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    args = parser.parse_args()
    args.in_part = any(
        getattr(args, name.replace("-", "_")) != parser.get_default(name.replace("-", "_"))
        for name in options
    )
    return args


def alternate(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return each function's median time in seconds; they take turns, so that a busy moment of the
    machine hits them all.
    """
    for function in functions.values():
        function()  # touches memory, fills caches and pools
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, object]:
    """Return what a reader needs to judge the numbers."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return {
        "system": system,
        "cpu": (named or [platform.processor() or platform.machine()])[0],
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "bagua_ref": bagua_ref.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def circumstances() -> dict[str, object]:
    """Return when and where something was measured."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
    }


def number(value: float) -> str:
    """Return three significant digits, whole from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def measured(result: dict[str, Any]) -> str:
    """Return when, where and with which versions a result was measured; of several runs, with how
    many rows each.
    """
    contenders = " ".join({row.get("contender", "") for row in result["rows"]})
    packages = ["torch", *(package for package, peer in PEERS.items() if peer in contenders)]

    def run(about: dict[str, Any]) -> str:
        machine, found = about["machine"], about["versions"]
        where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
        return ", ".join(
            [
                about["date"][:10],
                where,
                *(f"{name} {found[name]}" for name in packages if name in found),
            ]
        )

    if "runs" not in result:
        return f"Measured: {run(result)}."
    counts = Counter(run(result["runs"][row["run"]]) for row in result["rows"])
    shares = [
        f"{count} of {len(result['rows'])} rows " * (len(counts) > 1) + text
        for text, count in counts.items()
    ]
    return f"Measured: {'; '.join(shares)}."


def path_of(name: str) -> Path:
    """Return where full runs of the benchmark ``name`` write their JSON."""
    return Path(__file__).parent / "results" / f"{name}.json"


def load(name: str) -> Any:
    """Return what the last full run of the benchmark ``name`` has written."""
    return json.loads(path_of(name).read_text(encoding="utf-8"))


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row.peers))
    lines = [["work", "unit", "ours", *peers, "limit", "ratio"]]
    for row in rows:
        values = [f"{row.peers[peer]:.4g}" if peer in row.peers else "-" for peer in peers]
        verdict = "" if row.limit.holds(row.ratio) else "  MISSED"
        limit = f"{row.limit} x {row.against}" if row.limit.kind else "-"
        lines.append(
            [
                row.work,
                row.unit,
                f"{row.ours:.4g}",
                *values,
                limit,
                f"{row.ratio:.2f} x {row.against}{verdict}",
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def as_json(row: Row) -> dict[str, Any]:
    return {
        "work": row.work,
        "unit": row.unit,
        "ours": row.ours,
        "peers": row.peers,
        "against": row.against,
        "limit": str(row.limit),
        "ratio": row.ratio,
        "kept": row.limit.holds(row.ratio),
        **row.extra,
    }


def report(name: str, rows: Sequence[Row], args: argparse.Namespace) -> int:
    """Print the table, write the JSON, and return the exit status: 1 if a limit was missed in a
    full run.
    """
    show(rows)
    # committed results are of whole runs
    path = args.json or (None if args.quick or args.in_part else path_of(name))
    if path is not None:
        result = {
            "benchmark": name,
            "quick": args.quick,
            **circumstances(),
            "rows": list(map(as_json, rows)),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if args.quick else int(any(not row.limit.holds(row.ratio) for row in rows))


ONLY = {
    "default": "",
    "metavar": "TEXT",
    "help": "measure the rows with TEXT in their name again; keep the others",
}
"""The option ``--only`` of benchmarks whose results are merged."""


def keep(
    name: str,
    rows: Sequence[Row],
    args: argparse.Namespace,
    key: Sequence[str],
    order: Sequence[tuple[Any, ...]],
) -> list[dict[str, Any]]:
    """Merge rows that were measured into the benchmark's JSON, unless the run is a quick one, and
    return all that it has then.

    Args:
        name: the benchmark's.
        rows: what was measured now.
        args: of `arguments`; ``--json`` names another file.
        key: the entries that tell rows apart.
        order: their values for each row that there may be.
    """
    found = list(map(as_json, rows))
    path = args.json or (None if args.quick else path_of(name))
    if path is None:
        return found
    merge(path, name, found, key, order)
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"])


def merge(
    path: Path,
    name: str,
    rows: Sequence[dict[str, Any]],
    key: Sequence[str],
    order: Sequence[tuple[Any, ...]],
) -> None:
    """Write ``rows``; others that the file has stay as they are, with the run that they come from.

    Args:
        path: of the JSON file.
        name: the benchmark's.
        rows: what was measured now.
        key: the entries that tell rows apart.
        order: their values for each row that there may be.
    """
    runs, known = [], {}
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        runs = earlier["runs"]
        known = {tuple(row[part] for part in key): row for row in earlier["rows"]}
    runs.append(circumstances())
    known.update({tuple(row[part] for part in key): {**row, "run": len(runs) - 1} for row in rows})
    kept = [known[place] for place in order if place in known]
    used = sorted({row["run"] for row in kept})
    for row in kept:
        row["run"] = used.index(row["run"])
    result = {"benchmark": name, "runs": [runs[number] for number in used], "rows": []}
    lines = ",\n".join(f"    {json.dumps(row)}" for row in kept)  # a curve has hundreds of numbers
    path.write_text(
        json.dumps(result, indent=2).replace('"rows": []', f'"rows": [\n{lines}\n  ]') + "\n",
        encoding="utf-8",
    )

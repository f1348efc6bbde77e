"""Runs of all checks on what is right: ``python tests/meta/false_alarms.py`` adds those that its log does not have yet.

Nothing may be found, whatever the seed: 20 seeds of the quick profile and one of the full on the reference, 5 and one on the CUDA
sources under emulation. The log is tests/meta/false_alarms.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOG = Path(__file__).with_suffix(".json")
BACKENDS = {"reference": None, "cuda-emulated": ("kernels", "codec", "comm_ops", "algorithms")}
"""Name -> the suites that its kernels take part in; None: all."""
PLAN = [
    *(("reference", "quick", seed) for seed in range(20)),
    *(("cuda-emulated", "quick", seed) for seed in range(5)),
    ("reference", "full", 0),
    ("cuda-emulated", "full", 0),
]


def run(backend: str, profile: str, seed: int, jobs: int) -> dict[str, Any]:
    """Return the row of one run: what was found, per suite how many checks passed, how long it took."""
    from tests.cuda_emulation.backend import EmulatedBackend

    from bagua_ref.conformance import run_conformance
    from bagua_ref.conformance.reference_target import ReferenceTarget

    target = ReferenceTarget()
    if backend == "cuda-emulated":
        target.kernels = EmulatedBackend()
        target.name = backend
    report = run_conformance(target, BACKENDS[backend], profile, seed=seed, jobs=jobs, time_limit=600)
    passed: dict[str, int] = {}
    for result in report.results:
        passed[result.suite] = passed.get(result.suite, 0) + (result.status == "passed")
    return {
        "backend": backend,
        "profile": profile,
        "seed": seed,
        "passed": {suite: count for suite, count in passed.items() if count},
        "skipped": {result.id: result.message for result in report.results if result.status == "skipped"},
        "found": {result.id: result.message for result in report.failures()},
        "inputs": sum(result.examples for result in report.results),
        "seconds": round(report.seconds, 1),
        "jobs": jobs,
        "versions": report.versions,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--most", type=int, default=len(PLAN), help="stop after so many runs")
    parser.add_argument("--profile", choices=("quick", "full"), help="only runs of this profile")
    arguments = parser.parse_args()
    rows = json.loads(LOG.read_text()) if LOG.exists() else []
    done = {(row["backend"], row["profile"], row["seed"]) for row in rows}
    missing = [entry for entry in PLAN if entry not in done and arguments.profile in (None, entry[1])]
    for entry in missing[: arguments.most]:
        row = run(*entry, arguments.jobs)
        rows.append(row)
        rows.sort(key=lambda row: PLAN.index((row["backend"], row["profile"], row["seed"])))
        LOG.write_text(json.dumps(rows, indent=1) + "\n")
        print(*entry, f"{sum(row['passed'].values())} passed, {len(row['found'])} found, {row['seconds']} s", flush=True)
    return any(row["found"] for row in rows)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    raise SystemExit(main())

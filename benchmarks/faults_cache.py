"""Faults of the cache's servers, run for real: what training makes of each, and how long the epoch
takes.

    python benchmarks/faults_cache.py [--quick] [--json PATH]

Each row is an epoch of 64 samples in batches of 8, with the default timeout of 5 s. The faults are
in tests/cache_faults.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import common  # beside this file

sys.path.append(str(Path(__file__).parents[1]))

from tests.cache_faults import FAULTS, SLOW


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """Run all faults, or those that take less than 2 s, and return a row for each."""
    found = []
    for name, run in FAULTS.items():
        if not (quick and name in SLOW):
            report = run()
            found.append(
                {
                    "part": "cache",
                    "fault": name,
                    "outcome": report.outcome,
                    "seconds": round(report.seconds, 2),
                    "survived": report.survived,
                }
            )
    return found


def main() -> int:
    args = common.arguments("Faults of the cache's servers.")
    found = rows(args.quick)
    width = max(len(row["fault"]) for row in found)
    for row in found:
        print(f"{row['fault']:{width}}  {row['seconds']:6.2f} s  {row['outcome']}")
    path = args.json or (None if args.quick else common.path_of("faults_cache"))
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(not all(row["survived"] for row in found))


if __name__ == "__main__":
    sys.exit(main())

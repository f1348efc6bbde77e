"""Runner of the findings: ``python -m findings [--check] [NAME ...]``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from findings.common import missing

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__main__", "common"))
KEY = ("implementation", "clause", "case", "verdict")


def rows_of(name: str) -> list[dict[str, str]]:
    """Return the rows of a finding's script; none, with a message, if its peer is missing."""
    script = importlib.import_module(f"findings.{name}")
    if reason := missing(script.PEER):
        print(f"{name}: skipped: {reason}")
        return []
    rows = [asdict(row) for row in script.find()]
    for row in rows:
        print(
            f"{name}: {row['implementation']}, {row['clause']}, {row['case']}: {row['verdict']}."
            f" {row['complaint']}",
            flush=True,
        )
    return rows


def disagreements(name: str, rows: list[dict[str, str]]) -> list[str]:
    """Return in which verdicts the rows differ from the committed ones."""
    committed = {
        tuple(row[key] for key in KEY) for row in json.loads(RESULTS.read_text()).get(name, [])
    }
    found = {tuple(row[key] for key in KEY) for row in rows}
    return [
        f"{name}: {', '.join(row)}:"
        f" {'not among the committed ones' if row in found else 'committed, but not found now'}"
        for row in sorted(committed ^ found)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with results.json instead of writing it; no peer may be missing",
    )
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wrong: list[str] = []
    for name in arguments.names or NAMES:
        rows = rows_of(name)
        if arguments.check:
            wrong += disagreements(name, rows)
        elif rows:
            results[name] = rows
    if not arguments.check:
        # those of scripts that are gone are left out
        kept = {name: results[name] for name in NAMES if name in results}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Log of runs of all checks on correct targets: ``python tests/meta/false_alarms.py`` adds missing and outdated rows.

No run may find a failure: 20 seeds of the quick profile and one of the full profile on the reference, 5 and one on the emulated
CUDA sources. The log is tests/meta/false_alarms.json. ``--check`` runs nothing; it says whether the log is of the current checks,
and what has changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOG = Path(__file__).with_suffix(".json")
SOURCES = "src/bagua_ref/conformance"
BACKENDS = {"reference": None, "cuda-emulated": ("kernels", "codec", "comm_ops", "algorithms")}
"""Name -> the suites that use its kernels; None: all."""
PLAN = [
    *(("reference", "quick", seed) for seed in range(20)),
    *(("cuda-emulated", "quick", seed) for seed in range(5)),
    ("reference", "full", 0),
    ("cuda-emulated", "full", 0),
]


def fingerprint(root: Path = ROOT) -> str:
    """Return a hash of the checks' sources, by which a row identifies them."""
    files = sorted((root / SOURCES).rglob("*.py"))
    content = [(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in files]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def git(*arguments: str, root: Path = ROOT) -> str:
    """Return git's output; empty without a repository or such a commit."""
    try:
        ended = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


def staleness(rows: list[dict[str, Any]], root: Path = ROOT) -> list[str]:
    """Return a line per commit whose checks differ from those under ``root``, with the files that have changed since."""
    now, stale = fingerprint(root), {}
    for row in rows:
        if row.get("sources") != now:
            stale[row.get("commit", "")] = stale.get(row.get("commit", ""), 0) + 1
    lines = []
    for commit, count in stale.items():
        changed = git("diff", "--name-only", commit, "--", SOURCES, root=root).split() if commit else []
        files = ", ".join(name.removeprefix(f"{SOURCES}/") for name in changed) or "files unknown, as git does not have that commit"
        lines.append(
            f"{count} of {len(rows)} runs are of the checks at {commit[:12] or 'an unknown commit'}; changed since: {files}"
        )
    return lines


def run(backend: str, profile: str, seed: int, jobs: int) -> dict[str, Any]:
    """Return the row of a run: its findings, the number of passed checks per suite, and its duration."""
    from tests.cuda_emulation.backend import EmulatedBackend

    from bagua_ref.conformance import run_conformance
    from bagua_ref.conformance.targets.reference_target import ReferenceTarget

    target = ReferenceTarget()
    if backend == "cuda-emulated":
        target.kernels = EmulatedBackend()
        target.name = backend
    sources = fingerprint()  # before the run, as someone may edit the sources meanwhile
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
        "commit": git("rev-parse", "HEAD"),
        "sources": sources,
    }


def _entry(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["backend"], row["profile"], row["seed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--most", type=int, default=len(PLAN), help="stop after so many runs")
    parser.add_argument("--profile", choices=("quick", "full"), help="only runs of this profile")
    parser.add_argument("--check", action="store_true", help="only say whether the log is of the checks as they are")
    arguments = parser.parse_args()
    rows = json.loads(LOG.read_text()) if LOG.exists() else []
    if arguments.check:
        lines = staleness(rows)
        print(
            "\n".join(
                [f"{LOG.name}: stale; python tests/meta/{Path(__file__).name} runs what is missing", *lines]
                if lines
                else [f"{LOG.name}: current"]
            )
        )
        return 0
    now = fingerprint()
    done = {_entry(row) for row in rows if row.get("sources") == now}
    missing = [entry for entry in PLAN if entry not in done and arguments.profile in (None, entry[1])]
    for entry in missing[: arguments.most]:
        row = run(*entry, arguments.jobs)
        rows = [other for other in rows if _entry(other) != entry] + [row]
        rows.sort(key=lambda row: PLAN.index(_entry(row)))
        LOG.write_text(json.dumps(rows, indent=1) + "\n")
        print(*entry, f"{sum(row['passed'].values())} passed, {len(row['found'])} found, {row['seconds']} s", flush=True)
    return any(row["found"] for row in rows)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    raise SystemExit(main())

"""Search for failing inputs of every property: ``python property_tests/explore.py --minutes 20``,
or ``make explore``.

Each round runs all properties with a new seed, which is printed so that the round can be replayed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time


def main(arguments: list[str] | None = None) -> int:
    """Return pytest's exit status: that of the round that failed, or 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="no round starts later than this (default: 20)"
    )
    parser.add_argument(
        "--seed", type=int, help="seed of the first round; each later one adds 1 (default: random)"
    )
    parser.add_argument("--workers", type=int, default=2, help="pytest processes (default: 2)")
    parser.add_argument(
        "paths", nargs="*", default=["property_tests"], help="what to run (default: property_tests)"
    )
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    begun = time.monotonic()
    while True:
        minutes = (time.monotonic() - begun) / 60
        print(
            f"\nexplore: seed {seed}, {minutes:.1f} of {given.minutes:g} minutes; replay: make"
            f" explore SEED={seed}",
            flush=True,
        )
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--hypothesis-profile=explore",
            f"--hypothesis-seed={seed}",
        ]
        status = subprocess.run(
            [*pytest, f"--numprocesses={given.workers}", *given.paths]
        ).returncode
        if status:
            print(
                f"\nexplore: failed with seed {seed}. Replay the round: make explore SEED={seed}"
                " MINUTES=0"
            )
            print(f"Replay one test: {' '.join(pytest)} 'FILE::TEST'", flush=True)
            return status
        if time.monotonic() - begun >= 60 * given.minutes:
            return 0
        seed += 1


if __name__ == "__main__":
    sys.exit(main())

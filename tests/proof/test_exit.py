"""Repeated tests of leaving: of the commonest manners, all of 40 processes end cleanly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from tests import leaving

OFTEN = ("destroys", "forgets")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("times", "manners"),
    [(20, OFTEN), (2, [m for m in leaving.MANNERS if m not in OFTEN])],
    ids=[20, 2],
)
def test_every_exit_is_zero(times, manners):
    """Run pairs of interpreters, forked from one that has imported torch, as starting takes
    longest.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, leaving.__file__, str(times), *manners]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert Counter(ended.stdout.splitlines()) == {f"{manner}, 0, 0": times for manner in manners}, (
        ended.stderr[-4000:]
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("manner", leaving.MANNERS)
def test_an_exit_of_a_fresh_interpreter_is_zero(manner):
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    pipe = os.pipe()
    command = [sys.executable, leaving.__file__, manner, *map(str, pipe)]
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=pipe,
        )
        for rank in range(2)
    ]
    for end in pipe:
        os.close(end)
    try:
        complaints = [rank.communicate(timeout=120)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], complaints
    finally:
        for rank in ranks:
            rank.kill()

"""Leaving is clean a hundred times out of a hundred, and a worker group that is restarted trains again, in a slow loop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from tests import leaving
from tests.test_gloo import test_a_restarted_worker_group_trains_again as restart_once
from tests.test_gloo import test_a_script_leaves_cleanly as leave_once

TIMES = {"destroys": 100, "forgets": 100}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("manner", leaving.MANNERS)
def test_every_exit_is_zero(manner):
    """Pairs of interpreters that end on their own, forked from one that has imported torch, as starting takes longest."""
    times = TIMES.get(manner, 10)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, leaving.__file__, manner, str(times)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert Counter(ended.stdout.splitlines()) == {"0 0": times}, ended.stderr[-4000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("manner", ["destroys", "forgets"])
def test_every_exit_of_a_fresh_interpreter_is_zero(manner):
    for _ in range(5):
        leave_once(manner)


@pytest.mark.timeout(600)
def test_restarts_never_meet_what_the_failed_attempt_left(tmp_path):
    for _ in range(3):
        restart_once("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)

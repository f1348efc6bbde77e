"""Faults of ranks, caused for real over gloo: how each rank of a training ends.

Each case is a training of 2 ranks with a timeout of 12 s, in which something happens to rank 1,
after three steps if not told otherwise. The ranks of the last cases are in two network namespaces
joined by a link.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import zlib
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from tests import failing_ranks as faults
from tests.launch import Outcome, outcomes
from tests.scripts import ROOT, load_script

import bagua_ref
from bagua_ref.errors import CommunicationError

TIMEOUT = 12.0
namespaces = load_script("benchmarks/namespaces.py")
_loses_link = partial(faults.loses_its_link, device=namespaces.DEVICE)
FAULTS: dict[str, Any] = {
    "skips a batch before its forward pass": faults.forgets_a_batch,
    "runs a forward pass without backward (rank 0)": faults.looks_at_a_batch,
    "has NaN in its gradients": partial(faults.has_no_number, value=math.nan),
    "has inf in its gradients": partial(faults.has_no_number, value=math.inf),
    "is stopped for 2 s": partial(faults.stops, seconds=2),
    "raises before backward, and goes on": faults.raises_before_backward,
    "raises in backward, and goes on": faults.abandons_a_backward,
    "raises after backward, and goes on": faults.raises_after_backward,
    "skips optimizer.step()": faults.skips_an_optimizer_step,
    "loads another checkpoint than rank 0": faults.loads_another_checkpoint,
    "loads weights alone": faults.loads_other_weights,
    "leaves parameters unused": faults.leaves_a_parameter_unused,
    "freezes a parameter": faults.freezes_a_parameter,
    "comes later than the module's timeout": faults.comes_late,
    "is stopped for longer than the timeout": partial(faults.stops, seconds=TIMEOUT + 3),
    "ends a step early and waits in a barrier": faults.ends_early,
    "ends early, without abort": faults.leaves,
    "destroys its groups": faults.destroys,
    "ends by an exception": faults.ends_by_an_exception,
    "gets Ctrl-C, and goes on": faults.is_interrupted,
    "is killed before init_process_group()": None,
    "is killed before wrapping": None,
    "is killed in the first step": faults.dies_in_backward,
    "is killed between steps": faults.dies,
    "is killed in backward": faults.dies_in_backward,
    "is killed; workers of its DataLoader are busy": partial(
        faults.dies_before_its_children, children=faults.workers
    ),
    "is killed; a process that it forked lives on": partial(
        faults.dies_before_its_children, children=faults.fork
    ),
    "is killed; a process that C forked lives on": partial(
        faults.dies_before_its_children, children=faults.fork_unseen
    ),
    "is killed; workers are busy, over gloo": partial(
        faults.dies_before_its_children, children=faults.workers
    ),
    "is killed; a process of C lives on, over gloo": partial(
        faults.dies_before_its_children, children=faults.fork_unseen
    ),
    "serves the store and is killed (rank 0)": faults.serves_and_dies,
    "loses its link for 5 s": partial(_loses_link, seconds=5),
    "loses its link for ever": partial(_loses_link, seconds=None),
}
TRAIN_ON = {
    "skips a batch before its forward pass",
    "runs a forward pass without backward (rank 0)",
    "has NaN in its gradients",
    "has inf in its gradients",
    "is stopped for 2 s",
    "raises before backward, and goes on",
    "loses its link for 5 s",
}
ENDS = {
    "ends early, without abort": "error, exits with 0",
    "ends by an exception": "error, ValueError",
    "serves the store and is killed (rank 0)": "killed, error",
}
"""How rank 0 and rank 1 end, once if both end alike; all other faults but `TRAIN_ON` are errors, and
killed ranks are killed."""


def expected(fault: str) -> str:
    if fault in TRAIN_ON:
        return "trains on"
    return ENDS.get(fault, "error, killed" if fault.startswith("is killed") else "error")


def train(fault: str, nodes: list[int] | None) -> tuple[list[str], int, bool]:
    """Train as one rank; return its errors, a checksum of the weights and whether they are
    finite.
    """
    rank = int(os.environ["RANK"])
    if nodes is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=namespaces.DEVICE, MASTER_ADDR=namespaces.HOME)
        namespaces.enter(nodes[rank])

    def comes_to(moment: str) -> None:
        if rank == 1 and fault == f"is killed before {moment}":
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        comes_to("init_process_group()")
        if "serves the store" in fault:
            faults.serve_the_store()
        bagua_ref.init_process_group(timeout=TIMEOUT)
        comes_to("wrapping")
        options = {"timeout": 1.0} if "module's timeout" in fault else {}
        steps = 0 if "first step" in fault else 3
        training = faults.begin("gradient_allreduce", steps=steps, **options)
    except CommunicationError as error:
        return [str(error)], 0, True
    FAULTS[fault](training)
    weights = torch.cat([parameter.detach().view(-1) for parameter in training.module.parameters()])
    return training.errors, zlib.crc32(weights.numpy()), bool(weights.isfinite().all())


def ending(outcome: Outcome) -> str:
    """Return how a rank ended, in the words of the page."""
    if outcome.result is not None:
        return "error" if outcome.result[0] else "trains on"
    if outcome.error is not None:
        return type(outcome.error).__name__
    return "killed" if outcome.exitcode == -9 else f"exits with {outcome.exitcode}"


def run(fault: str) -> None:
    """Cause a fault, and compare how the ranks end with the page."""
    has_link = "link" in fault
    with namespaces.joined(2) if has_link else nullcontext() as nodes:
        ends = outcomes(
            train,
            2,
            fault,
            nodes,
            nodes=(1, 1) if has_link else (2,),
            init=False,
            limit=60.0,
            over_gloo="over gloo" in fault,
        )
    found = list(dict.fromkeys(map(ending, ends)))
    assert ", ".join(found) == expected(fault), [outcome.result for outcome in ends]
    if found == ["trains on"]:
        (_, first, finite), (_, second, _) = (outcome.result for outcome in ends)
        assert first == second, "the weights of the ranks differ"
        assert finite != ("in its gradients" in fault)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_ranks_end_as_expected(fault: str) -> None:
    if "link" not in fault:
        run(fault)
        return
    try:
        command = namespaces.unshare()
    except namespaces.UnavailableError as error:
        pytest.skip(f"a link that is lost {error}")
    ended = subprocess.run(
        [*command, sys.executable, "-m", __name__, fault], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


if __name__ == "__main__":
    run(sys.argv[1])

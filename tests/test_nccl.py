"""NCCL on a card (S2.5, S3.9): a training, a collective that does not end, the end of a process,
and ranks that share a card.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from tests.launch import launch, outcomes
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.errors import CommunicationTimeoutError

pytestmark = pytest.mark.gpu

ALGORITHMS = ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized")


def trained(name: str) -> Any:
    """Return the weights after some steps, on the host."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = model.with_bagua([optimizer], Algorithm.init(name, hierarchical=False))
    for step in range(4):
        inputs = torch.randn(
            5, 7, generator=torch.Generator().manual_seed(10 * step + bagua_ref.get_rank())
        )
        optimizer.zero_grad()
        wrapped(inputs.cuda()).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def all_trained() -> list[Any]:
    torch.cuda.set_device(0)
    return [trained(name) for name in ALGORITHMS]


def test_S2_5_one_rank_trains_over_nccl_and_two_on_one_card_over_gloo():
    (alone,) = launch(all_trained, 1)
    for name, weights in zip(ALGORITHMS, alone, strict=True):
        assert all(bool(tensor.isfinite().all()) for tensor in weights), name
    zero, one = launch(all_trained, 2)
    for name, mine, theirs in zip(ALGORITHMS, zero, one, strict=True):
        if "decentralized" not in name:
            assert all(map(torch.equal, mine, theirs)), name


def hung() -> None:
    """Queue a collective behind work that outlasts the timeout, and call the next one until it
    raises.
    """
    torch.cuda.set_device(0)
    bagua_ref.init_process_group(backend="nccl", timeout=2)
    x = torch.ones(1000, device="cuda")
    bagua_ref.allreduce_inplace(x)
    torch.cuda.synchronize()
    began = time.monotonic()
    torch.cuda._sleep(20_000_000_000)  # some 10 seconds
    bagua_ref.allreduce_inplace(x)
    assert time.monotonic() - began < 1  # the host does not wait
    while time.monotonic() - began < 6:
        bagua_ref.allreduce_inplace(x)
        time.sleep(0.05)


def test_S2_5_a_collective_that_does_not_end_is_aborted_and_the_next_one_raises():
    (outcome,) = outcomes(hung, 1, init=False)
    assert isinstance(outcome.error, CommunicationTimeoutError), outcome.traceback
    assert "allreduce timed out after 2 s" in str(outcome.error)


TRAINING = """
import torch, bagua_ref
from bagua_ref.algorithms import Algorithm
bagua_ref.init_process_group()
assert torch.distributed.get_backend() == "nccl"
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wrapped = model.with_bagua([optimizer], Algorithm.init("bytegrad", hierarchical=False))
for _ in range(3):
    optimizer.zero_grad()
    wrapped(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
print("trained", flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    ["", "bagua_ref.destroy_process_group()", "raise SystemExit(3)"],
    ids=["falls", "destroys", "exits"],
)
def test_S2_5_a_process_ends_as_it_wants_to(end):
    done = subprocess.run(
        [sys.executable, "-c", TRAINING.format(end=end)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (3 if "SystemExit" in end else 0), done.stderr
    assert done.stdout == "trained\n"
    assert done.stderr == ""


def shared() -> list[float]:
    torch.cuda.set_device(0)
    x = torch.ones(4, device="cuda")
    bagua_ref.allreduce_inplace(x, op=bagua_ref.ReduceOp.SUM)
    return x.tolist()


def refused() -> None:
    torch.cuda.set_device(0)
    bagua_ref.init_process_group(backend="nccl", timeout=30)
    bagua_ref.allreduce_inplace(torch.ones(4, device="cuda"))


def test_two_ranks_on_one_card_use_gloo_and_nccl_is_refused_by_name():
    assert launch(shared, 2) == [[2.0] * 4] * 2
    ended = outcomes(refused, 2, init=False)
    messages = [str(outcome.error) for outcome in ended]
    assert all("gloo" in message for message in messages), messages

"""Tests of ``train.py`` on simulated ranks: no cluster, no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from train import main, make_model, step


def test_replicas_stay_equal_in_any_schedule(sim_world: Any) -> None:
    sums = sim_world(main, 4, seeds=10)
    assert len(set(sums)) == 1


@pytest.mark.sim(ranks=[2, 3], seeds=10)
def test_a_mean_over_ranks() -> None:
    dist.init_process_group("gloo")
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.item() == (dist.get_world_size() - 1) / 2


def test_every_token_weighs_the_same(sim_world: Any) -> None:
    x = torch.randint(64, (8, 6), generator=torch.Generator().manual_seed(1))
    sim_world.same_as_one(step, {"x": x, "labels": x.roll(-1, 1)}, model=make_model)

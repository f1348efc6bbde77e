"""Tests of torch.distributed in the simulated world: the same results as processes over gloo."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tests import torch_programs
from tests.launch import launch
from tests.same import assert_same

from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.filterwarnings("ignore")


@functools.cache
def results(n: int) -> tuple[list[Any], list[Any]]:
    """The programs' results by rank, of gloo's processes and of simulated ranks."""
    names = [name for ranks, name in CASES if ranks == n]
    real = launch(torch_programs.run, n, names, n > 2, init=False, limit=300.0)
    return real, SimulatedWorld(n, torch_distributed=True).run(torch_programs.run, names, n > 2)


OF_FOUR = {
    "collectives",
    "coalesced collectives",
    "DDP, join",
    "functional collectives",
    "GPipe",
    "hierarchical averager",
    "HSDP",
    "messages",
    "objects",
    "subgroups",
    "tensor parallel",
}
"""Programs that do more on four ranks than on two."""

CASES = [(4 if name in OF_FOUR else 2, name) for name in torch_programs.PROGRAMS]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "name"), CASES)
def test_programs_have_gloos_results(n: int, name: str) -> None:
    for rank, (expected, got) in enumerate(zip(*results(n), strict=True)):
        assert_same(got[name], expected[name], f"{name}, rank {rank}")

"""Tests of torch.distributed in the simulated world: the same results as processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import torch_programs
from tests.launch import launch

from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest) -> tuple[list[str], list[Any], list[Any]]:
    """The programs' names, and their results by rank, of gloo's processes and of simulated ranks."""
    n, exact = request.param, request.param > 2
    names = [name for name in torch_programs.PROGRAMS if not exact or name not in torch_programs.INEXACT]
    real = launch(torch_programs.run, n, names, exact, init=False, limit=300.0)
    simulated = SimulatedWorld(n, torch_distributed=True).run(torch_programs.run, names, exact)
    return names, real, simulated


@pytest.mark.parametrize("name", torch_programs.PROGRAMS)
def test_programs_have_gloos_results(results: Any, name: str) -> None:
    names, real, simulated = results
    if name not in names:
        pytest.skip("its sums are not exact on 4 ranks")
    for rank, (expected, got) in enumerate(zip(real, simulated, strict=True)):
        assert_equal(got[name], expected[name], f"{name}, rank {rank}")


def assert_equal(got: Any, expected: Any, where: str) -> None:
    """Compare nested lists of tensors and other values, bit by bit."""
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape, where
        assert torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (got, expected))), (
            f"{where}: {got} is not {expected}"
        )
    elif isinstance(expected, list):
        assert len(got) == len(expected), where
        for i, pair in enumerate(zip(got, expected, strict=True)):
            assert_equal(*pair, f"{where}, {i}")
    else:
        assert got == expected, where

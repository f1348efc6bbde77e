"""Inputs of the properties: every backend available here, and the strategies that
`bagua_ref.conformance` ships.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import settings

from bagua_ref.backends import available_backends, register_backend
from bagua_ref.conformance.cases import table
from bagua_ref.conformance.cases.strategies import adversarial, dtype_named, name_of
from bagua_ref.conformance.checks.registry import Check, checks_of, variants
from bagua_ref.conformance.run.runner import CheckRun, row_id
from bagua_ref.conformance.run.search import PROFILES, Search
from bagua_ref.conformance.targets.target import resolve
from bagua_ref_pytest import conclude

__all__ = [
    "COMPRESSIBLE",
    "FLOATS",
    "Judging",
    "adversarial",
    "every_backend",
    "every_backend_but",
    "every_check",
    "inputs",
    "name_of",
]

COMPRESSIBLE = tuple(map(dtype_named, table.COMPRESSIBLE))
FLOATS = tuple(map(dtype_named, table.FLOATS))

register_backend(
    "cuda-emulated", "tests.cuda_emulation.backend:EmulatedBackend", hint="install g++"
)
register_backend("cuda-on-copies", "tests.cuda_emulation.copies:CudaOnCopies")


def _backends() -> list[ParameterSet | str]:
    """Return every backend that works here on CPU tensors; the CUDA sources compiled for the CPU
    need a compiler, so that they are proofs.
    """
    why_not = available_backends()
    chosen: list[ParameterSet | str] = [
        name for name, reason in why_not.items() if reason is None and not name.startswith("cuda")
    ]
    # Without g++ the properties are skipped with a reason; CI must have it, so there they fail.
    excused = (
        []
        if why_not["cuda-emulated"] is None or "CI" in os.environ
        else [pytest.mark.skip(why_not["cuda-emulated"])]
    )
    chosen.append(pytest.param("cuda-emulated", marks=[*excused, pytest.mark.proof]))
    if torch.cuda.is_available():
        lacking = [] if why_not["cuda"] is None else [pytest.mark.skip(why_not["cuda"])]
        chosen.append(pytest.param("cuda-on-copies", marks=[pytest.mark.gpu, *lacking], id="cuda"))
    return chosen


every_backend = pytest.mark.parametrize("backend", _backends())


def every_backend_but(name: str) -> pytest.MarkDecorator:
    """Return `every_backend` without one, with which another test does the same in another way."""
    return pytest.mark.parametrize(
        "backend", [row for row in _backends() if name not in (row, *getattr(row, "values", ()))]
    )


def inputs(of_100: int) -> settings:
    """Return the settings of a slow property: so many inputs where others have 100, in proportion
    where they have fewer.
    """
    return settings(max_examples=max(2, settings.default.max_examples * of_100 // 100))


def every_check(*suites: str) -> pytest.MarkDecorator:
    """Run a test once for each check of these suites and each of its dtypes."""
    rows = [(check, dtype) for check in checks_of(suites).values() for dtype in variants(check)]
    return pytest.mark.parametrize(("check", "dtype"), rows, ids=[row_id(*row) for row in rows])


class Judging:
    """Base class of tests that run checks with a new seed in each run, 0 in CI, or that of
    ``--hypothesis-seed``.

    `make test` tries 3 inputs beside those that each check walks, `make proof` 15, and
    ``bagua-ref verify`` 40.
    """

    seed = 0 if "CI" in os.environ else int.from_bytes(os.urandom(4), "big")
    time_limit = 60.0
    xfail: tuple[str, ...] = ()

    @pytest.fixture(autouse=True)
    def _inputs(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        is_proof = settings.default.max_examples >= PROFILES["quick"]
        monkeypatch.setitem(PROFILES, "quick", 15 if is_proof else 3)
        given = request.config.getoption("--hypothesis-seed")
        if given is not None:
            self.seed = int(given)

    def judge(self, target: Any, check: Check, dtype: str | None) -> None:
        """Pass, fail, skip or xfail as the check does."""
        how = Search("quick", self.seed)
        run = CheckRun(resolve(target), how, self.time_limit, frozenset(self.xfail))
        conclude(run.judge(check, dtype))

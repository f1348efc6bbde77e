"""Tests of the checks on a right target, with any seed."""

from __future__ import annotations

import os

import pytest

from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.checks.registry import all_checks
from bagua_ref.conformance.run.search import PROFILES
from bagua_ref.conformance.targets.reference_target import ReferenceTarget

pytestmark = pytest.mark.slow

# CI must give the same result every time
SEED = 0 if "CI" in os.environ else int.from_bytes(os.urandom(4), "big")


def test_nobody_is_blamed_wrongly_for_lack_of_inputs(monkeypatch):
    """The properties of conformance suites try many inputs, with another seed."""
    monkeypatch.setitem(PROFILES, "quick", 4)
    report = run_conformance(ReferenceTarget(), seed=SEED + 1)
    assert report.passed, report
    assert not report.failures()


def test_nobody_is_blamed_wrongly_for_large_inputs():
    checks = [name for name in all_checks() if name.rpartition(".")[2].startswith("long")]
    checks.append("collectives.S3.9.broadcast_object")
    report = run_conformance(ReferenceTarget(), checks=checks, profile="large", seed=SEED)
    assert report.passed, report

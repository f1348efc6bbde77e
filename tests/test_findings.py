"""Tests of the findings: verdicts are the committed ones, and every row says what it needs."""

from __future__ import annotations

import json

import pytest
import torch
from findings import __main__ as runner
from findings.common import Row, first_difference, judged, missing

from bagua_ref.conformance.expected.tolerances import EXACT

pytestmark = pytest.mark.slow

COMMITTED = json.loads(runner.RESULTS.read_text())


def test_every_row_says_what_its_verdict_needs() -> None:
    assert list(COMMITTED) == runner.NAMES
    needs = {
        "agrees": (),
        "not judged": ("why",),
        "fault": ("why", "promise", "given", "complaint", "effect"),
    }
    needs["differs by design"] = needs["fault"]
    for row in (row for rows in COMMITTED.values() for row in rows):
        assert all(row[field] for field in needs[row["verdict"]]), row


def test_a_peer_of_another_version_is_missing() -> None:
    assert missing("torch==" + torch.__version__.partition("+")[0]) is None
    assert (
        missing("torch==0.1")
        == f"torch {torch.__version__.partition('+')[0]} is installed, and the script is about 0.1"
    )
    assert missing("no-such-peer==1") == "no-such-peer is not installed"


def test_a_difference_is_located_and_judged() -> None:
    wanted = [[[torch.zeros(2)], [torch.zeros(2)]]]
    assert first_difference([[[torch.zeros(2)]], [[torch.zeros(2)]]], wanted, EXACT) is None
    told = first_difference([[[torch.zeros(2)]], [[torch.ones(2)]]], wanted, EXACT)
    assert told is not None
    assert told.startswith("after step 1, rank 1, parameter 0: 2 of 2 elements differ")
    assert judged("x", "S1", "case", None) == Row("x", "S1", "case", "agrees")
    assert judged("x", "S1", "case", told).verdict == "fault"

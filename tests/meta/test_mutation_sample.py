"""Tests of the mutation log: every mutant is accounted for, and a sample, one per room, is still killed by its test."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.meta.mutate import LOG, ROOMS, all_mutants, copy_of_checkout, run_mutant, run_pytest

RUN = json.loads(LOG.read_text(encoding="utf-8"))


def killing_test(row: dict[str, Any]) -> str:
    return row["by"] or row["then"].removeprefix("killed by ")


def sample() -> dict[str, dict[str, Any]]:
    """Return for each room one killed mutant of the log that still applies; always the same one."""
    found = {}
    for room in ROOMS:
        today = all_mutants(room)
        killed = [row for row in RUN["mutants"] if row["outcome"] == "killed" or row["then"].startswith("killed by ")]
        rows = [row for row in killed if row["room"] == room and row["id"] in today]
        assert rows, f"no killed mutant of the log is left in {room}: repeat the mutation run, python -m tests.meta.mutate"
        found[room] = random.Random(RUN["seed"]).choice(rows)
    return found


@pytest.fixture(scope="module")
def copy() -> Iterator[Path]:
    with copy_of_checkout() as folder:
        yield folder


def test_every_mutant_was_killed_or_is_explained() -> None:
    assert len(RUN["mutants"]) >= 200
    assert {row["room"] for row in RUN["mutants"]} == set(ROOMS)
    lived = [row for row in RUN["mutants"] if row["outcome"] in ("survived", "not covered")]
    assert [row["id"] for row in lived if not row["then"].startswith(("killed by ", "same: ", "gone: "))] == []


def test_the_killing_tests_pass_without_the_mutants(copy: Path) -> None:
    code, output = run_pytest(copy, [killing_test(row) for row in sample().values()], limit=120)
    assert code == 0, output


@pytest.mark.parametrize("room", ROOMS)
def test_a_mutant_is_still_killed_by_the_test_that_killed_it(room: str, copy: Path) -> None:
    row = sample()[room]
    assert run_mutant(copy, all_mutants(room)[row["id"]], [killing_test(row)])[0] == "killed", row

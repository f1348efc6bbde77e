"""The table of planted faults, `planted.jsonl`: a fault a line, as `tests.meta.edit` names it, and
what must find it.

A line has ``name``, ``where`` and ``edit`` (parts and replacements in turn), and either ``suite``
and ``clause``, whose checks must find it in the profile "quick" or the one that it names, and
``by``, the check that did (``mutants --note`` writes it); or ``test``, which must fail; or
``vectors``, the suite of golden vectors that the second implementation must then answer wrongly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_suffix(".jsonl")


@dataclass(frozen=True)
class Fault:
    """A fault that the checks of a clause must find.

    Attributes:
        name: what is wrong.
        where: the module and function.
        edit: parts and replacements in turn.
        suite: the checks that must find it.
        clause: the clause that it breaks.
        profile: of the checks that must find it.
        by: the check that has found it before, with its dtype, and is tried first; empty: not
            known.
    """

    name: str
    where: str
    edit: list[str]
    suite: str
    clause: str
    profile: str = "quick"
    by: str = ""


@dataclass(frozen=True)
class Guard:
    """A guard without which ``test`` must fail, or not end in ``limit`` seconds."""

    name: str
    where: str
    edit: list[str]
    test: str
    limit: int = 10


@dataclass(frozen=True)
class WrongAnswer:
    """A fault of the second implementation that golden vectors must find."""

    name: str
    where: str
    edit: list[str]
    vectors: str


ROWS = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
FAULTS = [Fault(**row) for row in ROWS if "suite" in row]
GUARDS = [Guard(**row) for row in ROWS if "test" in row]
WRONG_ANSWERS = [WrongAnswer(**row) for row in ROWS if "vectors" in row]


def note(found: dict[str, str]) -> None:
    """Write into the table by which check each of these faults was found."""
    rows = [
        {**row, "by": found[row["name"]]} if "suite" in row and row["name"] in found else row
        for row in ROWS
    ]
    TABLE.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")

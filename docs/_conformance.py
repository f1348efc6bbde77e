"""Write the tables of docs/conformance.md: ``python docs/_conformance.py``. A test says when that is due.

What is covered comes from the table of checks; what killed the mutants from the JSON that ``python tests/meta/mutants.py --json
docs/_mutants.json`` wrote.
"""

from __future__ import annotations

import json
from pathlib import Path

from bagua_ref.conformance.checks import all_checks
from bagua_ref.conformance.clauses import CLAUSES

PAGE = Path(__file__).with_name("conformance.md")
KILLS = Path(__file__).with_name("_mutants.json")


def coverage() -> str:
    lines = ["| clause | about | checks |", "|---|---|---|"]
    for clause, about in CLAUSES.items():
        rows = [check for check in all_checks().values() if check.clause == clause]
        checks = "<br>".join(f"`{check.id}`: {check.sentence}" for check in rows)
        lines.append(f"| {clause} | {about} | {checks or 'not covered'} |")
    return "\n".join(lines)


def kills() -> str:
    lines = ["| suite | mutant | clause | killed by | inputs needed | seconds |", "|---|---|---|---|---|---|"]
    for kill in json.loads(KILLS.read_text()):
        by = f"`{kill['by']}`" if kill["by"] else "**lives**"
        lines.append(
            f"| {kill['suite']} | {kill['mutant']} | {kill['clause']} | {by} | {kill['examples']} | {kill['seconds']:.1f} |"
        )
    return "\n".join(lines)


def page() -> str:
    """Return the whole page with the tables as they are now."""
    text = PAGE.read_text()
    for name, table in (("coverage", coverage()), ("mutants", kills())):
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())

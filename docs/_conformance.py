"""Tables of docs/conformance/, written by ``python docs/_conformance.py``. A test fails if they are
out of date.

A page for each suite lists its checks; clauses.md says which checks each clause of the
specification has.
"""

from __future__ import annotations

from pathlib import Path

from bagua_ref.conformance.clauses import CLAUSES, SUITES
from bagua_ref.conformance.suites.checks import Check, all_checks

FOLDER = Path(__file__).with_name("conformance")
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def clause_link(clause: str) -> str:
    return f"[{clause}](../spec.md#{clause.lower().replace('.', '-')})"


def checks_table(suite: str) -> str:
    """Return a row for each check of a suite."""
    lines = ["| check | clause | what must hold |", "|---|---|---|"]
    for check in all_checks().values():
        if check.suite == suite:
            lines.append(f"| `{check.id}` | {clause_link(check.clause)} | {check.sentence} |")
    return "\n".join(lines)


def clauses_table() -> str:
    """Return a row for each clause, with the names of its checks."""

    def names(clause: str) -> str:
        found: dict[str, list[Check]] = {}
        for check in all_checks().values():
            if check.clause == clause:
                found.setdefault(check.suite, []).append(check)
        each = [
            f"[{suite}]({suite}.md#checks): {', '.join(c.id.split('.')[-1] for c in checks)}"
            for suite, checks in found.items()
        ]
        return "<br>".join(each) or "not covered"

    lines = ["| clause | about | checks |", "|---|---|---|"]
    return "\n".join(
        [
            *lines,
            *(
                f"| {clause_link(clause)} | {about} | {names(clause)} |"
                for clause, about in CLAUSES.items()
            ),
        ]
    )


def pages() -> dict[Path, str]:
    """Return every page with its table as it is now."""
    tables = {suite: checks_table(suite) for suite in SUITES} | {"clauses": clauses_table()}
    found = {}
    for name, table in tables.items():
        path = FOLDER / f"{name}.md"
        before, _, rest = path.read_text().partition(BEGIN)
        found[path] = f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}"
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)

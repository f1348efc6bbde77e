"""The page docs/findings.md, written by ``python docs/_findings.py`` from findings/results.json."""

from __future__ import annotations

import json
from pathlib import Path

PAGE = Path(__file__).with_name("findings.md")
RESULTS = Path(__file__).parents[1] / "findings" / "results.json"
VERDICTS = {
    "agrees": "the check found nothing",
    "differs by design": (
        "its documentation describes a computation that differs from the specification's, or leaves"
        " room for one"
    ),
    "fault": (
        "it does not do what its documentation leads one to expect, or what another part of the"
        " same project does"
    ),
    "not judged": "with the reason",
}
HEAD = """# Findings in living implementations

We ran our checks on widely used implementations; these are the results. `make findings` installs torchft, Decent-DP, accelerate
and hivemind, without torch, beside the development environment, runs every script in `findings/`, and writes this page.
`python -m findings NAME` runs one of them, and `--check` compares verdicts with the committed ones. A script runs only with the
version of its peer that it pins. Ranks are two CPU processes over gloo, or those of the [simulated world](simulated-world.md).
Cases that begin with "simulated" are programs under [`bagua-ref sim`](sim.md), in 20 schedules. Most of the traps in them are
documented, as their rows say.
Expected values come from `bagua_ref.conformance.expected`, the [suites](conformance.md) and the [trace](traces.md), never from the
other implementation.

"""


def cell(text: str) -> str:
    """Return text for a cell of a table, on one line."""
    return " ".join(text.split()).replace("|", "\\|")


def page(results: dict[str, list[dict[str, str]]]) -> str:
    """Return the page for the rows of all scripts."""
    rows = [(name, row) for name, rows in results.items() for row in rows]
    lines = [
        "| verdict | means |",
        "|---|---|",
        *(f"| {verdict} | {meaning} |" for verdict, meaning in VERDICTS.items()),
    ]
    lines += [
        "",
        "## All cases",
        "",
        "| implementation | clause | case | verdict |",
        "|---|---|---|---|",
    ]
    for _, row in rows:
        verdict = f"not judged: {row['why']}" if row["verdict"] == "not judged" else row["verdict"]
        lines.append(
            "| "
            + " | ".join(
                cell(text) for text in (row["implementation"], row["clause"], row["case"], verdict)
            )
            + " |"
        )
    for verdict, title in (("fault", "Faults"), ("differs by design", "Differences by design")):
        lines += ["", f"## {title}"]
        for name, row in rows:
            if row["verdict"] != verdict:
                continue
            lines += [
                "",
                f"### {row['implementation']}: {row['case']}",
                "",
                f"{row['why']} (`python -m findings {name}`)",
                "",
            ]
            named = {
                "Clause": row["clause"],
                "Documented": row["promise"],
                "Input": row["given"],
                "Effect on training": row["effect"],
            }
            lines += [f"- **{key}**: {cell(text)}" for key, text in named.items() if text]
            lines += ["", "```text", " ".join(row["complaint"].split()), "```"]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))

"""The table of docs/algorithms/graphs.md, written by ``python docs/_mixing.py``. A test fails if it
is out of date.

For every mode and several numbers of ranks it has the rounds to consensus and the spectral gap per
round.
"""

from __future__ import annotations

from pathlib import Path

from bagua_ref.formulas.graphs import MODES
from bagua_ref.formulas.mixing import mixing

PAGE = Path(__file__).with_name("algorithms") / "graphs.md"
BEGIN, END = "<!-- mixing: begin -->\n", "<!-- mixing: end -->\n"
RANKS = (3, 4, 6, 8, 16, 32, 64)


def cell(mode: str, n: int) -> str:
    """Return rounds and gap; rounds in bold if they are exact."""
    if not MODES[mode].takes(n):
        return "–"
    found = mixing(MODES[mode].graphs(n))
    rounds = f"**{found.rounds}**" if found.exact else f"{found.rounds:,}"
    return f"{rounds} ({found.gap_per_round:.2g})"


def table() -> str:
    lines = [f"| mode | {' | '.join(f'n = {n}' for n in RANKS)} |", f"|---|{'---|' * len(RANKS)}"]
    return "\n".join(
        [
            *lines,
            *(f'| `"{mode}"` | {" | ".join(cell(mode, n) for n in RANKS)} |' for mode in MODES),
        ]
    )


def page() -> str:
    """Return the whole page with the table as it is now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())

"""Addresses outside of the documentation: ``python docs/_links.py`` asks for each, and lists those
that do not answer.

A test compares them with docs/_links.txt, so that a new one is looked at once.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".txt")
HOME = "bagua-ref/bagua_ref"
"""This repository: tests/test_packaging.py looks the files up."""


def addresses() -> list[str]:
    """Return what pages link to."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    found = (
        re.findall(r"\]\((https?://[^)\s#]+)", page.read_text(encoding="utf-8")) for page in pages
    )
    return sorted({address for each in found for address in each if HOME not in address})


if __name__ == "__main__":
    LIST.write_text("".join(f"{address}\n" for address in addresses()), encoding="utf-8")
    failed = 0
    for address in addresses():
        try:
            urllib.request.urlopen(
                urllib.request.Request(address, headers={"User-Agent": "bagua_ref"}), timeout=20
            ).close()
        except OSError as error:
            failed += 1
            print(f"{address}: {error}")
    sys.exit(failed > 0)

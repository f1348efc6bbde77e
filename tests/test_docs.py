"""The pages tell the truth: their Python runs, page by page, and prints what the page says it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)

MARK = "<<< end of block >>>"


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """Return the page's Python blocks, each with the text block that directly follows it, if one does."""
    return [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs_and_prints_what_it_says(page: Path) -> None:
    found = blocks(page)
    script = f"\nprint({MARK!r})\n".join(code for code, _ in found)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    printed = run.stdout.split(f"{MARK}\n")
    assert len(printed) == len(found)
    for (code, expected), actual in zip(found, printed, strict=True):
        assert expected is None or actual == expected, f"after\n{code}"


def test_a_page_of_the_guide_has_python() -> None:
    assert sum(len(blocks(page)) for page in PAGES) >= 20


def registered() -> set[str]:
    """Return what the package itself registers; the registry in this process may hold other tests' algorithms too."""
    return set(re.findall(r'Registry\.register\("(\w+)"', (ROOT / "src/bagua_ref/algorithms/__init__.py").read_text()))


def test_every_registered_algorithm_and_no_other_is_said_to_be_here() -> None:
    rows = re.findall(r"^\| \[`(\w+)`\]\((\S+)\) \|.*\| here \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == registered()
    assert all((ROOT / link).exists() for _, link in rows)
    specified = (ROOT / "docs/spec.md").read_text().split("In the registry:")[1].split("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", specified)) == registered()

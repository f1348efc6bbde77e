"""What a package index would show: built by the same hooks as the wheel, from the files as they are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    command = [sys.executable, "-m", "hatchling", "metadata"]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_the_long_description_is_the_readme_without_relative_links(metadata: dict[str, Any]) -> None:
    shown = metadata["readme"]
    assert shown["content-type"] == "text/markdown"
    assert "](docs/" in (ROOT / "README.md").read_text()
    assert [link for link in LINK.findall(shown["text"]) if not link.startswith("https://")] == []
    assert "[Bagua](https://github.com/BaguaSys/bagua)" in shown["text"]
    assert "\n- **Balance.** Samplers that give all replicas" in shown["text"]
    assert "| `bytegrad` | gradients, one byte per element |" in shown["text"]


def test_the_metadata_names_authors_and_addresses(metadata: dict[str, Any]) -> None:
    assert metadata["authors"] == [{"name": "The bagua_ref developers"}]
    assert metadata["urls"]
    assert all(url.startswith("https://") for url in metadata["urls"].values())

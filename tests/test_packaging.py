"""Tests of the package's metadata, built by the same hooks as the wheel, and of the cheap parts of
the release check.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests import release_check
from tests.scripts import ROOT

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    command = [sys.executable, "-m", "hatchling", "metadata"]
    return json.loads(
        subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        ).stdout
    )


def test_links_of_the_readme_are_absolute_and_lead_to_files(metadata: dict[str, Any]) -> None:
    readme = (ROOT / "README.md").read_text()
    home = metadata["urls"]["Repository"]
    raw = home.replace("github.com", "raw.githubusercontent.com")
    links = LINK.findall(readme)
    assert all(link.startswith("https://") for link in links)
    own = [
        link.removeprefix(prefix)
        for link in links
        for prefix in (f"{home}/blob/main/", f"{raw}/main/")
        if link.startswith(prefix)
    ]
    assert len(own) > 20
    assert [path for path in own if not (ROOT / path).is_file()] == []
    assert metadata["readme"]["text"] == readme


def test_the_metadata_names_authors_and_addresses(metadata: dict[str, Any]) -> None:
    assert metadata["authors"] == [{"name": "The bagua_ref developers"}]
    assert metadata["urls"]
    assert all(url.startswith("https://") for url in metadata["urls"].values())


def test_pytest_finds_the_plugin(metadata: dict[str, Any]) -> None:
    assert metadata["entry-points"] == {"pytest11": {"bagua_ref_pytest": "bagua_ref_pytest"}}


def test_the_release_check_takes_the_quick_start_from_the_readme() -> None:
    script = release_check.quick_start()
    compile(script, "train.py", "exec")
    assert "with_bagua" in script
    assert script.endswith("bagua_ref.destroy_process_group()\n")


def test_the_release_check_refuses_what_fails_and_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(folder: Path) -> None:
        (folder / "dist").mkdir()
        release_check.run(
            folder,
            Path(sys.executable),
            sys.executable,
            "-c",
            "print('it broke'); raise SystemExit(3)",
        )

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(release_check, "check", check)
    assert release_check.main() == 1
    printed = capsys.readouterr().out
    assert "it broke\n== FAILED: exit code 3, not 0: " in printed
    assert list(tmp_path.iterdir()) == []

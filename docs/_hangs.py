"""Write _hangs.json: what `bagua-ref explain`, simulated ranks and torch's own analyser say about the
programs of tests/hangs.py. Run it from the root: ``python docs/_hangs.py``.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import hangs, launch

from bagua_ref.explain import explain
from bagua_ref.simulation.findings import own_error
from bagua_ref.simulation.observation import Order, observe
from bagua_ref.simulation.programs import Program

_ANALYSER = "torch.distributed.flight_recorder.fr_trace"


def _row(folder: Path, hang: hangs.Hang) -> dict[str, Any]:
    """Run a program over gloo, and return what explain and torch's analyser say."""
    script, dumps = folder / f"{hang.name}.py", folder / hang.name
    script.write_text(hang.text())
    launch.outcomes(hangs.run, hang.ranks, str(script), str(dumps), init=False, limit=60.0)
    found = explain(dumps)
    assert found.finding is not None, hang.name
    command = [sys.executable, "-m", _ANALYSER, str(dumps), "--prefix", "torch_trace_rank_"]
    torchs = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (torchs.stdout + torchs.stderr).strip().splitlines()
    # its last line, without numbers of processes and times
    said = next((line for line in reversed(lines) if "tabulate" not in line), "nothing")
    return {
        "program": hang.name,
        "kind": found.finding.kind,
        "line": found.finding.line,
        "cause": found.cause,
        "certainty": found.certainty,
        "torch": re.sub(r"\s+", " ", said)[:80],
    }


def _simulated_line(script: Path, ranks: int) -> int | None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        finding = own_error(observe(Program(str(script)), (ranks,), Order()))
    return None if finding is None else finding.line


def main() -> None:
    """Run all programs, and write the table."""
    launch.preload("tests.hangs", "bagua_ref.explain")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ThreadPoolExecutor(8) as pool:
            rows = list(pool.map(lambda hang: _row(folder, hang), hangs.HANGS))
        for row, hang in zip(rows, hangs.HANGS, strict=True):
            script = folder / f"{hang.name}.py"
            # others sleep, die or end this process
            row["simulated"] = _simulated_line(script, hang.ranks) if hang.simulated else None
    text = json.dumps(rows, indent=1) + "\n"
    Path(__file__).with_name("_hangs.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

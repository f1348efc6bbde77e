from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.launch import run_script
from tests.scripts import ROOT, load_script, run_python

from bagua_ref.algorithms import GlobalAlgorithmRegistry
from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


def run(*command: str, temporary: Path | None = None) -> str:
    """Run Python; torchrun leaves its folders in ``temporary``."""
    ended = run_python(*command, **({"TMPDIR": str(temporary)} if temporary else {}))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def accuracy(printed: str) -> float:
    found = re.search(r"test accuracy ([\d.]+)%", printed)
    assert found, printed
    return float(found[1]) / 100


def test_torchrun_trains_with_bytegrad(tmp_path: Path) -> None:
    command = ("-m", "torch.distributed.run", "--nproc_per_node=2", "examples/train_digits.py", "--algorithm", "bytegrad")
    printed = run(*command, temporary=tmp_path)
    assert "bytegrad, 2 ranks" in printed
    assert accuracy(printed) > 0.9
    assert printed.count("epoch 10:") == 1


def test_without_a_launcher_it_is_a_world_of_one() -> None:
    script = "import runpy, sys; sys.argv[1:] = ['--epochs', '5']; runpy.run_path('examples/train_digits.py', run_name='__main__')"
    ended = run_script(script)
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout
    assert "gradient_allreduce, 1 rank:" in printed
    assert accuracy(printed) > 0.9


@pytest.mark.parametrize("name", GlobalAlgorithmRegistry.available_algorithms())
def test_every_algorithm_trains(name: str) -> None:
    main = load_script("examples/train_digits.py").main
    reached = SimulatedWorld(2).run(lambda comm: main(["--algorithm", name, "--epochs", "5"]))
    assert reached[0] == reached[1]
    assert reached[0] > 0.85


def test_an_unknown_algorithm_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_script("examples/train_digits.py").main(["--algorithm", "bytgrad"])
    assert ended.value.code == 2
    assert "'bytgrad'" in capsys.readouterr().err


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    kinds = (".py", ".sh", ".ipynb")
    assert [path.name for path in EXAMPLES.iterdir() if path.suffix in kinds and path.name not in listed] == []


def test_the_cells_of_the_notebook_print_what_it_shows() -> None:
    cells = json.loads((EXAMPLES / "simulated_world.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    mark = "<<< end of cell >>>"
    ended = run_script(f"\nprint({mark!r})\n".join("".join(cell["source"]) for cell in code))
    assert ended.returncode == 0, ended.stderr
    shown = ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in code]
    assert ended.stdout.split(f"{mark}\n") == shown

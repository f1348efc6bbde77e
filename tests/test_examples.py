from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout

import pytest
from tests.launch import launch, preload, run_script
from tests.scripts import ROOT, load_script

from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.slow
preload("sklearn.datasets")

EXAMPLES = ROOT / "examples"


def accuracy(printed: str) -> float:
    found = re.search(r"test accuracy ([\d.]+)%", printed)
    assert found, printed
    return float(found[1]) / 100


def printed_by(*arguments: str) -> str:
    """Return what this rank prints."""
    with redirect_stdout(io.StringIO()) as printed:
        load_script("examples/train_digits.py").main(arguments)
    return printed.getvalue()


def test_processes_train_with_bytegrad() -> None:
    first, second = launch(printed_by, 2, "--algorithm", "bytegrad", "--epochs", "3", init=False)
    assert "bytegrad, 2 ranks" in first
    assert accuracy(first) > 0.9
    assert first.count("epoch 3:") == 1
    assert second == ""


@pytest.mark.parametrize("name", ["gradient_allreduce", "qadam", "async", "diloco", "topk"])
def test_the_script_trains_with_options_of_its_own(name: str) -> None:
    main = load_script("examples/train_digits.py").main
    reached = SimulatedWorld(2).run(lambda comm: main(["--algorithm", name, "--epochs", "3"]))
    assert reached[0] == reached[1]
    assert reached[0] > 0.8


def test_an_unknown_algorithm_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_script("examples/train_digits.py").main(["--algorithm", "bytgrad"])
    assert ended.value.code == 2
    assert "'bytgrad'" in capsys.readouterr().err


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    kinds = (".py", ".sh", ".ipynb")
    assert [
        path.name for path in EXAMPLES.iterdir() if path.suffix in kinds and path.name not in listed
    ] == []


@pytest.mark.proof
def test_the_cells_of_the_notebook_print_what_it_shows() -> None:
    cells = json.loads((EXAMPLES / "simulated_world.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    mark = "<<< end of cell >>>"
    ended = run_script(f"\nprint({mark!r})\n".join("".join(cell["source"]) for cell in code))
    assert ended.returncode == 0, ended.stderr
    shown = [
        "".join(line for output in cell["outputs"] for line in output["text"]) for cell in code
    ]
    assert ended.stdout.split(f"{mark}\n") == shown

"""Tests of ``bagua-ref graph``, and of the numbers that it prints (S13)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagua_ref.cli import main
from bagua_ref.formulas import graphs
from bagua_ref.formulas.graphs import MODES
from bagua_ref.formulas.mixing import matrix, mixing


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the command and returns the exit code, standard output and
    standard error.
    """

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main(["graph", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


def sends_of(text: str) -> list[set[tuple[int, int]]]:
    """Return who sends to whom in each round, as printed."""
    found = []
    for part in re.split(r"^round \d+", text, flags=re.MULTILINE)[1:]:
        sends = set()
        words = " ".join(part.split("\n\n")[0].splitlines()[1:])
        for item in filter(None, map(str.strip, words.split(","))):
            if "<->" in item:
                a, b = map(int, item.split("<->"))
                sends |= {(a, b), (b, a)}
            elif "->" in item:
                source, receivers = item.split("->")
                sends |= {(int(source), int(receiver)) for receiver in receivers.split()}
        found.append(sends)
    return found


@pytest.mark.parametrize(
    ("mode", "n"),
    [(mode, n) for mode in MODES for n in (1, 3, 8, 33) if mode != "all" and MODES[mode].takes(n)],
)
def test_graph_prints_who_sends_to_whom(run: Any, mode: str, n: int) -> None:
    code, text, _ = run(mode, "--ranks", str(n))
    assert code == 0
    assert sends_of(text) == [
        {
            (source, receiver)
            for receiver, row in enumerate(MODES[mode].graph(t, n))
            for source, _ in row
            if source != receiver
        }
        for t in range(MODES[mode].period(n))
    ]


@pytest.mark.parametrize(
    ("mode", "n", "lines"),
    [
        ("one_peer_exponential", 16, ["exact after 4 rounds", "1 of 4 rounds; 1 per round"]),
        ("hypercube", 8, ["exact after 3 rounds"]),
        (
            "shift_one",
            16,
            ["176 rounds to within 1e-06", "0.425477 of 8 rounds; 0.0669317 per round (geometric"],
        ),
        ("ring", 8, ["64 rounds to within 1e-06", "0.195262 of the matrix of a round"]),
        ("exponential", 8, ["20 rounds to within 1e-06", "0.5 of the matrix of a round"]),
        ("all", 100, ["exact after 1 round\n", "every rank -> every other rank"]),
        ("ring", 1, ["exact after 0 rounds\n", "nobody sends"]),
    ],
)
def test_graph_says_how_fast_ranks_agree(run: Any, mode: str, n: int, lines: list[str]) -> None:
    text = run(mode, "--ranks", str(n))[1]
    assert [line for line in lines if line not in text] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [4, 5, 16])
@pytest.mark.parametrize("tolerance", [0.3, 1e-9])
def test_mixing_is_what_repeated_products_give(mode: str, n: int, tolerance: float) -> None:
    if not MODES[mode].takes(n):
        return
    period = MODES[mode].period(n)
    found = mixing([MODES[mode].graph(t, n) for t in range(period)], tolerance)
    product, distances = np.eye(n), []
    for t in range(max(period, found.rounds or 0)):
        product = matrix(MODES[mode].graph(t, n)) @ product
        distances.append(np.linalg.norm(product - 1 / n, 2))
    singular_values = np.linalg.svd(
        np.linalg.multi_dot(
            [np.eye(n)] * 2 + [matrix(MODES[mode].graph(t, n)) for t in range(period)][::-1]
        )
    )[1]
    assert found.contraction == pytest.approx(singular_values[1], abs=1e-9)
    assert found.rounds == next(
        place for place, distance in enumerate(distances, 1) if distance <= tolerance * (1 + 1e-9)
    )
    assert found.exact == (distances[found.rounds - 1] < 1e-12)


def test_ranks_that_do_not_talk_never_agree() -> None:
    apart = [[(0, 0.5), (1, 0.5)], [(1, 0.5), (0, 0.5)], [(2, 0.5), (3, 0.5)], [(3, 0.5), (2, 0.5)]]
    swap = [[(0, 0.0), (1, 1.0)], [(1, 0.0), (0, 1.0)]]
    for graph in (apart, swap):
        found = mixing([graph])
        assert (found.rounds, found.exact) == (None, False)
        assert found.spectral_gap == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"graphs": []}, "at least one graph"),
        ({"tolerance": 0}, "tolerance=0 must"),
        ({"tolerance": 1}, "tol"),
    ],
)
def test_mixing_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixing(**{"graphs": [graphs.ring(0, 3)], **given})


FUNCTIONS = """
def lazy(t, n):
    return [[(r, 0.75), ((r - (-1) ** t) % n, 0.25)] for r in range(n)]

def apart(t, n):
    return [[(r, 1.0)] for r in range(n)]

def wrong(t, n):
    return [[(r, 1.0 - 0.5 * t)] for r in range(n)]

def fails(t, n):
    raise LookupError("no graph")

number = 5
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_graphs.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_graphs", raising=False)


@pytest.mark.usefixtures("functions")
def test_graph_takes_a_function_of_the_current_folder(run: Any) -> None:
    code, text, _ = run("my_graphs:lazy", "--ranks", "5", "--period", "2")
    assert code == 0
    assert sends_of(text) == [{(r, (r + step) % 5) for r in range(5)} for step in (1, -1)]
    assert "round 1 (t = 1, 3, 5, ...)" in text
    assert "consensus     never" in run("my_graphs:apart", "--ranks", "3")[1]


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["ring"], "the following arguments are required: --ranks"),
        (
            ["ring", "--ranks", "1025"],
            "argument --ranks: '1025' must be an integer from 1 to 1,024",
        ),
        (["hypercube", "--ranks", "6"], "hypercube needs a power of two of ranks, not 6"),
        (["star", "--ranks", "6"], "argument MODE: invalid choice: 'star' (choose from all, "),
        (["ring", "--ranks", "6", "--period", "2"], "--period: it is for functions only"),
        (["ring", "--ranks", "6", "--tolerance", "0"], "argument --tolerance: '0' must be"),
        (["ring", "--ranks", "200", "--png", "x.png"], "pictures have up to 64 ranks, not 200"),
        (["ring", "--ranks", "4", "--png", "nowhere/x.png"], "cannot write 'nowhere/x.png': "),
        (["nowhere:function", "--ranks", "4"], "cannot load nowhere:function: ModuleNotFoundError"),
        (["my_graphs:fails", "--ranks", "4"], "my_graphs:fails(t=0, n=4): LookupError: no graph"),
        (
            ["my_graphs:wrong", "--ranks", "4", "--period", "2"],
            "my_graphs:wrong(t=1, n=4): ValueError: row 0 (sources of rank 0) has weights that sum",
        ),
    ],
)
def test_graph_names_bad_input(run: Any, arguments: list[str], complaint: str) -> None:
    code, _, complaints = run(*arguments)
    assert code == 2
    assert complaint in complaints


def test_graph_writes_a_picture_with_an_arrow_for_each_pair_and_the_same_as_json(
    run: Any, tmp_path: Path
) -> None:
    from bagua_ref.cli.graph import draw_graphs

    figure = draw_graphs(MODES["shift_one"].graphs(32), "a title")
    panels = [axes for axes in figure.axes if axes.lines]
    assert len(panels) == 12
    assert figure.get_supxlabel() == "the first 12 of 16 rounds"
    arrows = [text for text in panels[0].texts if getattr(text, "arrow_patch", None) is not None]
    assert len(arrows) == 16
    assert len(panels[0].texts) == 16 + 32
    picture = tmp_path / "ring.png"
    code, text, _ = run("ring", "--ranks", "4", "--png", str(picture), "--json")
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(text)
    assert found["graphs"] == [[[list(pair) for pair in row] for row in graphs.ring(0, 4)]]
    assert found["contraction"] == pytest.approx(1 / 3)
    assert (found["rounds_to_consensus"], found["exact"]) == (13, False)

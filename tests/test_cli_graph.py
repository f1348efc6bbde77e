"""Tests of ``bagua-ref graph``, and of the numbers that it prints (S13)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagua_ref.base.not_provided import install_command
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
        try:
            code = main(["graph", *arguments])
        except SystemExit as ended:
            code = int(str(ended.code))
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


def drawn_in(text: str) -> list[set[tuple[int, int]]]:
    """Return the same from the matrices; each rank must be marked in its own column."""
    found = []
    for part in re.split(r"^ +from ", text, flags=re.MULTILINE)[1:]:
        rows = [
            re.fullmatch(r"(?:  to|    ) *(\d+)  ([.ox ]+)", line) for line in part.splitlines()[1:]
        ]
        cells = [(int(row[1]), row[2].split()) for row in rows if row]
        assert all(marks[receiver] == "o" for receiver, marks in cells)
        found.append(
            {
                (source, receiver)
                for receiver, marks in cells
                for source, mark in enumerate(marks)
                if mark == "x"
            }
        )
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 8, 16, 32, 33])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "all"])
def test_it_prints_and_draws_who_sends_to_whom(run: Any, mode: str, n: int) -> None:
    if not MODES[mode].takes(n):
        return
    code, text, _ = run(mode, "--ranks", str(n))
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    wanted = [
        {
            (source, receiver)
            for receiver, row in enumerate(MODES[mode].graph(t, n))
            for source, _ in row
            if source != receiver
        }
        for t in range(MODES[mode].period(n))
    ]
    assert sends_of(text) == wanted
    assert drawn_in(text) == (wanted if n <= 32 else [])


def test_all_to_all_is_said_in_a_few_words(run: Any) -> None:
    assert "every rank -> every other rank" in run("all", "--ranks", "100")[1]


@pytest.mark.parametrize(
    ("mode", "n", "lines"),
    [
        (
            "one_peer_exponential",
            16,
            ["exact after 4 rounds", "1: 1 - the second-largest singular value, 0,", "1 per round"],
        ),
        ("hypercube", 8, ["exact after 3 rounds"]),
        (
            "shift_one",
            16,
            [
                "176 rounds to within 1e-06",
                "0.425477: 1 - the second-largest",
                "0.0669317 per round (geometric",
            ],
        ),
        (
            "ring",
            8,
            [
                "64 rounds to within 1e-06",
                "0.195262: 1 - the second-largest singular value, 0.804738",
            ],
        ),
        ("ring", 3, ["exact after 1 round\n"]),
        (
            "exponential",
            8,
            ["20 rounds to within 1e-06", "0.5: 1 - the second-largest singular value, 0.5"],
        ),
        ("one_peer_exponential", 6, ["28 rounds to within 1e-06"]),
        ("all", 5, ["exact after 1 round\n"]),
        ("ring", 1, ["exact after 0 rounds\n", "nobody sends"]),
    ],
)
def test_it_says_how_fast_ranks_agree(run: Any, mode: str, n: int, lines: list[str]) -> None:
    text = run(mode, "--ranks", str(n))[1]
    assert [line for line in lines if line not in text] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [2, 4, 5, 8, 16])
@pytest.mark.parametrize("tolerance", [0.3, 1e-3, 1e-9])
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


def test_json_has_the_same_and_nothing_else(run: Any, tmp_path: Path) -> None:
    code, text, _ = run(
        "ring",
        "--ranks",
        "4",
        "--tolerance",
        "0.01",
        "--json",
        "--json-file",
        str(tmp_path / "ring.json"),
    )
    found = json.loads(text)
    assert (code, json.loads((tmp_path / "ring.json").read_text())) == (0, found)
    assert found["graphs"] == [[[list(pair) for pair in row] for row in graphs.ring(0, 4)]]
    assert (found["mode"], found["ranks"], found["period"], found["picture"]) == (
        "ring",
        4,
        1,
        None,
    )
    assert found["contraction"] == pytest.approx(1 / 3)
    assert found["spectral_gap"] == found["spectral_gap_per_round"] == pytest.approx(2 / 3)
    assert (found["rounds_to_consensus"], found["exact"], found["tolerance"]) == (5, False, 0.01)


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
def test_a_function_of_the_current_folder(run: Any) -> None:
    code, text, _ = run("my_graphs:lazy", "--ranks", "5", "--period", "2")
    assert code == 0
    assert sends_of(text) == [
        {(r, (r + 1) % 5) for r in range(5)},
        {(r, (r - 1) % 5) for r in range(5)},
    ]
    assert "round 1 (t = 1, 3, 5, ...)" in text
    assert "consensus     never" in run("my_graphs:apart", "--ranks", "3")[1]
    assert "the same graph in every round" in run("my_graphs:lazy", "--ranks", "5")[1]


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["ring"], "the following arguments are required: --ranks"),
        (["--ranks", "4"], "the following arguments are required: MODE"),
        (["ring", "--ranks", "0"], "argument --ranks: 0 must be from 1 to 1024"),
        (["ring", "--ranks", "1025"], "argument --ranks: 1025 must be from 1 to 1024"),
        (["ring", "--ranks", "four"], "argument --ranks: invalid int value: 'four'"),
        (
            ["hypercube", "--ranks", "6"],
            "argument --ranks: hypercube needs a power of two of ranks, not 6",
        ),
        (
            ["shift_one", "--ranks", "1"],
            "argument --ranks: shift_one needs an even number of ranks, not 1",
        ),
        (
            ["star", "--ranks", "6"],
            (
                "argument MODE: invalid choice: 'star' (choose from all, shift_one,"
                " one_peer_exponential, hypercube, ring,"
            ),
        ),
        (
            ["ring", "--ranks", "6", "--period", "2"],
            "argument --period: it must be 1 or more, and is for functions only",
        ),
        (
            ["my_graphs:lazy", "--ranks", "6", "--period", "0"],
            "argument --period: it must be 1 or more",
        ),
        (
            ["ring", "--ranks", "6", "--tolerance", "0"],
            "argument --tolerance: 0.0 must be between 0 and 1",
        ),
        (
            ["ring", "--ranks", "200", "--png", "x.png"],
            "argument --png: of 200 ranks no picture can be drawn",
        ),
        (["ring", "--ranks", "4", "--png", "nowhere/x.png"], "cannot write 'nowhere/x.png': "),
        (["ring", "--ranks", "4", "--png", "x.what"], "cannot write 'x.what': "),
        (
            ["nowhere:function", "--ranks", "4"],
            "cannot load nowhere:function: ModuleNotFoundError: No module named 'nowhere'",
        ),
        (["my_graphs:nothing", "--ranks", "4"], "cannot load my_graphs:nothing: AttributeError: "),
        (
            ["my_graphs:number", "--ranks", "4"],
            "my_graphs:number(t=0, n=4): TypeError: 'int' object is not callable",
        ),
        (["my_graphs:fails", "--ranks", "4"], "my_graphs:fails(t=0, n=4): LookupError: no graph"),
        (
            ["my_graphs:wrong", "--ranks", "4", "--period", "2"],
            (
                "my_graphs:wrong(t=1, n=4): ValueError: row 0 (sources of rank 0) has weights that"
                " sum to 0.5; they must sum to 1"
            ),
        ),
    ],
)
def test_bad_input_is_named_and_exits_with_2(
    run: Any, arguments: list[str], complaint: str
) -> None:
    code, _, complaints = run(*arguments)
    assert code == 2
    assert complaint in complaints
    assert "Traceback" not in complaints


@pytest.mark.parametrize(
    ("mode", "n"),
    [("one_peer_exponential", 16), ("all", 5), ("ring", 1), ("hypercube", 64), ("shift_one", 32)],
)
def test_the_picture_has_an_arrow_for_each_message_and_all_ranks(
    run: Any, tmp_path: Path, mode: str, n: int
) -> None:
    from bagua_ref.cli.graph import draw_graphs

    period = MODES[mode].graphs(n)
    figure = draw_graphs(period, "a title")
    panels = [axes for axes in figure.axes if axes.lines]
    assert len(panels) == min(len(period), 12)
    for graph, axes in zip(period, panels, strict=False):
        pairs = {
            frozenset((source, receiver))
            for receiver, row in enumerate(graph)
            for source, _ in row
            if source != receiver
        }
        arrows = [text for text in axes.texts if getattr(text, "arrow_patch", None) is not None]
        assert len(arrows) == len(pairs)
        (line,) = axes.lines
        assert len(line.get_xdata()) == n
        numbers = [text.get_text() for text in axes.texts if text not in arrows]
        assert numbers == [str(rank) for rank in range(0, n, 1 if n <= 36 else 2)]
    assert (figure.get_supxlabel() == "the first 12 of 16 rounds") == (len(period) > 12)


def test_the_picture_is_written_and_is_the_same_every_time(run: Any, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        code, text, _ = run("exponential", "--ranks", "6", "--png", str(tmp_path / name))
        assert (code, f"Picture: {tmp_path / name}" in text) == (0, True)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, complaint = run("ring", "--ranks", "4", "--png", str(tmp_path / "x.png"))
    assert code == 2
    assert f"--png needs matplotlib; install with: {install_command('demo')}" in complaint

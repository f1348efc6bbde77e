"""Tests of the command line, of ``bagua-ref doctor``, ``selftest`` and ``demo``."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from base64 import b64decode
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tests.launch import run_script

import bagua_ref
from bagua_ref.base import not_provided
from bagua_ref.base.not_provided import install_command
from bagua_ref.base.utils import readable_bytes
from bagua_ref.cli import demo, doctor
from bagua_ref.cli.command import table
from bagua_ref.cli.demo import ALONE, Digits, Settings
from bagua_ref_cli import COMMANDS, GROUPS, main, parser_of_all

SOURCE = Path(__file__).parents[1] / "src"
PARAMETERS = 38282


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits.load()


# The command line


REQUIRED = {
    "demo": "",
    "doctor": "",
    "selftest": "",
    "advise": "--params 1e6 --ranks 2",
    "measure": "--output x",
    "balance": "--lengths x --ranks 2",
    "graph": "ring --ranks 4",
    "verify": "",
    "vectors export": "x",
    "vectors check": "x",
    "trace diff": "x y",
    "trace show": "x",
    "sim": "x",
    "explain": "x",
    "same": "x:y --batch z",
}
"""The arguments that each command requires."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs ``bagua-ref`` and returns the exit code, standard output and
    standard error.
    """

    def command(*words: str) -> tuple[int, str, str]:
        code = main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.mark.parametrize("command", ["", "vectors", "trace", *REQUIRED])
def test_help_fits_80_columns_and_errors_are_two_lines(
    command: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, printed, _ = run(*command.split(), "--help")
    assert code == 0
    assert printed.startswith(" ".join(["usage: bagua-ref", *command.split(), "[-h]"]))
    assert [line for line in printed.splitlines() if len(line) > 80] == []
    if command in REQUIRED:
        assert re.search(r"^  --json  ", printed, re.MULTILINE), "a flag"
        assert re.search(r"^  --json-file PATH  ", printed, re.MULTILINE)
    name = f"bagua-ref {command}".strip()
    for words in ("--no-such-option", f"{REQUIRED.get(command, '')} --no-such-option"):
        code, _, errors = run(*command.split(), *words.split())
        assert code == 2
        error, advice = errors.splitlines()
        assert error.startswith(f"{name}: error: unrecognized arguments: --no-such-option")
        assert advice == f"Help: {name} --help"


def test_each_command_has_examples_that_it_takes() -> None:
    assert COMMANDS.keys() == REQUIRED.keys()
    for name, command in COMMANDS.items():
        assert "Exit status" in command.epilog
        assert command.examples
        for line in command.examples:
            words = shlex.split(re.sub("^torchrun .* -m bagua_ref.cli", "bagua-ref", line))
            words = words[: words.index("--")] if "--" in words else words
            assert parser_of_all().parse_args(words[1:]).name == name


def test_no_number_of_a_table_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    printed = table("Title", ("", "step\n(ms)"), [("a name\n  and its options", "1,234,567.8")])
    assert printed.splitlines() == [
        "Title",
        "                          step",
        "                          (ms)",
        "------------------------------",
        "a name             1,234,567.8",
        "  and its options",
    ]


def test_packages_are_asked_for_before_anything_is_computed(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    hint = f"install with: {install_command('demo')}\n"
    for command in ("graph none --ranks 2", "trace diff none none"):
        code, _, error = run(*command.split(), "--png", "x")
        assert code == 2
        assert f": error: --png needs matplotlib; {hint}" in error


def test_version_and_every_help_do_not_import_torch() -> None:
    helps = [[*name.split(), "--help"] for name in ("", *GROUPS, *COMMANDS)]
    code = (
        "import sys, bagua_ref_cli\n"
        f"for words in [['--version'], ['help'], [], ['advice'], ['--versoin'], *{helps}]:\n"
        "    code = bagua_ref_cli.main(words)\n"
        "    assert code == 2 * (words in (['advice'], ['--versoin']))\n"
        "assert 'torch' not in sys.modules and 'bagua_ref' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert re.findall("Did you mean (.*)\\?", ended.stderr) == ["'advise'", "'--version'"]
    version, *lines = ended.stdout.splitlines()
    assert version == f"bagua_ref {bagua_ref.__version__}"
    for name in {name.partition(" ")[0] for name in COMMANDS}:
        assert sum(line.startswith(f"    {name} ") for line in lines) == 3


ADVISE = "advise --params 1M --ranks 2 --compute 1ms --bandwidth 1Gbit"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("advice", "advise"),
        ("advise --parms 1e6", "--params"),
        ("balance --lenghts x --ranks 2", "--lengths"),
        ("sim x.py --rnks 2", "--ranks"),
        ("sim x.py --faults kil", "kill"),
        ("graph rign --ranks 4", "ring"),
        ("demo --algorithms bytgrad", "bytegrad"),
        ("doctor --jso", "--json"),
        ("trace shwo x", "show"),
        ("verify --backend refrence", "reference"),
        ("verify --backend reference --suite kernls", "kernels"),
        ("verify --backend reference --check kernels.S1.ad", "kernels.S1.add"),
        (f"{ADVISE} --device h10", "h100"),
        (f"{ADVISE} --algorithm bytgrad", "bytegrad"),
        (f"{ADVISE} --algorithm bytegrad:compression=MXFP44", "MXFP4"),
        (f"{ADVISE} --algorithm bytegrad:compresion=MXFP4", "compression"),
        (f"{ADVISE} --algorithm decentralized:peer_selection_mode=rign", "ring"),
    ],
)
def test_a_misspelt_word_gets_the_nearest_one(typed: str, meant: str, run: Any) -> None:
    code, _, errors = run(*typed.split())
    assert code == 2
    error, advice = errors.splitlines()
    assert f"did you mean {meant!r}?" in error.lower().replace(meant.lower(), meant)
    assert advice.startswith("Help: bagua-ref ")


def test_options_of_the_simulated_program_are_told_from_those_of_sim(run: Any) -> None:
    for words in (["--lr", "1"], ["--seed", "1"]):  # not short for --seeds
        assert f"come last: x.py -- {' '.join(words)})" in run("sim", "x.py", *words)[2]


@pytest.mark.parametrize("command", ["trace", "vectors"])
def test_a_command_without_its_verb_prints_help(command: str, run: Any) -> None:
    code, printed, _ = run(command)
    assert code == 0
    assert printed.startswith(f"usage: bagua-ref {command} ")


@pytest.mark.proof
def test_selftest_trains_in_two_processes() -> None:
    command = [sys.executable, "-m", "bagua_ref.cli", "selftest", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["passed"]
    assert [row["problem"] for row in result["rows"]] == [""] * 4


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["demo", "--ranks", "0"], "--ranks: '0' must be an integer from 1 to 64"),
        (["demo", "--ranks", "two"], "--ranks: 'two' must be"),
        (["demo", "--seed", "-1"], "--seed: '-1' must be"),
        (["demo", "--output", f"{__file__}/report"], "must be a writable folder"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(
    arguments: list[str], complaint: str, run: Any
) -> None:
    code, _, error = run(*arguments)
    assert code == 2
    assert complaint in error


def test_in_a_checkout_an_extra_is_installed_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install_command("demo") == f"pip install -e '{SOURCE.parent}[demo]'"
    folder = tmp_path / "it's mine"
    (folder / "src" / "bagua_ref").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(not_provided, "_FOLDER", folder)
    assert shlex.split(install_command("demo")) == ["pip", "install", "-e", f"{folder}[demo]"]


def test_an_integration_without_its_library_names_the_command_that_installs_it() -> None:
    hidden = "sys.modules |= dict.fromkeys(('lightning', 'pytorch_lightning'))"
    ended = run_script(f"import sys\n{hidden}\nimport bagua_ref.integrations.lightning")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: bagua_ref.integrations.lightning needs lightning; install with:"
        f" {install_command('lightning')}"
    )


# Doctor


def test_doctor_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    server = folder / "redis-server"
    server.write_text("#!/bin/sh\necho Redis server v=9.9.9 sha=00000000:0 bits=64\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("BAGUA_TWO_LINES", "one\ntwo")
    monkeypatch.setenv("BAGUA_REF_BACKEND", "abacus")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert f"Redis server v=9.9.9 sha=00000000:0 bits=64 ({server})".replace(" ", "") in "".join(
        line.replace(" ", "") for line in lines
    )
    assert "  BAGUA_TWO_LINES      one two" in lines
    assert "  valkey-server        not on PATH" in lines


def test_doctor_names_the_trainers_that_the_tests_run_with(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"lightning": "2.5.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(doctor, "version", version)
    pinned = doctor.tested_versions()
    assert list(pinned) == [
        "lightning",
        "pytorch-lightning",
        "accelerate",
        "transformers",
        "ray",
        "timm",
        "torchdata",
    ]
    found = doctor.examine()["trainers"]
    assert doctor.examine()["extras"]["demo"].endswith(install_command("demo"))
    assert found["lightning"] == f"2.5.0 (tested with {pinned['lightning']})"
    assert found["accelerate"] == f"not installed (tested with {pinned['accelerate']})"


def test_what_is_tested_with_trainers_is_what_pip_installs_and_the_docs_name() -> None:
    root = SOURCE.parent
    assert (
        "-c src/bagua_ref/integrations/tested.txt"
        in (root / "constraints.txt").read_text().splitlines()
    )
    pages = "".join(
        (root / "docs" / name).read_text() for name in ("trainers.md", "process-groups.md")
    )
    for name, tested in doctor.tested_versions().items():
        assert f"`{name}` {tested}" in pages


def test_doctor_writes_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "4096")
    path = tmp_path / "doctor.json"
    assert main(["doctor", "--json", "--json-file", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(path.read_text())
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["kernel backends"]) == set(bagua_ref.available_backends())
    assert found["GPUs"]["count"] == torch.cuda.device_count()
    assert found["environment"]["BAGUA_DEFAULT_BUCKET_SIZE"] == "4096"
    assert found["problems"] == {}
    assert main(["doctor", "--json-file", str(tmp_path / "no" / "such")]) == 2
    error = f"bagua-ref doctor: error: cannot write {str(tmp_path / 'no' / 'such')!r}: No such file"
    assert capsys.readouterr().err.startswith(error)


def test_doctor_names_what_is_set_but_cannot_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "-1")
    monkeypatch.setenv("BAGUA_REF_TIMEOUT", "soon")
    monkeypatch.setenv("BAGUA_REF_BACKEND", "abacus")
    assert main(["doctor", "--json"]) == 0
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert "RANK='first'" in problems["launch"]
    assert "BAGUA_DEFAULT_BUCKET_SIZE='-1'" in problems["bucket size"]
    assert "BAGUA_REF_TIMEOUT='soon'" in problems["timeout"]
    assert "abacus" in problems["kernel backend"]


# Training


def test_batches_are_split_without_loss_and_the_test_set_is_apart(digits: Digits) -> None:
    settings = Settings(ranks=4, quick=True)
    whole = list(digits.batches(settings, 0, 1))
    shares = [list(digits.batches(settings, share, 4)) for share in range(4)]
    assert len(whole) == settings.steps == 10
    for step, (images, labels) in enumerate(whole):
        assert torch.equal(images, torch.cat([shares[share][step][0] for share in range(4)]))
        assert torch.equal(labels, torch.cat([shares[share][step][1] for share in range(4)]))
    assert (len(digits.train_labels), len(digits.test_labels)) == (1437, 360)
    together = torch.cat([digits.train_images, digits.test_images])
    assert len(torch.unique(together, dim=0)) == 1797


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e6, "2.5 MB"), (3e12, "3.0 TB")],
)
def test_readable_bytes(count: float, text: str) -> None:
    assert readable_bytes(count) == text


# The whole demo, in real processes


@pytest.fixture
def run_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Return a function that runs the demo in this process, its workers from the server of
    `tests.launch`; no file may be left.
    """
    forkserver.ensure_running()  # before the demo would let it import less
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }
    yield lambda *arguments: main(
        ["demo", "--ranks", "2", "--quick", "--output", str(tmp_path / "report"), *arguments]
    )
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert multiprocessing.active_children() == []
    # torch leaves a worker's traceback there
    assert [path for path in temporary.iterdir() if "errorfile" not in path.name] == []


@pytest.mark.slow
def test_the_demo_end_to_end(
    tmp_path: Path, run_demo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["gradient_allreduce", "bytegrad", "async"]
    assert run_demo("--json-file", str(tmp_path / "demo.json"), "--algorithms", *names) == 0
    out = capsys.readouterr().out
    assert re.search(r"bytegrad: test accuracy [\d.]+%, loss [\d.]+, 384.0 kB sent", out)
    assert re.search(r"gradient_allreduce +[\d.]+% +[\d.]+ +153.1 kB +100.0% +0 +[\d.]+ *\n", out)
    assert "\nNext: bagua-ref advise" in out
    found = json.loads((tmp_path / "report" / "results.json").read_text())
    assert json.loads((tmp_path / "demo.json").read_text()) == found
    by_name = {entry["algorithm"]: entry for entry in found["results"]}
    assert list(by_name) == [ALONE, *names]
    assert by_name["gradient_allreduce"]["bytes_per_step"] == 4 * PARAMETERS
    losses = by_name[ALONE]["losses"]
    assert by_name["gradient_allreduce"]["losses"] == pytest.approx(losses, rel=1e-3)
    page = (tmp_path / "report" / "index.html").read_text()
    for text in ("2 workers, 10 steps", "153.1 kB", "38.4 kB", "25.1%"):
        assert text in page
    (drawing,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', page)
    ElementTree.fromstring(b64decode(drawing))


@pytest.mark.slow
def test_stopping_the_demo_ends_its_workers(
    run_demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_line", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert run_demo() == 130
    assert capsys.readouterr().err == "bagua-ref demo: interrupted\n"


@pytest.mark.slow
def test_the_error_of_a_worker_is_printed(
    run_demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Digits, "load", lambda: (torch.zeros(1),))
    assert run_demo() == 1
    complaint = capsys.readouterr().err
    assert re.match(r"bagua-ref demo: worker \d: .*terminated with", complaint)
    assert "TypeError" in complaint


@pytest.mark.proof
def test_the_workers_of_a_demo_that_is_killed_end(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bagua_ref.cli",
        "demo",
        "--ranks",
        "2",
        "--output",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert next(
            (line for line in process.stdout if "single process: test accuracy" in line), None
        )
        process.kill()
        process.communicate(
            timeout=60
            # which ends when no process has the pipes: the server and its workers are told by the
            # system
        )

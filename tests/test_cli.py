from __future__ import annotations

import argparse
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
from tests.trainings import simulate

import bagua_ref
from bagua_ref.algorithms import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from bagua_ref.base import not_provided
from bagua_ref.base.not_provided import install_command
from bagua_ref.base.utils import readable_bytes
from bagua_ref.cli import _parser, balance, demo, doctor, main
from bagua_ref.cli.command import Commands
from bagua_ref.cli.demo import ALONE, RECIPES, Digits, Settings, TrainingOutcome, train
from bagua_ref.data_parallel.wrapping import Recipe
from bagua_ref.simulation import SimulatedWorld
from bagua_ref_cli import COMMANDS as LISTED
from bagua_ref_cli import main as script

SOURCE = Path(__file__).parents[1] / "src"
PARAMETERS = 38282


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits.load()


# The command line


COMMANDS = [
    "demo",
    "doctor",
    "selftest",
    "advise",
    "measure",
    "balance",
    "graph",
    "verify",
    "vectors export",
    "vectors check",
    "trace diff",
    "trace show",
    "sim",
    "same",
]


@pytest.mark.parametrize("command", ["", "vectors", "trace", *COMMANDS])
def test_help_fits_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(" ".join(["usage: bagua-ref", *command.split(), "[-h]"]))
    assert [line for line in printed.splitlines() if len(line) > 80] == []
    if command in COMMANDS:
        assert re.search(r"^  --json  ", printed, re.MULTILINE), "a flag"
        assert re.search(r"^  --json-file PATH  ", printed, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_error_is_two_lines_of_its_subcommand(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    required = {
        "advise": ["--params", "1e6", "--ranks", "2"],
        "measure": ["--output", "x"],
        "balance": ["--lengths", "x", "--ranks", "2"],
        "graph": ["ring", "--ranks", "4"],
        "vectors export": ["x"],
        "vectors check": ["x"],
        "trace show": ["x"],
        "trace diff": ["x", "y"],
        "sim": ["x"],
        "same": ["x:y", "--batch", "z"],
    }
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), *required.get(command, []), "--no-such-option"])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    error, advice = printed.err.splitlines()
    assert error.startswith(f"bagua-ref {command}: error: unrecognized arguments: --no-such-option")
    assert advice == f"Help: bagua-ref {command} --help"
    assert printed.out == ""


def subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers that run something."""
    inner = [
        choice
        for action in parser._actions
        if isinstance(action, Commands)
        for choice in action.choices.values()
    ]
    if not inner:
        yield parser
    for each in inner:
        yield from subcommands(each)


def test_each_command_has_examples_that_it_takes() -> None:
    whole = _parser(*LISTED)
    found = list(subcommands(whole))
    assert {parser.prog for parser in found} == {f"bagua-ref {name}" for name in COMMANDS}
    for parser in found:
        examples, _, rest = parser.format_help().partition("\nexamples:\n")[2].partition("\n\n")
        assert "Exit status" in rest
        for line in examples.splitlines():
            words = shlex.split(re.sub("^torchrun .* -m bagua_ref.cli", "bagua-ref", line.strip()))
            words = words[: words.index("--")] if "--" in words else words
            assert " ".join(words).startswith(parser.prog)
            assert whole.parse_args(words[1:]).parser is parser


@pytest.mark.parametrize(
    "command",
    [
        "balance --lengths {folder}/lengths --ranks 2",
        "advise --params 4e6 --ranks 4 --bandwidth 1Gbit --compute 10ms --algorithm topk",
    ],
)
def test_no_number_of_a_table_is_cut(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(balance, "write_picture", lambda *_: None)
    (tmp_path / "lengths").write_text(
        "".join(f"{length}\n" for length in (3, 9, 4, 12, 55, 7, 8, 21))
    )
    printed = {}
    for width in (200, 80, 60, 40):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(command.format(folder=tmp_path).split()) == 0
        printed[width] = capsys.readouterr().out
    wide = set(re.findall(r"[\d.]*\d%?", printed.pop(200)))
    for width, narrow in printed.items():
        assert "…" not in narrow, width
        assert wide <= set(re.findall(r"[\d.]*\d%?", narrow)), width


def test_packages_are_asked_for_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    hint = f"install with: {install_command('demo')}\n"
    for command in (
        "graph none --ranks 2",
        "trace diff none none",
        "advise --params 9 --ranks 2 --json",
    ):
        assert main([*command.split(), "--png", "x"]) == 2
        assert capsys.readouterr().err.endswith(f": error: --png needs matplotlib; {hint}")


@pytest.mark.parametrize("run", [main, script])
def test_version_and_help(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"bagua_ref {bagua_ref.__version__}\n"
    assert run([]) == 0
    printed = capsys.readouterr().out
    assert _parser(*LISTED).format_help() == printed
    assert all(f"    {name} " in printed for name in LISTED)


def test_version_help_and_misspelt_commands_do_not_import_torch() -> None:
    script = (
        "import sys, bagua_ref_cli\n"
        "for words in ['--version'], ['--help'], [], ['advice']:\n"
        "    try: bagua_ref_cli.main(words)\n"
        "    except SystemExit as ended: assert ended.code == 2\n"
        "assert 'torch' not in sys.modules and 'bagua_ref' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert "Did you mean 'advise'?" in ended.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("advice", "advise"),
        ("advise --parms 1e6", "--params"),
        ("graph rign --ranks 4", "ring"),
        ("demo --algorithms bytgrad", "bytegrad"),
        ("trace shwo x", "show"),
        ("advise --params 1 --ranks 2 --compute 1ms --bandwidth 1Gbit --device h10", "h100"),
    ],
)
def test_a_misspelt_word_gets_the_nearest_one(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script(typed.split())
    assert ended.value.code == 2
    assert f"Did you mean {meant!r}?\n" in capsys.readouterr().err


def test_options_of_the_simulated_program_are_told_from_those_of_sim(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        script(["sim", "x.py", "--lr", "1"])
    assert "(those of the program come last: x.py -- --lr 1)" in capsys.readouterr().err


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
        (["fly"], "'fly'"),
        (["demo", "--ranks", "0"], "--ranks: '0' must be a whole number from 1 to 64"),
        (["demo", "--ranks", "65"], "--ranks: '65' must be"),
        (["demo", "--ranks", "two"], "--ranks: 'two' must be"),
        (["demo", "--epochs", "0"], "--epochs: '0' must be"),
        (["demo", "--seed", "-1"], "--seed: '-1' must be"),
        (["demo", "--algorithms", "bytgrad"], "--algorithms: invalid choice: 'bytgrad'"),
        (["demo", "--output", f"{__file__}/report"], "must be a writable folder"),
        (["doctor", "--yaml"], "--yaml"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_missing_extra_is_named_after_wrong_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["demo", "--output", str(tmp_path)]) == 2
    complaint = "bagua-ref demo: error: the demo needs scikit-learn, matplotlib; install with: "
    assert capsys.readouterr().err == f"{complaint}{install_command('demo')}\n"
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--ranks", "0"])
    assert ended.value.code == 2
    assert "--ranks: '0'" in capsys.readouterr().err


def test_in_a_checkout_an_extra_is_installed_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install_command("demo") == f"pip install -e '{SOURCE.parent}[demo]'"
    folder = tmp_path / "it's mine"
    (folder / "src" / "bagua_ref").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(not_provided, "_FOLDER", folder)
    assert shlex.split(install_command("demo")) == ["pip", "install", "-e", f"{folder}[demo]"]


def test_of_an_installed_package_the_packages_of_an_extra_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bagua_ref-0.dist-info").mkdir()
    (tmp_path / "bagua_ref-0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: bagua_ref\nVersion: 0\nRequires-Dist:"
        " torch>=2.6\nRequires-Dist: other; extra == 'test'\nRequires-Dist: rich>=14; extra =="
        " 'demo'\nRequires-Dist: matplotlib; extra == \"demo\"\nRequires-Dist:"
        " bagua-ref[demo,test]; extra == 'dev'\nRequires-Dist: late; (python_version >= '3.10')"
        " and extra == 'dev'\n"
    )
    monkeypatch.setattr(not_provided, "_FOLDER", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert install_command("demo") == "pip install 'rich>=14' matplotlib"
    assert install_command("dev") == "pip install 'rich>=14' matplotlib other late"


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("transformers", "transformers", "transformers"),
        ("lightning", "lightning", "lightning"),
        ("pytorch_lightning", "pytorch_lightning", "trainers"),
    ],
)
def test_an_integration_without_its_library_names_the_command_that_installs_it(
    module: str, package: str, extra: str
) -> None:
    hidden = (
        "for name in ('transformers', 'lightning', 'pytorch_lightning'): sys.modules[name] = None"
    )
    ended = run_script(f"import sys\n{hidden}\nimport bagua_ref.integrations.{module}")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"ImportError: bagua_ref.integrations.{module} needs {package}; install with:"
        f" {install_command(extra)}"
    )


# Completion


def completion(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["--print-completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ver", ["verify"]),
        ("demo --al", ["--algorithms"]),
        ("demo --algorithms byte", ["bytegrad"]),
        ("trace ", ["diff", "show"]),
        ("verify --json-", ["--json-file"]),
        ("vectors check fo", ["folder"]),
        ("balance --lengths f", ["file", "folder"]),
    ],
)
def test_bash_completes(
    typed: str, offered: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    words = ["bagua-ref", *typed.split(" ")]
    script = (
        f"{completion('bash', capsys)}\nCOMP_WORDS=({' '.join(map(shlex.quote, words))});"
        f" COMP_CWORD={len(words) - 1}\ncomplete -p bagua-ref >&2; _shtab_bagua_ref 2>&1; printf"
        " '%s\\n' \"${COMPREPLY[@]}\""
    )
    run = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "bagua-ref" in run.stderr
    assert (
        sorted(word for word in run.stdout.split("\n") if word and not word.startswith("bash: "))
        == offered
    )


@pytest.mark.parametrize("shell", ["zsh", "tcsh", "fish"])
def test_other_shells_get_a_script_too(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "balance" in completion(shell, capsys)


def test_completion_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    hint = (
        "bagua-ref: error: --print-completion needs shtab; install with:"
        f" {install_command('completion')}\n"
    )
    assert capsys.readouterr().err == hint


# Colour

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)(?:;\d+)*m")


IN_TERMINAL = """
import os, pty, sys
from bagua_ref.cli import main
os.environ |= dict(TERM="xterm-256color", COLUMNS="80", NO_COLOR="1")
for arguments in {commands}:
    process, terminal = pty.fork()
    if process == 0:
        sys.exit(main(arguments))
    try:
        while shown := os.read(terminal, 65536):
            os.write(1, shown)
    except OSError:
        pass  # Linux raises it when the last writer is gone
    os.write(1, b"<<< end >>>")
"""


@pytest.mark.slow
def test_no_command_has_colours_with_no_color(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SOURCE.parent)  # for tests.hostile_backends
    (tmp_path / "lengths").write_text("1\n2\n3\n")
    commands = [
        "--help",
        "demo --ranks 0",
        "doctor",
        f"balance --lengths {tmp_path}/lengths --ranks 2 --png {tmp_path}/work.png",
        "graph ring --ranks 4",
        "verify --backend tests.hostile_backends:Raises --check kernels.S1.add[float32]",
        "vectors check --help",
        f"trace show {tmp_path}",
    ]
    shown = run_script(
        IN_TERMINAL.format(commands=[command.split() for command in commands])
    ).stdout.split("<<< end >>>")
    assert len(shown) == len(commands) + 1
    for command, text in zip(commands, shown, strict=False):
        assert text, command
        assert COLOUR.search(text) is None, command


# Doctor


def test_doctor_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "a-very-long-name" / ("x" * 100)
    folder.mkdir(parents=True)
    server = folder / "redis-server"
    server.write_text(
        "#!/bin/sh\necho Redis server v=9.9.9 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64"
        " build=ae4d7c971a948f0\n"
    )
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("BAGUA_" + "LONG_" * 20, "value " * 40)
    monkeypatch.setenv("BAGUA_TWO_LINES", "one\ntwo")
    monkeypatch.setenv("BAGUA_REF_BACKEND", "abacus")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert "x" * 100 in "".join(line.strip() for line in lines)
    for topic in (
        "versions",
        "kernel backends",
        "communication",
        "GPUs",
        "redis",
        "extras",
        "trainers",
        "environment",
        "problems",
    ):
        assert [line for line in lines if line.startswith(topic)], topic
    start = next(place for place, line in enumerate(lines) if line.startswith("  redis-server"))
    assert lines[start + 1].startswith(" " * 23)
    assert "  BAGUA_TWO_LINES      one two" in lines
    assert main(["doctor", "--json"]) == 0
    redis = json.loads(capsys.readouterr().out)["redis"]
    assert redis["redis-server"].startswith("Redis server v=9.9.9 sha=00000000:0")
    assert redis["redis-server"].endswith(f"({server})")
    assert redis["valkey-server"] == "not on PATH"


def test_doctor_names_what_an_extra_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.examine()["extras"]["demo"] == "installed"
    real = doctor.version

    def version(name: str) -> str:
        if name == "matplotlib":
            raise PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor, "version", version)
    found = doctor.examine()["extras"]
    assert found["demo"].startswith(
        "without matplotlib these cannot run: bagua-ref demo and pictures; "
    )
    assert found["demo"].endswith(install_command("demo"))
    assert found["completion"] == "installed"


def test_doctor_writes_json_into_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--json-file", str(tmp_path / "doctor.json")]) == 0
    assert capsys.readouterr().out.startswith("versions\n")
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "doctor.json").read_text())
    assert main(["doctor", "--json-file", str(tmp_path / "no" / "such")]) == 2
    complaint = (
        f"bagua-ref doctor: error: cannot write {str(tmp_path / 'no' / 'such')!r}: No such file or"
        " directory\n"
    )
    assert capsys.readouterr().err == complaint


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


def test_doctor_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "4096")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["bagua_ref"] == bagua_ref.__version__
    assert found["kernel backends"]["reference"] == "available"
    assert set(found["kernel backends"]) == set(bagua_ref.available_backends())
    assert found["communication"].keys() == {"gloo", "nccl"}
    assert found["GPUs"]["count"] == torch.cuda.device_count()
    assert found["environment"]["BAGUA_DEFAULT_BUCKET_SIZE"] == "4096"
    assert found["problems"] == {}


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


@pytest.mark.slow
def test_the_shares_of_a_batch_make_the_whole(digits: Digits) -> None:
    settings = Settings(ranks=4, epochs=2)
    whole = list(digits.batches(settings, 0, 1))
    shares = [list(digits.batches(settings, share, 4)) for share in range(4)]
    assert len(whole) == settings.steps == 44
    for step, (images, labels) in enumerate(whole):
        assert torch.equal(images, torch.cat([shares[share][step][0] for share in range(4)]))
        assert torch.equal(labels, torch.cat([shares[share][step][1] for share in range(4)]))
    first_epoch = torch.cat([images for images, _ in whole[:22]])
    assert (
        len(torch.unique(first_epoch, dim=0)) == len(torch.unique(digits.train_images, dim=0)) - 29
    )


def test_the_test_set_is_apart_from_the_training_set(digits: Digits) -> None:
    assert (len(digits.train_labels), len(digits.test_labels)) == (1437, 360)
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert 0 <= digits.train_images.min() < digits.train_images.max() <= 1
    together = torch.cat([digits.train_images, digits.test_images])
    assert len(torch.unique(together, dim=0)) == 1797


def train_simulated(name: str, settings: Settings, digits: Digits) -> TrainingOutcome:
    """Train in this process as the workers do; every rank must report its own steps and return the
    same outcome.
    """

    def rank(comm: Any) -> TrainingOutcome | None:
        if name == ALONE and comm.rank():
            return None
        bagua_ref.init_process_group()
        steps: list[Any] = []
        outcome = train(name, settings, digits, lambda **news: steps.append(news))
        assert len(steps) == settings.steps
        assert steps[-1].keys() == {"loss"}
        return outcome

    first, *others = SimulatedWorld(settings.ranks).run(rank)
    assert all(outcome == first for outcome in others if outcome is not None)
    return first


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RECIPES))
def test_every_algorithm_trains_in_a_simulated_world(name: str, digits: Digits) -> None:
    settings = Settings(ranks=2, epochs=3, algorithms=(name,))
    outcome = train_simulated(name, settings, digits)
    assert len(outcome.losses) == len(outcome.bytes_sent) == settings.steps
    assert outcome.final_loss < outcome.losses[0]
    assert outcome.bytes_sent == sorted(outcome.bytes_sent)
    assert outcome.final_loss == pytest.approx(sum(outcome.losses[-22:]) / 22)
    assert outcome.steps_per_second > 0


def test_full_precision_equals_one_process_and_sends_what_the_formula_says(digits: Digits) -> None:
    settings = Settings(ranks=4, epochs=1)
    alone, together = (
        train_simulated(name, settings, digits) for name in (ALONE, "gradient_allreduce")
    )
    assert together.losses == pytest.approx(alone.losses, rel=1e-3)
    assert together.bytes_per_step == 2 * 3 / 4 * 4 * PARAMETERS
    assert together.ratio == 1
    assert together.weight_difference == 0
    assert (alone.bytes_per_step, alone.ratio, alone.weight_difference) == (0, None, 0)


def test_bytegrad_sends_a_byte_per_element_and_its_headers(digits: Digits) -> None:
    outcome = train_simulated("bytegrad", Settings(ranks=4, quick=True), digits)
    chunk = 32 + -(-(PARAMETERS + 2) // 4 // 32) * 32  # S4.1; two elements of padding
    assert outcome.bytes_per_step == 2 * 3 / 4 * 4 * chunk
    assert outcome.ratio == pytest.approx(0.252, abs=0.001)
    assert outcome.weight_difference == 0


class Background(Algorithm):
    """An algorithm that must be stopped explicitly, whose ranks differ."""

    def reify(self, process_group: Any) -> AlgorithmImpl:
        class Impl(AlgorithmImpl):
            def abort(self, model: Any) -> None:
                stopped.append(model.bagua_train_step_counter)

        return Impl(process_group)


stopped: list[int] = []


def test_an_algorithm_that_works_in_the_background_is_stopped_and_ranks_are_combined(
    digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    GlobalAlgorithmRegistry.register("background", Background, "for a test")
    monkeypatch.setitem(RECIPES, "background", Recipe("background", {}, "a test"))
    stopped.clear()
    settings = Settings(ranks=2, algorithms=("background",), quick=True)
    single: list[float] = []

    def rank(r: int) -> TrainingOutcome:
        losses: list[float] = []
        outcome = train("background", settings, digits, lambda **news: losses.append(news["loss"]))
        single.append(losses[0])
        return outcome

    try:
        outcome, _ = simulate(2, rank)
    finally:
        del GlobalAlgorithmRegistry["background"]
    assert stopped == [10, 10]
    assert outcome.losses[0] == pytest.approx(sum(single) / 2)
    assert single[0] != single[1]
    assert outcome.weight_difference > 0  # nothing was exchanged


# Reports


def events(name: str, accuracy: float = 0.9) -> list[dict[str, Any]]:
    """Return what rank 0 reports of ten steps alone and with ``name``."""
    result: list[dict[str, Any]] = [{"algorithm": ALONE, "loss": 1.0} for _ in range(10)]
    outcome = TrainingOutcome(ALONE, 0.5, 1.0, 0, None, 1.0, 0.0, [1.0] * 10, [0] * 10)
    result.append({"algorithm": ALONE, "outcome": outcome})
    result += [{"algorithm": name, "loss": 0.25} for _ in range(10)]
    sent = [1000.0 * (step + 1) for step in range(10)]
    outcome = TrainingOutcome(name, accuracy, 0.5, 1000.0, 0.25, 1.0, 0.0, [0.5] * 10, sent)
    return [*result, {"algorithm": name, "outcome": outcome}]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_and_outcomes_are_printed(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    found = demo._show(events("bytegrad"), Settings(ranks=2, quick=True, algorithms=("bytegrad",)))
    printed, progress = capsys.readouterr()
    assert printed.splitlines() == [
        "starting 2 workers",
        "single process: test accuracy 50.0%, loss 1.000",
        "bytegrad: test accuracy 90.0%, loss 0.500, 10.0 kB sent",
    ]
    assert progress.count("bytegrad: step 10 of 10, loss 0.250") == 1
    assert ("\r" in progress) == terminal
    assert [outcome.algorithm for outcome in found] == [ALONE, "bytegrad"]


def check_page(page: str, expected: list[str]) -> None:
    for text in expected:
        assert text in page
    (drawing,) = re.findall(r'src="([^"]*)"', page)
    assert drawing.startswith("data:image/svg+xml;base64,")
    ElementTree.fromstring(b64decode(drawing.partition(",")[2]))
    assert "<script" not in page


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
    assert run_demo("--json-file", str(tmp_path / "demo.json")) == 0
    out = capsys.readouterr().out
    assert re.search(r"bytegrad: test accuracy [\d.]+%, loss [\d.]+, 384.0 kB sent", out)
    assert re.search(r"gradient_allreduce +[\d.]+% +[\d.]+ +153.1 kB +100.0% +0 +[\d.]+ *\n", out)
    assert "…" not in out
    found = json.loads((tmp_path / "report" / "results.json").read_text())
    assert json.loads((tmp_path / "demo.json").read_text()) == found
    assert [entry["algorithm"] for entry in found["results"]] == [ALONE, *RECIPES]
    by_name = {entry["algorithm"]: entry for entry in found["results"]}
    assert by_name["gradient_allreduce"]["bytes_per_step"] == 4 * PARAMETERS
    assert by_name["gradient_allreduce"]["losses"] == pytest.approx(
        by_name[ALONE]["losses"], rel=1e-3
    )
    assert by_name["bytegrad"]["ratio"] == pytest.approx(0.251, abs=0.001)
    for entry in by_name.values():
        assert len(entry["losses"]) == 10
        assert entry["steps_per_second"] > 0
    check_page(
        (tmp_path / "report" / "index.html").read_text(),
        ["2 workers, 10 steps", "153.1 kB", "38.4 kB", "25.1%"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_demo_ends_its_workers(
    number: signal.Signals,
    run_demo: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "show_progress", lambda *_: signal.raise_signal(number))
    assert run_demo() == 130
    assert capsys.readouterr().err == "bagua-ref demo: interrupted\n"


@pytest.mark.slow
def test_a_worker_that_dies_is_named(
    tmp_path: Path,
    run_demo: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        demo, "show_progress", lambda *_: multiprocessing.active_children()[0].kill()
    )
    assert run_demo() == 1
    assert re.search(r"bagua-ref demo: worker \d: .*terminated with", capsys.readouterr().err)
    assert not (tmp_path / "report" / "results.json").exists()


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

"""`bagua-ref sim`: planted bugs in programs of torch.distributed are found and named, and their
mended twins are not reported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import launch
from tests.sim_scripts import SCRIPTS, Script, mended, right

from bagua_ref.cli import main
from bagua_ref.simulation import Schedule, always
from bagua_ref.simulation.judge import Exploration, Judgement, judge
from bagua_ref.simulation.programs import Program
from bagua_ref_pytest import sim_world

assert sim_world  # a fixture
assert launch  # whose server forks

ENDED = "rank_dependent_branch"


def judged(folder: Path, text: str, ranks: int = 2, cpu: bool = False, **options: Any) -> Judgement:
    script = folder / "script.py"
    script.write_text(text)
    options = {"seeds": 6, "hash_seeds": (), "limit": 120.0, "processes": 1} | options
    return judge(Program(str(script), cpu=cpu), Exploration((ranks,), **options))


def script_of(name: str) -> Script:
    return next(script for script in SCRIPTS if script.name == name)


@pytest.mark.parametrize(
    "script",
    [script for script in SCRIPTS if "hash_seed" not in script.kinds],
    ids=lambda script: script.name,
)
def test_a_planted_bug_is_found_and_its_line_named(script: Script, tmp_path: Path) -> None:
    report = judged(tmp_path, script.text(broken=True), script.ranks)
    if script.hint:
        assert report.verdict == "agree"
        assert [hint for hint in report.hints if script.hint in hint]
        assert any(
            f"script.py:{line}" in hint for hint in report.hints for line in script.bug_lines()
        )
    else:
        assert report.verdict == "found"
        found = report.finding
        assert found is not None
        assert found.kind in script.kinds
        assert found.line in script.bug_lines()
        assert found.rank is not None
        assert f"rank {found.rank}" in found.message
        assert f"script.py:{found.line}" in found.message


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_mended_twins_and_right_programs_are_not_reported(ranks: int, tmp_path: Path) -> None:
    report = judged(tmp_path, mended(ranks), ranks, seeds=3)
    assert (report.verdict, report.finding, report.hints) == ("agree", None, [])


BAGUA = """
import os, torch
import bagua_ref
from bagua_ref.algorithms import Algorithm
bagua_ref.init_process_group()
rank = bagua_ref.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.ReLU(), torch.nn.Linear(40, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua(optimizer, Algorithm.init("{}"))
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 3), 1.0 + step + rank)).square().mean().backward()
    optimizer.step()
anything = torch.tensor(list(os.urandom(8)) if rank else [7] * 8)  # rank 1 receives there, or is no source
bagua_ref.broadcast(anything.clone(), src=0)
bagua_ref.scatter(anything, torch.zeros(4, dtype=torch.int64), src=0)
bagua_ref.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["bytegrad", "decentralized"])
def test_a_training_with_this_package_is_not_reported(name: str, tmp_path: Path) -> None:
    report = judged(tmp_path, BAGUA.format(name), seeds=2)
    assert (report.verdict, report.finding) == ("agree", None)


def test_what_a_rank_overwrites_by_receiving_is_not_what_it_sends(tmp_path: Path) -> None:
    text = (
        right() + "dist.broadcast(torch.tensor(list(os.urandom(8)) if rank else [7] * 8), src=0)\n"
    )
    assert judged(tmp_path, "import os\n" + text, seeds=2).finding is None


@pytest.mark.proof
def test_a_set_that_orders_collectives_is_found_by_another_hash_seed(tmp_path: Path) -> None:
    script = script_of("set_ordered_collectives")
    report = judged(tmp_path, script.text(broken=True), seeds=1, hash_seeds=(1,))
    assert report.finding is not None
    assert (report.finding.kind, report.finding.line in script.bug_lines()) == ("hash_seed", True)


@pytest.mark.proof
def test_a_program_without_a_seed_does_the_same_in_every_interpreter(tmp_path: Path) -> None:
    text = script_of("forgotten_no_sync").text(broken=False)
    # pickles that always differ
    text += "dist.broadcast_object_list([{'weight', 'bias', 'scale'}, os.urandom(8)], src=0)\n"
    text += script_of("set_ordered_collectives").text(broken=False).partition("world_size()\n")[2]
    planned: list[int | None] = []
    script = tmp_path / "script.py"
    script.write_text(text)
    search = Exploration((2,), seeds=1, faults=("slow",), limit=120.0, hash_seeds=(1,), processes=1)
    report = judge(Program(str(script)), search, lambda report: planned.append(report.planned))
    assert report.verdict == "agree"
    # Of the default schedule, early use, the seed, the other interpreter, and a slow rank each.
    assert planned == [None, None, None, 7, 7, 7, 7]


def test_the_schedule_of_a_finding_repeats_it_and_has_few_deviations(tmp_path: Path) -> None:
    text = script_of("first_come_first_served").text(broken=True)
    found = judged(tmp_path, text, 3).finding
    assert found is not None
    assert 1 <= found.schedule.deviations() <= 2
    again = judged(tmp_path, text, 3, schedule=Schedule.parse(str(found.schedule))).finding
    assert again is not None
    assert (again.kind, again.line) == (found.kind, found.line)


@pytest.mark.proof
def test_deviations_find_what_seeds_find(tmp_path: Path) -> None:
    found = judged(tmp_path, script_of("race_on_a_global").text(broken=True), deviations=1).finding
    assert found is not None
    assert (found.kind, found.schedule.deviations()) == ("schedule", 1)


def trains(after: Callable[[], None]) -> Callable[[], None]:
    def program() -> None:
        dist.init_process_group()
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            x = torch.full((1, 2), float(dist.get_rank() + step))
            try:
                model(x).sum().backward()
            except RuntimeError:
                after()
            optimizer.step()

    return program


def fails() -> None:
    raise SystemExit("gave up")


def test_survivors_of_a_fault_may_raise_but_not_train_on(sim_world: Any) -> None:
    sim_world(trains(fails), ranks=2, seeds=1, faults=("kill", "stop", "slow"))
    assert sim_world.report.planned == sim_world.report.runs > 20
    broken = judge(
        Program("swallows", function=trains(lambda: None)),
        Exploration((3,), seeds=1, faults=("kill",)),
    )
    assert broken.finding is not None
    assert broken.finding.kind == "fault"
    assert broken.finding.fault is not None
    assert "rank 0 is killed at its communication" in broken.finding.message


def test_an_invariant_is_checked_at_every_step(sim_world: Any) -> None:
    def program(limit: int) -> None:
        steps = [0]
        always(lambda: steps[0] < limit)
        dist.init_process_group()
        for _ in range(3):
            steps[0] += 1
            dist.barrier()

    sim_world(lambda: program(4), seeds=1)
    report = judge(Program("program", function=lambda: program(3)), Exploration((2,), seeds=1))
    assert report.finding is not None
    assert (report.finding.kind, report.finding.rank) == ("invariant", 0)


def test_the_fixture_fails_with_the_finding(sim_world: Any) -> None:
    def program() -> None:
        dist.init_process_group()
        if dist.get_rank() == 0:
            dist.barrier()

    with pytest.raises(
        pytest.fail.Exception, match=r"rank 0 waits in barrier\(\) for rank 1 .*rank 1 has ended"
    ):
        sim_world(program)


def test_the_limit_gives_no_verdict(tmp_path: Path) -> None:
    report = judged(tmp_path, right("is_completed_is_polled"), seeds=100_000, limit=1.0)
    assert (report.verdict, report.is_complete) == ("undecided", False)
    assert report.planned is None or report.runs < report.planned


def test_the_guide_shows_what_the_command_prints(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "sim.md").read_text()
    numbered = page.split("```text\n")[1].split("```")[0].splitlines()
    report = judged(tmp_path, "\n".join(line[4:] for line in numbered), 4)
    assert report.finding is not None
    shown = (
        page.split("```console\n")[1]
        .split("```")[0]
        .split("found in 1 run: ")[1]
        .split("replay:")[0]
    )
    assert (
        report.finding.message.replace(f"{tmp_path}/script.py", "train.py").split() == shown.split()
    )


# The command.


def sim(capsys: Any, *arguments: str) -> tuple[int, str]:
    code = main(["sim", *arguments])
    return code, capsys.readouterr().out


ENDS_IN_ONE_SCHEDULE = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group()
rank = dist.get_rank()
if rank == 0:
    print("begun")
    dist.send(torch.ones(1), 1)
elif rank == 2:
    dist.send(torch.ones(1), 1)
else:
    if dist.recv(torch.ones(1)) == 2:
        os._exit(3)
    dist.recv(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("text", "ranks", "kind", "words"),
    [
        (script_of(ENDED).text(broken=True), 2, "ended", "rank 1 has ended"),
        (ENDS_IN_ONE_SCHEDULE, 3, "crash", "the process of the run ended with exit code 3"),
    ],
    ids=["hang", "process that ends"],
)
def test_the_command_replays_what_it_names(
    text: str, ranks: int, kind: str, words: str, tmp_path: Path, capsys: Any
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    code, out = sim(capsys, str(script), "--ranks", str(ranks), "--json")
    result = json.loads(out)
    assert (code, result["version"], result["verdict"], result["kind"]) == (1, 1, "found", kind)
    assert words in result["message"]
    if kind == "ended":
        lines = script_of(ENDED).bug_lines()
        assert (result["rank"], result["file"], result["line"] in lines) == (0, str(script), True)
        assert result["command"] == f"bagua-ref sim {script} --ranks 2"
    else:
        assert result["schedule"].startswith("seed:")
        assert f"--schedule {result['schedule']}" in result["command"]
    code, out = sim(capsys, *result["command"].split()[2:])
    assert code == 1
    assert words in out
    assert "replay: bagua-ref sim" in out


def test_a_program_gets_its_arguments_a_folder_and_a_prefix_for_its_output(
    tmp_path: Path, capfd: Any
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, os, torch.distributed\ntorch.distributed.init_process_group()\n"
        "print(sys.argv[1:], os.listdir('.'), os.environ['RANK'])\n"
    )
    assert (
        main(
            [
                "sim",
                str(script),
                "--ranks",
                "2",
                "--schedule",
                "default",
                "--limit",
                "5m",
                "--",
                "--lr",
                "3",
            ]
        )
        == 0
    )
    out = capfd.readouterr().out.splitlines()
    assert sorted(out[:2]) == ["[rank 0] ['--lr', '3'] [] 0", "[rank 1] ['--lr', '3'] [] 1"]
    assert [line for line in out[2:] if not line.startswith(("OK: ", "Next: "))] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no script 'missing.py'"),
        (["nothing"], "must be a script.py or module:function"),
        (["{script}", "--ranks", "3", "--nodes", "1,1"], "must sum to --ranks 3"),
        (["{script}", "--faults", "fire"], "invalid choice: 'fire' (choose from kill, stop, slow)"),
        (["{script}", "--fault", "kill:1"], "must be KIND:RANK:NUMBER"),
        (["{script}", "--fault", "kill:2:0"], "rank 2 must be one of 0 to 1"),
        (["{script}", "--schedule", "3:1,2:1"], "ascending places"),
        (["{script}", "--limit", "soon"], "must be a time such as 90s"),
        (["{script}", "--deviations", "-1"], "'-1' must be an integer from 0"),
        (
            ["{script}", "--link", "fast"],
            "link='fast' must be BANDWIDTH,LATENCY such as 1Gbit,20ms",
        ),
        (
            ["{script}", "--link", "1Gbit,20ms", "--compute", "0ms"],
            "time '0ms' must be a number above 0 of s, ms or us",
        ),
        (["{script}", "--compute", "120ms"], "arguments --compute and --trace need --link"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    assert main(["sim", *(argument.format(script=script) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err


def run_sim(folder: Path, output: Connection, *arguments: str) -> None:
    """Run the command with ``output`` as its standard output, and a file for errors."""
    os.dup2(output.fileno(), 1)
    output.close()
    os.dup2(os.open(folder / "errors", os.O_WRONLY | os.O_CREAT), 2)
    tempfile.tempdir = str(folder)  # a killed command leaves its folder
    os._exit(main(["sim", *arguments]))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopping_the_command_ends_its_workers(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDS_IN_ONE_SCHEDULE.replace("os._exit(3)", "pass"))
    forks = multiprocessing.get_context("forkserver")  # that of tests.launch
    here, there = forks.Pipe(duplex=False)
    process = forks.Process(
        target=run_sim, args=(tmp_path, there, str(script), "--ranks", "3", "--seeds", "100000")
    )
    process.start()
    there.close()
    with open(here.fileno(), closefd=False) as printed:
        assert printed.readline() == "[rank 0] begun\n"
        time.sleep(0.3)  # until there are several workers
        assert process.pid is not None
        os.kill(process.pid, number)
        printed.read()  # which ends when no process has the pipe
    process.join()
    assert process.exitcode == (130 if number is signal.SIGINT else -number)
    assert (tmp_path / "errors").read_text() == (
        "bagua-ref sim: interrupted\n" if number is signal.SIGINT else ""
    )


def test_data_loaders_may_do_without_worker_processes(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\nclass Processes(torch.utils.data.Dataset):\n    __len__ = lambda self:"
        " 2\n    __getitem__ = lambda self, i: os.getpid()\nloader ="
        " torch.utils.data.DataLoader(Processes(), num_workers=1, timeout=9,"
        " persistent_workers=True)\ntorch.distributed.init_process_group()\nassert"
        " {int(batch) for batch in loader} == {os.getpid()}\n"
    )
    code, out = sim(capsys, str(script), "--schedule", "default", "--workers", "0")
    assert code == 0, out
    assert "hint: a data loader runs without its worker processes" in out
    code, out = sim(capsys, str(script), "--schedule", "default")
    assert code == 1
    assert "AssertionError" in out


def test_what_is_not_simulated_gives_no_verdict(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text("import subprocess\nsubprocess.run(['torchrun', '-c', ''])\n")
    code, out = sim(capsys, str(script), "--seeds", "1")
    assert code == 3
    assert "no verdict" in out

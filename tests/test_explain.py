"""`bagua-ref explain`: dumps of programs over gloo, dumps that are made up, and damaged ones."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests import hangs, launch
from tests.hangs import HANGS, HEALTHY, Hang

import bagua_ref
from bagua_ref.cli import main
from bagua_ref.explain import DumpError, Explanation, explain
from bagua_ref.observe import flight_recorder
from bagua_ref.simulation.findings import own_error
from bagua_ref.simulation.observation import Order, observe
from bagua_ref.simulation.programs import Program

launch.preload("tests.hangs", "bagua_ref.explain")

NOW = time.time_ns()
QUICK = ("rank_that_died", "exception_on_one_rank", "message_without_partner", "send_and_send")


def explained(folder: Path, text: str, ranks: int) -> Explanation:
    """Run a program over gloo, and explain its dumps."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(text)
    launch.outcomes(hangs.run, ranks, str(script), str(folder / "dumps"), init=False, limit=60.0)
    return explain(folder / "dumps")


def explained_all(folder: Path, programs: Iterable[tuple[str, str, int]]) -> list[Explanation]:
    """Explain programs that run at the same time, as they mostly wait."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda one: explained(folder / one[0], one[1], one[2]), programs))


def assert_named(found: Explanation, hang: Hang) -> None:
    finding = found.finding
    assert finding is not None, hang.name
    assert (finding.kind, finding.line in hang.lines()) == (hang.kind, True), finding
    assert hang.words in finding.message + found.cause


def test_programs_that_hang_over_gloo_are_explained(tmp_path: Path) -> None:
    chosen = [hang for hang in HANGS if hang.name in QUICK]
    programs = [(hang.name, hang.text(), hang.ranks) for hang in chosen]
    right = ("stopped_while_one_computes", hangs.healthy("stopped_while_one_computes"), 4)
    *found, healthy = explained_all(tmp_path, [*programs, right])
    for one, hang in zip(found, chosen, strict=True):
        assert_named(one, hang)
    assert healthy.finding is None


@pytest.mark.proof
def test_the_same_line_is_named_over_gloo_and_by_simulated_ranks(tmp_path: Path) -> None:
    found = explained_all(tmp_path, [(hang.name, hang.text(), hang.ranks) for hang in HANGS])
    for one, hang in zip(found, HANGS, strict=True):
        assert_named(one, hang)
        if hang.simulated:
            program = Program(str(tmp_path / hang.name / "script.py"))
            simulated = own_error(observe(program, (hang.ranks,), Order()))
            assert simulated is not None, hang.name
            assert one.finding is not None
            assert simulated.line == one.finding.line, hang.name


@pytest.mark.proof
def test_healthy_programs_are_not_accused(tmp_path: Path) -> None:
    found = explained_all(tmp_path, [(name, hangs.healthy(name), 4) for name in HEALTHY])
    assert [one.finding for one in found] == [None] * len(HEALTHY)


def entry(number: int, line: int = 5, **changes: Any) -> dict[str, Any]:
    """Return an entry of a recorder: an all-reduce that ended a while ago."""
    return {
        "frames": [
            {"name": "all_reduce", "filename": "x/site-packages/t/distributed_c10d.py", "line": 1},
            {"name": "main", "filename": "/job/train.py", "line": line},
        ],
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": NOW - 10**12 + number * 10**9,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "retired": True,
        "timeout_ms": 10_000,
        "is_p2p": False,
    } | changes


def pending(number: int, line: int = 5, **changes: Any) -> dict[str, Any]:
    return entry(number, line, state="started", retired=False, **changes)


def dump(folder: Path, rank: int, entries: list[dict[str, Any]], **changes: Any) -> Path:
    """Write a rank's dump."""
    folder.mkdir(exist_ok=True)
    path = folder / f"torch_trace_rank_{rank}"
    content = {"version": "2.10", "pg_config": {}, "entries": entries} | changes
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def test_the_first_difference_is_named_with_its_ranks_and_lines(tmp_path: Path) -> None:
    for rank in range(4):
        other = {"profiling_name": "nccl:broadcast"} if rank == 2 else {}
        dump(tmp_path, rank, [entry(1), entry(2), pending(3, 88 if rank == 2 else 91, **other)])
    found = explain(tmp_path).finding
    assert found is not None
    assert (found.kind, found.rank, found.file, found.line) == ("mismatch", 2, "/job/train.py", 88)
    assert "ranks 0-1, 3 call all_reduce of float32[4] at /job/train.py:91" in found.message


def test_a_failed_call_is_named_with_the_ranks_that_have_ended(tmp_path: Path) -> None:
    script = hangs.Hang("", 2, "if rank == 0:\n    dist.monitored_barrier()  # HERE", "failed", "")
    found = explained(tmp_path / "barrier", script.text(), 2)
    assert_named(found, script)
    assert "fails in monitored_barrier()" in str(found.finding)
    assert "rank 1 has ended" in str(found.finding)


def test_a_crash_is_named_by_its_line(tmp_path: Path) -> None:
    for rank in range(3):
        dump(tmp_path, rank, [entry(1)])
        (tmp_path / f"rank_{rank}.crash").touch()
    assert explain(tmp_path).finding is None
    (tmp_path / "rank_1.crash").write_text(
        "Fatal Python error: Segmentation fault\n\n"
        'Thread 0x0000000000000001 (most recent call first):\n  File "/job/load.py", line 3 in f\n\n'
        "Current thread 0x0000000000000002 (most recent call first):\n"
        '  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 9 in linear\n'
        '  File "/job/train.py", line 7 in step\n  File "/job/train.py", line 70 in <module>\n\n'
        "Extension modules: numpy (total: 1)\n"
    )
    found = explain(tmp_path).finding
    assert found is not None
    assert (found.kind, found.rank, found.line) == ("exception", 1, 7)
    assert "Segmentation fault" in found.message


def test_a_rank_without_the_call_is_named_with_its_last_one(tmp_path: Path) -> None:
    for rank in range(3):
        late = [] if rank == 1 else [pending(3, 7)]
        dump(tmp_path, rank, [entry(1), entry(2, 6), *late])
    result = explain(tmp_path)
    assert result.finding is not None
    assert result.finding.kind == "absent"
    assert "ranks 0, 2 wait in all_reduce of float32[4] for rank 1" in result.finding.message
    assert "rank 1 makes no call after all_reduce of float32[4] at /job/train.py:6" in (
        result.finding.message
    )


def test_ranks_dumped_at_other_moments_are_not_accused(tmp_path: Path) -> None:
    now = time.time_ns()
    recent = {"time_created_ns": now - 10**8}
    dump(tmp_path, 0, [entry(1), entry(2), pending(3, **recent)])
    early = dump(tmp_path, 1, [entry(1), entry(2)])
    assert explain(tmp_path).finding is None
    # a dump from before the others' calls says nothing about them, however long these have waited
    dump(tmp_path, 0, [entry(1), entry(2), pending(3)])
    os.utime(early, ns=(NOW - 10**12, NOW - 10**12))
    assert explain(tmp_path).finding is None


def test_a_missing_dump_is_a_note(tmp_path: Path) -> None:
    ranks = {"0": {"name": "0", "desc": "", "ranks": "[0, 1, 2]"}}
    for rank in (0, 2):
        dump(tmp_path, rank, [entry(1)], pg_config=ranks)
    found = explain(tmp_path)
    assert (found.finding, found.notes) == (None, ["no dump of rank 1"])


def test_a_group_made_anew_is_not_compared_with_the_old_one(tmp_path: Path) -> None:
    anew = {"pg_id": 1, "profiling_name": "nccl:barrier"}
    dump(tmp_path, 0, [entry(1), entry(2), entry(1, record_id=2, **anew)])
    dump(tmp_path, 1, [entry(1, record_id=2, **anew)])
    assert explain(tmp_path).finding is None


def test_circles_over_two_groups_are_a_deadlock(tmp_path: Path) -> None:
    for rank in (0, 1):
        group = {"process_group": (str(rank + 1), ""), "pg_id": rank + 1}
        names = {name: {"name": name, "desc": "", "ranks": "[0, 1]"} for name in ("0", "1", "2")}
        dump(
            tmp_path, rank, [entry(1), pending(1, 20 + rank, record_id=1, **group)], pg_config=names
        )
    found = explain(tmp_path).finding
    assert found is not None
    assert found.kind == "deadlock"


def test_sizes_of_an_all_to_all_are_named_by_pair(tmp_path: Path) -> None:
    sizes = [([[2], [3]], [[2], [4]]), ([[4], [5]], [[1], [5]])]
    for rank, (sent, received) in enumerate(sizes):
        of = {"profiling_name": "nccl:all_to_all", "input_sizes": sent, "output_sizes": received}
        of |= {"input_dtypes": ["Float"] * 2, "output_dtypes": ["Float"] * 2}
        ranks = {"0": {"name": "0", "desc": "", "ranks": "[0, 1]"}}
        dump(tmp_path, rank, [pending(1, **of)], pg_config=ranks)
    found = explain(tmp_path).finding
    assert found is not None
    assert "rank 0 sends 3 elements to rank 1" in found.message
    assert "rank 1 receives 1" in found.message


def test_only_calls_of_the_same_collective_are_compared(tmp_path: Path) -> None:
    ranks = {"0": {"name": "0", "desc": "", "ranks": "[0, 1]"}}
    of = {"profiling_name": "nccl:all_to_all", "input_dtypes": ["Float"] * 2}
    of |= {"output_dtypes": ["Float"] * 2}
    for rank, count in enumerate((1, 2)):  # rank 1 was dumped a step later, with other sizes
        sizes = [[2 + rank], [3 + rank]]
        entries = [entry(n, **of, input_sizes=sizes, output_sizes=sizes) for n in (1, 2)[:count]]
        path = dump(tmp_path, rank, entries, pg_config=ranks)
        os.utime(path, ns=(NOW, NOW - 10**12 + (1 + rank) * 10**9))
    assert explain(tmp_path).finding is None


SPY = """Process 42: python -u train.py --lr 0.1
Python v3.11.7 (/usr/bin/python3.11)

Thread 42 (idle): "MainThread"
    0x7f3a2c1b (libtorch_cpu.so)
    wait (threading.py:320)
    all_reduce (torch/distributed/distributed_c10d.py:2501)
        Arguments:
            tensor: <Tensor at 0x7f31>
    step (train.py:88)
    <module> (train.py:100)
Thread 0x7F31 (active+gil): "checkpoint"
    write (io.py:7)
    save (models/io.py:9)
    run (threading.py:975)
Thread 57 (idle)
    select (selectors.py:468)

Process 58: python -c "from multiprocessing.spawn import spawn_main"
Python v3.11.7 (/usr/bin/python3.11)
Parent process 42

Thread 58 (idle): "MainThread"
    load (data.py:5)
"""


def test_stacks_of_py_spy_say_where_a_rank_without_a_recorder_is(tmp_path: Path) -> None:
    (tmp_path / "spy_rank_1.txt").write_text(SPY)
    with pytest.raises(DumpError, match=r"only stacks.*: rank 1 is at train.py:88"):
        explain(tmp_path)
    dump(tmp_path, 0, [entry(1), pending(2)])
    result = explain(tmp_path)
    calls = [stack.call for stack in result.dumps[1].stacks]
    assert [(call.thread, call.file, call.line) for call in calls] == [
        ("", "train.py", 88),
        ("checkpoint", "models/io.py", 9),
        ("", "", 0),
    ]
    assert result.dumps[1].script == "train.py"
    assert result.finding is not None
    assert result.finding.kind == "absent"
    assert "rank 1 has no dump of a flight recorder; it is at train.py:88" in result.finding.message


def wait_for_rank_1(folder: str) -> None:
    bagua_ref.communication.barrier()
    dumping = threading.Timer(0.5, flight_recorder.dump, [folder])
    dumping.start()
    if bagua_ref.get_rank() == 1:
        dumping.join()
        time.sleep(1.0)
    bagua_ref.communication.barrier()
    dumping.join()


def test_our_own_recorder_says_who_waits(tmp_path: Path) -> None:
    launch.launch(wait_for_rank_1, 2, str(tmp_path))
    assert explain(tmp_path).finding is None  # nobody has waited for long
    path = tmp_path / "rank0.json"
    content = json.loads(path.read_text())
    content["waits"][0]["since"] -= 100
    own = {"for": "for its engine", "ranks": [], "since": content["waits"][0]["since"]}
    content["waits"].append(own)
    path.write_text(json.dumps(content))
    finding = explain(tmp_path).finding
    assert finding is not None
    assert finding.kind == "absent"
    assert finding.message.startswith("rank 0 waits in barrier")
    assert finding.message.endswith("for rank 1 since an unknown line; rank 1 makes no call")
    path.write_text(json.dumps(content | {"waits": [], "error": "CommunicationError: why"}))
    finding = explain(tmp_path).finding
    assert finding is not None
    assert (finding.kind, finding.message) == ("failed", "rank 0 fails: why")


class Bad:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch bad",)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def rename(path: Path) -> None:
    path.rename(path.with_name("torch_trace_rank_9"))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncate, "truncated"),
    "empty": (lambda path: path.write_bytes(b""), "damaged"),
    "text": (lambda path: path.write_text("hello"), "damaged"),
    "list": (lambda path: path.write_text("[]"), "no entries"),
    "code": (lambda path: path.write_bytes(pickle.dumps(Bad())), "posix.system"),
    "entry": (
        lambda path: path.write_bytes(pickle.dumps({"version": "2.10", "entries": [{}]})),
        "is missing",
    ),
    "later_version": (
        lambda path: path.write_bytes(pickle.dumps({"version": "3.0", "entries": []})),
        "version 3.0",
    ),
    "mixed_versions": (
        lambda path: path.write_bytes(pickle.dumps({"version": "2.4", "entries": []})),
        "different runs",
    ),
    "another_rank": (rename, "not of rank 9"),
    "twice": (
        lambda path: (path.parent / "old_rank_1").write_bytes(path.read_bytes()),
        "same rank",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_unreadable_dumps_are_named(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = {"0": {"name": "0", "desc": "", "ranks": "[0, 1]"}}
    path = [dump(tmp_path, rank, [entry(1)], pg_config=ranks) for rank in (0, 1)][1]
    change, words = DAMAGE[damage]
    change(path)
    assert main(["explain", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert not Path("bad").exists()


def test_the_command_prints_json_and_exits_with_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        dump(tmp_path, rank, [entry(1)])
    assert main(["explain", str(tmp_path)]) == 0
    assert "healthy: 2 dumps" in capsys.readouterr().out
    dump(tmp_path, 0, [entry(1), pending(2)])
    assert main(["explain", str(tmp_path), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["verdict"], result["kind"], result["ranks"]) == ("found", "absent", [0, 1])
    assert result["waits"][0]["waits_for"] == [1]
    picture = tmp_path / "calls.png"
    assert main(["explain", str(tmp_path), "--png", str(picture)]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result["command"] == "bagua-ref sim /job/train.py --ranks 2"


def test_a_folder_without_dumps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="explain_hangs"):
        explain(tmp_path)
    with pytest.raises(DumpError, match="No such file"):
        explain(tmp_path / "missing")


def test_sigterm_dumps_at_once_while_the_main_thread_is_blocked(tmp_path: Path) -> None:
    program = f"""
import datetime, os, signal, sys, threading, time
import torch, torch.distributed as dist
import bagua_ref

read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
bagua_ref.explain_hangs({str(tmp_path)!r}, after=100)
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
main = threading.main_thread().ident

def end():
    while sys._current_frames()[main].f_lineno < {{last}}:
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end).start()
store.wait(["never"], datetime.timedelta(seconds=60))
"""
    last = program.count("\n")
    began = time.monotonic()
    ended = launch.run_script(program.format(last=last))
    assert ended.returncode == -15
    assert time.monotonic() - began < 50
    stacks = json.loads((tmp_path / "stacks_rank_0.json").read_text())
    assert stacks["reason"] == "SIGTERM"
    main_thread = next(thread for thread in stacks["threads"] if not thread["name"])
    assert main_thread["frames"][0]["line"] == last


def test_handlers_and_descriptors_of_the_program_are_kept(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
import bagua_ref

read, write = os.pipe()
os.set_blocking(write, False)
assert signal.set_wakeup_fd(write) == -1
heard = []
handler = lambda number, frame: heard.append(number)
signal.signal(signal.SIGTERM, handler)
hook = sys.excepthook
watch = bagua_ref.explain_hangs({str(tmp_path)!r})
os.kill(os.getpid(), signal.SIGTERM)
assert os.read(read, 1) == bytes([signal.SIGTERM])
while not heard:
    pass
watch.close()
assert signal.getsignal(signal.SIGTERM) is handler
assert signal.set_wakeup_fd(-1) == write
assert sys.excepthook is hook
assert os.path.exists({str(tmp_path / "stacks_rank_0.json")!r})
"""
    ended = launch.run_script(program)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_simulated_ranks_are_not_watched(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    folder = tmp_path / "dumps"
    script.write_text(
        f"import bagua_ref, torch, torch.distributed as dist\nbagua_ref.explain_hangs({str(folder)!r})"
        '\ndist.init_process_group("gloo")\ndist.all_reduce(torch.ones(1))\n'
    )
    assert own_error(observe(Program(str(script)), (2,), Order())) is None
    assert not folder.exists()

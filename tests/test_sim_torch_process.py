"""Tests of what each simulated rank has of its own, as a process would: state, modules, threads,
clocks, launches.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import queue
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from tests.test_sim_torch_errors import init, run

from bagua_ref.errors import SimulationError
from bagua_ref.simulation.torch_distributed import run_script


def test_generators_environment_and_arguments_belong_to_the_rank():
    def main():
        rank = init()
        random.seed(rank)
        np.random.seed(rank)  # noqa: NPY002
        torch.manual_seed(rank)
        os.environ["OWN"], sys.argv = str(rank), ["script", str(rank)]
        dist.barrier()
        drawn = np.random.rand()  # noqa: NPY002
        return random.random(), drawn, torch.rand(1).item(), os.environ["OWN"], sys.argv[1]

    arguments, before = sys.argv, torch.get_rng_state()
    results = run(main)
    for rank, result in enumerate(results):
        drawn = torch.rand(1, generator=torch.Generator().manual_seed(rank)).item()
        assert result == (
            random.Random(rank).random(),
            np.random.RandomState(rank).rand(),
            drawn,
            str(rank),
            str(rank),
        )
    assert sys.argv is arguments
    assert "OWN" not in os.environ
    assert "RANK" not in os.environ
    assert torch.equal(torch.get_rng_state(), before)
    assert not dist.is_initialized()


def test_ranks_begin_with_generators_in_different_states_but_for_torchs():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    drawn = run(draw, 3)
    assert [len(set(column)) for column in zip(*drawn, strict=True)] == [3, 3, 1]
    random.seed(random.random())
    assert [row[:2] for row in run(draw, 3)] == [row[:2] for row in drawn]  # a run can be repeated


def test_a_script_has_its_own_main_module_and_modules_on_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "own_module_of_script.py").write_text("seen = []\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, pickle, own_module_of_script as own\n"
        "import torch.distributed as dist\n"
        "class C: pass\n"
        "if __name__ == '__main__':\n"
        "    dist.init_process_group('gloo')\n"
        "    own.seen.append(dist.get_rank())\n"
        "    dist.barrier()\n"
        "    assert type(pickle.loads(pickle.dumps(C()))) is C\n"
        "    print(own.seen, sys.argv[1:])\n"
    )
    before = list(sys.path)
    try:
        run(lambda: run_script(str(script), ["--a"]))
    finally:
        sys.path[:] = before
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] ['--a']", "[1] ['--a']"]
    assert "own_module_of_script" not in sys.modules
    assert sys.modules["__main__"].__name__ == "__main__"


def test_threads_locks_and_queues_of_the_program_are_scheduled():
    def main():
        rank = init()
        group, results, lock, done = (
            dist.new_group(),
            queue.Queue(2),
            threading.Lock(),
            threading.Event(),
        )

        def produce():
            for i in range(5):
                dist.all_reduce(x := torch.tensor([float(i + rank)]), group=group)
                results.put(x.item())
            done.set()

        thread = threading.Thread(target=produce)
        thread.start()
        got = []
        for _ in range(5):
            with lock:
                got.append(results.get())
            dist.barrier()
        done.wait()
        thread.join()
        with pytest.raises(queue.Empty):
            results.get(timeout=3)
        return got, thread.is_alive()

    for seed in range(5):
        assert run(main, seed=seed) == [([1.0, 3.0, 5.0, 7.0, 9.0], False)] * 2


def test_executors_of_the_program_are_scheduled():
    def main():
        init()
        group = dist.new_group()

        def add(i):
            dist.all_reduce(x := torch.tensor([float(i)]), group=group)
            time.sleep(100)
            return x.item()

        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            futures = [executor.submit(add, i) for i in range(3)]
            dist.barrier()
            return [future.result() for future in futures], time.monotonic() > 300

    assert run(main) == [([0.0, 2.0, 4.0], True)] * 2


def test_an_exception_in_a_thread_does_not_end_the_rank(monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    monkeypatch.setattr(
        threading, "excepthook", lambda arguments: seen.append(str(arguments.exc_value))
    )

    def main():
        def fail():
            raise ValueError("in the thread")

        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        return 1

    assert run(main) == [1, 1]
    assert seen == ["in the thread", "in the thread"]


def test_clocks_are_virtual_and_sleeping_takes_no_time():
    def main():
        start, ticks = time.time(), time.perf_counter()
        time.sleep(1000)
        while time.perf_counter() - ticks < 1000.01:
            pass
        return 1000 <= time.time() - start < 1001

    began = time.monotonic()
    assert run(main) == [True, True]
    assert time.monotonic() - began < 60


def test_spawn_calls_the_function_on_the_ranks():
    def main():
        results = []

        def train(local_rank, value):
            dist.init_process_group("gloo", "tcp://127.0.0.1:2000", rank=local_rank, world_size=2)
            dist.all_reduce(x := torch.tensor([value]))
            results.append(x.item())

        torch.multiprocessing.spawn(train, (3.0,), nprocs=2)
        return results

    assert run(main) == [[6.0], [6.0]]


@pytest.mark.parametrize(
    ("launch", "what"),
    [
        (
            lambda: subprocess.run([sys.executable, "-m", "torch.distributed.run", "x.py"]),
            "process '.*python",
        ),
        (lambda: multiprocessing.Process(target=print).start(), "process 'Process"),
        (lambda: torch.multiprocessing.spawn(print, nprocs=3), "3 processes on a node of 2 ranks"),
    ],
)
def test_other_launches_are_refused(launch, what):
    with pytest.raises(SimulationError, match=f"rank . starts {what}") as error:
        run(launch)
    assert error.value.kind == "unsupported"
    assert error.value.calls[0].file == __file__


def test_exit_code_zero_is_a_normal_end():
    def main():
        init()
        dist.barrier()
        sys.exit(0)

    assert run(main) == [None, None]
    with pytest.raises(SystemExit) as error:
        run(lambda: sys.exit(3))
    assert error.value.code == 3

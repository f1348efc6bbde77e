"""`bagua-ref sim` accuses no right program, and says when there is nothing to judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import launch
from tests.test_sim import judged

from bagua_ref.simulation import scheduler
from bagua_ref.simulation.judge import Exploration, judge
from bagua_ref.simulation.programs import Program

assert launch  # whose server forks

START = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(4)
"""
STEP = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(x).sum().backward()
optimizer.step()
"""
NOT_REPEATABLE = {
    "NumPy": "import numpy\nx = torch.tensor(numpy.random.default_rng().random(4)).float()" + STEP,
    "Python": "import random\nx *= random.Random().random()" + STEP,
    "system": "import os\nx *= os.urandom(1)[0]" + STEP,
    "results": "import uuid\nw = torch.zeros(1, requires_grad=True)\n(w * (uuid.uuid4().int % 1000003)).backward()"
    "\ntorch.optim.SGD([w], lr=1.0).step()",
}


@pytest.mark.parametrize("text", NOT_REPEATABLE.values(), ids=NOT_REPEATABLE)
def test_a_program_that_does_not_repeat_itself_has_no_race(text: str, tmp_path: Path) -> None:
    report = judged(tmp_path, START + text, seeds=2)
    found = report.finding
    assert found is not None
    assert (report.verdict, found.kind) == ("undecided", "not_repeatable")
    line = (START + text).rstrip("\n").count("\n") + (text[-1] != "\n")
    assert f"script.py:{found.line}" in found.message
    assert found.line in (line, line - 1, line + 1)


def test_a_program_that_does_not_repeat_itself_is_still_judged_run_by_run(tmp_path: Path) -> None:
    text = START + NOT_REPEATABLE["system"] + "if rank == 0:\n    dist.barrier()\n"
    report = judged(tmp_path, text, seeds=2)
    assert report.finding is not None
    assert (report.verdict, report.finding.kind) == ("found", "ended")


NO_VERDICT = {
    "nothing": ("print('needs a GPU')", "no rank communicates"),
    "set_device": ("import torch\ntorch.cuda.set_device(0)", "--cpu"),
    "device": (START + "x = torch.ones(2, device='cuda')\ndist.all_reduce(x)", "--cpu"),
    "module": (START + "torch.nn.Linear(1, 1).cuda()", "--cpu"),
}


@pytest.mark.parametrize(("text", "words"), NO_VERDICT.values(), ids=NO_VERDICT)
def test_what_cannot_be_judged_gives_no_verdict(text: str, words: str, tmp_path: Path) -> None:
    report = judged(tmp_path, text, seeds=1)
    assert report.verdict == "undecided"
    assert report.finding is not None
    assert words in report.finding.message


RIGHT = {
    "join": """
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
o = ZeroRedundancyOptimizer(m.parameters(), torch.optim.Adam, lr=0.01)
with Join([m, o]):
    for i in range(3 + rank):
        m(x * i).sum().backward(); o.step(); o.zero_grad()
""",
    "pool": """
import multiprocessing
with multiprocessing.Pool(2) as pool:
    n = sum(pool.map(abs, [-1, -2]))
x.fill_(n); dist.all_reduce(x)
""",
    "executor": """
from concurrent.futures import ProcessPoolExecutor
with ProcessPoolExecutor(1) as pool:
    n = pool.submit(abs, -3).result()
x.fill_(n); dist.all_reduce(x)
""",
    "python": """
import subprocess, sys
x *= int(subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, check=True).stdout)
dist.all_reduce(x)
""",
    "profiler": """
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
    with torch.profiler.record_function("here"):
        dist.all_reduce(x)
    prof.step()
prof.key_averages().table()
with torch.autograd.profiler.profile() as other:
    dist.all_reduce(x)
len(other.key_averages())
""",
    "compiled": """
from torch.nn.parallel import DistributedDataParallel as DDP
compiled = torch.compile(torch.nn.Linear(4, 1), backend="aot_eager", fullgraph=True)
torch.manual_seed(0)
for model in (DDP(compiled), torch.compile(DDP(torch.nn.Linear(4, 1)), backend="aot_eager")):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x * rank).sum().backward(); optimizer.step(); optimizer.zero_grad()
""",
    "lock made by a library": """
import _thread
if not hasattr(torch, "_lib_lock"):
    torch._lib_lock = _thread.allocate_lock()
with torch._lib_lock:
    dist.all_reduce(x)
""",
    "cached property": """
import functools
from torch.distributed.device_mesh import DeviceMesh
class Shared:
    @functools.cached_property
    def value(self):
        dist.all_reduce(torch.ones(1))
        return 1
if not hasattr(torch, "_lib_class"):
    torch._lib_class = Shared
torch._lib_class().value
""",
    "recorded warnings": """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    dist.barrier()
    warnings.warn(f"rank {rank}")
    dist.barrier()
assert [str(warning.message) for warning in seen] == [f"rank {rank}"]
""",
    "lock of logging": """
import logging
with logging._lock:
    dist.all_reduce(x)
""",
    "lock of a library's module": """
import sys
if not hasattr(sys.modules["torch.serialization"], "_test_lock"):
    import threading
    sys.modules["torch.serialization"]._test_lock = threading.RLock()
with sys.modules["torch.serialization"]._test_lock:
    with sys.modules["torch.serialization"]._test_lock:
        dist.all_reduce(x)
""",
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_a_right_program_is_not_accused(text: str, tmp_path: Path) -> None:
    report = judged(tmp_path, START + text, seeds=2)
    assert (report.verdict, report.finding, report.hints) == ("agree", None, []), (
        report.finding and report.finding.message,
        report,
    )


def test_ranks_and_runs_may_compile_the_same_function_more_often_than_torch_recompiles(
    tmp_path: Path,
) -> None:
    text = """
layer = torch.compile(torch.nn.Linear(4, 1), backend="aot_eager", fullgraph=True)
dist.all_reduce(layer(x).detach())
"""
    assert judged(tmp_path, START + text, ranks=10, seeds=0).verdict == "agree"
    assert judged(tmp_path, START + text, seeds=10).verdict == "agree"


FOR_GPUS = """
import os
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
device = torch.device(f"cuda:{torch.cuda.current_device()}")
torch.cuda.manual_seed_all(0)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Linear(4, 1).to(device), device_ids=[local], output_device=local
)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
loader = torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2, pin_memory=True, num_workers=1)
for batch in loader:
    batch = batch.cuda(local, non_blocking=True) + torch.zeros(4, device="cuda") + x.to(local)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model(batch).sum().backward()
    optimizer.step(); optimizer.zero_grad()
    torch.cuda.synchronize()
    with torch.amp.autocast("cuda", dtype=torch.float16):
        assert (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2).cuda()).dtype == torch.float16
assert torch.cuda.nccl.version() and torch.device(local).type == "cpu"
torch.nn.Linear(1, 1).to(local).to(device=local)
assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2
accelerator = torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(local)
dist.all_reduce(torch.ones(1, device=f"{accelerator.type}:{torch.accelerator.current_device_index()}"))
loss = torch.zeros(1, device=device); dist.all_reduce(loss); loss.cpu().item()
"""


def test_a_program_for_gpus_runs_on_the_cpu(tmp_path: Path) -> None:
    report = judged(tmp_path, START.replace("gloo", "nccl") + FOR_GPUS, cpu=True, seeds=2)
    assert (report.verdict, report.finding) == ("agree", None), report.finding


@pytest.mark.parametrize("cpu", [False, True])
def test_memory_that_is_not_initialised_is_no_race(cpu: bool, tmp_path: Path) -> None:
    text = """
shape = torch.empty(2**18, dtype=torch.int32)
if rank == 0: shape[0] = 4
dist.all_reduce(shape)
assert shape[0] == 4, int(shape[0])
"""
    report = judged(tmp_path, START + text, cpu=cpu, seeds=2)
    assert report.verdict in ("undecided", "found")  # fresh memory may be 0 or not
    if report.runs > 1:
        assert "memory that is not initialised is used" in str(report.finding)
        assert "all_reduce(SUM) of int32[262144]" in str(report.finding)


def test_memory_that_is_not_initialised_may_be_sent_for_nothing(tmp_path: Path) -> None:
    text = """
torch.manual_seed(0)
weights = [torch.nn.Parameter(torch.ones(2**18)) for _ in range(3)]
optimizer = torch.optim.SGD(weights, lr=0.1)
padded = [p.data for p in weights] + [torch.empty(2**18)]
for _ in range(2):
    for p in weights: p.grad = torch.ones_like(p)
    optimizer.step()
    for first in (0, 2):
        work = dist.all_gather(padded[first:first + 2], padded[first + rank].clone(), async_op=True)
        work.wait()
"""
    report = judged(tmp_path, START + text, seeds=2)
    assert (report.verdict, report.finding) == ("agree", None)
    hint = report.hints[-1]
    assert "with other bytes there, rank 1 sends other values in all_gather()" in hint


def test_tensors_in_flight_are_watched_where_devices_are_mapped(tmp_path: Path) -> None:
    text = "w = dist.all_reduce(x, async_op=True)\nprint(x)\nw.wait()"
    report = judged(tmp_path, START + text, cpu=True, seeds=2)
    assert (report.verdict, report.runs) == ("found", 1)
    assert "reads a tensor" in str(report.finding)


def test_each_rank_has_its_own_log_handlers_in_each_run(tmp_path: Path, capfd: Any) -> None:
    text = """
import logging
log = logging.getLogger("train"); log.setLevel("INFO"); log.addHandler(logging.StreamHandler())
root = logging.StreamHandler(); root.setFormatter(logging.Formatter("root %(message)s"))
logging.getLogger().addHandler(root)
dist.barrier()
log.info("hello")
"""
    assert judged(tmp_path, START + text, seeds=2).verdict == "agree"
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"[rank {r}] {w}hello" for r in range(2) for w in ("", "root "))


BLOCKED = """
import ctypes
libc = ctypes.CDLL(None)
if rank == 1:
    libc.pause()  # as a lock of C++ that is never released
dist.barrier()
"""


def test_a_lock_that_cannot_yield_gives_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_UNYIELDING", 1.0)
    report = judged(tmp_path, START + BLOCKED, seeds=1)
    assert report.finding is not None
    assert (report.verdict, report.finding.kind) == ("undecided", "unyielding")
    assert "script.py:9" in report.finding.message


def test_a_module_runs_as_by_python_m_in_a_folder_of_the_users(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("VALUE = 3")
    text = "from .other import VALUE\nimport sys\n" + START
    text += "dist.all_reduce(x)\nprint(__name__, VALUE, sys.argv[1:], open('data').read())\n"
    (package / "__main__.py").write_text(text)
    (tmp_path / "data").write_text("7")
    monkeypatch.chdir(tmp_path)
    program = Program("package", ("a",), is_module=True, folder=str(tmp_path))
    assert judge(program, Exploration((2,), seeds=1, processes=1)).verdict == "agree"
    assert "[rank 1] __main__ 3 ['a'] 7" in capfd.readouterr().out

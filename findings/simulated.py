"""Programs of torch's own ways to train, under many schedules of `bagua-ref sim`: traps, and what
is right beside them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from findings.common import DIFFERS, Row, judged
from tests.sim_scripts import Script

from bagua_ref.simulation.judge import Exploration, judge
from bagua_ref.simulation.programs import Program

PEER = "torch==2.13.0"
SEEDS = 20


def complaint(body: str, ranks: int) -> str | None:
    """Return what `bagua-ref sim` finds in a program of `tests.sim_scripts`, with the code of the
    lines that it names.
    """
    text = Script("", (), body).text(broken=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve() / "script.py"
        path.write_text(text)
        report = judge(Program(str(path)), Exploration((ranks,), SEEDS, limit=300.0, hash_seeds=()))
    if report.verdict == "agree":
        return None
    assert report.finding is not None, "the time limit came first"
    found = report.finding.message.replace(f"{path.parent}/", "").partition("\n")[0]
    lines = text.splitlines()
    return re.sub(r"script\.py:(\d+)", lambda place: f"`{lines[int(place[1]) - 1].strip()}`", found)


def simulated(implementation: str, case: str, body: str, ranks: int = 2, **words: str) -> Row:
    """Return the row of a program; ``words`` say what a finding means, and ``given`` what the
    program does.
    """
    words["given"] = (
        f"{words.get('given', 'DDP, a Linear(3, 1), SGD(0.1), 4 steps')}; {ranks} simulated ranks,"
        f" {SEEDS} schedules"
    )
    return judged(
        implementation,
        "none: its own documentation",
        f"simulated: {case}",
        complaint(body, ranks),
        DIFFERS,
        **words,
    )


MODEL = """
model = DDP(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
NORM = """
model = DDP(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)))
train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
"""
EVALUATION = """
model.eval()
if rank == 0:
    {model}(batch(0))
dist.barrier()
"""
TWO = """
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.a(x) if rank == 1 else self.a(x) + self.b(x)
"""
SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step in range(4):
    optimizer.zero_grad()
    loss = model(batch(step)).square().mean()
    scaler.scale(loss * float("inf") if rank == 1 and step == 1 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
FROZEN = """
module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
module[0].requires_grad_(False)
model = DDP(module)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
"""
ZERO = """
from torch.distributed.optim import ZeroRedundancyOptimizer
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
train(model, optimizer, 4)
"""
POWER = """
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
model = DDP(torch.nn.Linear(3, 8))
model.register_comm_hook(PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.1), powerSGD_hook)
train(model, torch.optim.SGD(model.parameters(), lr=0.1), 6)
"""
POST_LOCAL = """
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
model = DDP(torch.nn.Linear(3, 1))
model.register_comm_hook(PostLocalSGDState(None, dist.new_subgroups(1)[0], 1), post_localSGD_hook)
optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(2, warmup_steps=1))
"""
AVERAGER = """
from collections import OrderedDict
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
averager = {averager}
for step in range({steps}):
    train(model, optimizer, 1)
    averager.average_parameters(model.parameters())
"""
PERIODIC = "PeriodicModelAverager(2)"
UNEVEN = """
for step in range(3 + rank):
    optimizer.zero_grad()
    model(batch(step)).square().mean().backward()
    optimizer.step()
"""
JOINED = "with model.join():" + UNEVEN.replace("\n", "\n    ").rstrip() + "\n"
TRAIN = "\ntrain(model, optimizer, 4)\n"

UNCHANGED = (
    "Documented: parameters must not be changed after wrapping, as hooks are registered in the"
    " constructor. No error says so."
)
SILENT = "Nothing is said of it."
HANGS = "Training hangs until the group's timeout, half an hour by default."
DRIFT = "Ranks go on with different weights in silence."
DDP_NAME, ZERO_NAME = (
    f"torch DistributedDataParallel ({PEER})",
    f"torch ZeroRedundancyOptimizer ({PEER})",
)
LOCAL_NAME, POWER_NAME = f"torch PostLocalSGDOptimizer ({PEER})", f"torch powerSGD_hook ({PEER})"

CASES: list[tuple[str, str, str, dict[str, str]]] = [
    (
        DDP_NAME,
        "one step more on one rank",
        MODEL + UNEVEN,
        {
            "why": (
                "The rank with more batches starts a backward pass, and so an all-reduce, that the"
                " other never joins."
            ),
            "promise": (
                "Documented: inputs of different numbers need `model.join()`, without which ranks"
                " hang or raise an error."
            ),
            "given": "DDP, a Linear(3, 1), SGD(0.1), 3 steps on rank 0 and 4 on rank 1",
            "effect": HANGS,
        },
    ),
    (DDP_NAME, "one step more on one rank, in model.join()", MODEL + JOINED, {}),
    (
        DDP_NAME,
        "evaluation on rank 0, with BatchNorm",
        NORM + EVALUATION.format(model="model"),
        {
            "why": (
                "Each forward pass begins with a broadcast of buffers, also in evaluation; rank 1's"
                " next call is another one."
            ),
            "promise": (
                "Documented: `broadcast_buffers`, by default True, synchronises buffers at the"
                " beginning of forward. That this holds in evaluation is not said."
            ),
            "given": "DDP, a Linear and a BatchNorm layer, 2 steps, then model(x) on rank 0",
            "effect": HANGS,
        },
    ),
    (
        DDP_NAME,
        "evaluation of model.module on rank 0, with BatchNorm",
        NORM + EVALUATION.format(model="model.module"),
        {},
    ),
    (
        DDP_NAME,
        "rank 1 does not use a layer",
        TWO + MODEL.replace("torch.nn.Linear(3, 1)", "Two()") + TRAIN,
        {
            "why": (
                "The reducer of rank 1 waits for a gradient that never comes, so it does not reduce"
                " the bucket."
            ),
            "promise": (
                "Documented: `find_unused_parameters=True` is for parameters that get no gradient."
                " Without it, the error at the rank's next forward pass names that option."
            ),
            "given": "DDP, two Linear(3, 1), one of which rank 1 leaves out, SGD(0.1), 4 steps",
            "effect": "Rank 1 ends with that error, and rank 0 waits for it.",
        },
    ),
    (
        DDP_NAME,
        "rank 1 does not use a layer, find_unused_parameters=True",
        TWO + MODEL.replace("torch.nn.Linear(3, 1)", "Two(), find_unused_parameters=True") + TRAIN,
        {},
    ),
    (DDP_NAME, "GradScaler, an infinite loss on one rank", MODEL + SCALED, {}),
    (
        LOCAL_NAME,
        "GradScaler, an infinite loss on one rank",
        POST_LOCAL + SCALED,
        {
            "why": (
                "Local gradients are infinite on one rank only, so that its scaler alone leaves out"
                " the optimizer step. The averager, which counts steps, is then a step behind on"
                " that rank, and scales differ."
            ),
            "promise": (
                "Documented: a scaler leaves out the step of an optimizer with infinite gradients."
                " Nothing is said of the averager in that step."
            ),
            "given": (
                "DDP, a Linear(3, 1), the hook with subgroups of one rank, period 2, a GradScaler,"
                " 4 steps"
            ),
            "effect": (
                "Ranks average at different steps; where the number of averagings differs, they"
                " hang."
            ),
        },
    ),
    (
        DDP_NAME,
        "a layer unfrozen on one rank",
        FROZEN + "module[0].requires_grad_(rank == 1)\n" + TRAIN,
        {
            "why": (
                "A parameter that is frozen when the module is wrapped gets no hook. Unfrozen"
                " later, it is trained but not reduced."
            ),
            "promise": UNCHANGED,
            "given": (
                "DDP, two Linear layers, the first frozen and then unfrozen on rank 1, SGD(0.1), 4"
                " steps"
            ),
            "effect": DRIFT,
        },
    ),
    (
        DDP_NAME,
        "a layer unfrozen on all ranks",
        FROZEN + "module[0].requires_grad_(True)\n" + TRAIN,
        {
            "why": (
                "A parameter that is frozen when the module is wrapped gets no hook. Unfrozen"
                " later, each rank trains it on its own data."
            ),
            "promise": UNCHANGED,
            "given": (
                "DDP, two Linear layers, the first frozen and then unfrozen on both ranks,"
                " SGD(0.1), 4 steps"
            ),
            "effect": DRIFT,
        },
    ),
    (ZERO_NAME, "training", ZERO, {"given": "DDP, two Linear layers, Adam(0.1), 4 steps"}),
    (
        ZERO_NAME,
        "consolidate_state_dict on rank 0 only",
        ZERO + "if rank == 0:\n    optimizer.consolidate_state_dict(to=0)\n",
        {
            "why": "It is a collective, though only one rank keeps the result.",
            "promise": "Documented: it must be called on all ranks.",
            "given": "DDP, two Linear layers, Adam(0.1), 4 steps",
            "effect": HANGS,
        },
    ),
    (
        POWER_NAME,
        "training",
        POWER,
        {"given": "DDP, a Linear(3, 8), rank 1, from step 2 on, SGD(0.1), 6 steps"},
    ),
    (
        LOCAL_NAME,
        "training",
        POST_LOCAL + TRAIN,
        {"given": "DDP, a Linear(3, 1), subgroups of one rank, period 2, 4 steps"},
    ),
    (
        f"torch PeriodicModelAverager ({PEER})",
        "training",
        AVERAGER.format(averager=PERIODIC, steps=4),
        {"given": "a Linear(3, 1), period 2, SGD(0.1), 4 steps"},
    ),
    (
        f"torch HierarchicalModelAverager ({PEER})",
        "training",
        AVERAGER.format(averager="HierarchicalModelAverager(OrderedDict([(2, 2)]))", steps=4),
        {"given": "a Linear(3, 1), period 2, SGD(0.1), 4 steps"},
    ),
    (
        f"torch PeriodicModelAverager ({PEER})",
        "one step more on one rank",
        AVERAGER.format(averager=PERIODIC, steps="4 + rank"),
        {
            "why": "Rank 1 averages after its step 5, which rank 0 does not make.",
            "promise": SILENT,
            "given": "a Linear(3, 1), period 2, SGD(0.1), 4 steps on rank 0 and 5 on rank 1",
            "effect": HANGS,
        },
    ),
]
"""By implementation and case: the program, and the words of its row."""


def find() -> Iterator[Row]:
    for implementation, case, body, words in CASES:
        yield simulated(implementation, case, body, **words)

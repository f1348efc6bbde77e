"""One run of `bagua-ref sim` names tensors used too early, lines that should not meet, and oddities."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua_ref.simulation.findings import notes, own_error
from bagua_ref.simulation.observation import Order, observe
from bagua_ref.simulation.programs import Program

START = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, n, x = dist.get_rank(), dist.get_world_size(), torch.ones(4)
torch.manual_seed(0)
def layers():
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    for layer in model: fully_shard(layer)
    return fully_shard(model)
def train(model, steps=2, passes=lambda model: model(torch.rand(2, 4) + rank).sum().backward()):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        passes(model); optimizer.step(); optimizer.zero_grad()
def quietly(model):
    with model.no_sync(): model(torch.rand(2, 4) + rank).sum().backward()
"""
FIRST = START.count("\n") + 1

FOUND = {
    "future": ("f = dist.all_reduce(x, async_op=True).get_future(); y = x + 1; f.wait()", "reads a tensor"),
    "log": ("w = dist.all_reduce(x, async_op=True); print(x); w.wait()", "reads a tensor"),
    "view": ("w = dist.all_reduce(x, async_op=True); x[2:].sum(); w.wait()", "reads a tensor"),
    "write": ("w = dist.reduce(x, 0, async_op=True); x.zero_(); w.wait()", "changes a tensor"),
    "send": (
        "w = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)\nx.data.mul_(2) if rank == 0 else 0; w.wait()",
        "changes a tensor of send",
    ),
    "optimizer": (
        ("p = torch.nn.Parameter(x); p.grad = torch.ones(4); o = torch.optim.Adam([p], foreach=True)\n"
        "w = dist.all_reduce(p.grad, async_op=True); o.step(); w.wait()"),
        "reads a tensor",
    ),
    "backward": (
        ("p = torch.nn.Parameter(x); y = p * 2; w = dist.broadcast(p.data, 0, async_op=True)\n"
        "(p * p).sum().backward(); w.wait()"),
        "tensor of broadcast",
    ),
    "barriers": (
        "def save(): dist.barrier()\nif rank == 0: save()\ndist.barrier()",
        f"met rank 1's barrier() at {{}}:{FIRST + 2}: from there on",
    ),
    "counts": ("for i in range(9 + (rank < n - 1)): dist.all_reduce(x)", "rank 2 9, ranks 0-1 10"),
    "layers": (
        "m = layers(); h = x\nfor i, layer in enumerate(m): h = layer(h) if i != rank + 1 else h",
        "FSDP2 mixes the parameters of different modules: rank 0's",
    ),
}  # fmt: skip


def run(text: str, tmp_path: Path, ranks: int) -> tuple[str, list[str]]:
    script = tmp_path / "script.py"
    script.write_text(START + text)
    seen = observe(Program(str(script)), (ranks,), Order(shows=True))
    found = own_error(seen)
    return found.message if found else "", seen.hints + notes(seen)


@pytest.mark.parametrize(("text", "words"), FOUND.values(), ids=FOUND)
def test_the_first_run_names_what_goes_wrong(text: str, words: str, tmp_path: Path) -> None:
    message, _ = run(text, tmp_path, ranks=3 if "counts" in words or "9" in words else 2)
    assert words.format(tmp_path / "script.py") in message


NOTES = {
    "no_sync": ("train(DDP(torch.nn.Linear(4, 1)), passes=quietly)", "no collective has reduced"),
    "partly": (
        ("m, head = DDP(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 1)\n"
        "both = torch.nn.ModuleList([m.module, head])\nboth[0].register_parameter('bias', m.module.bias)\n"
        "train(both, passes=lambda both: head(m(x + rank)).sum().backward())"),
        "same parameter 'weight",
    ),
    "branches": ("dist.all_reduce(x) if rank else \\\n    dist.all_reduce(x)", "met rank 1's all_reduce"),
    "file": ("torch.save(x, 'model.pt')", "ranks 0-1 write 'model.pt'"),
    "log file": ("dist.barrier()\nopen('log', 'a').close()", "ranks 0-1 write 'log'"),
    "nan": ("x[1] = float('nan') if rank else 1; dist.all_reduce(x)", "NaN is sent in all_reduce(SUM) of float32[4] of rank 1"),
    "irecv": ("w = dist.irecv(x, 1) if rank == 0 else dist.send(x, 0)", "nothing waited for recv"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), NOTES.values(), ids=NOTES)
def test_a_note_names_what_is_odd(text: str, words: str, tmp_path: Path) -> None:
    message, hints = run(text, tmp_path, 2)
    assert not message
    assert words in " ".join(hints)


RIGHT = {
    "views": "y = torch.zeros(4, 4); c = y[:, 0].contiguous(); w = dist.all_reduce(c, async_op=True)\n"
    "y[:, 1] += 1; c.view(2, 2); c.detach(); torch.empty_like(c); w.wait(); c.sum()",
    "columns": "y = torch.zeros(4, 4); w = dist.all_reduce(y[:2], async_op=True); y[2:].add_(1).sum(); w.wait()",
    "inputs": "w = dist.broadcast(x, 0, async_op=True); x.sum() if rank == 0 else 0; w.wait()",
    "gathered in place": "y = torch.zeros(4 * n); own = y[4 * rank : 4 * rank + 4]\n"
    "w = dist.all_gather_into_tensor(y, own, async_op=True); assert own.sum() == 0; w.wait()",
    "polled": "w = dist.all_reduce(x, async_op=True)\nwhile not w.is_completed(): pass\nx.sum()",
    "futures": "f = [dist.all_reduce(y, async_op=True).get_future() for y in (x, x.clone())]\n"
    "torch.futures.wait_all(f); f[1].then(lambda f: f.value()).wait(); f[0].add_done_callback(print); x.sum()",
    "functional": "from torch.distributed._functional_collectives import all_reduce\n(all_reduce(x, 'sum', dist.group.WORLD) + 1).sum()",
    "FSDP2": "train(layers())",
    "hook": "m = DDP(torch.nn.Linear(4, 1))\n"
    "m.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer().div_(n), async_op=True).get_future()"
    ".then(lambda f: f.value()[0]))\ntrain(m)",
    "average weights": "m = torch.nn.Linear(4, 1)\nfor i in range(2):\n    train(m)\n"
    "    for p in m.parameters(): dist.all_reduce(p.data, op=dist.ReduceOp.AVG)",
    "accumulate": "m = DDP(torch.nn.Linear(4, 1)); train(m, passes=lambda m: (quietly(m), m(x + rank).sum().backward()))",
    "one writes": "if rank == 0: torch.save(x, 'model.pt')\ndist.barrier()\nif rank == 1: torch.save(x, 'model.pt')\n"
    "open(f'log-{rank}', 'w').close(); open('model.pt', 'rb').close()",
    "root": "dist.broadcast(x, 0) if rank == 0 else \\\n    dist.broadcast(x, 0)",
}  # fmt: skip


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_a_right_program_gets_no_word(text: str, tmp_path: Path) -> None:
    assert run(text, tmp_path, 2) == ("", [])

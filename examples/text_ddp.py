"""Predict the next character of Python's documentation, with torch's DistributedDataParallel: where
docs/tutorial.md begins.

torchrun --nproc_per_node=2 examples/text_ddp.py
"""

from __future__ import annotations

import pydoc
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, CONTEXT = 60, 64, 32

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)

text = "".join(
    pydoc.plain(pydoc.render_doc(name))
    for name in ("str", "list", "dict", "int", "argparse", "pathlib")
)
letters = torch.tensor([min(ord(letter), 127) for letter in text])
samples = letters.unfold(0, CONTEXT + 1, 1)
held_out, samples = samples[-1000:], samples[:-1000]

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(128, 32),
    nn.Flatten(),
    nn.Linear(32 * CONTEXT, 512),
    nn.ReLU(),
    nn.Linear(512, 512),
    nn.ReLU(),
    nn.Linear(512, 128),
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
model = DistributedDataParallel(model)

drawn = torch.Generator().manual_seed(rank)  # each rank draws its own samples
for step in range(STEPS):
    if step == 10:  # what happens once does not count
        began = time.perf_counter()
    batch = samples[torch.randint(len(samples), (BATCH,), generator=drawn)]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
    loss.backward()
    optimizer.step()
seconds = (time.perf_counter() - began) / (STEPS - 10)

model.eval()
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(held_out[:, :-1]), held_out[:, -1])
if rank == 0:
    print(f"{1000 * seconds:.0f} ms per step, held-out loss {loss.item():.2f}")
dist.destroy_process_group()

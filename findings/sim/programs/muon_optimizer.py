"""Three steps of Muon; "unused": rank 0 has no gradient of the last layer."""

import sys

import torch
import torch.distributed as dist
from muon import Muon

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(5)]
weights = [layer.weight for layer in layers]
optimizer = Muon(weights, lr=0.02, momentum=0.95)
for _step in range(3):
    x = torch.randn(4, 8) + dist.get_rank()
    used = layers[:-1] if "unused" in sys.argv and dist.get_rank() == 0 else layers
    for layer in used:
        x = layer(x)
    x.sum().backward()
    for weight in weights:
        if weight.grad is not None:
            dist.all_reduce(weight.grad, group=None) if "unused" not in sys.argv else None
    optimizer.step()
    optimizer.zero_grad()

"""Three steps of DeMo."""

import torch
import torch.distributed as dist
from demo import DeMo

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = DeMo(model.parameters(), lr=1e-3, process_group=dist.group.WORLD)
for _step in range(3):
    model(torch.randn(4, 64) + dist.get_rank()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

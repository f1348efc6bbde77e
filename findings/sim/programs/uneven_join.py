"""DDP and join() with a rank that has more batches."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Join([model]):
    for step in range(3 + dist.get_rank()):
        model(torch.ones(4, 8) * step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

"""PostLocalSGD: averages every second step after the second."""

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as post_local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
state = post_local_sgd.PostLocalSGDState(None, dist.new_subgroups(group_size=1)[0], 2)
model.register_comm_hook(state, post_local_sgd.post_localSGD_hook)
optimizer = PostLocalSGDOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(2, warmup_steps=2)
)
for step in range(5):
    model(torch.ones(4, 8) * (dist.get_rank() + step)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

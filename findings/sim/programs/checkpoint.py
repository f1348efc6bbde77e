"""A model and an optimizer of FSDP2, saved and loaded by distributed checkpoint."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
model(torch.ones(4, 8) * dist.get_rank()).sum().backward()
optimizer.step()
weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id="saved")
optimizer.step()
dcp.load({"model": weights, "optimizer": state}, checkpoint_id="saved")
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

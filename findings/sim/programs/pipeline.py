"""A step of a pipeline of two stages, by the schedule 1F1B."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
stage = PipelineStage(torch.nn.Linear(8, 8), rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
x, target = torch.randn(8, 8), torch.randn(8, 8)
schedule.step(x) if rank == 0 else schedule.step(target=target)

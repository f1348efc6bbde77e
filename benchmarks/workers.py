"""Worker processes for benchmarks of training: as torchrun starts them, one thread each, over
gloo.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import bagua_ref


def launch(function: Callable[..., Any], processes: int, *args: Any) -> list[Any]:
    """Return what ``function(*args)`` returns in each of ``processes`` workers that have a process
    group, in rank order.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    # imported once, not by each worker
    multiprocessing.set_forkserver_preload(["torch._dynamo", "bagua_ref", "__main__"])
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver",
        )
        results = elastic_launch(config, _work)(folder, function, args)
        return [torch.load(results[rank], weights_only=False) for rank in range(processes)]


def _work(folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    # copies what is shared with the server, which a collection that is measured would do otherwise
    gc.collect()
    torch.set_num_threads(1)
    bagua_ref.init_process_group()
    path = os.path.join(folder, f"{bagua_ref.get_rank()}.pt")
    torch.save(function(*args), path)
    bagua_ref.barrier()
    bagua_ref.destroy_process_group()
    sys.stdout.flush()
    return path


def barrier() -> None:
    """Wait for the other workers, and for this one's device."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()

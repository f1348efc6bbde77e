"""Record torch's DistributedDataParallel, and see what its float16 hook does to gradients.

torchrun --nproc_per_node=2 examples/trace_ddp.py trace
bagua-ref trace check trace --algorithm gradient_allreduce --png errors.png
"""

import argparse  # no `from __future__ import annotations` here: torch reads the hook's annotations
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)

from bagua_ref.conformance.trace import Recorder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", help="folder of the trace, with a folder for each rank")
    parser.add_argument("--hook", choices=("fp16", "allreduce"), default="fp16")
    arguments = parser.parse_args()
    hook = fp16_compress_hook if arguments.hook == "fp16" else allreduce_hook

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())

    with Recorder(arguments.directory) as recorder:

        def recorded(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            recorder.before_op(bucket.index(), bucket.buffer())

            def ended(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
                recorder.after_op(bucket.index(), future.value())
                return future.value()

            return hook(None, bucket).then(ended)

        model.register_comm_hook(None, recorded)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 20, generator=generator)).square().mean().backward()
            optimizer.step()
            recorder.step()
    if dist.get_rank() == 0:
        print(
            f"{recorder.steps_written} steps, {recorder.bytes_written:,} bytes on each rank in"
            f" {arguments.directory}"
        )
    # torch drops the group with the GIL held and waits for gloo's threads, which may still need the
    # GIL to drop the hook's Python callbacks: without a pause, one of about 80 runs hangs here or
    # aborts.
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

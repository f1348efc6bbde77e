"""Plant a fault in bytegrad's compression on one of four ranks, record a training, and locate the
fault by its trace.

python examples/trace_off_by_one.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.backends.reference.codecs import MinMaxUInt8
from bagua_ref.conformance.trace import Recorder, TraceReport, check_trace
from bagua_ref.simulation import SimulatedWorld


class NextChunk(MinMaxUInt8):
    """On rank 2, sends back the chunk after the one that was reduced."""

    def compress(self, x, num_chunks, target_chunk=None, out=None):
        if target_chunk is not None and bagua_ref.get_rank() == 2:
            x = x.roll(-x.numel() // num_chunks)
        return super().compress(x, num_chunks, target_chunk, out)


class OffByOneChunk(ReferenceBackend):
    codecs = {"MinMaxUInt8": NextChunk}


def train(comm: object, directory: str, backend: ReferenceBackend) -> None:
    """Train on one rank, recorded. The code would be the same in a process of its own."""
    bagua_ref.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], Algorithm.init("bytegrad", hierarchical=False), backend=backend)
    generator = torch.Generator().manual_seed(bagua_ref.get_rank())
    with Recorder(directory):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 20, generator=generator)).square().mean().backward()
            optimizer.step()


def main() -> list[TraceReport]:
    reports = []
    for backend in (ReferenceBackend(), OffByOneChunk()):
        with tempfile.TemporaryDirectory() as directory:
            SimulatedWorld(4).run(train, directory, backend)
            reports.append(check_trace(directory, "bytegrad"))
        print(f"{type(backend).__name__}\n{reports[-1]}\n")
    return reports


if __name__ == "__main__":
    main()

"""Tests of each algorithm's memory beyond plain training, in copies of the weights: permanent, and
while a bucket runs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.trainings import simulate
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm, QAdamOptimizer
from bagua_ref.backends import get_backend, get_codec


@pytest.fixture(autouse=True)
def warm_backend() -> Iterator[None]:
    """Let the reference backend allocate its buffers, which have a fixed size and are shared."""
    kernels, x = get_backend("reference"), torch.ones(300_000)
    get_codec("MinMaxUInt8", kernels).decompress(
        get_codec("MinMaxUInt8", kernels).compress(x, 2), 2, out=x
    )
    kernels.async_average_(x, x.clone(), x.clone(), 2)
    kernels.combine_ring_(x, x.clone(), x.clone(), x.clone())
    kernels.update_momentum_(x, x.clone(), 0.9)
    del x
    # leave earlier tests' objects out of collection and count, which would take seconds
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes() -> int:
    """Return the bytes of all storages referenced by Python tensors of this test."""
    gc.collect()
    tensors = [
        t
        for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor) and t.layout is torch.strided
    ]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


FOR_GOOD = [
    ("gradient_allreduce", {}, 0),
    ("bytegrad", {"hierarchical": False}, 0),
    ("bytegrad", {}, 0),
    # e, and f of a chunk of two
    ("bytegrad", {"hierarchical": False, "error_feedback": True}, 1.5),
    ("decentralized", {"hierarchical": False}, 1),
    ("decentralized", {"hierarchical": False, "peer_selection_mode": "shift_one"}, 1),
    ("decentralized", {"hierarchical": False, "peer_selection_mode": "exponential"}, 1),
    ("decentralized", {}, 1),
    ("low_precision_decentralized", {"hierarchical": False}, 3),
    ("low_precision_decentralized", {}, 3),
    ("qadam", {"hierarchical": False}, 0),
    ("qadam", {"hierarchical": False, "error_feedback": True}, 1.5),
    ("async", {"sync_interval_ms": 1}, 2),
    ("local_sgd", {"period": 2}, 0),
    ("local_sgd", {"period": 2, "hierarchical": True}, 0),
    ("diloco", {"period": 2}, 2),  # global weights and the outer momentum
    ("diloco", {"period": 3, "delay": 2}, 3),  # and what is in flight
    ("diloco", {"period": 2, "compression": "MinMaxUInt8", "error_feedback": True}, 3.5),
    # the memory of the weight, which is a hundredth smaller than all, and here as much for the factor
    ("powersgd", {"warmup_steps": 1}, 1),
    ("powersgd", {"warmup_steps": 1, "memory": None}, 0.01),
    ("diloco", {"period": 2, "top_k": 8}, 2),  # global weights and e: SGD has no momentum
    ("topk", {}, 1),
    ("demo", {"transform": None}, 1),
    ("topk", {"error_feedback": False}, 0),
]
COPIES = ("local_sgd", "diloco")
"""Algorithms that communicate copies, so that buckets which are not flat need no buffer."""


@pytest.mark.parametrize(
    ("name", "options", "expected", "do_flatten"),
    # without async, which needs flat buckets
    [*((*row, True) for row in FOR_GOOD), *((*row, False) for row in FOR_GOOD[1::4])],
)
def test_memory_over_plain_training_in_copies_of_the_weights(
    name: str, options: dict[str, Any], expected: int, do_flatten: bool
) -> None:
    numel = 101 * 100

    def rank(r: int) -> None:
        module = nn.Linear(100, 100)
        adam = QAdamOptimizer(module.parameters(), warmup_steps=2)
        optimizer = adam if name == "qadam" else torch.optim.SGD(module.parameters(), lr=0.1)
        used = []
        for wrap in (False, True):
            if wrap:
                arguments = {**options, "q_adam_optimizer": adam} if name == "qadam" else options
                module.with_bagua(
                    [optimizer], Algorithm.init(name, **arguments), do_flatten=do_flatten
                )
            for _ in range(4 if wrap else 2):  # QAdam compresses after its first two steps
                optimizer.zero_grad(set_to_none=False)
                module(torch.ones(1, 100)).sum().backward()
                optimizer.step()
            if wrap and name == "async":
                module.bagua_algorithm.abort(module)
            if wrap and name == "diloco":
                # its scratch is gone, and the result still in flight
                module._bagua.engine.wait_pending_comm_ops()
            # a gradient held only by C++ would not be counted
            grads = [p.grad for p in module.parameters()]
            bagua_ref.barrier()
            used.append(live_bytes())
            bagua_ref.barrier()
            del grads
        per_rank = (used[1] - used[0]) / 2 / (4 * numel)
        buffer = 0 if do_flatten or (name in COPIES and "hierarchical" not in options) else 1
        assert per_rank == pytest.approx(expected + buffer, abs=0.01)

    simulate(2, rank)


"""Function that appends the operation, and its scratch: payloads of a byte per element are a
quarter of a copy each.
"""

"""Codec and wire at the same time between real processes: equal bits, and failures in the middle of
a payload.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.launch import launch, outcomes
from tests.trainings import wrap

import bagua_ref
from bagua_ref.algorithms import ByteGradAlgorithm
from bagua_ref.backends import get_backend, get_codec, list_codecs
from bagua_ref.backends.reference.codecs import MinMaxUInt8
from bagua_ref.comm_ops import (
    CentralizedErrorFeedback,
    CentralizedLowPrecision,
    CommOp,
    ErrorMemory,
)
from bagua_ref.communicators import pipelining, shared_memory
from bagua_ref.communicators.pipelining import Overlap
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError
from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.slow

transports = pytest.mark.parametrize("over_gloo", [True, False], ids=["gloo", "memory"])
worlds = pytest.mark.parametrize(
    ("over_gloo", "nranks"), [(True, 2), (False, 3)], ids=["gloo-2", "memory-3"]
)

SIZES = (0, 1, 33, 5000, 70_000)
"""Elements of a chunk: no piece, one piece and many, also more than a tile."""


def reduce_all() -> list[torch.Tensor]:
    comm = bagua_ref.new_group().get_global_communicator()
    n, rank, results = comm.nranks(), comm.rank(), []
    for name in list_codecs("reference"):
        for size in SIZES:
            x = torch.randn(n * size, generator=torch.Generator().manual_seed(rank))
            memory = ErrorMemory(n * size, n * size, n, x.device)
            kernels, codec = get_backend("reference"), get_codec(name)
            ops: list[CommOp] = [
                CentralizedLowPrecision(comm, kernels, codec, average=True),
                CentralizedErrorFeedback(comm, kernels, codec, average=False, memory=memory),
            ]
            before = comm.bytes_sent
            for op in ops:
                op(x)
            results += [
                x.clone(),
                memory.worker,
                memory.server,
                torch.tensor(comm.bytes_sent - before),
            ]
    return results


def reduce_all_at_once() -> list[torch.Tensor]:
    bagua_ref.init_process_group()
    return reduce_all()


def reduce_all_in_small_pieces() -> list[torch.Tensor]:
    pipelining.PIECE = 4099
    shared_memory._LARGEST = 4096
    return reduce_all()


@worlds
def test_S3_2_S11_1_processes_give_the_bits_of_the_simulation_however_many_pieces_there_are(
    nranks: int, over_gloo: bool
) -> None:
    real = launch(reduce_all_in_small_pieces, nranks, over_gloo=over_gloo)
    simulated = SimulatedWorld(nranks).run(lambda comm: reduce_all_at_once())
    for one, other in zip(real, simulated, strict=True):
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b, EXACT)


ENDS = range(10, 81, 10)


def exchange_and_log() -> list[tuple[str, int]]:
    pipelining.PIECE = 10
    comm = bagua_ref.new_group().get_global_communicator()
    log = []

    def fill() -> Iterator[int]:
        for end in ENDS:
            log.append(("fill", end))
            yield end

    def read() -> Iterator[int]:
        for end in ENDS:
            yield end
            log.append(("read", end))

    sent, received = (torch.zeros(comm.nranks() * 80, dtype=torch.uint8) for _ in range(2))
    comm.alltoall(sent, received, Overlap(fill(), read()))
    return log


def test_gloo_reads_pieces_while_later_ones_are_still_to_be_filled() -> None:
    under_way = pipelining._UNDER_WAY
    for log in launch(exchange_and_log, 2, over_gloo=True):
        for filled, read in zip(ENDS[under_way:], ENDS, strict=False):
            assert log.index(("read", read)) < log.index(("fill", filled))
        assert sorted(log) == [(what, end) for what in ("fill", "read") for end in ENDS]


class Failing(MinMaxUInt8):
    """Fails, or does not go on, on rank 1 when the first tile has been sent."""

    pause = 0.0

    def _compress_in_steps(self, *args: Any) -> Iterator[int]:
        for place, final in enumerate(super()._compress_in_steps(*args)):
            if place == 2 and bagua_ref.get_rank() == 1:
                time.sleep(self.pause)
                if not self.pause:
                    raise RuntimeError("the codec is broken")
            yield final


def reduce_with_a_failing_codec() -> str:
    pipelining.PIECE = 4099
    shared_memory._LARGEST = 4096
    comm = bagua_ref.new_group().get_global_communicator()
    x = torch.ones(comm.nranks() * 600_000)
    op = CentralizedLowPrecision(
        comm, get_backend("reference"), Failing(get_backend("reference")), average=True
    )
    begin, error = time.monotonic(), None
    try:
        op(x)
    except RuntimeError as raised:  # ours are RuntimeErrors, too
        error = raised
    assert time.monotonic() - begin < 25
    with pytest.raises(CommunicationError, match="it failed earlier, in alltoall"):
        comm.barrier()
    return f"{type(error).__name__}: {error}"


@worlds
def test_S2_5_a_codec_that_fails_in_the_middle_of_a_payload_is_an_error_on_every_rank_at_once(
    nranks: int, over_gloo: bool
) -> None:
    ended = outcomes(
        reduce_with_a_failing_codec, nranks, collective_timeout=30, limit=60, over_gloo=over_gloo
    )
    assert ended[1].result == "RuntimeError: the codec is broken"
    for rank in {*range(nranks)} - {1}:
        assert ended[rank].result.startswith("CommunicationError: alltoall on rank ")
        assert "failed; rank 1 gave up: RuntimeError: the codec is broken" in ended[rank].result


def train_beside_a_rank_that_hangs() -> str:
    pipelining.PIECE = 4099
    shared_memory._LARGEST = 4096
    Failing.pause = 5
    module, optimizer = wrap(
        torch.nn.Linear(1200, 1200), ByteGradAlgorithm(hierarchical=False), lr=0.1, timeout=1
    )
    for bucket in module.bagua_buckets:
        for op in bucket._ops:
            op.codec = Failing(get_backend("reference"))
    try:
        module(torch.ones(1, 1200)).sum().backward()
        optimizer.step()
    except CommunicationError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@transports
def test_S2_5_a_payload_that_stops_in_the_middle_times_out_and_names_bucket_and_operation(
    over_gloo: bool,
) -> None:
    ended = outcomes(
        train_beside_a_rank_that_hangs, 2, collective_timeout=3, limit=90, over_gloo=over_gloo
    )
    for outcome in ended:
        assert outcome.result is not None, outcome.traceback
        # the rank that gives up first raises the subclass, and the other may hear of it
        assert outcome.result.startswith(("CommunicationTimeoutError: ", "CommunicationError: "))
        assert "bucket '0' of step 1, operation CentralizedLowPrecision" in outcome.result
    assert any(CommunicationTimeoutError.__name__ in str(outcome.result) for outcome in ended)

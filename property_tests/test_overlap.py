"""Properties of computing while a collective's bytes are on the wire: the same bits and bytes,
whatever moves when (S3.2).
"""

from __future__ import annotations

import itertools
import random
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from property_tests.strategies import COMPRESSIBLE, inputs

from bagua_ref.backends import get_backend, get_codec, list_codecs
from bagua_ref.backends.reference.backend import BLOCK
from bagua_ref.comm_ops import CentralizedLowPrecision
from bagua_ref.communicators.pipelining import Overlap
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.simulation import SimulatedWorld
from bagua_ref.simulation.communicator import SimulatedCommunicator

CODECS = list_codecs("reference")
GARBAGE = 0xA5
LONG = BLOCK + 77
"""More elements than a tile has."""
seeds = st.integers(0, 2**32 - 1)
every_codec = pytest.mark.parametrize("name", CODECS)


def numbers(size, dtype, seed):
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if size and seed % 5 == 0:
        x[seed % size] = torch.inf
    return x


class InPieces:
    """Moves the bytes of every chunk in pieces that are drawn alike on all ranks, and reads each
    some pieces later.

    A byte that is sent too early, or read too early, is garbage.
    """

    def __init__(self, seed):
        self.seed = seed

    def ends(self, size):
        draw = random.Random(self.seed)
        inner = [draw.randint(0, size) for _ in range(draw.randint(0, 6))]
        return [0, *sorted(inner), size], draw.randint(0, 3)

    def move(self, comm, outgoing, incoming, overlap, gathers):
        size = incoming.shape[1]
        ends, delay = self.ends(size)
        others = [rank for rank in range(comm.nranks()) if rank != comm.rank() or not gathers]
        incoming[others] = GARBAGE
        for place, (start, end) in enumerate(itertools.pairwise(ends)):
            overlap.fill(end)
            part = outgoing[:, start:end].contiguous()
            landing = torch.empty(comm.nranks(), end - start, dtype=torch.uint8)
            if gathers:
                comm._allgather(part.view(-1), landing.view(-1))
            else:
                comm._alltoall(part.view(-1), landing.view(-1))
            incoming[:, start:end] = landing
            if place >= delay:
                overlap.read(ends[place + 1 - delay])
        overlap.read(size)

    def patch(self):
        def overlapping(comm, collective, send, recv, overlap):
            gathers = collective == "allgather"
            self.move(
                comm,
                send.view(1 if gathers else comm.nranks(), -1),
                recv.view(comm.nranks(), -1),
                overlap,
                gathers,
            )

        return mock.patch.object(SimulatedCommunicator, "_overlapping", overlapping)


def in_whole(name, inputs, average):
    """S3.2 as it reads, without overlap, for the inputs of all ranks; return every rank's
    result.
    """
    n, codec, kernels = len(inputs), get_codec(name), get_backend("reference")
    payloads = torch.stack([codec.compress(x, n).view(n, -1) for x in inputs])
    result = inputs[0].clone()
    blocks = []
    for rank in range(n):
        x = torch.empty_like(result)
        codec.decompress(payloads[:, rank].reshape(-1), n, out=x)
        kernels.reduce_chunks_(x, n, target_chunk=rank, average=average)
        blocks.append(codec.compress(x, n, target_chunk=rank).view(n, -1)[rank])
    codec.decompress(torch.cat(blocks), n, out=result)
    return result


@inputs(30)
@given(
    n=st.integers(1, 5),
    name=st.sampled_from(CODECS),
    dtype=st.sampled_from(COMPRESSIBLE),
    sizes=st.lists(st.integers(0, 400) | st.sampled_from([LONG, 1024]), min_size=1, max_size=3),
    average=st.booleans(),
    seed=seeds,
)
@example(n=2, name="MinMaxUInt8", dtype=torch.float32, sizes=[LONG], average=False, seed=1)
def test_S3_2_every_bucket_has_the_bits_of_the_plain_operation_however_its_bytes_move(
    n, name, dtype, sizes, average, seed
):
    inputs = [
        [numbers(n * size, dtype, seed + 7 * rank + place) for rank in range(n)]
        for place, size in enumerate(sizes)
    ]

    def rank(comm):
        op = CentralizedLowPrecision(comm, get_backend("reference"), get_codec(name), average)
        xs = [bucket[comm.rank()].clone() for bucket in inputs]
        for x in xs:
            op(x)
        return xs, comm.bytes_sent

    with InPieces(seed).patch():
        results = SimulatedWorld(n).run(rank)
    expected = [in_whole(name, bucket, average) for bucket in inputs]
    wire = sum(2 * (n - 1) * get_codec(name).payload_bytes(size, dtype) for size in sizes)
    for xs, sent in results:
        assert sent == wire
        for x, wanted in zip(xs, expected, strict=True):
            assert_equal(x, wanted, EXACT)


@every_codec
@pytest.mark.parametrize("dtype", COMPRESSIBLE, ids=str)
@pytest.mark.parametrize(
    ("num_chunks", "size"), [(1, LONG), (3, LONG), (4, 33), (200, 1000), (2, 1), (2, 0)]
)
def test_S4_S12_bytes_that_are_final_stay_and_bytes_beyond_those_needed_do_not_matter(
    name, dtype, num_chunks, size
):
    codec, x = get_codec(name), numbers(num_chunks * size, dtype, 3)
    wanted, out = codec.compress(x, num_chunks), torch.empty_like(x)
    codec.decompress(wanted, num_chunks, out)

    payload = torch.full_like(wanted, GARBAGE)
    rows, whole = payload.view(num_chunks, -1), wanted.view(num_chunks, -1)
    finals = []
    for final in codec.compress_in_steps(x, num_chunks, out=payload):
        assert_equal(rows[:, :final].contiguous(), whole[:, :final].contiguous(), EXACT)
        finals.append(final)
    assert finals == sorted(finals)
    assert finals[-1] == whole.shape[1]
    assert_equal(payload, wanted, EXACT)

    payload.fill_(GARBAGE)
    result = torch.empty_like(x)
    for needed in codec.decompress_in_steps(payload, num_chunks, out=result):
        rows[:, :needed] = whole[:, :needed]
    assert_equal(result, out, EXACT)


@pytest.mark.parametrize("collective", ["alltoall", "allgather_inplace"])
def test_steps_that_ask_for_more_bytes_than_there_are_run_when_all_have_come(collective):
    def steps(found):
        yield 10**9
        found.append(collective)

    def rank(comm):
        filled, read = [], []
        tensors = [
            torch.zeros(2, dtype=torch.uint8) for _ in range(2 if collective == "alltoall" else 1)
        ]
        getattr(comm, collective)(*tensors, Overlap(steps(filled), steps(read)))
        return filled, read

    assert SimulatedWorld(2).run(rank) == [([collective], [collective])] * 2

"""Tests of the kernels that need a CUDA device: ``make gpu``. All are skipped without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cuda_emulation.inputs import assert_payload
from tests.threads import assert_right_on_threads
from torch import Tensor, nn

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.backends import available_backends, get_backend, get_codec
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.gpu

COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)
every_float = pytest.mark.parametrize("dtype", [*COMPRESSIBLE, torch.float64], ids=str)
every_codec = pytest.mark.parametrize(
    "name",
    ["MinMaxUInt8", "MXFP8", "MXFP8-RCEIL", "MXFP4", "MXFP4-EVEN", "MXINT8", "NVFP4", "OneBit"],
)
every_compressible = pytest.mark.parametrize("dtype", COMPRESSIBLE, ids=str)
sizes = pytest.mark.parametrize(
    ("num_chunks", "size"), [(1, 1), (3, 33), (2, 8191), (70, 5), (3, 20_001), (1, 3_000_017)]
)


def numbers(size: int, dtype: torch.dtype, skip: int = 0, seed: int = 0) -> Tensor:
    """Random numbers on the device, ``skip`` elements after an alignment boundary."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(size + skip, generator=generator, dtype=torch.float64).to(dtype).cuda()[skip:]
    )


def test_the_backend_is_there():
    assert available_backends()["cuda"] is None
    assert get_backend(None, device="cuda").name == "cuda"


@every_float
@sizes
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_arithmetic_is_the_reference_s(dtype, num_chunks, size, skip):
    def work(kernels: Any) -> Tensor:
        x, y, z, w = (
            numbers(num_chunks * size, dtype, skip * (seed % 2), seed) for seed in range(4)
        )
        reduced = numbers(
            num_chunks * size, torch.float64 if dtype is torch.float64 else torch.float32, skip, 5
        )
        kernels.add_(x, y)
        kernels.subtract_(x, z)
        kernels.add_scaled_(x, w, 0.3)
        kernels.average_(x, y)
        kernels.divide_(x, 3)
        kernels.combine_ring_(x, y, z, w)
        kernels.async_average_(x, reduced, z, 3)
        kernels.update_momentum_(x, y, 0.9)
        kernels.reduce_chunks_(x, num_chunks, num_chunks - 1, average=True)
        return x

    assert_equal(work(get_backend("cuda")), work(get_backend("reference")), EXACT)


@every_codec
@every_compressible
@sizes
@pytest.mark.parametrize("skip", [0, 1])
def test_bytes_are_the_reference_s(name, dtype, num_chunks, size, skip):
    cuda, reference = get_codec(name, "cuda"), get_codec(name, "reference")
    x = numbers(num_chunks * size, dtype, skip)
    room = torch.full(
        (num_chunks * cuda.payload_bytes(size, dtype) + skip,),
        255,
        dtype=torch.uint8,
        device="cuda",
    )
    payload = cuda.compress(x, num_chunks, out=room[skip:])
    assert_payload(name, payload, reference.compress(x, num_chunks), num_chunks)
    x[x.numel() // 2] = float("nan")
    assert_payload(
        name, cuda.compress(x, num_chunks), reference.compress(x, num_chunks), num_chunks
    )
    mine, theirs = torch.empty_like(x), torch.empty_like(x)
    cuda.decompress(payload, num_chunks, mine)
    reference.decompress(payload, num_chunks, theirs)
    assert_equal(mine, theirs, EXACT)


@every_codec
@every_compressible
def test_every_16_bit_pattern_and_no_subnormal_is_flushed(name, dtype):
    order = torch.arange(65536, dtype=torch.int32)
    x = (
        (order << 16 | order).view(torch.float32)
        if dtype is torch.float32
        else order.to(torch.int16).view(dtype)
    ).cuda()
    expected = get_codec(name, "reference").compress(x, 64)
    assert_payload(name, get_codec(name, "cuda").compress(x, 64), expected, 64)
    mine, theirs = torch.empty_like(x), torch.empty_like(x)
    get_codec(name, "cuda").decompress(expected, 64, mine)
    get_codec(name, "reference").decompress(expected, 64, theirs)
    assert_equal(mine, theirs, EXACT)


@every_float
def test_movement_and_order_are_the_reference_s(dtype):
    cuda, reference = get_backend("cuda"), get_backend("reference")
    base = numbers(40_000, dtype)
    tensors = [
        base[1:9],
        base[7:17_000],
        base[5],
        base[:5040].view(70, 72).t(),
        base[100:200:3],
        base[:6].view(2, 3).expand(4, 2, 3),
    ]
    flat = base.new_zeros(sum(tensor.numel() for tensor in tensors))
    cuda.gather_flat(tensors, flat)
    assert_equal(flat, torch.cat([tensor.reshape(-1) for tensor in tensors]), EXACT)
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    cuda.scatter_flat(flat, targets)
    for target, tensor in zip(targets, tensors, strict=True):
        assert_equal(target, tensor, EXACT)
    keys = (base * 3).round()
    keys[::7] = float("nan")
    assert torch.equal(cuda.order_by_complexity(keys), reference.order_by_complexity(keys))


def test_two_threads_on_two_streams_and_two_on_one():
    cuda, reference = get_backend("cuda"), get_backend("reference")
    inputs = [numbers(200_000, torch.float32, seed=seed) * 10**seed for seed in range(4)]
    expected = [get_codec("MinMaxUInt8", reference).compress(x, 2) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]

    def compress(index: int) -> Tensor:
        with torch.cuda.stream(streams[index // 2]):
            payload = get_codec("MinMaxUInt8", cuda).compress(inputs[index], 2)
        streams[index // 2].synchronize()  # it is compared on another stream
        return payload

    assert_right_on_threads(compress, expected, rounds=50)


def test_kernels_do_not_wait_for_the_device():
    cuda, x = get_backend("cuda"), numbers(1000, torch.float32)
    get_codec("MinMaxUInt8", cuda).compress(x, 1)  # compile and load it
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)  # keeps the stream busy for some tenths of a second
    get_codec("MinMaxUInt8", cuda).compress(x, 1)
    cuda.add_(x, x.clone())
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "name", ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized"]
)
def test_simulated_ranks_train_on_one_card_as_under_the_reference(name):
    def train(backend: str) -> list[Tensor]:
        def rank(comm: Any) -> Tensor:
            bagua_ref.init_process_group()
            torch.manual_seed(comm.rank())
            model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3)).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            model.with_bagua([optimizer], Algorithm.init(name, hierarchical=False), backend=backend)
            for step in range(4):
                inputs = numbers(35, torch.float32, seed=100 * comm.rank() + step).view(5, 7)
                optimizer.zero_grad()
                # Autograd has one thread per device, so simulated ranks must run backward on their
                # own threads.
                with torch.autograd.set_multithreading_enabled(False):
                    model(inputs).square().mean().backward()
                optimizer.step()
            return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

        return SimulatedWorld(4).run(rank)

    for mine, theirs in zip(train("cuda"), train("reference"), strict=True):
        assert_equal(mine, theirs, EXACT)

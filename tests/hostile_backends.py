"""Targets that misbehave in every way a target may: those that a process survives, and those that
it does not.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.backends.reference.codecs import MXFP8, MinMaxUInt8, OneBit
from bagua_ref.conformance.targets.world import own_communicator

ADD = "kernels.S1.add[float16]"


def kernels(**methods):
    """Return the reference's kernels, some of them replaced."""
    return type("Kernels", (ReferenceBackend,), methods)()


def adds(change):
    """Return kernels that change the sum, which is right before."""
    return kernels(_add_=lambda self, x, y: (ReferenceBackend._add_(self, x, y), change(x)))


def raises(error):
    def method(self, *arguments):
        raise error

    return method


class Raises(ReferenceBackend):
    _add_ = raises(RuntimeError("out of cheese"))


def recurses(self, x, y):
    self._add_(x, y)


def slow(self, *arguments):
    time.sleep(0.01)
    ReferenceBackend._async_average_(self, *arguments)


def narrow(self, x, y, factor):
    if x.dtype is not torch.float32:
        raise RuntimeError("float32 only")
    ReferenceBackend._add_scaled_(self, x, y, factor)


def one_size(self, x, divisor):
    if x.numel() == 4:
        ReferenceBackend._divide_(self, x, divisor)


def contiguous_only(self, tensors, out):
    rows = [x.as_strided(x.shape, x.contiguous().stride()) for x in tensors]
    ReferenceBackend._gather_flat(self, rows, out)


def two_ranks(world):
    if world.world_size > 2:
        raise RuntimeError("two ranks only")
    return own_communicator(world)


class ReadsBeyondTheEnd(MinMaxUInt8):
    def _compress(self, x, num_chunks, target_chunk, out):
        super()._compress(x, num_chunks, target_chunk, out)
        if num_chunks == 1 and x.numel():
            beyond = x.as_strided((1,), (1,), x.storage_offset() + x.numel())
            out[: x.element_size()] = beyond.view(torch.uint8)


class IsShort(MinMaxUInt8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        return super().compress(x, num_chunks, target_chunk, out)[:-1]


class ChangesItsInput(OneBit):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        payload = super().compress(x, num_chunks, target_chunk, out)
        x.zero_()
        return payload


kept: dict[int, torch.Tensor] = {}


class KeepsMemory(MinMaxUInt8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        payload = super().compress(x, num_chunks, target_chunk, out)
        if out is None:  # the memory of the last payload, if it is as long
            return kept.setdefault(payload.numel(), payload).copy_(payload)
        return payload


LEVELS = "codec.S4.2.levels[float16]"
FAILED, PASSED = "failed", "passed"
DISHONEST = {
    "raises": (Raises(), ADD, FAILED, "add_ raised RuntimeError: out of cheese"),
    "exits": (kernels(_add_=raises(SystemExit(3))), ADD, FAILED, "SystemExit: 3"),
    "recurses": (kernels(_add_=recurses), ADD, FAILED, "RecursionError"),
    "writes beyond the end": (
        adds(lambda x: x.as_strided((x.numel() + 1,), (1,))[-1:].zero_()),
        ADD,
        FAILED,
        "memory beside x was written",
    ),
    "writes before the start": (
        adds(lambda x: x.as_strided((1,), (1,), x.storage_offset() - 1).zero_()),
        ADD,
        FAILED,
        "memory beside x was written, -1 elements from its start",
    ),
    "resizes its argument": (adds(lambda x: x.resize_(x.numel() + 3)), ADD, FAILED, ""),
    "returns its inputs": (kernels(_add_=lambda *given: None), ADD, FAILED, "elements differ"),
    "returns zeros": (adds(torch.Tensor.zero_), ADD, FAILED, "elements differ"),
    "another dtype": (kernels(codecs={}, _add_scaled_=narrow), "S1.add_scaled", FAILED, "only"),
    "its dtype": (kernels(_add_scaled_=narrow), "S1.add_scaled[float32]", PASSED, ""),
    "one size": (kernels(_divide_=one_size), "S3.3.divide[float16]", FAILED, "elements differ"),
    "two ranks": (
        SimpleNamespace(communicator=two_ranks),
        "collectives.S3.9.allgather",
        FAILED,
        "two ranks only",
    ),
    "contiguous only": (
        kernels(_gather_flat=contiguous_only),
        "S2.3.gather_flat",
        FAILED,
        "elements differ",
    ),
    "1 in 20": (
        adds(lambda x: x.add_(random.random() < 1 / 20)),
        "S1.add[float32]",
        FAILED,
        "differ",
    ),
    "slow": (kernels(_async_average_=slow), "S3.6.async_average[float16]", PASSED, ""),
    "returns nothing": (
        kernels(_order_by_complexity=lambda *given: None),
        "S7.2.order_by_complexity[float16]",
        FAILED,
        "NoneType instead of a tensor",
    ),
    "another dtype of the result": (
        kernels(_order_by_complexity=lambda self, keys: keys.argsort(stable=True).int()),
        "S7.2.order_by_complexity[float16]",
        FAILED,
        "torch.int32",
    ),
    "reads beyond the end": (
        kernels(codecs={"MinMaxUInt8": ReadsBeyondTheEnd}),
        LEVELS,
        FAILED,
        "minimum of chunk 0",
    ),
    "returns too little": (kernels(codecs={"MinMaxUInt8": IsShort}), LEVELS, FAILED, "of shape"),
    "changes its inputs": (
        kernels(codecs={"OneBit": ChangesItsInput}),
        "codec.S12.2.payload_OneBit[float16]",
        FAILED,
        "x is only read",
    ),
    "keeps memory": (
        kernels(codecs={"MinMaxUInt8": KeepsMemory}),
        "codec.S4.1.fresh[float16]",
        FAILED,
        "",
    ),
}
"""What a target does -> the target, a check, its status, and what is said of a failure."""


class CrashesOnce(MXFP8):
    def compress(self, *arguments, **options):
        mark = Path(os.environ["CRASHED"])
        if not mark.exists():
            mark.touch()
            os._exit(3)
        return super().compress(*arguments, **options)


class Deadly(ReferenceBackend):
    """Kernels that end the process, never return, or write on its standard output."""

    codecs = {"MXFP8": CrashesOnce}

    def __init__(self):
        os.write(1, b"look at me, too")

    def _update_momentum_(self, *arguments):
        os.kill(os.getpid(), signal.SIGSEGV)

    def _reduce_chunks_(self, x, num_chunks, target_chunk, average):
        sum(range(10**14))  # one call into C that holds the interpreter lock

    def _scatter_flat(self, flat, tensors):
        os.write(1, b"look at me")
        super()._scatter_flat(flat, tensors)

"""Backends that misbehave in every way a backend under test may; each differs from the reference in
one thing.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import torch

from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.backends.reference.codecs import MXFP8, MinMaxUInt8, OneBit
from bagua_ref.conformance.targets.world import own_communicator


class Raises(ReferenceBackend):
    def _add_(self, x, y):
        raise RuntimeError("out of cheese")


class Exits(ReferenceBackend):
    def _add_(self, x, y):
        raise SystemExit(3)


class Interrupts(ReferenceBackend):
    def _add_(self, x, y):
        raise KeyboardInterrupt


class RecursesForever(ReferenceBackend):
    def _add_(self, x, y):
        self._add_(x, y)


class WritesBeyondTheEnd(ReferenceBackend):
    def _add_(self, x, y):
        super()._add_(x, y)
        x.as_strided((x.numel() + 1,), (1,))[-1] = 0


class WritesBeforeTheStart(ReferenceBackend):
    def _add_(self, x, y):
        super()._add_(x, y)
        x.as_strided((1,), (1,), x.storage_offset() - 1)[0] = 0


class LongMinMaxUInt8(MinMaxUInt8):
    def _compress(self, x, num_chunks, target_chunk, out):
        if num_chunks == 1 and target_chunk is None and x.numel():
            longer = x.as_strided((x.numel() + 1,), (1,))
            low, high = longer.min(), longer.max()
            super()._compress(x.clamp(low, high), num_chunks, target_chunk, out)
            out[: x.element_size() * 2] = torch.stack([low, high]).view(torch.uint8)
        else:
            super()._compress(x, num_chunks, target_chunk, out)


class ReadsBeyondTheEnd(ReferenceBackend):
    codecs = {"MinMaxUInt8": LongMinMaxUInt8}


class UsesTheStoragesStart(ReferenceBackend):
    def _add_(self, x, y):
        super()._add_(x.as_strided(x.shape, (1,), 0), y)


class ShortMinMaxUInt8(MinMaxUInt8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        return super().compress(x, num_chunks, target_chunk, out)[:-1]


class ReturnsWrongShapes(ReferenceBackend):
    codecs = {"MinMaxUInt8": ShortMinMaxUInt8}


class ReturnsNothing(ReferenceBackend):
    def _order_by_complexity(self, keys):
        return None


class ReturnsNaN(ReferenceBackend):
    def _average_(self, x, y):
        x.fill_(float("nan"))


class ClosesWhatItIsGiven(ReferenceBackend):
    def _add_(self, x, y):
        super()._add_(x, y)
        x.resize_(x.numel() + 3)


CHECK_OF = {
    ReadsBeyondTheEnd: "codec.S4.2.levels",
    ReturnsWrongShapes: "codec.S4.2.levels",
    ReturnsNothing: "kernels.S7.2.order_by_complexity",
    ReturnsNaN: "kernels.S3.4.average",
}
"""The check that must fail, by backend; "kernels.S1.add" where none is given."""

ALL = [
    value
    for value in list(vars().values())
    if isinstance(value, type)
    and issubclass(value, ReferenceBackend)
    and value is not ReferenceBackend
]


class ChangesOneBit(OneBit):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        payload = super().compress(x, num_chunks, target_chunk, out)
        x.zero_()
        return payload


class KeepsMinMaxUInt8(MinMaxUInt8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        payload = super().compress(x, num_chunks, target_chunk, out)
        if out is None:  # the memory of the last payload, if it is as long
            kept = _kept.setdefault(payload.numel(), payload)
            return kept.copy_(payload)
        return payload


_kept: dict[int, torch.Tensor] = {}


class CrashesOnceMXFP8(MXFP8):
    def compress(self, *arguments, **options):
        mark = Path(os.environ["CRASHED"])
        if not mark.exists():
            mark.touch()
            os._exit(3)
        return super().compress(*arguments, **options)


class DishonestKernels(ReferenceBackend):
    """Each method misbehaves in a way of its own; none says so."""

    codecs = {
        "MinMaxUInt8": KeepsMinMaxUInt8,
        "OneBit": ChangesOneBit,
        "MXFP8": CrashesOnceMXFP8,
    }

    def _add_(self, x, y):
        raise RuntimeError("out of cheese")

    def _subtract_(self, x, y):
        """Leave the input as it is."""

    def _combine_ring_(self, x, left, right, weight):
        x.zero_()

    def _add_scaled_(self, x, y, factor):
        if x.dtype is not torch.float32:
            raise RuntimeError("float32 only")
        super()._add_scaled_(x, y, factor)

    def _divide_(self, x, divisor):
        if x.numel() == 4:
            super()._divide_(x, divisor)

    def _gather_flat(self, tensors, out):
        super()._gather_flat([x.as_strided(x.shape, x.contiguous().stride()) for x in tensors], out)

    def _average_(self, x, y):
        super()._average_(x, y)
        if random.random() < 1 / 20:
            x += 1

    def _async_average_(self, *arguments):
        time.sleep(0.01)
        super()._async_average_(*arguments)

    def _update_momentum_(self, *arguments):
        os.kill(os.getpid(), signal.SIGSEGV)

    def _reduce_chunks_(self, x, num_chunks, target_chunk, average):
        sum(range(10**14))  # one call into C that holds the interpreter lock

    def _scatter_flat(self, flat, tensors):
        os.write(1, b"look at me")
        super()._scatter_flat(flat, tensors)

    def _order_by_complexity(self, keys):
        return super()._order_by_complexity(keys).int()


class Dishonest:
    """The kernels, and a communicator for two ranks."""

    kernels = DishonestKernels()

    def __init__(self):
        os.write(1, b"look at me, too")

    @staticmethod
    def communicator(world):
        if world.world_size > 2:
            raise RuntimeError("two ranks only")
        return own_communicator(world)

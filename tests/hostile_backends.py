"""Backends that misbehave in every way a backend under test may; each differs from the reference in
one thing.
"""

from __future__ import annotations

import os
import signal
import time

import torch

from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.backends.reference.codecs import MinMaxUInt8


class Raises(ReferenceBackend):
    def _add_(self, x, y):
        raise RuntimeError("out of cheese")


class Exits(ReferenceBackend):
    def _add_(self, x, y):
        raise SystemExit(3)


class Interrupts(ReferenceBackend):
    def _add_(self, x, y):
        raise KeyboardInterrupt


class Sleeps(ReferenceBackend):
    def _add_(self, x, y):
        time.sleep(1000)


class HoldsTheInterpreter(ReferenceBackend):
    def _add_(self, x, y):
        sum(range(10**14))  # one call into C that holds the interpreter lock


class Segfaults(ReferenceBackend):
    def _add_(self, x, y):
        os.kill(os.getpid(), signal.SIGSEGV)


class Leaves(ReferenceBackend):
    def _add_(self, x, y):
        os._exit(0)


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


class ChangesItsInput(ReferenceBackend):
    def _add_(self, x, y):
        super()._add_(x, y)
        y += 1


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


class ReturnsAnotherDtype(ReferenceBackend):
    def _order_by_complexity(self, keys):
        return super()._order_by_complexity(keys).int()


class ReturnsNaN(ReferenceBackend):
    def _average_(self, x, y):
        x.fill_(float("nan"))


class DiffersNowAndThen(ReferenceBackend):
    calls = 0

    def _add_(self, x, y):
        super()._add_(x, y)
        DiffersNowAndThen.calls += 1
        if DiffersNowAndThen.calls % 7 == 0 and x.numel():
            x[0] = 12345


class ClosesWhatItIsGiven(ReferenceBackend):
    def _add_(self, x, y):
        super()._add_(x, y)
        x.resize_(x.numel() + 3)


CHECK_OF = {
    ReadsBeyondTheEnd: "codec.S4.2.levels",
    ReturnsWrongShapes: "codec.S4.2.levels",
    ReturnsNothing: "kernels.S7.2.order_by_complexity",
    ReturnsAnotherDtype: "kernels.S7.2.order_by_complexity",
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


class Prints(ReferenceBackend):
    """A correct backend that prints."""

    def _add_(self, x, y):
        print("look at me")
        super()._add_(x, y)

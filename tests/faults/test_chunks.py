"""Chunked sparse exchanges with a fault, most of them those of public codes: each is found by a check
of the clause that it breaks.
"""

from __future__ import annotations

import pytest
import torch
from tests.wrong_objects import Faults, Whole, assert_found

from bagua_ref.backends.chunks import ChunkCoder, Chunks, Stat2
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.conformance.targets.reference_algorithms import ReferenceAlgorithms

FAULTS = Faults()


def found_by(check):
    """Enter a coder, or algorithms, into the table, with the check that must fail for them."""

    def enter(wrong):
        def make():
            if issubclass(wrong, ReferenceAlgorithms):
                return type("Target", (Whole,), {"algorithms": wrong("reference")})()
            return type("Backend", (ReferenceBackend,), {"chunk_coder": wrong})()

        FAULTS.row(wrong.__name__, make, f"algorithms.{check}")
        return wrong

    return enter


@found_by("S15.6.rounds")
class SelectsAnEvenNumber(ChunkCoder):
    def __init__(self, chunks, k, codec):
        super().__init__(chunks, max(2, k - k % 2), codec)


class Rows(Chunks):
    """Rows in place of blocks."""

    def __init__(self, right):
        shape = right._shape
        super().__init__((*shape[:-1], 1, *shape[-1:]), 64)
        self._shape = shape


@found_by("S15.1.chunks")
class TakesRowsForChunks(ChunkCoder):
    def __init__(self, chunks, k, codec):
        super().__init__(Rows(chunks), k, codec)


@found_by("S15.2.ties")
class TakesTheLastOfEquals(ChunkCoder):
    def encode(self, y):
        slope = torch.arange(y.shape[1]) * 2.0**-20
        return super().encode(torch.where(y == 0, y, y + y.sign() * slope))


@found_by("S15.4.contributors")
class DividesBySenders(ChunkCoder):
    def add_decoded(self, sent, total, counts=None):
        super().add_decoded(sent, total)
        if counts is not None and self.count:
            ones = torch.ones(self.count).view(torch.uint8)
            plain = ChunkCoder(self.chunks, self.k, None)
            plain.add_decoded(torch.cat([sent[: plain.nbytes - len(ones)], ones]), counts)


@found_by("S15.3.messages")
class PacksTheOtherWay(ChunkCoder):
    def encode(self, y):
        return super().encode(y).flip(0)

    def add_decoded(self, sent, total, counts=None):
        super().add_decoded(sent.flip(0), total, counts)


@found_by("S15.3.messages")
class SendsIndicesOfWholeChunks(ChunkCoder):
    def encode(self, y):
        sent = super().encode(y)
        return torch.cat([sent, sent[:4]]) if self.k == self.chunks.numel else sent

    def __init__(self, chunks, k, codec):
        super().__init__(chunks, k, codec)
        self.nbytes += 4 * (self.count > 0 and self.k == chunks.numel)

    def add_decoded(self, sent, total, counts=None):
        right = ChunkCoder(self.chunks, self.k, self.codec)
        right.add_decoded(sent[: right.nbytes], total, counts)


def with_stat2(made):
    """Return a coder with another Stat2."""

    def init(self, chunks, k, codec):
        if isinstance(codec, Stat2):
            codec = made(codec.kernels)
        ChunkCoder.__init__(self, chunks, k, codec)

    return type(made.__name__, (ChunkCoder,), {"__init__": init})


class GivesZerosALevel(Stat2):
    def _compress(self, x, *arguments):
        super()._compress(torch.where(x == 0, 1e-30, x), *arguments)


class GivesCode0ToTheLowest(Stat2):
    def _decompress(self, payload, num_chunks, out):
        super()._decompress(payload, num_chunks, out)
        out[out < out.mean() - 1.4 * out.std()] = 0


class AddsInFloat32(Stat2):
    def _decompress(self, payload, num_chunks, out):
        super()._decompress(payload, num_chunks, out)
        out *= 1 + 2**-23


class KeepsInfinities(Stat2):
    def _compress(self, x, *arguments):
        super()._compress(x.clamp(-1e38, 1e38), *arguments)


for stat2 in (GivesZerosALevel, GivesCode0ToTheLowest, AddsInFloat32, KeepsInfinities):
    found_by("S15.3.stat2")(with_stat2(stat2))


def altered(name, method, check, **changes):
    """Enter trainings whose ``method`` gets other values, or functions of the right ones."""

    def train(self, world, weights, program, **options):
        for option, change in changes.items():
            options[option] = change(options[option]) if callable(change) else change
        return getattr(ReferenceAlgorithms, method).__get__(self)(
            world, weights, program, **options
        )

    found_by(check)(type(name, (ReferenceAlgorithms,), {method: train}))


def squared(outer):
    return outer and {**outer, "lr": outer["lr"] ** 2}


altered("AppliesTheOuterRateTwice", "diloco", "S15.5.rounds", outer_optimizer=squared)
altered("DoesNotDecay", "diloco", "S15.5.rounds", error_decay=1.0)
altered("HasOneSizeOfChunks", "diloco", "S15.1.chunks", chunk=64)
altered("SelectsMore", "demo", "S15.6.rounds", top_k=lambda k: k + 1)
altered("DividesByAll", "demo", "S15.4.contributors", mean="all")
altered("TransformsNothing", "demo", "S15.6.cosine", transform=None)
altered("KeepsItsMomentum", "demo", "S15.6.rounds", decay=lambda decay: decay / 2)
altered("WarmsUpLonger", "demo", "S15.6.warmup", warmup_steps=lambda steps: steps + 1)
altered("NeverSigns", "demo", "S15.6.rounds", sign=False)


@found_by("S15.6.not_finite")
class HasZeroForTheSignOfNaN(ReferenceAlgorithms):
    def demo(self, world, weights, program, **options):
        history = super().demo(world, weights, program, **options)
        return [[x if x is None else x.nan_to_num(0.0) for x in step] for step in history]


@found_by("S15.5.restart")
class ForgetsARestart(ReferenceAlgorithms):
    def diloco(self, world, weights, program, **options):
        kept = [action for action in program if action[0] != "restart"]
        history = super().diloco(world, weights, kept, **options)
        return history + [history[-1]] * (len(program) - len(kept))


@pytest.mark.proof
@pytest.mark.parametrize(("make", "check"), FAULTS)
def test_wrong_chunks_are_found(make, check):
    assert_found(make(), check)

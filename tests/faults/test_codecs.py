"""Codecs with a fault: each is found by a check of the clause that it breaks."""

from __future__ import annotations

import pytest
import torch
from tests.wrong_objects import assert_found

from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.backends.reference.codecs import MXFP4, MXFP8, MXINT8, MinMaxUInt8, OneBit
from bagua_ref.conformance import run_conformance

HEADER = 32
FOUND_BY = []


def found_by(check):
    """Enter a codec into the table, with the check that must fail for it."""

    def enter(codec):
        FOUND_BY.append(pytest.param(codec, check, id=codec.__name__))
        return codec

    return enter


def rows(flat, count):
    return flat.view(count, -1)


class OwnLevels(MinMaxUInt8):
    """S4.2 in a few lines over right headers and padding; what a fault overrides is wrong."""

    epsilon = 1e-7

    def ends(self, chunk):
        return chunk.float().min(), chunk.float().max()

    def rounded(self, values):
        return values.round()

    def scale(self, low, high):
        return torch.tensor(255.0) / ((high - low) + self.epsilon)

    def compress(self, x, num_chunks, target_chunk=None, out=None):
        out = super().compress(x, num_chunks, target_chunk, out)
        for index, (chunk, block) in enumerate(
            zip(rows(x, num_chunks), rows(out, num_chunks), strict=True)
        ):
            header = block[: 2 * x.element_size()].clone().view(x.dtype)
            if target_chunk not in (None, index) or not x.numel() or header.isnan().any():
                continue
            low, high = self.ends(chunk)
            scale = self.scale(low, high)
            upper = self.rounded(high * scale)
            level = self.rounded(chunk.float() * scale).minimum(upper) - (upper - 255)
            block[HEADER : HEADER + len(chunk)] = level.clamp(0, 255).byte()
        return out


@found_by("codec.S4.2.epsilon[float32]")
class HasNoEpsilon(OwnLevels):
    epsilon = 0


@found_by("codec.S4.2.epsilon[float32]")
class HasASmallerEpsilon(OwnLevels):
    epsilon = 1e-8


@found_by("codec.S4.2.levels")
class RoundsLevelsHalfUp(OwnLevels):
    def rounded(self, values):
        return (values + 0.5).floor()


@found_by("codec.S4.6.bound")
class RoundsLevelsDown(OwnLevels):
    def rounded(self, values):
        return values.floor()


@found_by("codec.S4.2.levels[float32]")
class FormsTheScaleInFloat64(OwnLevels):
    def scale(self, low, high):
        return (255 / ((high.double() - low.double()) + self.epsilon)).float()


@found_by("codec.S4.2.long")
class TakesTheEndsOfTheFirst65536(OwnLevels):
    def ends(self, chunk):
        return super().ends(chunk[: 2**16])


@found_by("codec.S4.2.levels")
class HasWiderSteps(OwnLevels):
    def scale(self, low, high):
        return torch.tensor(254.0) / ((high - low) + self.epsilon)


@found_by("codec.S4.1.header")
class SwapsTheHeader(MinMaxUInt8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        out = super().compress(x, num_chunks, target_chunk, out)
        for block in rows(out, num_chunks):
            header = block[: 2 * x.element_size()]
            header.copy_(header.clone().view(x.dtype).flip(0).view(torch.uint8))
        return out


@found_by("codec.S4.1.header")
class KeepsNegativeZeros(MinMaxUInt8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        out = super().compress(x, num_chunks, target_chunk, out)
        for block in rows(out, num_chunks):
            header = block[: 2 * x.element_size()]
            ends = header.clone().view(x.dtype)
            ends[ends == 0] = -0.0
            header.copy_(ends.view(torch.uint8))
        return out


@found_by("codec.S4.1.gaps")
class LeavesGarbageInTheGaps(MinMaxUInt8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        before = None if out is None else out.clone()
        out = super().compress(x, num_chunks, target_chunk, out)
        if before is not None:
            end = HEADER + x.numel() // num_chunks
            rows(out, num_chunks)[:, end:] = rows(before, num_chunks)[:, end:]
        return out


@found_by("codec.S4.3.round_trip[float32]")
class MultipliesByTheReciprocal(MinMaxUInt8):
    def decompress(self, payload, num_chunks, out):
        super().decompress(payload, num_chunks, out)
        for block, values in zip(rows(payload, num_chunks), rows(out, num_chunks), strict=True):
            low, high = block[: 2 * out.element_size()].clone().view(out.dtype).float()
            scale = 255 / ((high - low) + 1e-7)
            lower = (high * scale).round() - 255
            if scale.isfinite():
                level = block[HEADER : HEADER + len(values)].float()
                values.copy_((level + lower) * (1 / scale))


@found_by("codec.S4.3.any_levels[float16]")
class OverflowsToInfinity(MinMaxUInt8):
    def decompress(self, payload, num_chunks, out):
        super().decompress(payload, num_chunks, out)
        largest = torch.finfo(out.dtype).max
        out[out == largest] = float("inf")


@found_by("codec.S4.6.bound")
class DecodesHalfALevelTooHigh(MinMaxUInt8):
    def decompress(self, payload, num_chunks, out):
        super().decompress(payload, num_chunks, out)
        for block, values in zip(rows(payload, num_chunks), rows(out, num_chunks), strict=True):
            low, high = block[: 2 * out.element_size()].clone().view(out.dtype).float()
            values += ((high - low) / 500).to(out.dtype)


@found_by("codec.S4.4.poison")
class PoisonsAllChunks(MinMaxUInt8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        if not x.isfinite().all():
            x = torch.full_like(x, float("nan"))
        return super().compress(x, num_chunks, target_chunk, out)


@found_by("codec.S4.4.poison")
class PoisonsOnlyForNaN(MinMaxUInt8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        largest = torch.finfo(x.dtype).max / 4
        x = torch.where(x.isinf(), torch.full_like(x, largest) * x.sign(), x)
        return super().compress(x, num_chunks, target_chunk, out)


@found_by("codec.S4.4.poison")
class DecodesPoisonAsZero(MinMaxUInt8):
    def decompress(self, payload, num_chunks, out):
        super().decompress(payload, num_chunks, out)
        out.nan_to_num_(nan=0)


@found_by("codec.S4.5.target_chunk")
class ClearsTheOtherChunks(MinMaxUInt8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        if target_chunk is not None and out is not None:
            out.zero_()
        return super().compress(x, num_chunks, target_chunk, out)


@found_by("codec.S4.5.target_chunk")
class WritesEveryChunk(MinMaxUInt8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        return super().compress(x, num_chunks, None, out)


@found_by("codec.S4.5.refuses[float64]")
class TakesFloat64(MinMaxUInt8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        return super().compress(
            x.float() if x.dtype is torch.float64 else x, num_chunks, target_chunk, out
        )


# S12


@found_by("codec.S12.1.payload_MXFP8")
class RoundsTheExponentUp(MXFP8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        out = super().compress(x, num_chunks, target_chunk, out)
        blocks = -(-(x.numel() // num_chunks) // 32)
        scales = rows(out, num_chunks)[:, :blocks]
        scales[(scales > 0) & (scales < 254)] += 1
        return out


@found_by("codec.S12.1.round_trip_MXFP8")
class LosesTheSignOfZero(MXFP8):
    def decompress(self, payload, num_chunks, out):
        super().decompress(payload, num_chunks, out)
        out += 0


@found_by("codec.S12.1.any_payload_MXFP8")
class DecodesNaNAs480(MXFP8):
    def decompress(self, payload, num_chunks, out):
        super().decompress(payload, num_chunks, out)
        c = out.numel() // num_chunks
        blocks = -(-c // 32)
        codes = rows(payload, num_chunks)[:, blocks : blocks + c]
        clean = rows(payload, num_chunks).clone()
        clean[:, blocks : blocks + c][codes & 0x7F == 0x7F] = 0x7E
        super().decompress(clean.view(-1), num_chunks, out)


@found_by("codec.S12.1.payload_MXFP4")
class PutsTheFirstIntoTheHighNibble(MXFP4):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        out = super().compress(x, num_chunks, target_chunk, out)
        c = x.numel() // num_chunks
        codes = rows(out, num_chunks)[:, -(-c // 32) : -(-c // 32) + -(-c // 2)]
        codes.copy_((codes << 4) | (codes >> 4))
        return out


@found_by("codec.S12.1.ties_MXINT8")
class RoundsIntegersDown(MXINT8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        out = super().compress(x, num_chunks, target_chunk, out)
        c = x.numel() // num_chunks
        codes = rows(out, num_chunks)[:, -(-c // 32) : -(-c // 32) + c]
        codes[codes == 2] = 1
        return out


@found_by("codec.S12.1.any_payload_MXINT8")
class Decodes128AsPositive(MXINT8):
    def decompress(self, payload, num_chunks, out):
        super().decompress(payload, num_chunks, out)
        c = out.numel() // num_chunks
        codes = rows(payload, num_chunks)[:, -(-c // 32) : -(-c // 32) + c]
        rows(out, num_chunks)[codes == 128] *= -1


@found_by("codec.S12.3.poison_MXFP8")
class PoisonsTheChunkNotTheBlock(MXFP8):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        chunks = rows(x, num_chunks).clone()
        chunks[~chunks.isfinite().all(1)] = float("nan")
        return super().compress(chunks.view(-1), num_chunks, target_chunk, out)


@found_by("codec.S12.2.payload_OneBit")
class ScalesByTheMeanMagnitude(OneBit):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        out = super().compress(x, num_chunks, target_chunk, out)
        scale = rows(x, num_chunks).float().abs().mean(1)
        if x.numel() and target_chunk is None and scale.isfinite().all():
            rows(out, num_chunks)[:, :4] = scale.view(torch.uint8).view(num_chunks, 4)
        return out


@found_by("codec.S12.2.payload_OneBit")
class TakesZerosForNegative(OneBit):
    def compress(self, x, num_chunks, target_chunk=None, out=None):
        whole = super().compress(x, num_chunks, target_chunk, out)
        tiny = torch.where(x == 0, torch.full_like(x, -1e-7), x)
        bits = super().compress(tiny, num_chunks, target_chunk)
        rows(whole, num_chunks)[:, HEADER:] = rows(bits, num_chunks)[:, HEADER:]
        return whole


def backend_with(codec):
    class Backend(ReferenceBackend):
        codecs = {**ReferenceBackend.codecs, codec.name: codec}

    return Backend()


@pytest.mark.proof
@pytest.mark.parametrize(("codec", "check"), FOUND_BY)
def test_a_wrong_codec_is_found(codec, check):
    assert_found(backend_with(codec), check)


@pytest.mark.proof
def test_levels_without_a_fault_pass():
    assert run_conformance(backend_with(OwnLevels), ["codec"], checks=["S4.2", "S4.6"]).passed

"""Codecs with a fault: each is found by a check of the clause that it breaks."""

from __future__ import annotations

import pytest
import torch
from tests.wrong_objects import Faults, assert_found

from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.backends.reference.codecs import MinMaxUInt8
from bagua_ref.conformance import run_conformance

HEADER = 32
FAULTS = Faults()


def backend_with(made):
    """Return a backend with another codec."""
    codecs = {**ReferenceBackend.codecs, made.name: made}
    return type("Backend", (ReferenceBackend,), {"codecs": codecs})()


def compress(codec, check):
    """Return a decorator of a wrong compression: it gets the right one, and its arguments with all
    defaults.
    """

    def enter(wrong):
        def filled(right, x, num_chunks, target_chunk=None, out=None):
            return wrong(right, x, num_chunks, target_chunk, out)

        filled.__name__ = wrong.__name__
        of = ReferenceBackend.codecs[codec]
        return FAULTS.of(of, "compress", backend_with)(f"codec.{check}")(filled)

    return enter


def decompress(codec, check):
    """Return a decorator of a function that changes what was decompressed."""

    def enter(change):
        def changed(right, payload, num_chunks, out):
            right(payload, num_chunks, out)
            change(rows(payload, num_chunks), rows(out, num_chunks))

        changed.__name__ = change.__name__
        of = ReferenceBackend.codecs[codec]
        return FAULTS.of(of, "decompress", backend_with)(f"codec.{check}")(changed)

    return enter


def rows(flat, count):
    return flat.view(count, flat.numel() // count)


class OwnLevels(MinMaxUInt8):
    """S4.2 in a few lines over right headers and padding; what a fault overrides is wrong."""

    epsilon = 1e-7
    steps = 255.0
    most = 2**30

    def rounded(self, values):
        return values.round()

    def scale(self, low, high):
        return torch.tensor(self.steps) / ((high - low) + self.epsilon)

    def compress(self, x, num_chunks, target_chunk=None, out=None):
        out = super().compress(x, num_chunks, target_chunk, out)
        for index, (chunk, block) in enumerate(
            zip(rows(x, num_chunks), rows(out, num_chunks), strict=True)
        ):
            header = block[: 2 * x.element_size()].clone().view(x.dtype)
            if target_chunk not in (None, index) or not x.numel() or header.isnan().any():
                continue
            ends = chunk[: self.most].float()
            scale = self.scale(ends.min(), ends.max())
            upper = self.rounded(ends.max() * scale)
            level = self.rounded(chunk.float() * scale).minimum(upper) - (upper - 255)
            block[HEADER : HEADER + len(chunk)] = level.clamp(0, 255).byte()
        return out


def levels(name, check, **changes):
    """Enter levels that differ in attributes."""
    made = type(name, (OwnLevels,), changes)
    FAULTS.row(name, lambda: backend_with(made), f"codec.{check}")


levels("HasNoEpsilon", "S4.2.epsilon[float32]", epsilon=0)
levels("HasASmallerEpsilon", "S4.2.epsilon[float32]", epsilon=1e-8)
levels("HasWiderSteps", "S4.2.levels", steps=254.0)
levels("TakesTheEndsOfTheFirst65536", "S4.2.long", most=2**16)
levels("RoundsHalfUp", "S4.2.levels", rounded=lambda self, values: (values + 0.5).floor())
levels("RoundsDown", "S4.6.bound", rounded=lambda self, values: values.floor())
levels(
    "FormsTheScaleInFloat64",
    "S4.2.levels[float32]",
    scale=lambda self, low, high: (255 / ((high.double() - low.double()) + 1e-7)).float(),
)


@compress("MinMaxUInt8", "S4.1.header")
def swaps_the_header(right, x, num_chunks, target_chunk, out):
    out = right(x, num_chunks, target_chunk, out)
    for block in rows(out, num_chunks):
        header = block[: 2 * x.element_size()]
        header.copy_(header.clone().view(x.dtype).flip(0).view(torch.uint8))
    return out


@compress("MinMaxUInt8", "S4.1.header")
def keeps_negative_zeros(right, x, num_chunks, target_chunk, out):
    out = right(x, num_chunks, target_chunk, out)
    for block in rows(out, num_chunks):
        header = block[: 2 * x.element_size()]
        ends = header.clone().view(x.dtype)
        ends[ends == 0] = -0.0
        header.copy_(ends.view(torch.uint8))
    return out


@compress("MinMaxUInt8", "S4.1.gaps")
def leaves_garbage_in_the_gaps(right, x, num_chunks, target_chunk, out):
    before = None if out is None else out.clone()
    out = right(x, num_chunks, target_chunk, out)
    if before is not None:
        end = HEADER + x.numel() // num_chunks
        rows(out, num_chunks)[:, end:] = rows(before, num_chunks)[:, end:]
    return out


@compress("MinMaxUInt8", "S4.4.poison")
def poisons_all_chunks(right, x, *others):
    return right(x if x.isfinite().all() else torch.full_like(x, torch.nan), *others)


@compress("MinMaxUInt8", "S4.4.poison")
def poisons_only_for_nan(right, x, *others):
    largest = torch.finfo(x.dtype).max / 4
    return right(torch.where(x.isinf(), torch.full_like(x, largest) * x.sign(), x), *others)


@compress("MinMaxUInt8", "S4.5.target_chunk")
def clears_the_other_chunks(right, x, num_chunks, target_chunk, out):
    if target_chunk is not None and out is not None:
        out.zero_()
    return right(x, num_chunks, target_chunk, out)


@compress("MinMaxUInt8", "S4.5.target_chunk")
def writes_every_chunk(right, x, num_chunks, target_chunk, out):
    return right(x, num_chunks, None, out)


@compress("MinMaxUInt8", "S4.5.refuses[float64]")
def takes_float64(right, x, *others):
    return right(x.float() if x.dtype is torch.float64 else x, *others)


def ends_of(block, dtype):
    return block[: 2 * dtype.itemsize].clone().view(dtype).float()


@decompress("MinMaxUInt8", "S4.3.round_trip[float32]")
def multiplies_by_the_reciprocal(payload, out):
    for block, values in zip(payload, out, strict=True):
        low, high = ends_of(block, out.dtype)
        scale = 255 / ((high - low) + 1e-7)
        if scale.isfinite():
            level = block[HEADER : HEADER + len(values)].float()
            values.copy_((level + ((high * scale).round() - 255)) * (1 / scale))


@decompress("MinMaxUInt8", "S4.3.any_levels[float16]")
def overflows_to_infinity(payload, out):
    out[out == torch.finfo(out.dtype).max] = torch.inf


@decompress("MinMaxUInt8", "S4.6.bound")
def decodes_half_a_level_too_high(payload, out):
    for block, values in zip(payload, out, strict=True):
        low, high = ends_of(block, out.dtype)
        values += ((high - low) / 500).to(out.dtype)


@decompress("MinMaxUInt8", "S4.4.poison")
def decodes_poison_as_zero(payload, out):
    out.nan_to_num_(nan=0)


# S12


def codes(payload, size, bits=8):
    """Return the bytes of a payload's elements."""
    start = -(-size // 32)
    return payload[:, start : start - (-size * bits // 8)]


@compress("MXFP8", "S12.1.payload_MXFP8")
def rounds_the_exponent_up(right, x, num_chunks, *others):
    out = right(x, num_chunks, *others)
    scales = rows(out, num_chunks)[:, : -(-(x.numel() // num_chunks) // 32)]
    scales[(scales > 0) & (scales < 254)] += 1
    return out


@compress("MXFP8", "S12.3.poison_MXFP8")
def poisons_the_chunk_not_the_block(right, x, num_chunks, *others):
    chunks = rows(x, num_chunks).clone()
    chunks[~chunks.isfinite().all(1)] = torch.nan
    return right(chunks.view(-1), num_chunks, *others)


@compress("MXFP4", "S12.1.payload_MXFP4")
def puts_the_first_into_the_high_nibble(right, x, num_chunks, *others):
    out = right(x, num_chunks, *others)
    both = codes(rows(out, num_chunks), x.numel() // num_chunks, 4)
    both.copy_((both << 4) | (both >> 4))
    return out


@compress("MXINT8", "S12.1.ties_MXINT8")
def rounds_integers_down(right, x, num_chunks, *others):
    out = right(x, num_chunks, *others)
    found = codes(rows(out, num_chunks), x.numel() // num_chunks)
    found[found == 2] = 1
    return out


@decompress("MXFP8", "S12.1.round_trip_MXFP8")
def loses_the_sign_of_zero(payload, out):
    out += 0


@decompress("MXFP8", "S12.1.any_payload_MXFP8")
def decodes_nan_as_infinity(payload, out):
    out[(codes(payload, out.shape[1]) & 0x7F == 0x7F) & out.isnan()] = torch.inf


@decompress("MXINT8", "S12.1.any_payload_MXINT8")
def decodes_128_as_positive(payload, out):
    out[codes(payload, out.shape[1]) == 128] *= -1


@compress("OneBit", "S12.2.payload_OneBit")
def scales_by_the_mean_magnitude(right, x, num_chunks, target_chunk, out):
    out = right(x, num_chunks, target_chunk, out)
    scale = rows(x, num_chunks).float().abs().mean(1)
    if x.numel() and target_chunk is None and scale.isfinite().all():
        rows(out, num_chunks)[:, :4] = scale.view(torch.uint8).view(num_chunks, 4)
    return out


@compress("OneBit", "S12.2.payload_OneBit")
def takes_zeros_for_negative(right, x, num_chunks, target_chunk, out):
    whole = right(x, num_chunks, target_chunk, out)
    tiny = torch.where(x == 0, torch.full_like(x, -1e-7), x)
    bits = right(tiny, num_chunks, target_chunk, None)
    rows(whole, num_chunks)[:, HEADER:] = rows(bits, num_chunks)[:, HEADER:]
    return whole


@pytest.mark.proof
@pytest.mark.parametrize(("make", "check"), FAULTS)
def test_a_wrong_codec_is_found(make, check):
    assert_found(make(), check)


@pytest.mark.proof
def test_levels_without_a_fault_pass():
    assert run_conformance(backend_with(OwnLevels), ["codec"], checks=["S4.2", "S4.6"]).passed

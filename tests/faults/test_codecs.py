"""Codecs with a fault: each is found by a check of the clause that it breaks."""

from __future__ import annotations

import numpy as np
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


# S12.6, S12.7


def rounding(codec, number):
    """Enter a codec of which another number is added to the bits of the largest."""
    name = f"{codec} adds {number:#x}"
    made = type(name, (ReferenceBackend.codecs[codec],), {"rounding": number})
    FAULTS.row(name, lambda: backend_with(made), f"codec.S12.6.payload_{codec}")


rounding("MXFP8-RCEIL", 0x1FFFFE)
rounding("MXFP4-RCEIL", 0x400000)
rounding("MXFP8-EVEN", 0x7FFFF)
rounding("MXFP4-EVEN", 0x80000)
rounding("MXFP8-CEIL", 0x800000)


def scales(codec, check):
    """Return a decorator of a method `scales` that is wrong."""
    return FAULTS.of(ReferenceBackend.codecs[codec], "scales", backend_with)(f"codec.{check}")


def powers(right, largest, chunk, exponent):
    """Return scale bytes and factors of exponents."""
    _, factor = right(largest, chunk)
    exponent = np.clip(np.nan_to_num(exponent), -127, 127).astype(np.int32)
    return exponent + 127, np.where(np.isnan(factor), factor, np.float32(2) ** -exponent)


@scales("MXFP8-RCEIL", "S12.6.payload_MXFP8-RCEIL")
def takes_the_logarithm_in_float32(right, largest, chunk):
    logarithm = np.log2(largest.view(np.float32) / np.float32(448))
    return powers(right, largest, chunk, np.ceil(logarithm))


def divides_first(right, largest, chunk, number):
    half, exponent = np.frexp(largest.view(np.float32) / np.float32(number))
    exact = np.where(half == 0, -127, exponent - (half == 0.5))
    return powers(right, largest, chunk, exact)


@scales("MXFP8-RCEIL", "S12.6.payload_MXFP8-RCEIL")
def divides_by_448_first(right, largest, chunk):
    return divides_first(right, largest, chunk, 448)


@scales("MXFP4-RCEIL", "S12.6.payload_MXFP4-RCEIL")
def divides_by_6_first(right, largest, chunk):
    return divides_first(right, largest, chunk, 6)


def products(scale, chunk, factor=None):
    """Return scale bytes and factors of scales that are not yet E4M3 numbers."""
    rounded = torch.from_numpy(scale).clamp(max=448).to(torch.float8_e4m3fn)
    s = rounded.float().numpy()
    factor = (1 / (s * (1 / chunk))) if factor is None else factor(s)
    return rounded.view(torch.uint8).numpy(), np.minimum(factor, np.finfo(np.float32).max)


SIXTH = np.float32(1 / 6)


@scales("NVFP4", "S12.7.payload_NVFP4")
def divides_the_block_s_largest_by_6_and_t(right, largest, chunk):
    return products(largest.view(np.float32) / np.float32(6) / (1 / chunk), chunk)


@scales("NVFP4", "S12.7.payload_NVFP4")
def multiplies_from_the_left(right, largest, chunk):
    return products(largest.view(np.float32) * chunk * SIXTH, chunk)


@scales("NVFP4", "S12.7.payload_NVFP4")
def has_no_subnormal_scales(right, largest, chunk):
    scale = largest.view(np.float32) * (chunk * SIXTH)
    return products(np.maximum(scale, np.float32(2.0**-6)), chunk)


@scales("NVFP4", "S12.7.ties_NVFP4")
def divides_by_the_scales_one_after_another(right, largest, chunk):
    return products(
        largest.view(np.float32) * (chunk * SIXTH), chunk, lambda s: (1 / (1 / chunk)) / s
    )


@scales("NVFP4", "S12.7.payload_NVFP4")
def shares_a_scale_between_two_blocks(right, largest, chunk):
    pairs = np.maximum(largest[:-1:2], largest[1::2])
    shared = largest.copy()
    shared[:-1:2], shared[1::2] = pairs, pairs
    return right(shared, chunk)


@FAULTS.of(ReferenceBackend.codecs["NVFP4"], "begin", backend_with)("codec.S12.7.payload_NVFP4")
def takes_the_largest_of_all_chunks(right, x, payload):
    whole = right(x.reshape(1, -1), payload[:1])
    payload[:, :4] = payload[:1, :4].clone()
    return np.repeat(whole, len(x), axis=0)


@FAULTS.of(ReferenceBackend.codecs["NVFP4"], "factors", backend_with)(
    "codec.S12.7.any_payload_NVFP4"
)
def multiplies_the_scales_first(right, scale, payload):
    s, t = right(scale, payload)
    return [s * t]


@compress("NVFP4", "S12.7.poison_NVFP4")
def poisons_the_factor_alone(right, x, num_chunks, target_chunk, out):
    good = torch.where(x.isfinite(), x, torch.zeros_like(x))
    found = right(good, num_chunks, target_chunk, out)
    bad = ~rows(x, num_chunks).isfinite().all(1)
    if x.numel() and target_chunk is None:
        rows(found, num_chunks)[bad, :4] = torch.tensor([torch.nan]).view(torch.uint8)
    return found


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

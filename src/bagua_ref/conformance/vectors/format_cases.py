"""Cases of the codecs of S12: compress, and decompress what was compressed and any other bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bagua_ref.backends import get_codec
from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.conformance.expected.codecs_scalar import FORMATS
from bagua_ref.conformance.vectors.case import Case, canonical, name_of, seed_of
from bagua_ref.conformance.vectors.numbers import KINDS, Numbers, tensor_of

__all__ = ["format_cases"]

_SIZES = (0, 1, 2, 31, 32, 33, 65, 300)
_SINCE = "2"


def format_cases() -> Iterator[Case]:
    """Yield every case of suite ``codecs``."""
    for codec in (*FORMATS, "OneBit"):
        for dtype in COMPRESSIBLE:
            inputs = _one_bit(dtype) if codec == "OneBit" else _microscaling(codec, dtype)
            for name, flag, x, num_chunks in inputs:
                yield from _both(codec, dtype, name, flag, canonical(x), num_chunks)
            yield _target(codec, dtype)
            yield from _any_bytes(codec, dtype)


def _microscaling(codec: str, dtype: torch.dtype) -> Iterator[tuple[str, str, Tensor, int]]:
    """Yield a name, a flag, the numbers and how many chunks they are."""

    def numbers(name: str) -> Numbers:
        return Numbers(seed_of(f"codecs/{codec}/{name_of(dtype)}/{name}"))

    for size in _SIZES:
        yield f"size-{size}", "valid" if size else "edge", numbers(f"size-{size}").uniform(2 * size, dtype), 2
    for kind, (flag, draw) in KINDS.items():
        x = draw(numbers(kind), 3 * 70, dtype)
        yield f"chunks-{kind}", "poison" if not x.isfinite().all() else flag, x, 3
    form = FORMATS[codec]
    for power in (-20, -14, -3, 0, 3, 8, 15):
        scale = 2.0 ** (power - form.emax)
        ties = [(a + b) / 2 * scale for a, b in zip(form.numbers[-40:], form.numbers[-39:], strict=False)]
        low = [(a + b) / 2 * scale for a, b in zip(form.numbers[:8], form.numbers[1:9], strict=False)]
        values = [value * sign for value in (*low, *ties) for sign in (1, -1)]
        blocks = [values[start : start + 31] for start in range(0, len(values), 31)]
        yield f"ties-{power}", "edge", tensor_of([v for block in blocks for v in (2.0**power, *block)], dtype), 1


def _one_bit(dtype: torch.dtype) -> Iterator[tuple[str, str, Tensor, int]]:
    """Yield inputs as `_microscaling` does, whose mean squares are squares: s has no error of its own to 1 ulp."""
    for size in _SIZES:
        signs = Numbers(seed_of(f"codecs/OneBit/{name_of(dtype)}/{size}"))
        yield (
            f"size-{size}",
            "valid" if size else "edge",
            tensor_of([(1.5, -1.5)[signs.below(2)] for _ in range(3 * size)], dtype),
            3,
        )
    yield "seven-and-one", "valid", tensor_of([7.0, -1.0, 1.0, -7.0] * 11, dtype), 2
    yield "zeros", "edge", tensor_of([0.0, -0.0, -0.0, 0.0, 0.0], dtype), 1
    for place, bad in enumerate((float("nan"), float("inf"), float("-inf"))):
        yield f"poisoned-{place}", "poison", tensor_of([2.0] * 40 + [-2.0] * 39 + [bad], dtype), 2


def _both(codec: str, dtype: torch.dtype, name: str, flag: str, x: Tensor, num_chunks: int) -> Iterator[Case]:
    payload = get_codec(codec, "reference").compress(x, num_chunks)
    clause = "S12.3" if flag == "poison" else "S12.2" if codec == "OneBit" else "S12.1"
    common = {"codec": codec, "num_chunks": num_chunks}
    yield Case(
        "codecs", "codec_compress", clause, name_of(dtype), f"{codec}-{name}",
        {"x": x}, {"payload": payload}, {**common, "target_chunk": None}, (flag,), since=_SINCE,
    )  # fmt: skip
    yield _decompressed(codec, dtype, f"{codec}-{name}", clause, flag, payload, num_chunks, x.numel())


def _decompressed(
    codec: str, dtype: torch.dtype, name: str, clause: str, flag: str, payload: Tensor, num_chunks: int, num_elements: int
) -> Case:
    restored = torch.empty(num_elements, dtype=dtype)
    get_codec(codec, "reference").decompress(payload, num_chunks, restored)
    parameters = {"codec": codec, "num_chunks": num_chunks, "num_elements": num_elements}
    return Case(
        "codecs", "codec_decompress", clause, name_of(dtype), name,
        {"payload": payload}, {"x": canonical(restored)}, parameters, (flag,), since=_SINCE,
    )  # fmt: skip


def _target(codec: str, dtype: torch.dtype) -> Case:
    """Return a compression of one chunk into a payload whose other blocks stay."""
    numbers, found = Numbers(seed_of(f"codecs/{codec}/{name_of(dtype)}/target")), get_codec(codec, "reference")
    x = tensor_of([2.5, -2.5] * 60, dtype)
    before = torch.tensor([numbers.below(256) for _ in range(3 * found.payload_bytes(40, dtype))], dtype=torch.uint8)
    after = found.compress(x, 3, 1, before.clone())
    return Case(
        "codecs", "codec_compress", "S12.2" if codec == "OneBit" else "S12.1", name_of(dtype), f"{codec}-target-1-of-3",
        {"x": x, "payload": before}, {"payload": after}, {"codec": codec, "num_chunks": 3, "target_chunk": 1}, ("edge",),
        since=_SINCE,
    )  # fmt: skip


def _any_bytes(codec: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield payloads with every code, at many scales: what another compressor may have made."""
    numbers, clause = Numbers(seed_of(f"codecs/{codec}/{name_of(dtype)}/any")), "S12.2" if codec == "OneBit" else "S12.1"
    found = get_codec(codec, "reference")
    if codec == "OneBit":
        for place, scale in enumerate((0.0, -2.0, 7e4, 3.4e38, float("inf"), 2.0**-149)):
            payload = torch.tensor([numbers.below(256) for _ in range(found.payload_bytes(70, dtype))], dtype=torch.uint8)
            payload[:4] = torch.tensor([scale]).view(torch.uint8)
            yield _decompressed(codec, dtype, f"{codec}-scale-{place}", clause, "edge", payload, 1, 70)
        return
    for scale in (0, 1, 100, 127, 135, 142, 247, 250, 254, 255):
        size = 2 ** FORMATS[codec].bits
        payload = torch.zeros(found.payload_bytes(size, dtype), dtype=torch.uint8)
        blocks = -(-size // 32)
        codes = torch.arange(size, dtype=torch.uint8)
        codes = codes if FORMATS[codec].bits == 8 else codes[::2] | codes[1::2] << 4
        payload[:blocks], payload[blocks : blocks + len(codes)] = scale, codes
        yield _decompressed(codec, dtype, f"{codec}-every-code-{scale}", clause, "edge", payload, 1, size)

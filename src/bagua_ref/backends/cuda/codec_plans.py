"""Launch plans of the codecs: kernels over chunks and parts of chunks (S4, S12)."""

from __future__ import annotations

import ctypes

from torch import Tensor

from bagua_ref.backends.cuda.launch import (
    PACK,
    WAVES,
    WORKSPACE,
    DeviceProperties,
    KernelLaunch,
    Plan,
    long,
    name_of,
    one_launch,
    pointer,
)

__all__ = [
    "ON_CHIP",
    "compress_blocks",
    "compress_minmax",
    "compress_products",
    "compress_signs",
    "decompress",
]

ON_CHIP = 32768
"""Maximum bytes of shared memory for a chunk compressed in one pass; two such blocks fit on any
multiprocessor.
"""

_SLACK = 16  # a chunk in shared memory keeps its offset from a 16-byte boundary
# the most parts of a chunk in find_ends and find_largest, few enough for each block of the next kernel
# to merge
_END_PARTS = 512
# the most parts of a chunk in sum_squares, whatever the device: the order of a sum must not depend
# on it
_SUM_PARTS = 1024
_MIN_PART = 4096  # the fewest elements that are worth a block
# parts begin at multiples of this: all parts of a chunk have the same alignment and share no byte
# or scale
_PART_STEP = 128
# bytes of the tensor in a part with a block of its own: blocks in turn work side by side
_COMPRESSED, _RESTORED = 32768, 16384


def compress_minmax(
    device: DeviceProperties, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor
) -> Plan:
    """Plan the compression of one or all blocks to MinMaxUInt8 (S4): one pass if a chunk fits into
    shared memory, else two.
    """
    size = x.numel() // num_chunks
    start, payload, num_chunks = _chosen(x, num_chunks, target_chunk, out)
    if size * x.element_size() + _SLACK <= ON_CHIP:
        shared = -(-size * x.element_size() // PACK) * PACK + _SLACK
        args = (start, long(size), long(num_chunks), payload)
        return one_launch(
            "codec",
            f"compress_on_chip_{name_of(x)}",
            min(num_chunks, WAVES * device.multiprocessors),
            args,
            shared,
        )
    first = _parts(size, _END_PARTS)
    launches = _two_passes(
        "codec", ("find_ends", "quantise"), x, size, (start, payload, num_chunks), first
    )
    return Plan(launches, workspace=num_chunks * first[0] * 2 * ctypes.sizeof(ctypes.c_float))


def compress_blocks(
    codec: str,
    rounding: int,
    device: DeviceProperties,
    x: Tensor,
    num_chunks: int,
    target_chunk: int | None,
    out: Tensor,
) -> Plan:
    """Plan the compression of one or all chunks to an MX format, given by name, with a scale rule,
    given by index (S12.1, S12.6).
    """
    size = x.numel() // num_chunks
    if size == 0:
        return Plan()
    start, payload, num_chunks = _chosen(x, num_chunks, target_chunk, out)
    part_size = _COMPRESSED // x.element_size()
    parts = -(-size // part_size)
    args = (start, long(rounding), long(size), long(parts), long(part_size), payload)
    return one_launch("microscaling", f"compress_{codec}_{name_of(x)}", num_chunks * parts, args)


def compress_products(
    device: DeviceProperties, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor
) -> Plan:
    """Plan the compression of one or all blocks to NVFP4 (S12.7): first the largest magnitudes,
    then the rest.
    """
    size = x.numel() // num_chunks
    if size == 0:
        return Plan()
    start, payload, num_chunks = _chosen(x, num_chunks, target_chunk, out)
    first = _parts(size, _END_PARTS)
    kernels = "find_largest", "compress_NVFP4"
    launches = _two_passes("microscaling", kernels, x, size, (start, payload, num_chunks), first)
    return Plan(launches, workspace=num_chunks * first[0] * ctypes.sizeof(ctypes.c_uint))


def compress_signs(
    device: DeviceProperties, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor
) -> Plan:
    """Plan the compression of one or all blocks to OneBit (S12.2): first sums of squares, then
    scales and signs.
    """
    size = x.numel() // num_chunks
    if size == 0:
        return Plan()
    start, payload, num_chunks = _chosen(x, num_chunks, target_chunk, out)
    first = _parts(size, _SUM_PARTS)
    launches = _two_passes(
        "one_bit", ("sum_squares", "write_signs"), x, size, (start, payload, num_chunks), first
    )
    return Plan(launches, workspace=num_chunks * first[0] * ctypes.sizeof(ctypes.c_double))


def decompress(
    device: DeviceProperties,
    out: Tensor,
    payload: Tensor,
    num_chunks: int,
    source: str,
    kernel: str,
) -> Plan:
    """Plan the decompression of all chunks with one kernel, given by its source and its name
    without the dtype (S4.3, S12).
    """
    size = out.numel() // num_chunks
    if size == 0:
        return Plan()
    part_size = _RESTORED // out.element_size()
    parts = -(-size // part_size)
    args = (pointer(payload), long(size), long(parts), long(part_size), pointer(out))
    return one_launch(source, f"{kernel}_{name_of(out)}", num_chunks * parts, args)


def _two_passes(
    source: str,
    kernels: tuple[str, str],
    x: Tensor,
    size: int,
    chosen: tuple[ctypes.c_void_p, ctypes.c_void_p, int],
    first: tuple[int, int],
) -> tuple[KernelLaunch, KernelLaunch]:
    """Return two launches: the first writes a number per part of a chunk to the workspace, the
    second reads the numbers of its chunk.

    The first goes through memory from the beginning, a block for each part, the second from the
    end, which is still in the second-level cache as far as that can hold it.

    Args:
        source: source file of both kernels.
        kernels: their names, without the dtype.
        x: the tensor to compress.
        size: number of elements of a chunk.
        chosen: the result of `_chosen`.
        first: parts of the first launch, a result of `_parts`.
    """
    start, payload, num_chunks = chosen
    many, part_size = map(long, first)
    begin, end = (f"{kernel}_{name_of(x)}" for kernel in kernels)
    args = (start, long(size), many, part_size, WORKSPACE)
    short = _COMPRESSED // x.element_size()
    parts = -(-size // short)
    return (
        KernelLaunch(source, begin, num_chunks * first[0], args),
        KernelLaunch(
            source,
            end,
            num_chunks * parts,
            (start, long(size), many, WORKSPACE, long(parts), long(short), payload),
        ),
    )


def _chosen(
    x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor
) -> tuple[ctypes.c_void_p, ctypes.c_void_p, int]:
    """Return the start addresses of the chunks to compress and of their payloads, and the number of
    chunks.
    """
    if target_chunk is None:
        return pointer(x), pointer(out), num_chunks
    starts = (pointer(t).value or 0 for t in (x, out))
    skipped = (target_chunk * (t.numel() // num_chunks) * t.element_size() for t in (x, out))
    source, target = (
        ctypes.c_void_p(start + skip) for start, skip in zip(starts, skipped, strict=True)
    )
    return source, target, 1


def _parts(size: int, wanted: int) -> tuple[int, int]:
    """Return the number of parts of a chunk, and the size of each part except the last."""
    parts = max(1, min(wanted, -(-size // _MIN_PART)))
    part_size = -(-size // (parts * _PART_STEP)) * _PART_STEP
    return -(-size // part_size), part_size

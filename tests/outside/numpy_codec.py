"""OneBit in NumPy, written from S12 alone, as a program that answers requests on
standard input and output.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
ITEM = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
    "uint8": np.dtype("u1"),
}


def padded(size: int) -> int:
    return -(-size // 32) * 32


def to_float32(x: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def rounded(x: Array, dtype: str) -> Array:
    """Round to the dtype; numbers beyond its range become its largest finite ones."""
    largest = {
        "float16": 65504.0,
        "bfloat16": 2.0**127 * (2 - 2**-7),
        "float32": float(np.finfo(np.float32).max),
    }[dtype]
    finite = np.clip(x.astype(np.float64), -largest, largest).astype(np.float32)
    if dtype == "float32":
        return finite
    if dtype == "float16":
        return finite.astype(np.float16)
    bits = finite.view(np.uint32)
    return np.where(np.isnan(finite), 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(
        np.uint16
    )


class OneBit:
    @staticmethod
    def payload_bytes(c: int) -> int:
        return 32 + padded(-(-c // 8)) if c else 0

    @staticmethod
    def compress(x: Array) -> Array:
        block = np.zeros(OneBit.payload_bytes(x.size), np.uint8)
        if np.isfinite(x).all():
            scale = np.float32(np.sqrt(np.square(x.astype(np.float64)).sum() / x.size))
            bits = np.packbits(x >= 0)
            block[32 : 32 + bits.size] = bits
        else:
            scale = np.uint32(0x7FC00000).view(np.float32)
        block[:4] = np.frombuffer(scale.tobytes(), np.uint8)
        return block

    @staticmethod
    def decompress(block: Array, c: int) -> Array:
        scale = block[:4].copy().view("<f4")[0]
        return np.where(np.unpackbits(block[32:])[:c] == 1, scale, -scale)


CODECS: dict[str, Any] = {"OneBit": OneBit}


def answer(
    header: dict[str, Any], tensors: dict[str, tuple[Array, str]]
) -> tuple[dict[str, Any], dict[str, tuple[Array, str]]]:
    if header["call"] == "hello":
        return {"protocol": 2, "name": "NumPy", "codecs": list(CODECS)}, {}
    codec = CODECS[header["codec"]]
    if header["call"] == "payload_bytes":
        return {"value": codec.payload_bytes(header["num_elements"])}, {}
    chunks = header["num_chunks"]
    if header["call"] == "compress":
        x, dtype = tensors["x"]
        parts = to_float32(x, dtype).reshape(chunks, x.size // chunks)
        blocks = [codec.compress(part) if part.size else np.zeros(0, np.uint8) for part in parts]
        if "target_chunk" in header:
            before, target = (
                tensors["payload"][0].reshape(chunks, -1).copy(),
                header["target_chunk"],
            )
            before[target] = blocks[target]
            blocks = list(before)
        return {}, {"payload": (np.concatenate(blocks), "uint8")}
    size, dtype = header["num_elements"] // chunks, header["dtype"]
    parts = tensors["payload"][0].reshape(chunks, -1)
    values = [codec.decompress(part, size) for part in parts] if size else [np.zeros(0, np.float32)]
    return {}, {"x": (rounded(np.concatenate(values), dtype), dtype)}


def main() -> None:
    """Answer until standard input ends."""
    for line in sys.stdin:
        header = json.loads(line)
        tensors = {
            name: (np.frombuffer(base64.b64decode(x["data"]), ITEM[x["dtype"]]), x["dtype"])
            for name, x in header["tensors"].items()
        }
        try:
            found, outputs = answer(header, tensors)
        except Exception as error:
            found, outputs = {"error": f"{type(error).__name__}: {error}"}, {}
        found |= {"id": header["id"], "tensors": {}}
        for name, (x, dtype) in outputs.items():
            data = base64.b64encode(x.tobytes()).decode()
            found["tensors"][name] = {"dtype": dtype, "shape": [x.size], "data": data}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

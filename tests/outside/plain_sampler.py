"""Balanced samplers in plain Python, written from S7 alone, as a program that answers requests on
standard input and output.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from typing import Any


def sampler_indices(header: dict[str, Any], tensors: dict[str, list[Any]]) -> list[int]:
    """Return the samples that one rank draws (S7.2, S7.3)."""
    keys = [
        cost + noise for cost, noise in zip(header["complexities"], tensors["noise"], strict=True)
    ]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    n, replicas = len(keys), header["num_replicas"]
    count = n // replicas if header["drop_last"] else (n + replicas - 1) // replicas
    return [
        order[(chunk * replicas + header["rank"]) % n] for chunk in tensors["chunk_order"][:count]
    ]


def equal_batches(header: dict[str, Any], tensors: dict[str, list[Any]]) -> list[int]:
    """Return which of its batches one rank takes, in order (S7.4)."""
    counts = tensors["counts"]
    mine = counts[header["rank"]]
    wanted = min(counts) if header["drop_last"] else max(counts)
    return [place % mine for place in range(wanted)]


def main() -> None:
    """Answer until standard input ends."""
    for line in sys.stdin:
        header = json.loads(line)
        tensors = {  # all of them are int64
            name: list(struct.unpack(f"<{x['shape'][0]}q", base64.b64decode(x["data"])))
            for name, x in header["tensors"].items()
        }
        outputs = {}
        if header["call"] == "sampler_indices":
            outputs["indices"] = sampler_indices(header, tensors)
        elif header["call"] == "equal_batches":
            outputs["batches"] = equal_batches(header, tensors)
        answer: dict[str, Any] = {"id": header["id"], "tensors": {}}
        if header["call"] == "hello":
            answer |= {"protocol": 2, "name": "plain sampler", "samplers": True}
        for name, values in outputs.items():
            data = base64.b64encode(struct.pack(f"<{len(values)}q", *values)).decode()
            answer["tensors"][name] = {"dtype": "int64", "shape": [len(values)], "data": data}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""Balanced samplers in plain Python, written from S7 alone, as a program that answers requests on
standard input and output.
"""

from __future__ import annotations

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
    while line := sys.stdin.buffer.readline():
        header, tensors = json.loads(line), {}
        for entry in header["tensors"]:
            form = f"<{entry['shape'][0]}q"  # all of them are int64
            tensors[entry["name"]] = list(
                struct.unpack(form, sys.stdin.buffer.read(struct.calcsize(form)))
            )
        outputs = {}
        if header["call"] == "sampler_indices":
            outputs["indices"] = sampler_indices(header, tensors)
        elif header["call"] == "equal_batches":
            outputs["batches"] = equal_batches(header, tensors)
        members: dict[str, Any] = (
            {"protocol": 1, "name": "plain sampler", "samplers": True}
            if header["call"] == "hello"
            else {}
        )
        members["tensors"] = [
            {"name": name, "dtype": "int64", "shape": [len(values)]}
            for name, values in outputs.items()
        ]
        sys.stdout.buffer.write(json.dumps(members).encode() + b"\n")
        for values in outputs.values():
            sys.stdout.buffer.write(struct.pack(f"<{len(values)}q", *values))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

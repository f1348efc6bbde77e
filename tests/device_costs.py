"""The costs of codecs per device, computed from committed benchmark results."""

from __future__ import annotations

import json
from statistics import fmean, median
from typing import Any

from tests.scripts import ROOT

CODECS = {
    "MinMaxUInt8": "",
    "MXFP8": " MXFP8",
    "MXFP4": " MXFP4",
    "MXINT8": " MXINT8",
    "OneBit": " OneBit",
}
"""Codec -> its name in the rows of codec.json and gpu_kernels.json."""
PAYLOAD = {
    "MinMaxUInt8": 1,
    "MXFP8": 1 + 1 / 32,
    "MXFP4": 1 / 2 + 1 / 32,
    "MXINT8": 1 + 1 / 32,
    "OneBit": 1 / 8,
}
"""Bytes per element."""


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        (ROOT / "benchmarks" / "results" / f"{name}.json").read_text()
    )["rows"]
    return rows


def cpu() -> dict[str, Any]:
    """Return the means of compressing and decompressing; topk, powersgd and the fixed cost of a
    bucket are medians over all links of what their training with three buckets computed.
    """
    ms = {row["work"]: row["ours"] for row in rows_of("codec")}
    codec = {
        name: fmean(ms[f"{way}{text} 25e6 float32"] for way in ("compress", "decompress")) / 25e9
        for name, text in CODECS.items()
    }
    own: dict[str, list[float]] = {}
    for row in rows_of("predicted_times"):
        own.setdefault(row["contender"], []).append(row["parts"]["own"] / 1e3)
    fixed = median(own["gradient_allreduce"]) / 3
    elements = {"topk": ("topk, 1 %", 811_873), "powersgd": ("powersgd, rank 4", 9_437_184)}
    for name, (contender, passed) in elements.items():
        codec[name] = (median(own[contender]) - 3 * fixed) / passed
    return {"codec": codec, "operation": {"": fixed}}


def h100() -> dict[str, Any]:
    """Return the same for 25e6 elements; the fixed cost is what a step of four buckets takes longer
    than one without communication.
    """
    rate = {row["work"]: row["ours"] * 1e9 for row in rows_of("gpu_kernels")}
    codec = {
        name: fmean(
            (4 + PAYLOAD[name]) / rate[f"{way}{text} float32 24,999,936"]
            for way in ("compress", "decompress")
        )
        for name, text in CODECS.items()
    }
    seconds = {
        row["work"].partition(",")[0]: 1 / row["ours"] - 1 / row["peers"]["no communication"]
        for row in rows_of("gpu_training")
        if "one rank over NCCL, perceptron" in row["work"]
    }
    coded = (seconds["bytegrad"] - 100.4e6 * codec["MinMaxUInt8"]) / 4
    operation = dict.fromkeys((*CODECS, "topk", "powersgd"), coded)
    return {"codec": codec, "operation": {**operation, "": seconds["gradient_allreduce"] / 4}}

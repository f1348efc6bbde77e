"""Comparison of payloads of codecs with those expected: messages name fields, and scripts repeat
the failure (S4, S12).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua_ref.conformance.expected import codecs_scalar
from bagua_ref.conformance.expected.tolerances import ULP
from bagua_ref.conformance.lab.lab import KernelCall, Lab

__all__ = ["compare_payload", "is_payload", "script_of_bound"]


def compare_payload(
    lab: Lab,
    codec: str,
    call: KernelCall,
    name: str,
    wanted: Tensor,
    num_chunks: int,
    first: int = 0,
) -> None:
    """Compare the payload of chunks from ``first`` on; a scale of OneBit may differ by 1 ulp, as
    the sum's order is free.
    """
    actual = call.results[name]
    if codec == "OneBit" and is_payload(actual, wanted) and wanted.numel():
        theirs, ours = (
            t.view(num_chunks, -1)[:, :4]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.float32)
            .view(-1)
            for t in (actual, wanted)
        )
        scales = f"{name}.view({num_chunks}, -1)[:, :4].reshape(-1).view(torch.float32)"
        call.results[scales] = theirs
        lab.compare(call, scales, ours, ULP(1), field="scales")
        same = torch.where(theirs.isnan(), theirs.view(torch.int32) == 0x7FC00000, True)
        wanted = wanted.clone()
        wanted.view(num_chunks, -1)[same, :4] = actual.view(num_chunks, -1)[same, :4]
    lab.compare(call, name, wanted, field=_field(lab, codec, call, actual, wanted, first))


def is_payload(actual: object, wanted: Tensor) -> bool:
    """Return whether a result can be compared with a payload byte by byte."""
    return (
        isinstance(actual, Tensor) and actual.dtype is torch.uint8 and actual.shape == wanted.shape
    )


def script_of_bound(lab: Lab, codec: str, x: Tensor, value: float, block: list[float]) -> str:
    """Return a script that compresses ``x``, whose element ``value`` is in ``block``, and compares
    the error of what comes back.
    """
    script = lab.script(
        KernelCall(f"{codec}.compress", {"x": x, "num_chunks": 1}, {}),
        f"out = torch.zeros({x.numel()}, dtype={lab.dtype})",
        "codec.decompress(result, 1, out=out)",
        f"value, block, back = {value!r}, {block!r}, out[{x.tolist().index(value)}].item()",
        f"assert abs(back - value) <= error_bound({codec!r}, value, block, back,"
        f" {lab.dtype_name!r}), back",
    )
    return f"from bagua_ref.conformance.expected.codecs_scalar import error_bound\n{script}"


def _field(
    lab: Lab, codec: str, call: KernelCall, actual: object, wanted: Tensor, first: int
) -> str:
    """Return the field of the first byte that differs; empty if none does."""
    if (
        not isinstance(actual, Tensor)
        or not is_payload(actual, wanted)
        or torch.equal(actual, wanted)
    ):
        return ""
    size, place = (
        call.arguments["x"].numel() // call.arguments["num_chunks"],
        int((actual != wanted).nonzero()[0]),
    )
    return codecs_scalar.field_at(
        codec, place + first * codecs_scalar.payload_size(codec, size), size, lab.dtype_name
    )

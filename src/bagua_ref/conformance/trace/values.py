"""Arguments that a recorder accepts: names, JSON values, and tensors alone, in lists or by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.conformance.formats.safetensors_file import CODES

__all__ = ["Given", "bucket_name", "described", "flat_copy", "named_tensors", "plain_values"]

Given = Tensor | list[Tensor]
"""A tensor, or a list of tensors that are taken as one flat tensor."""


def bucket_name(bucket: Any) -> str:
    """Return a bucket's name as text."""
    if not isinstance(bucket, str | int) or isinstance(bucket, bool):
        raise TypeError(f"bucket={bucket!r} must be a name or a number")
    return str(bucket)


def plain_values(argument: str, values: Any) -> dict[str, Any]:
    """Return a mapping of names to JSON values."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{argument}={values!r} must be a mapping of names to values")
    for name, value in values.items():
        if value is not None and not isinstance(value, str | int | float):
            raise TypeError(f"{argument}: {name}={value!r} must be a number, a string, a bool or None, as JSON")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{argument}: {name}={value!r} must be finite, as JSON has no infinity or NaN")
    return dict(values)


def named_tensors(argument: str, tensors: Any) -> dict[str, Given]:
    """Return the given values by name, as tensors that share memory with them if possible."""
    named = dict(tensors) if isinstance(tensors, Mapping) else {"x": tensors}
    if not named:
        raise ValueError(f"{argument}={tensors!r} must hold at least one tensor")
    found: dict[str, Given] = {}
    for role, value in named.items():
        if not isinstance(role, str) or not role.isidentifier():
            raise ValueError(f"{argument}: the name {role!r} must be an identifier, such as 'x'")
        if not isinstance(value, list | tuple):
            found[role] = _as_tensor(argument, value)
            continue
        parts = [_as_tensor(argument, part) for part in value]
        if len({part.dtype for part in parts}) != 1:
            raise ValueError(
                f"{argument}: {role} must be a list of at least one tensor, all of one dtype, not "
                f"{sorted({str(part.dtype) for part in parts})}"
            )
        found[role] = parts
    return found


def described(given: Given) -> dict[str, Any]:
    """Return the manifest's description of a bucket with input x."""
    parts = given if isinstance(given, list) else [given]
    return {
        "dtype": str(parts[0].dtype).removeprefix("torch."),
        "elements": sum(part.numel() for part in parts),
        "tensors": [
            {"name": str(place) if isinstance(given, list) else "x", "shape": list(part.shape)} for place, part in enumerate(parts)
        ],
    }


def flat_copy(given: Given) -> Tensor:
    """Return a flat copy in main memory."""
    if isinstance(given, list):
        return torch.cat([part.detach().reshape(-1) for part in given]).cpu()
    return given.detach().reshape(-1).to("cpu", copy=True)


def _as_tensor(argument: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        # torch refuses negative strides and warns of read-only arrays.
        value = torch.from_numpy(np.require(value, requirements=["C", "W"]))
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{argument}: {value!r} must be a torch.Tensor or a NumPy array, not {type(value).__name__}")
    if value.dtype not in CODES:
        raise TypeError(f"{argument}: {value.dtype} is not supported; use one of {', '.join(CODES.values())}")
    return value

"""What users may hand to a recorder: names, JSON values, and tensors alone, in lists or by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bagua_ref.conformance.vectors.safetensors_file import CODES

__all__ = ["as_tensor", "bucket_name", "flat_copy", "named_tensors", "plain_values"]


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
            raise TypeError(f"{argument}: {name}={value!r} must be a number, a string, a bool or None, which JSON can hold")
    return dict(values)


def named_tensors(argument: str, tensors: Any) -> dict[str, Any]:
    """Return what was given, by name."""
    named = dict(tensors) if isinstance(tensors, Mapping) else {"x": list(tensors) if isinstance(tensors, tuple) else tensors}
    if not named:
        raise ValueError(f"{argument}={tensors!r} must hold at least one tensor")
    for role, value in named.items():
        if not isinstance(role, str) or not role.isidentifier():
            raise ValueError(f"{argument}: the name {role!r} must be an identifier, such as 'x'")
        parts = value if isinstance(value, list) else [value]
        dtypes = {as_tensor(part).dtype for part in parts}
        if len(dtypes) != 1:
            raise ValueError(
                f"{argument}: {role} is a list of tensors, which must be at least one and of one dtype, not "
                f"{sorted(map(str, dtypes))}"
            )
    return named


def as_tensor(value: Any) -> torch.Tensor:
    """Return ``value`` as a tensor, without copying."""
    found = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"tensors: {value!r} must be a torch.Tensor or a NumPy array, not {type(value).__name__}")
    if found.dtype not in CODES:
        raise TypeError(f"tensors: {found.dtype} is not recorded; known are {', '.join(CODES.values())}")
    return found


def flat_copy(value: Any) -> torch.Tensor:
    """Return a flat copy in main memory."""
    if isinstance(value, list):
        return torch.cat([as_tensor(part).detach().reshape(-1) for part in value]).cpu()
    return as_tensor(value).detach().reshape(-1).to("cpu", copy=True)

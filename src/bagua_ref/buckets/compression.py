"""Checks of the argument ``compression=``, and the codec that it names."""

from __future__ import annotations

import warnings

import torch

from bagua_ref.backends import get_codec, is_codec, list_codecs
from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.codec import COMPRESSIBLE, Codec

__all__ = ["check_compression", "codec_named"]


def check_compression(compression: str | None, *, optional: bool = False) -> None:
    """Raise ValueError unless ``compression`` is the name of a codec, or None if that is allowed; the message lists the names."""
    if optional and compression is None:
        return
    if not is_codec(compression):
        allowed = ", ".join([*(["None"] if optional else []), *map(repr, list_codecs())])
        raise ValueError(f"compression={compression!r} is not a known codec; it must be one of {allowed}")


def codec_named(
    compression: str | None, kernels: KernelBackend, bucket: str, dtype: torch.dtype, *, has_memory: bool = False
) -> Codec:
    """Return the codec of a bucket's operation.

    Args:
        compression: its name.
        kernels: the backend for which it is to work.
        bucket: the bucket's name, for messages.
        dtype: the bucket's.
        has_memory: whether the operation has an error memory; some codecs warn if it has none.

    Raises:
        ValueError: there is no such codec.
        TypeError: codecs do not take the dtype.
        BackendUnavailableError: the backend does not have it.
    """
    check_compression(compression)
    assert compression is not None
    if dtype not in COMPRESSIBLE:
        raise TypeError(f"compression={compression!r} takes float16, bfloat16 or float32, not bucket {bucket!r}'s {dtype}")
    codec = get_codec(compression, kernels)
    if codec.biased and not has_memory:
        warnings.warn(
            f"compression={compression!r} without error memory loses what it rounds, and training may not converge", stacklevel=3
        )
    return codec

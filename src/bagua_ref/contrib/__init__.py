"""Beside training itself: balanced samplers, the cache of slow datasets, the fused optimizer."""

from typing import Any

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNorm":
        from bagua_ref.contrib import sync_batchnorm  # noqa: F401  (raises the error that names what to use instead)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

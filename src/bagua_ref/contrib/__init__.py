"""Beside training itself: balanced samplers, the cache of slow datasets, the fused optimizer."""

from bagua_ref.contrib.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]

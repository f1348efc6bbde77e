"""Extensions beyond communication: balanced samplers, a cache for slow datasets, a fused
optimizer.
"""

from typing import Any

from bagua_ref.base.not_provided import not_provided
from bagua_ref.contrib.budget_batch_sampler import BudgetBatchSampler
from bagua_ref.contrib.cache_loader import CacheLoader
from bagua_ref.contrib.cached_dataset import CachedDataset
from bagua_ref.contrib.fuse.optimizer import fuse_optimizer
from bagua_ref.contrib.load_balancing_data_loader import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

__all__: list[str] = [
    "BudgetBatchSampler",
    "CacheLoader",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "fuse_optimizer",
]


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNorm":
        raise not_provided("contrib.sync_batchnorm")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

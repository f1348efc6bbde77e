"""Extensions beyond communication: balanced samplers, a cache for slow datasets, a fused
optimizer.
"""

from typing import TYPE_CHECKING

from bagua_ref.base.not_provided import explain_missing
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

if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("contrib")

"""The balanced samplers, under the original's module name; each is defined in a file of its own."""

from bagua_ref.contrib.load_balancing_batch_sampler import LoadBalancingDistributedBatchSampler
from bagua_ref.contrib.load_balancing_sampler import LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]

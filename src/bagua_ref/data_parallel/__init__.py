"""Training: hooks, bucketing and state broadcast behind ``with_bagua``, and a wrapper with torch DDP's interface (S5)."""

from bagua_ref.data_parallel import functional
from bagua_ref.data_parallel.distributed import DistributedDataParallel, to_bagua_process_group

__all__ = ["DistributedDataParallel", "functional", "to_bagua_process_group"]

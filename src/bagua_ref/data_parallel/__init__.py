"""Data-parallel training: hooks, buckets and state broadcast behind ``with_bagua``, and a wrapper
with the interface of torch's DDP (S5).
"""

from typing import TYPE_CHECKING

from bagua_ref.base.not_provided import explain_missing
from bagua_ref.data_parallel import functional
from bagua_ref.data_parallel.distributed import DistributedDataParallel, to_bagua_process_group
from bagua_ref.data_parallel.grad_scaler import GradScaler
from bagua_ref.data_parallel.joining import join
from bagua_ref.data_parallel.wrapping import train

__all__ = [
    "DistributedDataParallel",
    "GradScaler",
    "functional",
    "join",
    "to_bagua_process_group",
    "train",
]

if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("data_parallel")

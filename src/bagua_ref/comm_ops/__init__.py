"""The bucket operations of S3, one file each. They know kernels and communicators, not buckets."""

from bagua_ref.comm_ops.asynchronous import AsynchronousModelAverage
from bagua_ref.comm_ops.base import CommOp
from bagua_ref.comm_ops.centralized import CentralizedFullPrecision, CentralizedScatterGather
from bagua_ref.comm_ops.decentralized import Decentralized, shift_one_peer
from bagua_ref.comm_ops.hierarchical import Hierarchical
from bagua_ref.comm_ops.low_precision import CentralizedLowPrecision
from bagua_ref.comm_ops.low_precision_decentralized import LowPrecisionDecentralized
from bagua_ref.comm_ops.python_op import PythonOp

__all__ = [
    "AsynchronousModelAverage",
    "CentralizedFullPrecision",
    "CentralizedLowPrecision",
    "CentralizedScatterGather",
    "CommOp",
    "Decentralized",
    "Hierarchical",
    "LowPrecisionDecentralized",
    "PythonOp",
    "shift_one_peer",
]

"""The bucket operations of S3, S10, S11 and S15, which depend on kernels and communicators but not
on buckets.
"""

from bagua_ref.comm_ops.asynchronous import AsynchronousModelAverage
from bagua_ref.comm_ops.base import CommOp, Hierarchical, PythonOp
from bagua_ref.comm_ops.centralized import (
    CentralizedErrorFeedback,
    CentralizedFullPrecision,
    CentralizedLowPrecision,
    CentralizedScatterGather,
    ErrorMemory,
)
from bagua_ref.comm_ops.chunked_sparse import ChunkedSparse
from bagua_ref.comm_ops.decentralized import Decentralized, LowPrecisionDecentralized
from bagua_ref.comm_ops.low_rank import LowRank
from bagua_ref.comm_ops.top_k import TopK
from bagua_ref.formulas.graphs import shift_one_peer

__all__ = [
    "AsynchronousModelAverage",
    "CentralizedErrorFeedback",
    "CentralizedFullPrecision",
    "CentralizedLowPrecision",
    "CentralizedScatterGather",
    "ChunkedSparse",
    "CommOp",
    "Decentralized",
    "ErrorMemory",
    "Hierarchical",
    "LowPrecisionDecentralized",
    "LowRank",
    "PythonOp",
    "TopK",
    "shift_one_peer",
]

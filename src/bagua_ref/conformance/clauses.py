"""Names of the specification's clauses, and of the suites that check them."""

from __future__ import annotations

SPEC_VERSION = "1.1"
"""Version of the clauses that the checks cite; every report contains it."""

VECTORS_VERSION = "3"
"""Version of the cases of golden vectors, as in ``vectors/v3``."""

SUITES = (
    "kernels",
    "codec",
    "collectives",
    "comm_ops",
    "algorithms",
    "samplers",
)
"""The suites; each checks one part of a target."""

CLAUSES = {
    "S1": "rounding of every operation",
    "S2.1": "order and bucketing of parameters",
    "S2.2": "padding",
    "S2.3": "flat storage",
    "S2.4": "the order in which buckets are scheduled",
    "S2.5": "waiting, errors and timeouts",
    "S2.6": "tensors registered twice, mixed buckets",
    "S3.1": "sum or mean over all ranks",
    "S3.2": "the same with one byte per element",
    "S3.3": "hierarchical operations",
    "S3.4": "decentralized averaging",
    "S3.5": "low-precision decentralized averaging on a ring",
    "S3.6": "asynchronous averaging",
    "S3.7": "reduction of chunks",
    "S3.8": "Python operations",
    "S3.9": "collectives",
    "S4.1": "layout of the payload",
    "S4.2": "levels",
    "S4.3": "decompression",
    "S4.4": "poisoned and empty chunks",
    "S4.5": "target chunk, dtypes",
    "S4.6": "bound of the error",
    "S5": "wrapping",
    "S5.1": "gradient_allreduce",
    "S5.2": "bytegrad",
    "S5.3": "decentralized",
    "S5.4": "low_precision_decentralized",
    "S5.5": "qadam",
    "S5.6": "async",
    "S5.7": "names in the registry",
    "S6": "fused optimizer",
    "S7.1": "samples per replica",
    "S7.2": "order of samples",
    "S7.3": "chunks and ranks",
    "S7.4": "equal numbers of batches",
    "S7.5": "what samplers refuse",
    "S7.6": "another number of replicas",
    "S7.7": "batches under a budget",
    "S8.1": "keys and stores",
    "S8.2": "what the cache returns, and what it writes",
    "S8.3": "servers that fail",
    "S8.4": "the server of a job",
    "S8.5": "how values are stored",
    "S9": "warm-up, counting of steps, and states of local updates",
    "S9.1": "local_sgd",
    "S9.2": "diloco: global weights and optimizers",
    "S9.3": "fragments",
    "S9.4": "when fragments are sent and applied, and how",
    "S9.5": "the mean of a fragment",
    "S9.6": "identities, and evaluation of the global weights",
    "S10.1": "powersgd: warm-up, and what is compressed",
    "S10.2": "rounds of powersgd, and what they leave",
    "S10.3": "orthonormal columns",
    "S10.4": "gradients that are not finite",
    "S10.5": "messages, conservation and exactness of powersgd",
    "S11.1": "error memory of compression",
    "S11.2": "topk",
    "S12.1": "MXFP8, MXFP4 and MXINT8",
    "S12.2": "OneBit",
    "S12.3": "poisoned blocks and bounds of the codecs of S12",
    "S12.4": "a second opinion on MXFP8 and MXFP4",
    "S12.6": "scale rules of MXFP8 and MXFP4",
    "S12.7": "NVFP4",
    "S13": "graphs for decentralized averaging",
    "S13.1": "one_peer_exponential",
    "S13.2": "hypercube",
    "S13.3": "ring and exponential",
    "S13.4": "graphs of a user's function",
    "S13.5": "conservation of the mean, intervals",
    "S14": "what a step costs",
    "S15.1": "chunks",
    "S15.2": "selection",
    "S15.3": "messages and Stat2",
    "S15.4": "means",
    "S15.5": "SparseLoCo: diloco with top_k",
    "S15.6": "demo",
    "S16.1": "install() on DDP",
    "S16.2": "install() on FSDP2",
    "S16.3": "the same with error memory",
    "S16.4": "install() on HSDP",
    "S16.5": "what install() refuses",
}
"""Number -> topic, for each heading of the specification without subheadings, and for others that
have checks.
"""

NOT_COVERED = (
    "S2.6",
    "S3.8",
    "S5.7",
    "S6",
    "S8.1",
    "S8.2",
    "S8.3",
    "S8.4",
    "S8.5",
    "S12.4",
    "S14",
    "S16.1",
    "S16.2",
    "S16.3",
    "S16.4",
    "S16.5",
)
"""The clauses without checks. A test compares them with the table of checks, which need not be
imported to know them.
"""

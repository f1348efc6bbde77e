"""The reference backend: SPEC's kernels in NumPy, written to be read beside the clauses and
compared with bit for bit.
"""

from bagua_ref.backends.reference.backend import ReferenceBackend
from bagua_ref.backends.reference.codecs import CODECS

__all__ = ["ReferenceBackend"]

ReferenceBackend.codecs = CODECS  # here, as codecs compute in its blocks

"""The reference backend: SPEC's kernels in NumPy, for reading beside the clauses and for bitwise
comparison.
"""

from bagua_ref.backends.reference.backend import ReferenceBackend
from bagua_ref.backends.reference.codecs import CODECS

__all__ = ["ReferenceBackend"]

ReferenceBackend.codecs = CODECS  # here, as codecs compute in its blocks

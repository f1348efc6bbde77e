"""The reference backend: SPEC's kernels in NumPy, written to be read beside the clauses and compared with bit for bit."""

from bagua_ref.backends.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]

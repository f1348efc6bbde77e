"""Golden vectors: files of inputs and expected outputs, for implementations in any language."""

from bagua_ref.conformance.clauses import VECTORS_VERSION
from bagua_ref.conformance.vectors.files import (
    VectorsError,
    VectorsReport,
    Verdict,
    check_outputs,
    check_program,
    export_vectors,
)

__all__ = [
    "VECTORS_VERSION",
    "VectorsError",
    "VectorsReport",
    "Verdict",
    "check_outputs",
    "check_program",
    "export_vectors",
]

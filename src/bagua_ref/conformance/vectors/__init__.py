"""Golden vectors: files of inputs and expected outputs, for implementations in any language."""

from bagua_ref.conformance.clauses import VECTORS_VERSION
from bagua_ref.conformance.vectors.case import Case
from bagua_ref.conformance.vectors.files import (
    VectorsError,
    VectorsReport,
    Verdict,
    check_outputs,
    check_program,
    export_vectors,
)
from bagua_ref.conformance.vectors.rows import all_cases

__all__ = [
    "VECTORS_VERSION",
    "Case",
    "VectorsError",
    "VectorsReport",
    "Verdict",
    "all_cases",
    "check_outputs",
    "check_program",
    "export_vectors",
]

"""Traces of whole trainings: digests of all that a step computes; inputs and outputs of every
bucket operation, replayed.
"""

from bagua_ref.conformance.formats import digest
from bagua_ref.conformance.trace.check import check_trace
from bagua_ref.conformance.trace.differences import Difference, DifferenceReport, diff_records
from bagua_ref.conformance.trace.files import (
    TRACE_VERSION,
    RankTrace,
    Record,
    TraceError,
    read_trace,
)
from bagua_ref.conformance.trace.recorder import Recorder
from bagua_ref.conformance.trace.recording import Recording, record
from bagua_ref.conformance.trace.report import Divergence, Execution, TraceReport

__all__ = [
    "TRACE_VERSION",
    "Difference",
    "DifferenceReport",
    "Divergence",
    "Execution",
    "RankTrace",
    "Record",
    "Recorder",
    "Recording",
    "TraceError",
    "TraceReport",
    "check_trace",
    "diff_records",
    "digest",
    "read_trace",
    "record",
]

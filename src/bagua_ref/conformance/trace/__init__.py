"""Traces of whole trainings: inputs and outputs of every bucket operation, recorded, then replayed for all ranks."""

from bagua_ref.conformance.trace.check import check_trace
from bagua_ref.conformance.trace.files import TRACE_VERSION, RankTrace, Record, TraceError, read_trace
from bagua_ref.conformance.trace.recorder import Recorder
from bagua_ref.conformance.trace.report import Divergence, Execution, TraceReport

__all__ = [
    "TRACE_VERSION",
    "Divergence",
    "Execution",
    "RankTrace",
    "Record",
    "Recorder",
    "TraceError",
    "TraceReport",
    "check_trace",
    "read_trace",
]

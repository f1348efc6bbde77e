"""The oracle that outside implementations are checked with: checks of every clause, expected values, tolerances, reports."""

from bagua_ref.conformance.clauses import SPEC_VERSION, SUITES
from bagua_ref.conformance.report import Report, Result
from bagua_ref.conformance.runner import run_conformance
from bagua_ref.conformance.tolerances import EXACT, SUM, ULP, Tolerance, assert_equal

__all__ = ["EXACT", "SPEC_VERSION", "SUITES", "SUM", "ULP", "Report", "Result", "Tolerance", "assert_equal", "run_conformance"]

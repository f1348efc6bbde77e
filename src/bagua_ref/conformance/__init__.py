"""The oracle for checking other implementations: checks of every clause, expected values,
tolerances, reports.
"""

from bagua_ref.conformance.clauses import SPEC_VERSION, SUITES
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, ULP, Tolerance, assert_equal
from bagua_ref.conformance.run.report import Report, Result
from bagua_ref.conformance.run.runner import run_conformance

__all__ = [
    "EXACT",
    "SPEC_VERSION",
    "SUITES",
    "SUM",
    "ULP",
    "Report",
    "Result",
    "Tolerance",
    "assert_equal",
    "run_conformance",
]

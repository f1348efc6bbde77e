"""Diagnosis of hanging jobs: `explain` reads the dumps of the ranks, and `explain_hangs` makes
ranks write them.
"""

from bagua_ref.explain.dumps import DumpError
from bagua_ref.explain.verdict import Explanation, explain
from bagua_ref.explain.watch import HangWatch, explain_hangs

__all__ = ["DumpError", "Explanation", "HangWatch", "explain", "explain_hangs"]

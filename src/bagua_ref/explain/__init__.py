"""Why a real job hangs: `explain` reads what its ranks have dumped, and `explain_hangs` lets them
dump it.
"""

from bagua_ref.explain.dumps import DumpError
from bagua_ref.explain.verdict import Explanation, explain
from bagua_ref.explain.watch import HangWatch, explain_hangs

__all__ = ["DumpError", "Explanation", "HangWatch", "explain", "explain_hangs"]

"""Public alias of `bagua_ref.formulas.graphs`."""

import sys

from bagua_ref.formulas import graphs
from bagua_ref.formulas.graphs import *

sys.modules[__name__] = graphs

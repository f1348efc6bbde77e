"""The public name of `bagua_ref.formulas.graphs`, which it is."""

import sys

from bagua_ref.formulas import graphs
from bagua_ref.formulas.graphs import *

sys.modules[__name__] = graphs

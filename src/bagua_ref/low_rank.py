"""Public alias of `bagua_ref.formulas.low_rank`."""

import sys

from bagua_ref.formulas import low_rank
from bagua_ref.formulas.low_rank import *

sys.modules[__name__] = low_rank

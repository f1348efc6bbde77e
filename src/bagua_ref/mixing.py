"""Public alias of `bagua_ref.formulas.mixing`."""

import sys

from bagua_ref.formulas import mixing as module
from bagua_ref.formulas.mixing import *

sys.modules[__name__] = module

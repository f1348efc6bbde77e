"""Public alias of `bagua_ref.base.runtime`."""

import sys

from bagua_ref.base import runtime
from bagua_ref.base.runtime import *

sys.modules[__name__] = runtime

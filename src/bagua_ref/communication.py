"""Public alias of `bagua_ref.groups.communication`."""

import sys

from bagua_ref.groups import communication
from bagua_ref.groups.communication import *

sys.modules[__name__] = communication

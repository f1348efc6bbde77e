"""Public alias of `bagua_ref.observe.flight_recorder`."""

import sys

from bagua_ref.observe import flight_recorder
from bagua_ref.observe.flight_recorder import *

sys.modules[__name__] = flight_recorder

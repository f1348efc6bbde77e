"""Public alias of `bagua_ref.base.utils`."""

import sys

from bagua_ref.base import utils
from bagua_ref.base.utils import *

sys.modules[__name__] = utils

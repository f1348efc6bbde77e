"""Public alias of `bagua_ref.buckets.tensor`."""

import sys

from bagua_ref.buckets import tensor
from bagua_ref.buckets.tensor import *

sys.modules[__name__] = tensor

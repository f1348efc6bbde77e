"""Public alias of `bagua_ref.buckets.bucket`."""

import sys

from bagua_ref.buckets import bucket
from bagua_ref.buckets.bucket import *

sys.modules[__name__] = bucket

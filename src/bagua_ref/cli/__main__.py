"""``python -m bagua_ref.cli``, the same as ``bagua-ref``."""

import sys

from bagua_ref_cli import main

sys.exit(main())

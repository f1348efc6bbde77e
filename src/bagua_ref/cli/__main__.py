"""``python -m bagua_ref.cli``, for launchers."""

import sys

from bagua_ref_cli import main

sys.exit(main())

"""``python -m bagua_ref.cli`` is ``bagua-ref``."""

import sys

from bagua_ref_cli import main

if __name__ == "__main__":
    sys.exit(main())

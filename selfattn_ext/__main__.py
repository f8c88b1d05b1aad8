"""``python -m selfattn_ext``: see cli.py."""

import sys

from selfattn_ext.cli import main

if __name__ == "__main__":
    sys.exit(main())

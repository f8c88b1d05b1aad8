"""``python -m selfattn_ext``: see commands/cli.py."""

import sys

from selfattn_ext.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())

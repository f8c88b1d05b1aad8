"""The entry point of ``python -m selfattn_ext``, which commands/cli.py implements."""

import sys

from selfattn_ext.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())

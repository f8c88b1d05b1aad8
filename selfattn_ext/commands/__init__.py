"""The subcommands of ``python -m selfattn_ext``."""

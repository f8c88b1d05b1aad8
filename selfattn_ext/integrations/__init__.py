"""Integrations run other people's code on this package's kernels, without a change to that code."""

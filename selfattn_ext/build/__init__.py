"""Builds and finds the compiled library: its sources and flags, the tools of a build, loading."""

"""Caches of keys and values: attention to them, and memory for the layers of a decoder."""

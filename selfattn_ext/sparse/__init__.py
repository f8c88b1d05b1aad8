"""Attention of queries to the keys that they select, by index."""

from .sparse_attention import sparse_attention

__all__ = ["sparse_attention"]
